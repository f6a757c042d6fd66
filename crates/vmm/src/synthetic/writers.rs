//! The threads that write, and the gate that stops them.
use std::{
    io,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use transship_memory::PAGE_BYTES;

use super::{
    lock,
    machine::{Buffers, Machine, Program},
};

/// Pages between two looks at the clock.
const BATCH: usize = 16;
/// A writer that is so far behind its rate doesn't catch up.
const MOST_BEHIND: Duration = Duration::from_secs(1);

/// The writers of a guest; they begin behind a closed gate. Dropping this ends them.
pub(super) struct Writers {
    gate: Arc<Gate>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    pub(super) fn start(machine: &Arc<Machine>) -> io::Result<Self> {
        let program = &machine.program;
        let idle = program.write_rate == Some(0) || program.hot_pages == 0;
        // A thread without pages of its own would have nothing to do.
        let count = if idle { 0 } else { program.threads.min(program.hot_pages) };
        let mut writers = Self { gate: Arc::default(), threads: Vec::new() };
        for t in 0..count {
            let (gate, machine) = (writers.gate.clone(), machine.clone());
            let write = move || write_on(&gate, &machine, t, count);
            writers.threads.push(thread::Builder::new().name(format!("writer {t}")).spawn(write)?);
        }
        Ok(writers)
    }

    pub(super) fn go(&self) {
        self.gate.open();
    }

    /// Returns when no thread writes any more.
    pub(super) fn halt(&self) {
        self.gate.close();
    }

    pub(super) fn is_going(&self) -> bool {
        self.gate.is_open()
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.gate.quit();
        for thread in self.threads.drain(..) {
            // A panic there was printed.
            let _ = thread.join();
        }
    }
}

/// The life of writer `t` of `count`.
fn write_on(gate: &Gate, machine: &Machine, t: u64, count: u64) {
    let mut buffers = Buffers::new();
    let mut pages = own_pages(&machine.program, t, count).cycle();
    while let Some(_inside) = gate.enter() {
        let mut pace = WriteRate::new(machine.program.write_rate, count);
        while gate.is_open() {
            let batch = pages.by_ref().take(pace.batch()).take_while(|_| gate.is_open());
            let written = batch.map(|number| machine.write(number, &mut buffers)).count() as u64;
            machine.count_writes(written);
            if let Some(due) = pace.after(written * PAGE_BYTES as u64) {
                gate.wait_while_open(due);
            }
        }
    }
}

/// The pages of one writer: its slice of the hot pages of each region.
fn own_pages(program: &Program, t: u64, count: u64) -> impl Iterator<Item = u64> + Clone {
    let (pages, first, end) =
        (program.region_pages, program.hot_pages * t / count, program.hot_pages * (t + 1) / count);
    (0..program.regions).flat_map(move |region| region * pages + first..region * pages + end)
}

/// When the next bytes are due.
struct WriteRate {
    /// Bytes a second of this thread; none: now.
    rate: Option<f64>,
    due: Instant,
}

impl WriteRate {
    fn new(rate: Option<u64>, threads: u64) -> Self {
        Self { rate: rate.map(|rate| rate as f64 / threads as f64), due: Instant::now() }
    }

    /// Pages to write at once: few when they are to come slowly.
    fn batch(&self) -> usize {
        let in_ten_ms = |rate: f64| (rate / 100.0) as usize / PAGE_BYTES;
        self.rate.map_or(BATCH, |rate| in_ten_ms(rate).clamp(1, BATCH))
    }

    fn after(&mut self, bytes: u64) -> Option<Instant> {
        let rate = self.rate?;
        let now = Instant::now();
        // A rate of a byte a year is nobody's wish, but must not overflow.
        self.due += Duration::from_secs_f64((bytes as f64 / rate).min(1e6));
        if self.due + MOST_BEHIND < now {
            self.due = now;
        }
        (self.due > now).then_some(self.due)
    }
}

/// A gate that threads pass while it is open, and that can be closed behind the last of them.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    /// The same as in `state`, to be looked at without the lock (Relaxed): `close` waits under the lock for all to be
    /// out.
    open: AtomicBool,
}

#[derive(Default)]
struct GateState {
    open: bool,
    quit: bool,
    inside: usize,
}

/// A thread is inside while it has this.
struct Inside<'a>(&'a Gate);

impl Gate {
    /// Waits for the gate to open; none: never again.
    fn enter(&self) -> Option<Inside<'_>> {
        let mut state = lock(&self.state);
        while !state.open && !state.quit {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        if state.quit {
            return None;
        }
        state.inside += 1;
        Some(Inside(self))
    }

    fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    fn open(&self) {
        self.set(|state| state.open = true);
    }

    fn quit(&self) {
        self.set(|state| (state.open, state.quit) = (false, true));
    }

    fn close(&self) {
        self.set(|state| state.open = false);
        let mut state = lock(&self.state);
        while state.inside > 0 {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn set(&self, change: impl FnOnce(&mut GateState)) {
        let mut state = lock(&self.state);
        change(&mut state);
        self.open.store(state.open, Ordering::Relaxed);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until `until`, or until the gate is no longer open.
    fn wait_while_open(&self, until: Instant) {
        let mut state = lock(&self.state);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if !state.open || left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.set(|state| state.inside -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::content::Initial;

    fn program(regions: u64, region_pages: u64, hot_pages: u64) -> Program {
        Program {
            seed: 1,
            regions,
            region_pages,
            touched_pages: 0,
            hot_pages,
            initial: Initial::Zero,
            write_rate: None,
            threads: 1,
            writes: 0,
        }
    }

    #[test]
    fn every_hot_page_belongs_to_one_writer() {
        let program = program(2, 100, 7);
        let mut pages: Vec<u64> = (0..3).flat_map(|t| own_pages(&program, t, 3)).collect();
        pages.sort_unstable();
        assert_eq!(pages, (0..7).chain(100..107).collect::<Vec<_>>());
    }

    #[test]
    fn slow_writers_write_page_by_page() {
        assert_eq!(WriteRate::new(Some(4096), 1).batch(), 1);
        assert_eq!(WriteRate::new(Some(1 << 30), 1).batch(), BATCH);
        assert_eq!(WriteRate::new(None, 1).after(1 << 40), None);
        let mut pace = WriteRate::new(Some(1 << 20), 2);
        let begin = pace.due;
        pace.after(1 << 19);
        assert_eq!(pace.due - begin, Duration::from_secs(1));
    }

    #[test]
    fn a_closed_gate_has_nobody_behind_it() {
        let gate = Gate::default();
        let writing = AtomicBool::new(false);
        let mut left_behind = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(_inside) = gate.enter() {
                    writing.store(true, Ordering::Relaxed);
                    while gate.is_open() {
                        thread::yield_now();
                    }
                    writing.store(false, Ordering::Relaxed);
                }
            });
            for _ in 0..100 {
                gate.open();
                while !writing.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                gate.close();
                left_behind += u32::from(writing.load(Ordering::Relaxed));
            }
            gate.quit();
        });
        assert_eq!(left_behind, 0);
    }
}
