//! Brings the pages of a guest that runs already: those that somebody waits for first, the rest in the order of the file.
//!
//! ```text
//!   VMM touches a page ──► userfaultfd ──► urgent threads ──┐ read the page and its neighbours  ┌──► into place,
//!                                                           ├───────────── file ───────────────►│    wake who waits
//!                             background threads ───────────┘ 1 MiB after the other             └──►
//! ```
//!
//! A page that can't be read is left missing, and who waits for it goes on waiting: nobody ever sees zeros in its place.
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    },
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::{
    Error as MemoryError, Fault, Missing, PAGE_BYTES, PageBuffer, PageRange, PageSet, WINDOW_PAGES,
};

use super::{
    origin::{Origin, wrong},
    pages::Source,
};
use crate::{
    Error, Progress, cpu,
    page_map::{PageMap, runs, window_mask},
};

/// Threads that serve those who wait: as many of the guest's vCPUs can wait for the disk at once.
pub(super) const URGENT_THREADS: usize = 4;
/// How often an urgent thread looks whether it is over.
const TICK: Duration = Duration::from_millis(50);
/// Pages about one that somebody waits for that are brought with it: 128 KiB.
const URGENT_PAGES: u64 = 32;
/// Pages that a background thread takes at once: 1 MiB.
const UNIT_PAGES: u64 = 256;
/// Pages in between that are read and thrown away rather than reading twice.
const GAP_PAGES: u64 = 32;
/// Runs of pages that are not in the file and at least this long are left to the kernel at once: 2 MiB.
const RELEASE_PAGES: u64 = 512;
/// Each of them takes a mapping of the process, which may have 65530.
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

struct Region {
    stored: PageSet,
    pages_offset: u64,
    placed: Placed,
    pages: u64,
    /// Pages that come and go together.
    unit: u64,
}

/// Pages that have been brought. That one is missing here means nothing: it may just be brought. That one is here means that it was in place.
struct Placed(PageMap);

impl Placed {
    fn new(pages: u64) -> Self {
        Self(PageMap::new(pages))
    }

    /// They are in place.
    fn insert(&self, range: PageRange) {
        // Whoever sees the bits sees the pages: they came by a system call, which is no promise about what is stored after it.
        fence(Ordering::Release);
        self.0.insert_range(range);
    }

    fn contains(&self, page: u64) -> bool {
        let found = self.0.contains(page);
        fence(Ordering::Acquire);
        found
    }

    fn window(&self, first: u64) -> u128 {
        self.0.window(first)
    }
}

impl Filling {
    /// `sources`: by region of `missing`, which [`check_units`] has let pass. Pages that are there already are left as they are.
    pub(super) fn new(origin: &Origin, sources: Vec<Source>, missing: Missing) -> Self {
        let region = |(index, source): (usize, Source)| {
            let Source { stored, pages_offset } = source;
            let (pages, unit) = (stored.pages(), missing.unit_pages(index));
            Region { placed: Placed::new(pages), stored, pages_offset, pages, unit }
        };
        let regions: Vec<_> = sources.into_iter().enumerate().map(region).collect();
        let mut units: Vec<_> = regions.iter().enumerate().flat_map(|(index, region)| region.units(index)).collect();
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

    /// For whoever takes over: those who wait are told of again.
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
            if let Err(error) = self.bring(region, unit, &mut buffer) {
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
        if region.placed.contains(fault.page) || region.stored_in(page) == 0 {
            self.missing.fill_zero(fault.region, page)?;
            return Ok(());
        }
        self.bring(fault.region, region.clip(fault.page, URGENT_PAGES), buffer)
    }

    /// Brings those pages of a range that are in the file and not in place. `buffer` has room for the range.
    fn bring(&self, index: usize, range: PageRange, buffer: &mut PageBuffer) -> Result<(), Error> {
        let region = &self.regions[index];
        let wanted = region.wanted(range);
        if region.unit > 1 {
            return if wanted.is_empty() { Ok(()) } else { self.bring_whole(index, range, &wanted, buffer) };
        }
        for span in spans(&wanted) {
            let bytes = &mut buffer.bytes_mut()[..span.bytes() as usize];
            self.read(region, span, bytes)?;
            for run in wanted.iter().filter(|run| span.first <= run.first && run.end() <= span.end()) {
                let from = ((run.first - span.first) as usize) * PAGE_BYTES;
                self.missing.fill(index, run.first, &bytes[from..][..run.bytes() as usize])?;
                region.placed.insert(*run);
            }
        }
        Ok(())
    }

    /// Huge pages come as a whole, with zeros where the file has nothing.
    fn bring_whole(
        &self,
        index: usize,
        range: PageRange,
        wanted: &[PageRange],
        buffer: &mut PageBuffer,
    ) -> Result<(), Error> {
        let region = &self.regions[index];
        let bytes = &mut buffer.bytes_mut()[..range.bytes() as usize];
        bytes.fill(0);
        for run in wanted {
            let at = ((run.first - range.first) as usize) * PAGE_BYTES;
            self.read(region, *run, &mut bytes[at..][..run.bytes() as usize])?;
        }
        self.missing.fill(index, range.first, bytes)?;
        region.placed.insert(range);
        Ok(())
    }

    fn read(&self, region: &Region, pages: PageRange, into: &mut [u8]) -> Result<(), Error> {
        let at = region.position(pages.first);
        self.file.read_exact_at(into, at).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                wrong(&self.name, format_args!("it ends before offset {:#x}; it was cut short", at + pages.bytes()))
            }
            _ => wrong(&self.name, format_args!("reading {} bytes at offset {at:#x}: {error}", pages.bytes())),
        })
    }

    /// Tells the thread that leads. Should it have heard too much already, one more makes no difference.
    fn tell(&self, error: Error) {
        let event = match error {
            Error::Memory(MemoryError::Gone { .. }) => Event::Gone,
            error => Event::Failed(error),
        };
        let _ = self.events.try_send(event);
    }
}

impl Region {
    /// Where a page is in the file.
    fn position(&self, page: u64) -> u64 {
        self.pages_offset + page * PAGE_BYTES as u64
    }

    /// The aligned range about `page` that has `pages` pages, or as many as a huge one.
    fn clip(&self, page: u64, pages: u64) -> PageRange {
        let pages = pages.max(self.unit);
        let first = page / pages * pages;
        // Huge pages are whole also at the end.
        PageRange::new(first, pages.min(self.pages - first))
    }

    fn units(&self, index: usize) -> impl Iterator<Item = (usize, u64)> {
        let pages = UNIT_PAGES.max(self.unit);
        let mut firsts: Vec<u64> = self.stored.windows().map(|(first, _)| first / pages * pages).collect();
        firsts.dedup();
        firsts.into_iter().map(move |first| (index, first))
    }

    /// Runs of a range that are in the file and not in place; of huge pages all that are in the file.
    fn wanted(&self, range: PageRange) -> Vec<PageRange> {
        let mut wanted: Vec<PageRange> = Vec::new();
        for window in (range.first / WINDOW_PAGES * WINDOW_PAGES..range.end()).step_by(WINDOW_PAGES as usize) {
            let placed = self.placed.window(window);
            let pages = self.stored.window(window) & window_mask(range, window) & !placed;
            for run in runs(window, pages) {
                match wanted.last_mut() {
                    Some(last) if last.end() == run.first => last.count += run.count,
                    _ => wanted.push(run),
                }
            }
        }
        wanted
    }

    /// How many pages of a range are in the file.
    fn stored_in(&self, range: PageRange) -> u64 {
        let windows = (range.first / WINDOW_PAGES * WINDOW_PAGES..range.end()).step_by(WINDOW_PAGES as usize);
        let pages = |window| self.stored.window(window) & window_mask(range, window);
        windows.map(|window| u64::from(pages(window).count_ones())).sum()
    }

    /// Long runs of pages that are not in the file, of whole huge pages.
    fn holes(&self) -> impl Iterator<Item = PageRange> + '_ {
        let end = std::iter::once(PageRange::new(self.pages, 0));
        let mut from = 0;
        let gaps = self.stored.ranges().chain(end).map(move |stored| {
            let gap = from..stored.first;
            from = stored.end();
            gap
        });
        gaps.filter_map(|gap| {
            let (first, end) = (gap.start.next_multiple_of(self.unit), gap.end / self.unit * self.unit);
            (end.saturating_sub(first) >= RELEASE_PAGES).then(|| PageRange::new(first, end - first))
        })
    }
}

/// # Errors
/// Memory in pages so large that nobody should wait for one.
pub(super) fn check_units(missing: &Missing, regions: usize) -> Result<(), Error> {
    match (0..regions).map(|region| missing.unit_pages(region)).max() {
        Some(pages) if pages > LARGEST_PAGES => Err(Error::Unfit(format!(
            "guest memory in pages of {} MiB can't be brought one by one while the guest waits; leave out --lazy",
            (pages * PAGE_BYTES as u64) >> 20
        ))),
        _ => Ok(()),
    }
}

/// Joins runs that are close to each other.
fn spans(runs: &[PageRange]) -> Vec<PageRange> {
    let mut spans: Vec<PageRange> = Vec::new();
    for run in runs {
        match spans.last_mut() {
            Some(span) if run.first - span.end() <= GAP_PAGES => span.count = run.end() - span.first,
            _ => spans.push(*run),
        }
    }
    spans
}

fn count(progress: &Progress, pages: u64) {
    let bytes = pages * PAGE_BYTES as u64;
    progress.normal_pages.fetch_add(pages, Ordering::Relaxed);
    progress.wire_bytes.fetch_add(bytes, Ordering::Relaxed);
    progress.round_left.fetch_sub(bytes, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(pages: u64, unit: u64, stored: &[(u64, u64)]) -> Region {
        let mut set = PageSet::empty(pages);
        stored.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
        Region { stored: set, pages_offset: 1 << 20, placed: Placed::new(pages), pages, unit }
    }

    fn pairs(ranges: impl IntoIterator<Item = PageRange>) -> Vec<(u64, u64)> {
        ranges.into_iter().map(|range| (range.first, range.count)).collect()
    }

    #[test]
    fn what_is_wanted_is_stored_and_not_in_place() {
        let region = region(1000, 1, &[(10, 5), (120, 20), (300, 700)]);
        assert_eq!(pairs(region.wanted(PageRange::new(0, 256))), [(10, 5), (120, 20)], "joined across windows");
        assert_eq!(pairs(region.wanted(PageRange::new(12, 116))), [(12, 3), (120, 8)]);
        region.placed.insert(PageRange::new(125, 10));
        assert_eq!(pairs(region.wanted(PageRange::new(96, 64))), [(120, 5), (135, 5)]);
        assert_eq!(pairs(region.wanted(PageRange::new(992, 8))), [(992, 8)]);
        assert_eq!(region.stored_in(PageRange::new(0, 1000)), 725);
        assert_eq!(pairs([region.clip(999, 32), region.clip(5, 32)]), [(992, 8), (0, 32)]);
    }

    #[test]
    fn runs_that_are_close_are_read_at_once() {
        let runs = [PageRange::new(0, 1), PageRange::new(33, 2), PageRange::new(68, 1), PageRange::new(69, 1)];
        assert_eq!(pairs(spans(&runs)), [(0, 35), (68, 2)]);
        assert!(spans(&[]).is_empty());
    }

    #[test]
    fn only_long_runs_of_whole_units_are_released() {
        let small = region(4096, 1, &[(100, 1), (700, 1), (1300, 2000)]);
        assert_eq!(pairs(small.holes()), [(101, 599), (701, 599), (3300, 796)]);
        let huge = region(4096, 512, &[(100, 1), (700, 1), (1300, 2000)]);
        assert_eq!(pairs(huge.holes()), [(3584, 512)]);
        assert_eq!(pairs(region(4096, 1, &[]).holes()), [(0, 4096)]);
        assert_eq!(pairs(region(4096, 1, &[(0, 4096)]).holes()), []);
    }

    #[test]
    fn units_cover_what_is_stored() {
        assert_eq!(region(1000, 1, &[(10, 5), (120, 20), (300, 1)]).units(3).collect::<Vec<_>>(), [(3, 0), (3, 256)]);
        assert_eq!(region(1024, 512, &[(10, 5), (300, 1), (600, 1)]).units(0).collect::<Vec<_>>(), [(0, 0), (0, 512)]);
    }
}
