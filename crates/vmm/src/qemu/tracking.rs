//! Begins to track what a QEMU writes.
use std::{fs::File, os::fd::OwnedFd};

use transship_guest::GuestError;
use transship_memory::{Area, GuestMemory, LetWait, Region, SyncTracker, Tracker, UffdTracker};

use super::{
    back_ends::{self, BackEnds},
    faults,
    qmp::Qmp,
    vcpus::{Processors, Threads},
};
use crate::Tracking;

/// All that takes a right.
pub(super) struct Acquired {
    uffd: OwnedFd,
    pagemap: OwnedFd,
    /// Of the other processes that write.
    others: Vec<back_ends::Acquired>,
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
    pub(super) fn of(
        qmp: &mut Qmp,
        memory: &GuestMemory,
        tracking: Tracking,
        others: &BackEnds,
    ) -> Result<Self, GuestError> {
        let pagemap = pagemap(qmp.pid())?;
        if way(tracking, memory, others)? == Tracking::Sync {
            let waiting = Some(Waiting { processors: Processors::of(qmp)?, known_by: None });
            return Ok(Self { uffd: faults::for_all(qmp)?, pagemap, others: Vec::new(), waiting });
        }
        let others = others.acquire()?;
        Ok(Self { uffd: faults::for_users(qmp.pid())?, pagemap, others, waiting: None })
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

    /// `areas`: where QEMU has the regions of `memory`. `elsewhere`: where the others have them.
    pub(super) fn begin(
        self,
        memory: &GuestMemory,
        areas: Vec<Area>,
        elsewhere: Vec<Vec<Area>>,
    ) -> Result<Box<dyn Tracker>, GuestError> {
        let Self { uffd, pagemap, others, waiting } = self;
        let pages: Vec<_> = memory.regions().iter().map(Region::pages).collect();
        if let Some(Waiting { processors, known_by }) = waiting {
            let private = memory.regions().iter().enumerate().filter(|(_, region)| region.is_private());
            let private: Vec<usize> = private.map(|(number, _)| number).collect();
            let threads = known_by.unwrap_or_else(|| Box::new(Threads::of(processors)));
            return Ok(Box::new(SyncTracker::new(uffd, pagemap, areas, &pages, &private, threads)?));
        }
        let mut tracker = UffdTracker::new(uffd, pagemap, areas, pages)?.with_memory(memory);
        for (other, areas) in others.into_iter().zip(elsewhere) {
            tracker = tracker.with_other(other.uffd, other.pagemap, areas)?;
        }
        Ok(Box::new(tracker))
    }
}

/// The way that is taken, never `Auto`.
///
/// # Errors
/// The kernel can't; one of the other processes that write can't be tracked so.
pub(super) fn way(tracking: Tracking, memory: &GuestMemory, others: &BackEnds) -> Result<Tracking, GuestError> {
    let way = tracking.of(memory)?;
    if way == Tracking::Sync {
        others.refuse(
            "this way of tracking",
            "boot Linux 6.7 or newer, and leave out --tracker sync and --converge pace",
        )?;
    }
    Ok(way)
}

/// The page map of a process.
pub(super) fn pagemap(pid: i32) -> Result<OwnedFd, GuestError> {
    let path = format!("/proc/{pid}/pagemap");
    Ok(OwnedFd::from(File::open(&path).map_err(GuestError::system(format!("open {path}")))?))
}
