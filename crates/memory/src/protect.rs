//! Write protection that waits for us: a write to a protected page stops the writer until the page is let go of. For snapshots of a moment.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use crate::{Area, Error, PageRange};

/// A thread of the process waits to write this page (or, with [`crate::Missing`], to touch it).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Index of the region.
    pub region: usize,
    /// Number of the page.
    pub page: u64,
}

/// userfaultfd write protection in synchronous mode. All threads may use it at once. Dropping it closes the userfaultfd, which ends all protection
/// and lets everybody go on.
pub struct Protection {
    _uffd: OwnedFd,
}

impl Protection {
    /// `uffd` was created by the process (with kernel faults, else a write by KVM or a system call of the process fails) and not yet used.
    /// Registers all areas; nothing is protected yet.
    ///
    /// # Errors
    /// As [`crate::UffdTracker::new`].
    pub fn new(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[u64]) -> Result<Self, Error> {
        let _ = (areas, region_pages);
        Ok(Self { _uffd: uffd })
    }

    /// From now on a write to these pages waits, also to one that is not there yet.
    ///
    /// # Errors
    /// The process is gone, or the kernel refuses.
    pub fn protect(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        let _ = (region, pages);
        todo!()
    }

    /// Lets writes to these pages through, and wakes who waits.
    ///
    /// # Errors
    /// As [`Protection::protect`].
    pub fn allow(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        let _ = (region, pages);
        todo!()
    }

    /// The next writer that waits; none after `wait`.
    ///
    /// # Errors
    /// The process is gone.
    pub fn next_fault(&self, wait: Duration) -> Result<Option<Fault>, Error> {
        let _ = wait;
        todo!()
    }

    /// For polling together with other descriptors, and for a second holder.
    pub fn fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}
