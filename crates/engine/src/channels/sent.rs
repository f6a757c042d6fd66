//! What was sent in a round, as far as the source knows it.
use transship_memory::PageCount;

/// What was done in a round.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    pub(crate) normal: PageCount,
    /// Pages found to be zero, and those of them that had to be announced because the destination held other content.
    /// Holes are announced, too.
    pub(crate) zero: PageCount,
    pub(crate) zero_sent: PageCount,
    pub(crate) resent: PageCount,
    /// Of `normal`: pages that the destination reads itself. It may find that they are zero.
    pub(crate) lent: PageCount,
    /// Pages that went by way of a slot.
    pub(crate) handed: PageCount,
    /// Without those of lent pages and slots, until the round is confirmed.
    pub(crate) bytes: u64,
    pub(crate) cpu_seconds: f64,
}

impl Sent {
    pub(crate) fn add(&mut self, other: &Self) {
        self.normal += other.normal;
        self.zero += other.zero;
        self.zero_sent += other.zero_sent;
        self.resent += other.resent;
        self.lent += other.lent;
        self.handed += other.handed;
        self.bytes += other.bytes;
        self.cpu_seconds += other.cpu_seconds;
    }

    /// Whether a destination that reports these numbers has all of this. Of lent pages it may have found any number to
    /// be zero.
    pub(crate) fn is_settled_by(&self, pages: u64, zero: u64) -> bool {
        let found = self.normal.get().checked_sub(pages).filter(|&found| found <= self.lent.get());
        found.and_then(|found| self.zero_sent.get().checked_add(found)) == Some(zero)
    }
}
