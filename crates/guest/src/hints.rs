//! Memory that a guest says it does not need.
use std::time::Instant;

use crate::{GuestError, RegionPages};

/// A guest's statement about its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// It does not need the contents that these pages had when hints were requested.
    Free(RegionPages),
    /// It has named all pages that it does not need.
    NamedAll,
}

/// Asks a running guest which of its memory it does not need. docs/free-pages.md says when a hint may be relied on.
/// When this is dropped, for whatever reason, the guest gets back all memory that it has set aside.
pub trait Hints: Send {
    /// Requests hints. Writes to **all** guest memory must have been tracked since before this call: a hint means that
    /// the page was free at some moment after it. Hints of earlier calls are void.
    ///
    /// # Errors
    /// No hints are available.
    fn start(&mut self) -> Result<(), GuestError>;
    /// The next hint of the guest; none if none comes until `deadline`. With a deadline in the past it does not wait.
    ///
    /// # Errors
    /// There will be no more hints. Those that came stay valid.
    fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, GuestError>;
    /// Ends the hints; to be called before the next scan.
    ///
    /// # Errors
    /// There will be no more hints anyway.
    fn stop(&mut self) -> Result<(), GuestError>;
    /// Gives the guest back the memory that it has set aside. Does not wait until the guest has it.
    ///
    /// # Errors
    /// The guest has it already.
    fn done(&mut self) -> Result<(), GuestError>;
    /// Waits, after `done`, until the guest has back what it had set aside, as far as that is known, for a few seconds
    /// at most.
    ///
    /// # Errors
    /// It is unknown.
    fn taken_back(&mut self) -> Result<(), GuestError>;
    /// Memory to which the source of the hints itself writes, past the tracker.
    fn writes_to(&mut self) -> Vec<RegionPages>;
}
