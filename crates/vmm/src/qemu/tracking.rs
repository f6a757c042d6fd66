//! Begins to track what a QEMU writes.
use std::{fs::File, os::fd::OwnedFd};

use transship_guest::GuestError;
use transship_memory::{Area, GuestMemory, LetWait, Region, SyncTracker, Tracker, UffdTracker};

use super::{
    faults,
    qmp::Qmp,
    vcpus::{Processors, Threads},
};
use crate::Tracking;

/// All that takes a right.
pub(super) struct Acquired {
    uffd: OwnedFd,
    pagemap: OwnedFd,
    /// Writers that wait for the tracker; none: nobody does.
    waiting: Option<Waiting>,
}

/// What is known of them.
struct Waiting {
    processors: Processors,
    /// By this other process; none: by this one.
    known_by: Option<Box<dyn LetWait>>,
}

impl Acquired {
    pub(super) fn of(qmp: &mut Qmp, memory: &GuestMemory, tracking: Tracking) -> Result<Self, GuestError> {
        let path = format!("/proc/{}/pagemap", qmp.pid());
        let pagemap = OwnedFd::from(File::open(&path).map_err(GuestError::system(format!("open {path}")))?);
        if tracking.of(memory)? == Tracking::Sync {
            let waiting = Some(Waiting { processors: Processors::of(qmp)?, known_by: None });
            return Ok(Self { uffd: faults::for_all(qmp)?, pagemap, waiting });
        }
        Ok(Self { uffd: faults::for_users(qmp)?, pagemap, waiting: None })
    }

    /// What another process must be told to know the threads; none: nobody need know them.
    pub(super) fn threads(&self) -> Option<String> {
        self.waiting.as_ref()?.processors.to_text()
    }

    /// That process does.
    pub(super) fn know_threads_by(&mut self, other: Box<dyn LetWait>) {
        if let Some(waiting) = &mut self.waiting {
            waiting.known_by = Some(other);
        }
    }

    /// `areas`: where QEMU has the regions of `memory`.
    pub(super) fn begin(self, memory: &GuestMemory, areas: Vec<Area>) -> Result<Box<dyn Tracker>, GuestError> {
        let Self { uffd, pagemap, waiting } = self;
        let pages: Vec<u64> = memory.regions().iter().map(Region::pages).collect();
        let private = memory.regions().iter().enumerate().filter(|(_, region)| region.is_private());
        let private: Vec<usize> = private.map(|(number, _)| number).collect();
        if let Some(Waiting { processors, known_by }) = waiting {
            let threads = known_by.unwrap_or_else(|| Box::new(Threads::of(processors)));
            return Ok(Box::new(SyncTracker::new(uffd, pagemap, areas, &pages, &private, threads)?));
        }
        let tracker = UffdTracker::new(uffd, pagemap, areas, pages)?;
        Ok(Box::new(private.into_iter().fold(tracker, UffdTracker::with_private)))
    }
}
