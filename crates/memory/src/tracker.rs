//! Which pages were written since the last look.
use std::os::fd::OwnedFd;
use crate::{Error, PageSet};

/// Reports written pages. The first scan of a region reports every page that may hold something and arms the tracking;
/// each later scan reports the pages written since the scan before, and re-arms them in the same step, so no write is lost.
pub trait Tracker: Send {
    /// # Errors
    /// The tracked process is gone, or the kernel refuses. Nothing may then be assumed to be clean.
    fn scan(&mut self, region: usize) -> Result<PageSet, Error>;
}

/// Where (a part of) a region is mapped in the tracked process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Index into the guest's regions.
    pub region: usize,
    /// First page of the region that this area maps.
    pub first_page: u64,
    /// Address in the tracked process.
    pub address: u64,
    pub bytes: u64,
}

/// userfaultfd write protection in asynchronous mode, read by PAGEMAP_SCAN on the tracked process's pagemap (Linux 6.7).
/// Dropping it closes the userfaultfd, which ends the tracking; the process runs on as before.
pub struct UffdTracker {}

#[allow(unused_variables)]
impl UffdTracker {
    /// `uffd` was created by the tracked process and not yet used (no UFFDIO_API); `pagemap` is its /proc/PID/pagemap.
    /// `region_pages[i]` is the size of region i in pages. Negotiates the features, registers all areas.
    pub fn new(uffd: OwnedFd, pagemap: OwnedFd, areas: Vec<Area>, region_pages: Vec<u64>) -> Result<Self, Error> { todo!() }
}

impl Tracker for UffdTracker {
    fn scan(&mut self, region: usize) -> Result<PageSet, Error> { todo!("{region}") }
}
