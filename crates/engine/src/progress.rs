//! What is going on, for a progress bar: atomics that any thread may read at any time, and a flag to cancel.
mod held;

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use transship_memory::Waits;

use held::Gate;
pub use held::Held;

/// Where a move is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    #[default]
    /// Looking for the other side.
    Connecting,
    /// The guest runs, its pages travel.
    Rounds,
    /// The guest runs; it could be stopped at any moment, and is not before somebody says so.
    Held,
    /// The guest stands still.
    Switchover,
    /// Given up here; past the point of no return.
    HandedOver,
    /// The pages of a snapshot are written; the file is being completed.
    Completing,
    /// A snapshot's pages are read.
    Reading,
    /// The memory is there; the VMM loads its devices.
    Loading,
    /// The guest runs, and its pages come when it touches them.
    Filling,
    /// What a QEMU says is carried to another one.
    Relaying,
    /// It runs at the destination, or the file is complete.
    Done,
}

/// Shared between the engine, which writes, and a display, which reads. Relaxed everywhere: numbers for people.
#[derive(Debug, Default)]
pub struct Progress {
    /// The round that is under way, from 1.
    pub round: AtomicU32,
    /// Bytes of pages that this round has still to look at; `round_total` at its start.
    pub round_left: AtomicU64,
    /// See `round_left`.
    pub round_total: AtomicU64,
    /// Bytes sent or received so far.
    pub wire_bytes: AtomicU64,
    /// Bytes of QEMU's, taken or given, that went through a relay so far.
    pub relayed_bytes: AtomicU64,
    /// Pages sent or received with content so far.
    pub normal_pages: AtomicU64,
    /// Pages found to be zero so far.
    pub zero_pages: AtomicU64,
    /// Pages written a second, as of the last scan.
    pub dirty_rate: AtomicU64,
    /// What the encoders did so far.
    pub encoding: EncodingProgress,
    /// CPU time so far.
    pub cpu: CpuProgress,
    /// Writers that wait for the tracker.
    waits: OnceLock<Arc<Waits>>,
    deadline: OnceLock<Deadline>,
    gate: Gate,
    phase: Mutex<Phase>,
    cancelled: AtomicBool,
    /// There is no way back: nothing is cancelled any more, and no deadline counts.
    is_settled: AtomicBool,
}

/// By when it must have ended.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    /// How long it was from the start.
    after: Duration,
}

/// What encoders did so far.
#[derive(Debug, Default)]
pub struct EncodingProgress {
    /// Packets that were to be encoded.
    pub submitted: AtomicU64,
    /// Those of them that found all encoders busy.
    pub busy: AtomicU64,
    /// Pages that were sent as they are because of that.
    pub raw_busy_pages: AtomicU64,
    /// Bytes that encoders were given.
    pub bytes_in: AtomicU64,
    /// Bytes that they made of them.
    pub bytes_out: AtomicU64,
}

impl EncodingProgress {
    /// Share of packets that found all encoders busy; 0 without any.
    pub fn busy_ratio(&self) -> f64 {
        match self.submitted.load(Ordering::Relaxed) {
            0 => 0.0,
            submitted => self.busy.load(Ordering::Relaxed) as f64 / submitted as f64,
        }
    }
}

/// CPU time of this process by role, counted while the threads work.
#[derive(Debug, Default)]
pub struct CpuProgress {
    /// The thread that leads.
    pub main: CpuTime,
    /// All encoder threads together.
    pub encoders: CpuTime,
    /// All decoder threads together.
    pub decoders: CpuTime,
    /// All channel threads together: they write at the source, and read at the destination.
    pub channels: CpuTime,
}

/// CPU time that threads add to.
#[derive(Debug, Default)]
pub struct CpuTime(AtomicU64);

impl CpuTime {
    /// In seconds.
    pub fn seconds(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 / 1e9
    }

    pub(crate) fn add(&self, seconds: f64) {
        self.0.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, seconds: f64) {
        self.0.store((seconds * 1e9) as u64, Ordering::Relaxed);
    }
}

impl Progress {
    /// A fresh one, to be shared.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }
    /// Where the move is.
    pub fn phase(&self) -> Phase {
        *self.phase.lock().unwrap_or_else(|e| e.into_inner())
    }
    /// For the engine: the move is here now.
    pub fn set_phase(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(|e| e.into_inner()) = phase;
    }
    /// For how long writers were held so far, all of them together.
    pub fn held_time(&self) -> Duration {
        self.waits.get().map_or(Duration::ZERO, |waits| waits.held_time())
    }
    /// These are the guest's writers.
    pub(crate) fn watch_writers(&self, waits: &Arc<Waits>) {
        // A second move with the same numbers keeps showing the first one's; there is none.
        let _ = self.waits.set(Arc::clone(waits));
    }
    /// Asks the engine to stop as soon as it can; the source guest runs on. Without effect past the point of no return.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
    /// As `cancel`, unless it is too late: then the phase that it has reached.
    ///
    /// # Errors
    /// The guest was given up, or all is done.
    pub fn try_cancel(&self) -> Result<(), Phase> {
        // `give_up` holds the same lock: one of the two comes first.
        let phase = self.phase.lock().unwrap_or_else(|e| e.into_inner());
        match *phase {
            Phase::HandedOver | Phase::Filling | Phase::Done => Err(*phase),
            _ => {
                self.cancel();
                Ok(())
            }
        }
    }
    /// The point of no return, unless somebody has cancelled or the deadline has passed: then false.
    pub(crate) fn give_up(&self) -> bool {
        let mut phase = self.phase.lock().unwrap_or_else(|e| e.into_inner());
        if self.is_cancelled() {
            return false;
        }
        *phase = Phase::HandedOver;
        true
    }
    /// Whether somebody called `cancel` since the last call of this.
    pub(crate) fn take_cancel(&self) -> bool {
        self.cancelled.swap(false, Ordering::Relaxed)
    }
    /// Whether somebody called `cancel`, or the deadline has passed.
    pub fn is_cancelled(&self) -> bool {
        let asked = self.cancelled.load(Ordering::Relaxed) || self.time_left().is_some_and(|left| left.is_zero());
        asked && !self.is_settled.load(Ordering::Relaxed)
    }
    /// From now on it can't be cancelled, and no deadline ends it.
    pub(crate) fn settle(&self) {
        self.is_settled.store(true, Ordering::Relaxed);
    }
    /// It must have ended so long after now, or is ended as `cancel` does. To be called once, before it starts.
    pub fn end_within(&self, after: Duration) {
        // No deadline can be told from one that is further away than the clock reaches.
        if let Some(at) = Instant::now().checked_add(after) {
            let _ = self.deadline.set(Deadline { at, after });
        }
    }
    /// Until the deadline, if there is one.
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline.get().map(|deadline| deadline.at.saturating_duration_since(Instant::now()))
    }
    /// The deadline that has passed, unless somebody has cancelled before.
    pub(crate) fn passed_deadline(&self) -> Option<Duration> {
        let Deadline { at, after } = *self.deadline.get()?;
        (Instant::now() >= at && !self.cancelled.load(Ordering::Relaxed)).then_some(after)
    }
}
