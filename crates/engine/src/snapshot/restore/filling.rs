//! Brings the pages of a guest that runs already: those that somebody waits for first, the rest in the order of the
//! file.
//!
//! ```text
//!   VMM touches a page ──► userfaultfd ──► urgent threads ──┐ read the page and its neighbours  ┌──► into place,
//!                                                           ├───────────── file ───────────────►│    wake who waits
//!                             background threads ───────────┘ 1 MiB after the other             └──►
//! ```
//!
//! Each page is brought once in the life of the guest (`transship_memory::Claims`): one that has been there and is
//! missing was given back, and is zero, also where the process that had brought it is dead. A page that can't be read
//! is left missing, and who waits for it goes on waiting: nobody ever sees zeros in its place.
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::{Claims, Error as MemoryError, Fault, Missing, PAGE_BYTES, PageBuffer, PageRange};

use super::stored::{Region, UNIT_PAGES, spans};
use crate::{
    Error, Progress, cpu, fail_point,
    snapshot::{file::origin::Origin, mapped::pages::Source},
    stream::whence::wrong,
};

/// Threads that serve those who wait: as many of the guest's vCPUs can wait for the disk at once.
pub(super) const URGENT_THREADS: usize = 4;
/// How often an urgent thread checks whether everything is over.
const TICK: Duration = Duration::from_millis(50);
/// Pages about one that somebody waits for that are brought with it: 128 KiB.
const URGENT_PAGES: u64 = 32;
/// Long runs that are left to the kernel at once: each of them takes a mapping of the process, which may have 65530.
const RELEASES: usize = 1024;
/// Memory in larger pages can't be brought while somebody waits.
const LARGEST_PAGES: u64 = 1024;

/// What the thread that leads hears.
pub(super) enum Event {
    /// All pages of the file are in place.
    Complete,
    /// A page can't be brought. Threads that serve others go on with those that can.
    Failed(Error),
    /// There is no VMM any more.
    Gone,
}

/// Pages on their way. All threads use it at once.
pub(super) struct Filling {
    name: String,
    file: Arc<File>,
    missing: Missing,
    claims: Claims,
    regions: Vec<Region>,
    /// Region and first page, in the order of the file.
    units: Vec<(usize, u64)>,
    /// The next unit that nobody has taken.
    next: AtomicUsize,
    /// Units that are not in place.
    left: AtomicUsize,
    /// The threads are to end.
    ended: AtomicBool,
    events: Sender<Event>,
    incoming: Receiver<Event>,
    faults: AtomicU64,
    /// CPU time of threads that have ended.
    cpu_nanos: AtomicU64,
}

impl Filling {
    /// `sources`: by region of `missing`, which [`check_units`] has let pass; `claims`: of these regions. Pages that
    /// are there already are left as they are.
    pub(super) fn new(origin: &Origin, sources: Vec<Source>, missing: Missing, claims: Claims) -> Self {
        let region = |(index, source): (usize, Source)| {
            let Source { stored, pages_offset } = source;
            let (pages, unit) = (stored.pages(), missing.unit_pages(index));
            Region { index, stored, pages_offset, pages, unit }
        };
        let regions: Vec<_> = sources.into_iter().enumerate().map(region).collect();
        let mut units: Vec<_> = regions.iter().flat_map(Region::units).collect();
        units.sort_unstable_by_key(|&(region, first)| regions[region].position(first));
        // A failure of each thread, and one word that it is complete.
        let (events, incoming) = bounded(1024);
        if units.is_empty() {
            let _ = events.try_send(Event::Complete);
        }
        Self {
            name: origin.name.clone(),
            file: Arc::clone(origin.for_pages()),
            missing,
            claims,
            left: AtomicUsize::new(units.len()),
            regions,
            units,
            next: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            events,
            incoming,
            faults: AtomicU64::new(0),
            cpu_nanos: AtomicU64::new(0),
        }
    }

    /// What happens.
    pub(super) fn events(&self) -> &Receiver<Event> {
        &self.incoming
    }

    /// The userfaultfd and where it is in use.
    pub(super) fn missing(&self) -> &Missing {
        &self.missing
    }

    /// How often somebody had to wait.
    pub(super) fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// CPU seconds of all threads, once they have ended.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.cpu_nanos.load(Ordering::Relaxed) as f64 / 1e9
    }

    fn count_cpu(&self) {
        self.cpu_nanos.fetch_add((cpu::thread_seconds() * 1e9) as u64, Ordering::Relaxed);
    }

    /// Leaves long runs that are not in the file to the kernel, which has zeros of its own.
    ///
    /// # Errors
    /// The process is gone, or can't have so many mappings.
    pub(super) fn release_holes(&self) -> Result<(), Error> {
        let all = self.regions.iter().enumerate();
        let mut holes: Vec<(usize, PageRange)> =
            all.flat_map(|(index, region)| region.holes().map(move |hole| (index, hole))).collect();
        holes.sort_unstable_by_key(|(_, hole)| std::cmp::Reverse(hole.count));
        holes.truncate(RELEASES);
        holes.into_iter().try_for_each(|(region, hole)| Ok(self.missing.release(region, hole)?))
    }

    /// All is in place: the kernel does the rest.
    ///
    /// # Errors
    /// The process is gone, or the kernel refuses.
    pub(super) fn release_all(&self) -> Result<(), MemoryError> {
        let mut regions = self.regions.iter().enumerate();
        regions.try_for_each(|(index, region)| self.missing.release(index, PageRange::new(0, region.pages)))
    }

    /// For a process that takes over: waiting faults are reported again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn wake_all(&self) -> Result<(), MemoryError> {
        let mut regions = self.regions.iter().enumerate();
        regions.try_for_each(|(index, region)| self.missing.wake(index, PageRange::new(0, region.pages)))
    }

    /// Has all threads end soon.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// The life of a thread that serves those who wait.
    pub(super) fn urgent(&self) {
        self.serve_all();
        self.count_cpu();
    }

    fn serve_all(&self) {
        let mut buffer = self.buffer(URGENT_PAGES);
        while !self.ended.load(Ordering::Relaxed) {
            let served = match self.missing.next_fault(TICK) {
                Ok(Some(fault)) => self.serve(fault, &mut buffer),
                Ok(None) => Ok(()),
                Err(error) => {
                    self.tell(error.into());
                    return;
                }
            };
            if let Err(error) = served {
                self.tell(error);
            }
        }
    }

    /// The life of a thread that brings the rest.
    pub(super) fn background(&self, progress: &Progress) {
        self.bring_all(progress);
        self.count_cpu();
    }

    fn bring_all(&self, progress: &Progress) {
        let mut buffer = self.buffer(UNIT_PAGES);
        while let Some(&(region, first)) = self.units.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.ended.load(Ordering::Relaxed) {
                return;
            }
            let unit = self.regions[region].clip(first, UNIT_PAGES);
            if let Err(error) = self.bring(region, unit, &mut buffer, "restore.unit-read") {
                return self.tell(error);
            }
            count(progress, self.regions[region].stored_in(unit));
            // Release, and Acquire by the last one: what it says is true for the pages of all.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let _ = self.events.try_send(Event::Complete);
            }
        }
    }

    /// Room for `pages` pages or a huge one.
    fn buffer(&self, pages: u64) -> PageBuffer {
        let most = self.regions.iter().map(|region| region.unit.max(pages)).max().unwrap_or(pages);
        PageBuffer::new(most as usize)
    }

    fn serve(&self, fault: Fault, buffer: &mut PageBuffer) -> Result<(), Error> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let region = &self.regions[fault.region];
        let page = region.clip(fault.page, region.unit);
        // It was there and is not any more: the guest has given it back since. Or the file does not have it.
        if self.claims.is_done(fault.region, fault.page) || region.stored_in(page) == 0 {
            self.missing.fill_zero(fault.region, page)?;
            return Ok(());
        }
        self.bring(fault.region, region.clip(fault.page, URGENT_PAGES), buffer, "restore.urgent-read")
    }

    /// Brings those pages of a range that are in the file, and that nobody else has brought. `buffer` has room for the
    /// range. A thread that is placing one of them at this moment wakes the threads that wait for it. `step`: where a
    /// test may hold us, with what we have read.
    fn bring(&self, index: usize, range: PageRange, buffer: &mut PageBuffer, step: &str) -> Result<(), Error> {
        let region = &self.regions[index];
        if region.unit > 1 {
            let missing = |unit: &PageRange| !self.claims.is_claimed(index, unit.first) && region.stored_in(*unit) > 0;
            return region.in_units(range).filter(missing).try_for_each(|unit| self.bring_whole(index, unit, buffer));
        }
        let wanted = region.wanted(range, |first| self.claims.window(index, first));
        for span in spans(&wanted) {
            let bytes = &mut buffer.bytes_mut()[..span.bytes() as usize];
            self.read(region, span, bytes)?;
            fail_point::reach(step)?;
            for run in wanted.iter().filter(|run| span.first <= run.first && run.end() <= span.end()) {
                let from = ((run.first - span.first) as usize) * PAGE_BYTES;
                self.missing.fill_once(&self.claims, index, run.first, &bytes[from..][..run.bytes() as usize])?;
            }
        }
        Ok(())
    }

    /// A huge page comes as a whole, with zeros where the file has nothing.
    fn bring_whole(&self, index: usize, unit: PageRange, buffer: &mut PageBuffer) -> Result<(), Error> {
        let region = &self.regions[index];
        let bytes = &mut buffer.bytes_mut()[..unit.bytes() as usize];
        bytes.fill(0);
        for run in region.wanted(unit, |_| 0) {
            let at = ((run.first - unit.first) as usize) * PAGE_BYTES;
            self.read(region, run, &mut bytes[at..][..run.bytes() as usize])?;
        }
        self.missing.fill_once(&self.claims, index, unit.first, bytes)?;
        Ok(())
    }

    fn read(&self, region: &Region, pages: PageRange, into: &mut [u8]) -> Result<(), Error> {
        let at = region.position(pages.first);
        self.file.read_exact_at(into, at).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                wrong(&self.name, format_args!("it ends before offset {:#x}; it was cut short", at + pages.bytes()))
            }
            _ => wrong(&self.name, format_args!("can't read {} bytes at offset {at:#x}: {error}", pages.bytes())),
        })
    }

    /// Tells the thread that leads. If its queue is already full, one more makes no difference.
    fn tell(&self, error: Error) {
        let event = match error {
            Error::Memory(MemoryError::Gone { .. }) => Event::Gone,
            error => Event::Failed(error),
        };
        let _ = self.events.try_send(event);
    }
}

/// # Errors
/// Memory in pages so large that nobody should wait for one.
pub(super) fn check_units(missing: &Missing, regions: usize) -> Result<(), Error> {
    match (0..regions).map(|region| missing.unit_pages(region)).max() {
        Some(pages) if pages > LARGEST_PAGES => Err(Error::Unfit(format!(
            "pages of {} MiB of guest memory are too large to be brought one by one while the guest waits; leave out \
             --lazy",
            (pages * PAGE_BYTES as u64) >> 20
        ))),
        _ => Ok(()),
    }
}

fn count(progress: &Progress, pages: u64) {
    let bytes = pages * PAGE_BYTES as u64;
    progress.normal_pages.fetch_add(pages, Ordering::Relaxed);
    progress.wire_bytes.fetch_add(bytes, Ordering::Relaxed);
    progress.round_left.fetch_sub(bytes, Ordering::Relaxed);
}
