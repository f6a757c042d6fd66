//! What has to be sent, or written to a file, next: which pages were written, and which of them hold anything.
//!
//! Order matters: the scan comes first, and re-arms the tracking; the look at the holes comes second; reading pages
//! comes last. A page that changes after its scan is reported by the next one, and a page that becomes a hole after the
//! look is seen by the next look, at the latest when the guest stands still. What the guest says that it can do without
//! is asked for between the first scan and its look: that is not looked at.
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

use transship_memory::{
    Error as MemoryError, Freeing, GuestMemory, Holes, PAGE_BYTES, PageRange, PageSet, Region, Tracker,
};

use crate::{
    Error, Progress, Report, RoundReport,
    guest::Place,
    page_map::{PageMap, runs},
};

/// Windows that travel between threads as one piece of work: 4 MiB.
const WINDOWS_PER_BATCH: usize = 8;

/// One region's part of a round.
pub(crate) struct Pending {
    /// To be sent: written, and not holes.
    pub(crate) send: PageSet,
    /// Sent with content in an earlier round, and holes now.
    pub(crate) gone: PageSet,
}

impl Pending {
    /// The windows that have something to send, several at a time: first page and wanted pages.
    pub(crate) fn batches(&self) -> impl Iterator<Item = Vec<(u64, u128)>> + '_ {
        let mut windows = self.send.windows();
        std::iter::from_fn(move || {
            let batch: Vec<_> = windows.by_ref().take(WINDOWS_PER_BATCH).collect();
            (!batch.is_empty()).then_some(batch)
        })
    }
}

/// Looks at a guest's memory again and again. `content`, wherever it is asked for: by region, the pages that the other
/// end (or the file) holds content for.
pub(crate) struct Scanner {
    memory: GuestMemory,
    tracker: Box<dyn Tracker>,
    /// By region.
    holes: Vec<Holes>,
    pending: Vec<Pending>,
    /// By region: pages that were left out since the guest can do without them, and that no scan has found written
    /// since.
    dead: Vec<PageSet>,
    /// Not sent when it was their turn: they count as written in the next scan.
    owed: Vec<Place>,
    /// What the tracker does not see being written; it counts as written in the last scan.
    unseen: Vec<Place>,
    /// What the pending round's report will say.
    next: RoundReport,
    last_scan: Instant,
}

impl Scanner {
    /// Arms the tracking. Then all memory is pending, until `plan_first_round` or `scan_again` has looked for the holes
    /// in it.
    pub(crate) fn begin(memory: GuestMemory, tracker: Box<dyn Tracker>, freeing: Freeing) -> Result<Self, Error> {
        let holes = memory.regions().iter().map(|_| Holes::new(freeing)).collect();
        let dead = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let (next, last_scan) = (RoundReport::default(), Instant::now());
        let (pending, owed, unseen) = (Vec::new(), Vec::new(), Vec::new());
        let mut scanner = Self { memory, tracker, holes, pending, dead, owed, unseen, next, last_scan };
        for index in 0..scanner.memory.regions().len() {
            let send = scanner.find_written(index, None)?;
            scanner.pending.push(Pending { gone: PageSet::empty(send.pages()), send });
        }
        Ok(scanner)
    }

    /// As `begin`, for a guest that stands still: all that it holds is in the one round.
    pub(crate) fn standing_still(memory: GuestMemory) -> Result<Self, Error> {
        let tracker = Everything(memory.regions().iter().map(Region::pages).collect());
        let mut scanner = Self::begin(memory, Box::new(tracker), Freeing::Never)?;
        scanner.plan_first_round(None)?;
        Ok(scanner)
    }

    /// By region: what the next round sends.
    pub(crate) fn pending(&self) -> &[Pending] {
        &self.pending
    }

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.iter().map(|pending| pending.send.count()).sum::<u64>() * PAGE_BYTES as u64
    }

    /// By region: what the guest can do without and nobody has sent. It may differ from what the other end holds there,
    /// which is zero.
    pub(crate) fn dead(&self) -> &[PageSet] {
        &self.dead
    }

    /// After `begin`: what is not a hole is the first round. Without `free`, by region: what the guest can do without,
    /// as it has said since the scan.
    pub(crate) fn plan_first_round(&mut self, free: Option<&[PageSet]>) -> Result<(), Error> {
        for (index, mut all) in std::mem::take(&mut self.pending).into_iter().enumerate() {
            if let Some(free) = free {
                all.send.subtract(&free[index]);
            }
            let nothing = PageMap::new(all.send.pages());
            let pending = self.look(index, all.send, &nothing)?;
            self.pending.push(pending);
        }
        self.next = describe(&self.memory, &self.pending);
        self.left_out(free.unwrap_or_default());
        // The scan reported everything.
        self.next.written += self.next.free;
        self.next.hole = self.next.scanned - self.next.written;
        Ok(())
    }

    /// These pages of the first round, by region, were not sent.
    pub(crate) fn left_out(&mut self, free: &[PageSet]) {
        self.dead.iter_mut().zip(free).for_each(|(dead, free)| dead.union_with(free));
        self.next.free += free.iter().map(PageSet::count).sum::<u64>();
    }

    /// Pages that were pending and were not sent. Most likely the next look finds them to be holes.
    pub(crate) fn not_sent(&mut self, places: Vec<Place>) {
        self.owed = places;
    }

    /// Pages that may be written without being seen count as written in the last scan.
    pub(crate) fn not_seen(&mut self, places: &[Place]) {
        self.unseen.extend(places);
    }

    /// The begin of the pending round's report, to be completed once it is sent.
    pub(crate) fn take_report(&mut self) -> RoundReport {
        std::mem::take(&mut self.next)
    }

    /// Looks which pages were written since the last scan. They are the next round.
    pub(crate) fn scan(&mut self, content: &[PageMap], report: &mut Report, progress: &Progress) -> Result<(), Error> {
        self.scan_and_look(None, content)?;
        let now = Instant::now();
        let seconds = now.duration_since(self.last_scan).as_secs_f64();
        self.last_scan = now;
        self.next.dirty_pages_per_s = self.next.written as f64 / seconds;
        if let Some(done) = report.rounds.last_mut() {
            done.dirty_pages_per_s = self.next.dirty_pages_per_s;
        }
        progress.dirty_rate.store(self.next.dirty_pages_per_s as u64, Relaxed);
        Ok(())
    }

    /// The last look, with the guest standing still: what the scan before it found and was not sent yet, and what came
    /// since.
    pub(crate) fn scan_again(&mut self, content: &[PageMap]) -> Result<(), Error> {
        let earlier = std::mem::take(&mut self.pending);
        let dirty_rate = self.next.dirty_pages_per_s;
        self.scan_and_look(Some(earlier), content)?;
        self.next.dirty_pages_per_s = dirty_rate;
        Ok(())
    }

    /// A look after the last one, when all of that has been sent. Returns how many pages have changed since.
    pub(crate) fn scan_once_more(&mut self, content: &[PageMap]) -> Result<u64, Error> {
        self.scan_and_look(None, content)?;
        let late = self.pending.iter().map(|pending| pending.send.count() + pending.gone.count()).sum();
        if late > 0 {
            tracing::info!(late, "pages were written after the last round, while the guest stood still");
        }
        Ok(late)
    }

    /// Scans all regions, and looks for holes in each after its scan. `earlier`: what an earlier scan found and nobody
    /// has sent.
    fn scan_and_look(&mut self, earlier: Option<Vec<Pending>>, content: &[PageMap]) -> Result<(), Error> {
        let mut pending = Vec::new();
        for (index, content) in content.iter().enumerate() {
            let found = self.find_written(index, earlier.as_ref().map(|earlier| &earlier[index]))?;
            pending.push(self.look(index, found, content)?);
        }
        self.owed.clear();
        self.pending = pending;
        self.next = describe(&self.memory, &self.pending);
        Ok(())
    }

    /// Scans a region: its pages that were written, or count as written.
    fn find_written(&mut self, index: usize, earlier: Option<&Pending>) -> Result<PageSet, Error> {
        let mut written = self.tracker.scan(index)?;
        self.owed.iter().filter(|place| place.region == index).for_each(|place| written.insert(place.pages));
        if let Some(before) = earlier {
            written.union_with(&before.send);
            // Holes by then, which nobody was told of. One that was looked at since is memory of zeros, and not
            // written.
            written.union_with(&before.gone);
            let unseen = self.unseen.iter().filter(|place| place.region == index);
            unseen.for_each(|place| written.insert(place.pages));
        }
        self.dead[index].subtract(&written);
        Ok(written)
    }

    /// Looks for holes where it matters: in what was found, and where the other end holds content. What is left is to
    /// be sent.
    fn look(&mut self, index: usize, found: PageSet, content: &PageMap) -> Result<Pending, Error> {
        let region = &self.memory.regions()[index];
        let (mut send, mut gone) = (found, content.to_set(region.pages()));
        let mut wanted = gone.clone();
        wanted.union_with(&send);
        let data = self.holes[index].look(region, &wanted)?;
        send.intersect_with(data);
        gone.subtract(data);
        Ok(Pending { send, gone })
    }
}

fn describe(memory: &GuestMemory, pending: &[Pending]) -> RoundReport {
    let scanned = memory.regions().iter().map(Region::pages).sum();
    let written = pending.iter().map(|p| p.send.count()).sum();
    let hole = pending.iter().map(|p| p.gone.count()).sum();
    RoundReport { scanned, written, hole, ..RoundReport::default() }
}

/// Those of the wanted pages of a window that are holes now: reading them would fill them again. What can't be told is
/// none.
pub(crate) fn new_holes(memory: &Region, first: u64, wanted: u128) -> u128 {
    let is_data = |range| memory.is_data(range).unwrap_or(true);
    let mut holes = 0;
    for run in runs(first, wanted).filter(|run| !is_data(*run)) {
        for page in (run.first..run.end()).filter(|page| !is_data(PageRange::new(*page, 1))) {
            holes |= 1 << (page - first);
        }
    }
    holes
}

/// Reports all pages of regions of these sizes.
struct Everything(Vec<u64>);

impl Tracker for Everything {
    fn scan(&mut self, region: usize) -> Result<PageSet, MemoryError> {
        Ok(PageSet::full(self.0[region]))
    }
}
