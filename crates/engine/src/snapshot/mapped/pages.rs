//! Pages from a mapped-ram file into guest memory: several threads, in the order of the file, straight into place.
use std::{
    iter,
    num::{NonZero, NonZeroU64},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use rustix::fs::Advice;
use transship_memory::{
    FileIo, FileQueue, GuestMemory, PageCount, PageNumber, PageRange, PageSet, REQUEST_PAGES, Turns, WINDOW_PAGES,
};

use crate::{Error, Progress, cpu, snapshot::file::origin::Origin, stream::whence::wrong};

/// Pages that a thread takes at once: a request's, so that the requests of all threads come in the order of the file.
const UNIT_PAGES: PageCount = REQUEST_PAGES;
/// Requests of a thread in flight. Each has a buffer of 2 MiB, through which its pages go: with 32 MiB of them a
/// restore took a quarter more CPU time than with 4 (2 GiB, four threads: 1.4 s, 1.2 s), and no less time, since few
/// buffers stay in the processor's cache.
const DEPTH: u16 = 4;

/// The pages of one region in the file.
pub(crate) struct Source {
    /// Which are there.
    pub(crate) stored: PageSet,
    /// Where the first one would be.
    pub(crate) pages_offset: u64,
}

/// What the threads did.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// Whether the kernel was asked by io_uring.
    pub(crate) uring: bool,
    /// CPU seconds of all threads.
    pub(crate) cpu_seconds: f64,
}

/// Reads all pages of `sources`, which are by region, into `memory`, which reads as zero.
///
/// # Errors
/// The first one of any thread; cancelled.
pub(crate) fn read(
    origin: &Origin,
    sources: &[Source],
    memory: &GuestMemory,
    threads: u8,
    io: FileIo,
    progress: &Progress,
) -> Result<Done, Error> {
    let work = Work::new(origin, sources, memory, io, progress);
    advise(origin);
    let queues = work.queues(usize::from(threads).min(work.units.len()).max(1))?;
    let mut done = Done { uring: queues.iter().any(FileQueue::is_uring), ..Done::default() };
    let mut failed = None;
    thread::scope(|scope| {
        let work = &work;
        let readers: Vec<_> = queues.into_iter().map(|queue| scope.spawn(move || work.run(queue))).collect();
        for reader in readers {
            match reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                Ok(cpu_seconds) => done.cpu_seconds += cpu_seconds,
                Err(error) => failed = failed.take().or(Some(error)),
            }
        }
    });
    failed.map_or(Ok(done), Err)
}

/// Tells the kernel what is about to happen; harmless where it does not care.
fn advise(origin: &Origin) {
    let rest = origin.bytes.and_then(|bytes| NonZeroU64::new(bytes.saturating_sub(origin.offset)));
    let _ = rustix::fs::fadvise(&origin.file, origin.offset, rest, Advice::Sequential);
}

/// What the threads share.
struct Work<'a> {
    origin: &'a Origin,
    sources: &'a [Source],
    memory: &'a GuestMemory,
    io: FileIo,
    progress: &'a Progress,
    /// Through the page cache they read in turn.
    turns: Turns,
    /// Region and first page of all units that have pages, in the order of the file.
    units: Vec<(usize, PageNumber)>,
    /// The next unit that nobody has taken.
    next: AtomicUsize,
    /// A thread has failed: the others need not go on.
    ended: AtomicBool,
}

impl<'a> Work<'a> {
    fn new(
        origin: &'a Origin,
        sources: &'a [Source],
        memory: &'a GuestMemory,
        io: FileIo,
        progress: &'a Progress,
    ) -> Self {
        let mut units: Vec<_> = sources.iter().enumerate().flat_map(|(region, source)| units(region, source)).collect();
        units.sort_unstable_by_key(|&(region, first)| sources[region].pages_offset + first.offset());
        let (next, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { origin, sources, memory, io, progress, turns: Turns::default(), units, next, ended }
    }

    /// One for each thread. Where the kernel has several requests of each, there are no more of them than cores: they
    /// would only take turns on these to put pages into place.
    fn queues(&self, threads: usize) -> Result<Vec<FileQueue>, Error> {
        let first = self.queue()?;
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = if first.is_uring() { threads.min(cores) } else { threads };
        iter::once(Ok(first)).chain((1..threads).map(|_| self.queue())).collect()
    }

    fn queue(&self) -> Result<FileQueue, Error> {
        let name = &self.origin.name;
        let file = self.origin.for_pages().try_clone();
        let file = file.map_err(|source| Error::Io { what: format!("open {name}"), source })?;
        let queue = FileQueue::new(self.memory.clone(), file.into(), DEPTH, self.io);
        let queue = queue.map_err(|source| Error::Io { what: format!("read {name}"), source })?;
        Ok(queue.taking(&self.turns))
    }

    /// A thread's life, in CPU seconds.
    fn run(&self, queue: FileQueue) -> Result<f64, Error> {
        let result = self.read_units(queue);
        if result.is_err() {
            self.ended.store(true, Ordering::Relaxed);
        }
        result.map(|()| cpu::thread_seconds())
    }

    fn read_units(&self, mut queue: FileQueue) -> Result<(), Error> {
        let name = &self.origin.name;
        while let Some(&(region, first)) = self.units.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.progress.is_cancelled() {
                return Err(Error::RESTORE_CANCELLED);
            }
            if self.ended.load(Ordering::Relaxed) {
                break;
            }
            let mut pages = PageCount::ZERO;
            for run in unit_runs(&self.sources[region].stored, first) {
                let at = self.sources[region].pages_offset + run.first.offset();
                queue.read(region, run, at).map_err(|error| wrong(name, error))?;
                pages += run.count;
            }
            self.count(pages);
        }
        queue.finish().map_err(|error| wrong(name, error))
    }

    fn count(&self, pages: PageCount) {
        let bytes = pages.bytes();
        self.progress.normal_pages.fetch_add(pages.get(), Ordering::Relaxed);
        self.progress.wire_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.progress.round_left.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn units(region: usize, source: &Source) -> impl Iterator<Item = (usize, PageNumber)> {
    let mut firsts: Vec<_> = source.stored.windows().map(|window| window.first.unit(UNIT_PAGES)).collect();
    firsts.dedup();
    firsts.into_iter().map(move |first| (region, first))
}

/// The runs of pages in the unit from `first` on.
pub(crate) fn unit_runs(stored: &PageSet, first: PageNumber) -> impl Iterator<Item = PageRange> + '_ {
    let windows = first.run(UNIT_PAGES).parts(WINDOW_PAGES);
    windows.flat_map(|PageRange { first, .. }| first.masked(stored.window(first)).runs())
}
