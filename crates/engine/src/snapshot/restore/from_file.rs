//! Brings the pages of a guest that runs already from a file: those that somebody waits for first, the rest in the
//! order of the file.
//!
//! ```text
//!   urgent threads ──────┐ read the page and its neighbours
//!                        ├───────────── file ───────────────► into place
//!   background threads ──┘ 1 MiB after the other
//! ```
use std::{
    fs::File,
    ops::Deref,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use transship_memory::{Claims, Fault, Missing, PageBuffer, PageCount, PageNumber, PageRange};

use crate::{
    Error, Progress, fail_point,
    filling::{Filling, Region, UNIT_PAGES, spans},
    snapshot::{file::origin::Origin, mapped::pages::Source},
    stream::whence::wrong,
};

/// Threads that serve those who wait: as many of the guest's vCPUs can wait for the disk at once.
pub(super) const URGENT_THREADS: usize = 4;
/// Pages about one that somebody waits for that are brought with it: 128 KiB.
const URGENT_PAGES: PageCount = PageCount::new(32);
/// Room for the rest: a huge page, which a disk fills faster than as many small ones, also where it fills a part of it.
/// A fault that is waited for would wait for a huge page to be cleared, too.
const ROOM_PAGES: PageCount = PageCount::within(2 << 20);

/// Pages on their way from a file. All threads use it at once.
pub(super) struct FromFile {
    filling: Filling,
    name: String,
    file: Arc<File>,
    /// By region: where its page 0 is, or would be.
    offsets: Vec<u64>,
    /// Region and first page, in the order of the file.
    units: Vec<(usize, PageNumber)>,
    /// The next unit that nobody has taken.
    next: AtomicUsize,
    /// Units that are not in place.
    left: AtomicUsize,
}

impl Deref for FromFile {
    type Target = Filling;

    fn deref(&self) -> &Filling {
        &self.filling
    }
}

impl FromFile {
    /// As [`Filling::new`].
    pub(super) fn new(origin: &Origin, sources: Vec<Source>, missing: Missing, claims: Claims) -> Self {
        let (stored, offsets): (Vec<_>, Vec<_>) =
            sources.into_iter().map(|Source { stored, pages_offset }| (stored, pages_offset)).unzip();
        let filling = Filling::new(stored, missing, claims);
        let mut units: Vec<_> = filling.regions().iter().flat_map(Region::units).collect();
        units.sort_unstable_by_key(|&(region, first)| position(&offsets, region, first));
        if units.is_empty() {
            filling.tell_complete();
        }
        Self {
            filling,
            name: origin.name.clone(),
            file: Arc::clone(origin.for_pages()),
            offsets,
            left: AtomicUsize::new(units.len()),
            units,
            next: AtomicUsize::new(0),
        }
    }

    /// The life of a thread that serves those who wait.
    pub(super) fn urgent(&self) {
        let mut buffer = self.buffer(URGENT_PAGES);
        self.serve(|Fault { region, page }| {
            let about = self.regions()[region].clip(page, URGENT_PAGES);
            self.bring(region, about, &mut buffer, "restore.urgent-read")
        });
    }

    /// The life of a thread that brings the rest.
    pub(super) fn background(&self, progress: &Progress) {
        self.bring_all(progress);
        self.count_cpu();
    }

    fn bring_all(&self, progress: &Progress) {
        let mut buffer = self.buffer(UNIT_PAGES.max(ROOM_PAGES));
        while let Some(&(region, first)) = self.units.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.has_ended() {
                return;
            }
            let unit = self.regions()[region].clip(first, UNIT_PAGES);
            if let Err(error) = self.bring(region, unit, &mut buffer, "restore.unit-read") {
                return self.tell(error);
            }
            count(progress, self.regions()[region].stored_in(unit));
            // Release, and Acquire by the last one: what it says is true for the pages of all.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.tell_complete();
            }
        }
    }

    /// Room for `pages` pages or a huge one.
    fn buffer(&self, pages: PageCount) -> PageBuffer {
        let most = self.regions().iter().map(|region| region.unit.max(pages)).max().unwrap_or(pages);
        PageBuffer::new(most.index())
    }

    /// Brings those pages of a range that are in the file, and that nobody else has brought. `buffer` has room for the
    /// range. A thread that is placing one of them at this moment wakes the threads that wait for it. `step`: where a
    /// test may hold us, with what we have read.
    fn bring(&self, index: usize, range: PageRange, buffer: &mut PageBuffer, step: &str) -> Result<(), Error> {
        let region = &self.regions()[index];
        if region.unit > PageCount::ONE {
            let missing =
                |unit: &PageRange| !self.claims().is_claimed(index, unit.first) && !region.stored_in(*unit).is_zero();
            return region.in_units(range).filter(missing).try_for_each(|unit| self.bring_whole(index, unit, buffer));
        }
        let wanted = region.wanted(range, |first| self.claims().window(index, first));
        for span in spans(&wanted) {
            let bytes = &mut buffer.bytes_mut()[..span.bytes() as usize];
            self.read(region, span, bytes)?;
            fail_point::reach(step)?;
            for run in wanted.iter().filter(|run| span.first <= run.first && run.end() <= span.end()) {
                let from = (run.first - span.first).buffer_bytes();
                self.missing().fill_once(self.claims(), index, run.first, &bytes[from..][..run.bytes() as usize])?;
            }
        }
        Ok(())
    }

    /// A huge page comes as a whole, with zeros where the file has nothing.
    fn bring_whole(&self, index: usize, unit: PageRange, buffer: &mut PageBuffer) -> Result<(), Error> {
        let region = &self.regions()[index];
        let bytes = &mut buffer.bytes_mut()[..unit.bytes() as usize];
        bytes.fill(0);
        for run in region.wanted(unit, |_| 0) {
            let at = (run.first - unit.first).buffer_bytes();
            self.read(region, run, &mut bytes[at..][..run.bytes() as usize])?;
        }
        self.missing().fill_once(self.claims(), index, unit.first, bytes)?;
        Ok(())
    }

    fn read(&self, region: &Region, pages: PageRange, into: &mut [u8]) -> Result<(), Error> {
        let at = position(&self.offsets, region.index, pages.first);
        self.file.read_exact_at(into, at).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                wrong(&self.name, format_args!("it ends before offset {:#x}; it was cut short", at + pages.bytes()))
            }
            _ => wrong(&self.name, format_args!("can't read {} bytes at offset {at:#x}: {error}", pages.bytes())),
        })
    }
}

/// Where a page of a region is in the file.
fn position(offsets: &[u64], region: usize, page: PageNumber) -> u64 {
    offsets[region] + page.offset()
}

fn count(progress: &Progress, pages: PageCount) {
    let bytes = pages.bytes();
    progress.normal_pages.fetch_add(pages.get(), Ordering::Relaxed);
    progress.wire_bytes.fetch_add(bytes, Ordering::Relaxed);
    progress.round_left.fetch_sub(bytes, Ordering::Relaxed);
}
