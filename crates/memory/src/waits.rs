//! Writers that wait for a tracker, and for how long they are made to.
use std::{
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::PageCount;

/// How fast pages may be written for the first time since they were scanned.
pub trait WriterPace: Send + Sync {
    /// Whether one more page may be let go of now. `passed`: how many were since this pace was set. If it may not, its
    /// writer is held, for a few milliseconds at most, and asked about again.
    fn may_pass(&self, passed: u64) -> bool;

    /// How many times as long as usual a writer may be held.
    fn patience(&self) -> u32 {
        1
    }
}

/// Knows the threads of the process whose memory is tracked.
pub trait LetWait: Send {
    /// For how long this thread is usually held at a page that it wants to write; zero: it is not to be held at all.
    /// Called only when it is to be held, and while it waits.
    fn at_most(&mut self, thread: u32) -> Duration;
}

/// Holds every thread for as long. For processes whose threads that write do nothing else.
impl LetWait for Duration {
    fn at_most(&mut self, _thread: u32) -> Duration {
        *self
    }
}

/// How much writers have waited so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waited {
    /// Writes that waited at all, until their page was let go of.
    pub writes: u64,
    /// Those of them that were held, because of the pace.
    pub held: u64,
    /// How long, all of them together.
    pub held_time: Duration,
    /// The longest of them.
    pub longest: Duration,
}

/// What a tracker and its user share.
#[derive(Default)]
pub struct Waits {
    writes: AtomicU64,
    held: AtomicU64,
    held_ns: AtomicU64,
    /// Since it was asked for last.
    longest_ns: AtomicU64,
    pace: Mutex<Option<Box<dyn WriterPace>>>,
    /// Pages that were let go of since the pace was set.
    passed: AtomicU64,
}

impl fmt::Debug for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waits").field("writes", &self.writes).field("held", &self.held).finish_non_exhaustive()
    }
}

// All numbers are for people, but for `passed`, which one thread counts. So they are relaxed.
impl Waits {
    /// Holds writers so that pages are written no faster than this. None: nobody is held, from now on.
    pub fn set_pace(&self, pace: Option<Box<dyn WriterPace>>) {
        let mut set = self.pace();
        self.passed.store(0, Relaxed);
        *set = pace;
    }

    /// How much writers have waited so far; the longest wait is that since the last call.
    pub fn so_far(&self) -> Waited {
        Waited {
            writes: self.writes.load(Relaxed),
            held: self.held.load(Relaxed),
            held_time: Duration::from_nanos(self.held_ns.load(Relaxed)),
            longest: Duration::from_nanos(self.longest_ns.swap(0, Relaxed)),
        }
    }

    /// How long writers were held so far.
    pub fn held_time(&self) -> Duration {
        Duration::from_nanos(self.held_ns.load(Relaxed))
    }

    /// Whether so many pages may be let go of now.
    pub(crate) fn may_pass(&self, pages: PageCount) -> bool {
        let last = || self.passed.load(Relaxed) + pages.get() - 1;
        self.pace().as_ref().is_none_or(|pace| pace.may_pass(last()))
    }

    pub(crate) fn patience(&self) -> u32 {
        self.pace().as_ref().map_or(1, |pace| pace.patience())
    }

    /// A writer goes on, who was held for this long.
    pub(crate) fn passed(&self, pages: PageCount, held: Option<Duration>) {
        self.passed.fetch_add(pages.get(), Relaxed);
        self.writes.fetch_add(1, Relaxed);
        if let Some(held) = held {
            let ns = u64::try_from(held.as_nanos()).unwrap_or(u64::MAX);
            self.held.fetch_add(1, Relaxed);
            self.held_ns.fetch_add(ns, Relaxed);
            self.longest_ns.fetch_max(ns, Relaxed);
        }
    }

    fn pace(&self) -> MutexGuard<'_, Option<Box<dyn WriterPace>>> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
