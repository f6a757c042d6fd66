//! The threads that put pages into the file.
//!
//! Only one thread reads a page, once. It checks whether the page is zero and hands it to the kernel, straight from
//! guest memory, or from where it was copied to. Only ranges travel between threads.
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use transship_memory::{FileIo, Freeing, GuestMemory, PageCount, PageRange, Region, Turns, WindowPages};

use crate::{
    Error, Progress, cpu,
    page_map::PageMap,
    scan::{Pending, new_holes},
    snapshot::{
        file::{
            pace::FilePace,
            queues::Queues,
            target::{DEPTH, Target},
        },
        mapped::layout::Spot,
    },
};

/// How often a wait checks whether the user has cancelled.
const TICK: Duration = Duration::from_millis(50);
/// Requests of a thread in flight that each have a copy of their pages, 2 MiB. More of them were not faster.
const COPIES: u16 = 4;

/// What the threads share.
pub(crate) struct Pages {
    pub(crate) memory: GuestMemory,
    /// Whether memory may be given back while it is written.
    pub(crate) freeing: Freeing,
    /// By region: where its first page is; a stream has no places.
    pub(crate) places: Vec<Spot>,
    /// By region: pages that the file holds content for. All others are zero.
    pub(crate) content: Vec<PageMap>,
    /// By region: pages that were ever written to the file.
    pub(crate) written: Vec<PageMap>,
    /// A disk takes pages of 4 KiB one by one from a mapping, and a copy of them as one: they are copied before they
    /// are written.
    copies: bool,
    pub(crate) pace: Arc<FilePace>,
    pub(crate) progress: Arc<Progress>,
    /// A thread has failed: the others need not go on.
    failed: AtomicBool,
}

/// What was done in a round.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Written {
    pub(crate) normal: PageCount,
    pub(crate) zero: PageCount,
    /// Of the normal pages: those that the file had some content for.
    pub(crate) rewritten: PageCount,
    pub(crate) cpu_seconds: f64,
}

/// A piece of a round.
struct Batch {
    region: usize,
    windows: Vec<WindowPages>,
}

/// A round, for one thread: it takes batches until there are no more.
type Round = Receiver<Batch>;
type Outcome = Result<Written, transship_memory::Error>;

/// A thread, and where it gets its rounds from; none: it is to end.
struct WriterThread {
    rounds: Option<Sender<Round>>,
    handle: Option<JoinHandle<()>>,
}

/// Threads that wait for rounds. They have ended when this is dropped.
pub(crate) struct Writers {
    pub(crate) pages: Arc<Pages>,
    threads: Vec<WriterThread>,
    outcomes: Receiver<Outcome>,
    is_uring: bool,
}

impl Writers {
    /// Starts `count` threads, each with requests of its own on the file. `places`: see [`Pages`]; `copies`: pages are
    /// copied before they are written, which takes more of the cores and less of the disk's time.
    ///
    /// # Errors
    /// The kernel does not let us have what was asked for.
    pub(crate) fn start(
        memory: &GuestMemory,
        freeing: Freeing,
        places: Vec<Spot>,
        count: u8,
        (how, copies): (FileIo, bool),
        target: &Target,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let pages = Pages { copies, ..Pages::new(memory, freeing, places, target, progress) };
        let pages = Arc::new(pages);
        let (done, outcomes) = bounded(usize::from(count));
        let (ready, started) = bounded(usize::from(count));
        let (mut threads, turns) = (Vec::new(), Turns::default());
        for number in 0..count {
            let (pages, done, ready, turns) = (Arc::clone(&pages), done.clone(), ready.clone(), turns.clone());
            let files = target.page_descriptors()?;
            let (rounds, work) = bounded::<Round>(1);
            let run = move || {
                // The requests are this thread's own.
                let mut queues = match Queues::new(&pages.memory, files, (how, pages.depth()), &turns) {
                    Ok(queues) => queues,
                    Err(error) => return drop(ready.send(Err(error))),
                };
                drop(ready.send(Ok(queues.is_uring())));
                for round in work {
                    if done.send(pages.write_round(&mut queues, &round)).is_err() {
                        break; // nobody wants it any more
                    }
                }
            };
            let spawned = thread::Builder::new().name(format!("writer{number}")).spawn(run);
            let handle = spawned.map_err(|source| Error::Io { what: "start a thread".into(), source })?;
            threads.push(WriterThread { rounds: Some(rounds), handle: Some(handle) });
        }
        let mut is_uring = false;
        for _ in 0..count {
            let started = started.recv().unwrap_or_else(|_| Err(std::io::Error::other("a writer ended at once")));
            is_uring = started.map_err(|source| Error::Io { what: "prepare to write pages".into(), source })?;
        }
        Ok(Self { pages, threads, outcomes, is_uring })
    }

    /// Whether the kernel takes requests by io_uring.
    pub(crate) fn is_uring(&self) -> bool {
        self.is_uring
    }

    /// Writes what is pending, and returns when the kernel has all of it. Pages that are gone are forgotten.
    ///
    /// # Errors
    /// The first one of any thread; cancelled. The threads are then of no use any more.
    pub(crate) fn write(&self, pending: &[Pending], target: &Target) -> Result<Written, Error> {
        let (queue, batches) = bounded(2 * self.threads.len());
        for rounds in self.threads.iter().filter_map(|thread| thread.rounds.as_ref()) {
            // One that is gone is missed below.
            let _ = rounds.send(batches.clone());
        }
        drop(batches);
        let fed = self.feed(pending, &queue);
        if fed.is_err() {
            self.pages.failed.store(true, Relaxed);
        }
        drop(queue);
        let collected = self.collect(target);
        fed?;
        collected
    }

    fn feed(&self, pending: &[Pending], queue: &Sender<Batch>) -> Result<(), Error> {
        for (region, pending) in pending.iter().enumerate() {
            for range in pending.gone.ranges() {
                self.pages.content[region].take(range).for_each(drop);
            }
            for windows in pending.batches() {
                let mut batch = Batch { region, windows };
                loop {
                    if self.pages.progress.is_cancelled() {
                        return Err(Error::CANCELLED);
                    }
                    match queue.send_timeout(batch, TICK) {
                        Ok(()) => break,
                        Err(SendTimeoutError::Timeout(back)) => batch = back,
                        // All threads have failed; what they say is collected.
                        Err(SendTimeoutError::Disconnected(_)) => return Ok(()),
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for all threads, also after a failure: what they have given to the kernel still goes to the file.
    fn collect(&self, target: &Target) -> Result<Written, Error> {
        let mut total = Written::default();
        let mut failure = None;
        for _ in &self.threads {
            match self.next_outcome()? {
                Ok(written) => total.add(&written),
                Err(error) => failure = failure.or(Some(target.failed_pages(error))),
            }
        }
        failure.map_or(Ok(total), Err)
    }

    fn next_outcome(&self) -> Result<Outcome, Error> {
        loop {
            match self.outcomes.recv_timeout(TICK) {
                Ok(outcome) => return Ok(outcome),
                // What one has to say it says before it ends, unless it panics.
                Err(_) if self.outcomes.is_empty() && self.threads.iter().any(WriterThread::is_gone) => {
                    let source = std::io::Error::other("a writer thread has ended because of a bug");
                    return Err(Error::Io { what: "write pages".into(), source });
                }
                Err(_) => {}
            }
        }
    }
}

impl WriterThread {
    fn is_gone(&self) -> bool {
        self.handle.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.threads.iter_mut().for_each(|thread| thread.rounds = None);
        for handle in self.threads.iter_mut().filter_map(|thread| thread.handle.take()) {
            // A panic there has been printed.
            let _ = handle.join();
        }
    }
}

impl Pages {
    /// Of a file that has none yet.
    pub(crate) fn new(
        memory: &GuestMemory,
        freeing: Freeing,
        places: Vec<Spot>,
        target: &Target,
        progress: &Arc<Progress>,
    ) -> Self {
        let maps = || PageMap::empty(memory);
        Self {
            memory: memory.clone(),
            freeing,
            places,
            content: maps(),
            written: maps(),
            copies: false,
            pace: Arc::clone(&target.pace),
            progress: Arc::clone(progress),
            failed: AtomicBool::new(false),
        }
    }

    fn write_round(&self, queues: &mut Queues, batches: &Round) -> Outcome {
        let begin = cpu::thread_seconds();
        let mut written = Written::default();
        let mut outcome = Ok(());
        for batch in batches {
            // After a failure what comes is taken and dropped, so that nobody waits for room.
            if outcome.is_err() || self.failed.load(Relaxed) {
                continue;
            }
            let mut windows = batch.windows.into_iter();
            outcome = windows.try_for_each(|window| self.write_window(queues, batch.region, window, &mut written));
            if outcome.is_err() {
                self.failed.store(true, Relaxed);
            }
        }
        let finished = queues.finish();
        outcome.and(finished).inspect_err(|_| self.failed.store(true, Relaxed))?;
        Ok(Written { cpu_seconds: cpu::thread_seconds() - begin, ..written })
    }

    /// Whether its pages are copied before they are written: huge ones need not be.
    fn copies(&self, region: &Region) -> bool {
        self.copies && !region.is_huge_file()
    }

    /// Requests of a thread in flight.
    fn depth(&self) -> u16 {
        if self.memory.regions().iter().any(|region| self.copies(region)) { COPIES } else { DEPTH }
    }

    fn write_window(
        &self,
        queues: &mut Queues,
        region: usize,
        wanted: WindowPages,
        written: &mut Written,
    ) -> Result<(), transship_memory::Error> {
        let memory = &self.memory.regions()[region];
        let holes = self.new_holes(region, wanted);
        let Spot { file, offset } = self.places[region];
        let zero = queues.of(file).write_window(region, wanted.without(holes), offset, self.copies(memory))? | holes;
        let present = wanted.without(zero);
        written.normal += present.count();
        written.zero += wanted.with(zero).count();
        let had = self.content[region].window(present.first);
        written.rewritten += present.with(present.mask & had).count();
        self.note(region, present, zero);
        // What is written next waits for what was asked for now.
        self.pace.wait(present.bytes());
        Ok(())
    }

    /// The mask of those that have become holes since the look. They read as zero, and stay holes.
    pub(crate) fn new_holes(&self, region: usize, wanted: WindowPages) -> u128 {
        match self.freeing {
            Freeing::Announced | Freeing::Possible => new_holes(&self.memory.regions()[region], wanted),
            Freeing::Never => 0,
        }
    }

    /// Takes note of pages: the file holds content for these, and none for those of the same window that `zero` names.
    pub(crate) fn note(&self, region: usize, present: WindowPages, zero: u128) {
        self.content[region].remove(present.with(zero));
        self.content[region].insert(present);
        self.written[region].insert(present);
        let progress = &self.progress;
        progress.normal_pages.fetch_add(present.count().get(), Relaxed);
        progress.zero_pages.fetch_add(zero.count_ones().into(), Relaxed);
        progress.wire_bytes.fetch_add(present.bytes(), Relaxed);
        let done = present.with(present.mask | zero).bytes();
        let _ = progress.round_left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(done)));
    }

    /// Pages of the guest that the file holds.
    pub(crate) fn stored(&self) -> PageCount {
        let regions = self.memory.regions().iter().zip(&self.content);
        regions.map(|(memory, content)| content.to_set(memory.pages()).count()).sum()
    }

    /// The pages that the file has and that are zero now, run by run: region, and pages.
    pub(crate) fn stale(&self) -> Vec<(usize, PageRange)> {
        let mut stale = Vec::new();
        for (region, memory) in self.memory.regions().iter().enumerate() {
            let mut pages = self.written[region].to_set(memory.pages());
            pages.subtract(&self.content[region].to_set(memory.pages()));
            stale.extend(pages.ranges().map(|range| (region, range)));
        }
        stale
    }
}

impl Written {
    pub(crate) fn add(&mut self, other: &Self) {
        self.normal += other.normal;
        self.zero += other.zero;
        self.rewritten += other.rewritten;
        self.cpu_seconds += other.cpu_seconds;
    }
}
