//! Begins to track what a QEMU writes.
use std::{fs::File, os::fd::OwnedFd};

use transship_guest::GuestError;
use transship_memory::{Area, GuestMemory, Region, SyncTracker, Tracker, UffdTracker};

use super::{faults, qmp::Qmp, vcpus::Threads};
use crate::Tracking;

/// All that takes a right.
pub(super) struct Acquired {
    uffd: OwnedFd,
    pagemap: OwnedFd,
    /// Whose writers may be held; none: nobody is to wait.
    threads: Option<Box<Threads>>,
}

impl Acquired {
    pub(super) fn of(qmp: &mut Qmp, memory: &GuestMemory, tracking: Tracking) -> Result<Self, GuestError> {
        let path = format!("/proc/{}/pagemap", qmp.pid());
        let pagemap = OwnedFd::from(File::open(&path).map_err(GuestError::system(format!("open {path}")))?);
        if tracking.of(memory)? == Tracking::Sync {
            let threads = Some(Box::new(Threads::of(qmp)?));
            return Ok(Self { uffd: faults::for_all(qmp)?, pagemap, threads });
        }
        Ok(Self { uffd: faults::for_users(qmp)?, pagemap, threads: None })
    }

    /// `areas`: where QEMU has the regions of `memory`.
    pub(super) fn begin(self, memory: &GuestMemory, areas: Vec<Area>) -> Result<Box<dyn Tracker>, GuestError> {
        let Self { uffd, pagemap, threads } = self;
        let pages: Vec<u64> = memory.regions().iter().map(Region::pages).collect();
        let private = memory.regions().iter().enumerate().filter(|(_, region)| region.is_private());
        let private: Vec<usize> = private.map(|(number, _)| number).collect();
        if let Some(threads) = threads {
            return Ok(Box::new(SyncTracker::new(uffd, pagemap, areas, &pages, &private, threads)?));
        }
        let tracker = UffdTracker::new(uffd, pagemap, areas, pages)?;
        Ok(Box::new(private.into_iter().fold(tracker, UffdTracker::with_private)))
    }
}
