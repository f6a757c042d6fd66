//! Pages that come after the guest: who waits for which, and how they are put.
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::{Fault, PageCount, PageNumber, PageRange, PageSet, WindowPages};
use transship_wire::{Message, Pages};

use crate::{Error, PostCopyReport, Progress, control::Control, fail_point, filling::Filling, owed};

/// Waits that are remembered for the report.
const WAITS_MOST: usize = 1 << 20;

/// The guest's memory, as the connections of a supply line fill it. All threads use it at once.
pub(super) struct Arrival {
    pub(super) filling: Filling,
    progress: Arc<Progress>,
    /// Since when a page is waited for.
    waiting: Mutex<HashMap<(usize, PageNumber), Instant>>,
    /// How many there are: most pages are nobody's who waits.
    are_waiting: AtomicUsize,
    /// How long each was waited for, in microseconds.
    waited: Mutex<Vec<u32>>,
    /// The line that stands, for what is said on it.
    line: Mutex<Option<Control>>,
    is_ours: AtomicBool,
    /// The source may be told so.
    runs: AtomicBool,
    /// Whether it was started, or could not be, is known, and the source was told if it was.
    is_start_over: AtomicBool,
    /// That the guest was given away, and whether it is to run, as the source says on every line but the first.
    given: (Sender<bool>, Receiver<bool>),
    by_push: AtomicU64,
    by_fault: AtomicU64,
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Arrival {
    pub(super) fn new(filling: Filling, progress: &Arc<Progress>) -> Self {
        Self {
            filling,
            progress: Arc::clone(progress),
            waiting: Mutex::default(),
            are_waiting: AtomicUsize::new(0),
            waited: Mutex::default(),
            line: Mutex::new(None),
            is_ours: AtomicBool::new(false),
            runs: AtomicBool::new(false),
            is_start_over: AtomicBool::new(false),
            given: bounded(1),
            by_push: AtomicU64::new(0),
            by_fault: AtomicU64::new(0),
        }
    }

    /// The guest was handed over.
    pub(super) fn is_ours(&self) {
        self.is_ours.store(true, Ordering::Release);
    }

    /// Whether it was.
    pub(super) fn was_handed_over(&self) -> bool {
        self.is_ours.load(Ordering::Acquire)
    }

    /// The source has said that it has given the guest away. One word is enough.
    pub(super) fn give(&self, run: bool) {
        let _ = self.given.0.try_send(run);
    }

    /// Has a word, once the source has said on a line that it has given the guest away: whether that is to run.
    pub(super) fn given(&self) -> &Receiver<bool> {
        &self.given.1
    }

    /// It was let run, or left as it came if that was stopped: tells the source, also on the lines to come.
    pub(super) fn runs(&self) {
        self.runs.store(true, Ordering::Release);
        // The source may have disconnected: the guest runs anyway.
        let _ = self.say(&Message::Running);
    }

    /// It was started, which was said, or could not be. Until now the source is not told that all is there: it would
    /// not wait for the word that the guest runs.
    pub(super) fn start_is_over(&self) {
        self.is_start_over.store(true, Ordering::Release);
    }

    /// Whether the source may be told that all is there.
    pub(super) fn may_be_over(&self) -> bool {
        self.is_start_over.load(Ordering::Acquire)
    }

    /// The life of the thread that hears the guest's faults: it asks for pages, and does not wait for them.
    pub(super) fn serve(&self) {
        self.filling.serve(|Fault { region, page }| {
            let is_new = {
                let mut waiting = lock(&self.waiting);
                let is_new = !waiting.contains_key(&(region, page));
                waiting.entry((region, page)).or_insert_with(Instant::now);
                self.are_waiting.store(waiting.len(), Ordering::Release);
                is_new
            };
            // Somebody may have brought it before we had said that we wait.
            if self.filling.claims().is_done(region, page) {
                self.came(region, page.run(PageCount::ONE));
                return Ok(self.filling.missing().wake(region, page.run(PageCount::ONE))?);
            }
            if is_new {
                self.ask(region, page);
            }
            Ok(())
        });
    }

    /// A line that is broken is followed by one on which this is asked again.
    fn ask(&self, region: usize, page: PageNumber) {
        let mut line = lock(&self.line);
        if let Some(control) = line.as_mut() {
            let _ = control.send(&Message::Want { region: region as u16, page: page.get() });
        }
    }

    /// From now on this line is the one that stands: says on it what is lacked, and what is waited for.
    pub(super) fn begin(&self, mut control: Control) -> Result<(), Error> {
        let mut line = lock(&self.line);
        *line = None;
        owed::send(&mut control, &self.lacks())?;
        if self.runs.load(Ordering::Acquire) {
            control.send(&Message::Running)?;
        }
        fail_point::reach("destination.line")?;
        let waiting: Vec<_> = lock(&self.waiting).keys().copied().collect();
        for (region, page) in waiting {
            control.send(&Message::Want { region: region as u16, page: page.get() })?;
        }
        *line = Some(control);
        Ok(())
    }

    /// No line stands.
    pub(super) fn end_line(&self) {
        *lock(&self.line) = None;
    }

    /// Says something on the line, if one stands.
    pub(super) fn say(&self, message: &Message) -> Result<(), Error> {
        lock(&self.line).as_mut().map_or(Ok(()), |control| control.send(message))
    }

    /// By region: the pages that are not there yet.
    pub(super) fn lacks(&self) -> Vec<PageSet> {
        (0..self.filling.regions().len()).map(|region| self.filling.claims().not_done(region)).collect()
    }

    /// Pages of a window that came in order; without bytes they are zero.
    pub(super) fn push(&self, region: usize, pages: WindowPages, bytes: Option<&[u8]>) -> Result<(), Error> {
        let mut rest = bytes;
        for run in pages.runs() {
            let bytes = rest.map(|bytes| bytes.split_at(run.bytes() as usize));
            rest = bytes.map(|(_, rest)| rest);
            let put = self.put(region, run, bytes.map(|(bytes, _)| bytes))?;
            self.by_push.fetch_add(put.get(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Pages that somebody waited for, or beside such. They were checked to be the region's.
    pub(super) fn wanted(&self, pages: &Pages) -> Result<(), Error> {
        let Pages { region, first, count, bytes } = pages;
        let bytes = (!bytes.is_empty()).then_some(bytes.as_slice());
        let put = self.put(usize::from(*region), PageRange::new(*first, (*count).into()), bytes)?;
        self.by_fault.fetch_add(put.get(), Ordering::Relaxed);
        Ok(())
    }

    /// Those that are there already, or were, are left as they are. Returns how many were put.
    fn put(&self, region: usize, run: PageRange, bytes: Option<&[u8]>) -> Result<PageCount, Error> {
        let (missing, claims) = (self.filling.missing(), self.filling.claims());
        let put = match bytes {
            Some(bytes) => missing.fill_once(claims, region, run.first, bytes)?,
            None => missing.leave_zero(claims, region, run)?,
        };
        let bytes = put.bytes();
        let left = &self.progress.round_left;
        let _ = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(bytes)));
        self.came(region, run);
        Ok(put)
    }

    /// Nobody waits for these any more.
    fn came(&self, region: usize, run: PageRange) {
        if self.are_waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        let (mut waiting, mut waited) = (lock(&self.waiting), lock(&self.waited));
        waiting.retain(|&(of, page), since| {
            let is_here = of == region && run.contains(page);
            if is_here && waited.len() < WAITS_MOST {
                waited.push(since.elapsed().as_micros().try_into().unwrap_or(u32::MAX));
            }
            !is_here
        });
        self.are_waiting.store(waiting.len(), Ordering::Release);
    }

    /// What happened so far.
    pub(super) fn report(&self, report: &mut PostCopyReport) {
        let mut waited = lock(&self.waited).clone();
        waited.sort_unstable();
        let ms = |share: usize| waited.get(waited.len() * share / 100).map_or(0.0, |us| f64::from(*us) / 1e3);
        report.by_fault = self.by_fault.load(Ordering::Relaxed);
        report.by_push = self.by_push.load(Ordering::Relaxed);
        report.faults = waited.len() as u64;
        (report.fault_median_ms, report.fault_p99_ms) = (ms(50), ms(99));
    }
}
