//! Somebody who puts a guest back as it was if whoever holds it dies.
use std::os::fd::OwnedFd;

use crate::GuestError;

/// What another process must know to put a guest back as it was.
#[derive(Debug, Default)]
pub struct LastWill {
    /// Not secret.
    pub text: String,
    /// What it must have open for that.
    pub files: Vec<OwnedFd>,
}

/// What is to become of a guest should whoever holds it die now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
    /// It is stopped, or about to be: it is to run again, with all its devices.
    RunAgain,
    /// It stands, or runs, and is to be left so; it is to have all its devices.
    LeaveIt,
}

/// Somebody who outlives this process, and puts a guest back as it was should the process die while it is not. Whoever
/// stops a guest, or unplugs something, says so here first.
pub trait Guard: Send {
    /// Something of the guest is about to be changed; it is to be left as it runs or stands. `will`: what
    /// [`crate::SourceGuest::last_will`] has said.
    ///
    /// # Errors
    /// There is nobody: nothing may be changed.
    fn begin(&mut self, will: LastWill) -> Result<(), GuestError>;
    /// What is to be done from now on.
    ///
    /// # Errors
    /// It is not heard: what was said before holds.
    fn instruct(&mut self, duty: Duty) -> Result<(), GuestError>;
    /// The guest is as it was, or is about to be given up: once this has returned nobody acts.
    ///
    /// # Errors
    /// It can't be made sure.
    fn end(&mut self) -> Result<(), GuestError>;
}
