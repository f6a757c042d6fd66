//! Begins to track what a QEMU writes.
use std::{fs::File, os::fd::OwnedFd};

use transship_guest::GuestError;
use transship_memory::{Area, GuestMemory, Region, SyncTracker, Tracker, UffdTracker};

use super::{faults, qmp::Qmp, vcpus::Threads};
use crate::Tracking;

/// `areas`: where QEMU has the regions of `memory`.
pub(super) fn begin(
    qmp: &mut Qmp,
    memory: &GuestMemory,
    areas: Vec<Area>,
    tracking: Tracking,
) -> Result<Box<dyn Tracker>, GuestError> {
    let path = format!("/proc/{}/pagemap", qmp.pid());
    let pagemap = OwnedFd::from(File::open(&path).map_err(GuestError::system(format!("open {path}")))?);
    let pages: Vec<u64> = memory.regions().iter().map(Region::pages).collect();
    let private = memory.regions().iter().enumerate().filter(|(_, region)| region.is_private());
    let private: Vec<usize> = private.map(|(number, _)| number).collect();
    if tracking.of(memory)? == Tracking::Sync {
        let threads = Box::new(Threads::of(qmp)?);
        let uffd = faults::for_all(qmp)?;
        let tracker = SyncTracker::new(uffd, pagemap, areas, &pages, &private, threads)?;
        return Ok(Box::new(tracker));
    }
    let tracker = UffdTracker::new(faults::for_users(qmp)?, pagemap, areas, pages)?;
    Ok(Box::new(private.into_iter().fold(tracker, UffdTracker::with_private)))
}
