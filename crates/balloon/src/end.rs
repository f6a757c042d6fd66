//! How the balloon ends.
use transship_lines::Shutdown;

/// How it is asked to end. QEMU 11.1 may not survive the end of a balloon that it is connected with.
pub struct End<'a> {
    /// Clients are sent away, and it ends when no QEMU is connected.
    pub when_unused: &'a Shutdown,
    /// It ends at once, if it was asked by the other before.
    pub now: &'a Shutdown,
    /// Called when one is, so that it does not end yet.
    pub waiting: &'a (dyn Fn() + Sync),
}
