//! Memory whose pages are brought when somebody touches them. For guests that run before their memory is there.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use crate::{Area, Error, Fault, PageRange};

/// userfaultfd for missing pages of a process whose memory files are holes from end to end. All threads may use it at once.
///
/// When the last holder of the userfaultfd closes it, the kernel answers faults on holes with zeros: whoever drops this has brought all pages,
/// or has seen to it that nobody runs, or that somebody else holds it.
pub struct Missing {
    _uffd: OwnedFd,
}

impl Missing {
    /// `uffd` was created by the process, with kernel faults, and not yet used; or, with `negotiated`, is one that was here before. Registers all areas.
    ///
    /// # Errors
    /// As [`crate::UffdTracker::new`].
    pub fn new(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[u64]) -> Result<Self, Error> {
        let _ = (areas, region_pages);
        Ok(Self { _uffd: uffd })
    }

    /// Puts pages into place that are still missing, and wakes who waits for them. Pages that are there already are left as they are. How many were
    /// put.
    ///
    /// # Errors
    /// The process is gone, no memory is left, bytes that are not whole pages.
    pub fn fill(&self, region: usize, first: u64, bytes: &[u8]) -> Result<u64, Error> {
        let _ = (region, first, bytes);
        todo!()
    }

    /// As [`Missing::fill`], with zeros.
    ///
    /// # Errors
    /// As [`Missing::fill`].
    pub fn fill_zero(&self, region: usize, pages: PageRange) -> Result<u64, Error> {
        let _ = (region, pages);
        todo!()
    }

    /// The next one that waits for a page; none after `wait`.
    ///
    /// # Errors
    /// The process is gone.
    pub fn next_fault(&self, wait: Duration) -> Result<Option<Fault>, Error> {
        let _ = wait;
        todo!()
    }

    /// All pages are there or are to be zero: from now on the kernel serves these pages by itself.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn release(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        let _ = (region, pages);
        todo!()
    }

    /// For polling together with other descriptors, and for a second holder.
    pub fn fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}
