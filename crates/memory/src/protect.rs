//! Write protection that waits for us: a write to a protected page stops the writing thread until the page is released.
//! For snapshots of a moment.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use crate::{
    Area, Error, Fault, PageCount, PageRange,
    fault::{Faults, Stretch},
    uffd::{self, Writes},
};

/// userfaultfd write protection in synchronous mode. All threads may use it at once. Dropping it closes the
/// userfaultfd, which ends all protection and lets everybody go on, once no other holder is left.
///
/// Protected is the mapping of the process, not the file: writes through other mappings (ours too) pass. A hole that is
/// punched is no write: what was there is gone, and its protection with it. A VM that gives memory back must not do so
/// meanwhile.
pub struct Protection {
    faults: Faults,
}

impl Protection {
    /// `uffd` was created by the process (with kernel faults, else a write by KVM or a system call of the process
    /// fails) and not yet used. Registers all areas; nothing is protected yet.
    ///
    /// # Errors
    /// As [`crate::UffdTracker::new`].
    pub fn new(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[PageCount]) -> Result<Self, Error> {
        let need = "Linux 6.4 or newer is needed, and a userfaultfd that was not used before";
        let faults =
            Faults::new(uffd, uffd::PROTECT, ("make writes to shared memory wait", need), areas, region_pages)?;
        Ok(Self { faults })
    }

    /// Pages of the region that are protected and released together: 1, or those of a huge page. Ranges consist of
    /// whole ones.
    pub fn unit_pages(&self, region: usize) -> PageCount {
        self.faults.unit_pages(region)
    }

    /// From now on a write to these pages waits, even to a page that is not there yet. Reads do not wait.
    ///
    /// # Errors
    /// The process is gone, or the kernel refuses; pages that the region does not have; parts of huge pages.
    pub fn protect(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        self.set(region, pages, Writes::Wait)
    }

    /// Lets writes to these pages through, and wakes the threads that wait. Harmless for pages that are not protected:
    /// a fault may be reported before its page is released and read after that.
    ///
    /// # Errors
    /// As [`Protection::protect`].
    pub fn allow(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        self.set(region, pages, Writes::Pass)
    }

    /// The next write that waits; none after `wait`. Each is reported once, to one caller; several may wait for the
    /// same page.
    ///
    /// # Errors
    /// The process is gone (which is only noticed after `wait`).
    pub fn next_fault(&self, wait: Duration) -> Result<Option<Fault>, Error> {
        self.faults.next(wait)
    }

    /// Appends writers that wait, as many as there are and at most 64; waits up to `wait` for the first. What this
    /// caller has got no other gets.
    ///
    /// # Errors
    /// As [`Protection::next_fault`].
    pub fn next_faults(&self, wait: Duration, out: &mut Vec<Fault>) -> Result<(), Error> {
        self.faults.next_few(wait, usize::MAX, out)
    }

    /// For polling together with other descriptors, and for a second holder.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.faults.fd()
    }

    fn set(&self, region: usize, pages: PageRange, writes: Writes) -> Result<(), Error> {
        for stretch in self.faults.stretches(region, pages)? {
            uffd::while_changing(|| uffd::write_protect(self.fd(), stretch.addresses, writes))
                .map_err(|source| refused(&stretch, source))?;
        }
        Ok(())
    }
}

pub(crate) fn refused(stretch: &Stretch, source: io::Error) -> Error {
    match source.raw_os_error() {
        // No process; no memory there, or none that is registered.
        Some(libc::ESRCH | libc::ENOENT) => Error::Gone { region: stretch.region, source },
        _ => Error::system(format!("protect pages of region number {} from writes", stretch.region), source),
    }
}
