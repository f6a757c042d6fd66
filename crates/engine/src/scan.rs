//! What has to be sent, or written to a file, next: which pages were written, and which of them hold anything.
//!
//! Order matters: the scan comes first, and re-arms the tracking; the look at the holes comes second; reading pages comes last. A page that
//! changes after its scan is reported by the next one, and a page that becomes a hole after the look is seen by the next look, at the latest
//! when the guest stands still.
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

/// Looks at a guest's memory again and again. `content`, wherever it is asked for: by region, the pages that the other end (or the file) holds
/// content for.
pub(crate) struct Scanner {
    memory: GuestMemory,
    tracker: Box<dyn Tracker>,
    /// By region.
    holes: Vec<Holes>,
    pending: Vec<Pending>,
    /// By region: pages that were left out since the guest can do without them, and that no scan has found written since.
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
    /// Arms the tracking; the first round has everything that is not a hole.
    pub(crate) fn begin(memory: GuestMemory, tracker: Box<dyn Tracker>, freeing: Freeing) -> Result<Self, Error> {
        let holes = memory.regions().iter().map(|_| Holes::new(freeing)).collect();
        let empty: Vec<_> = memory.regions().iter().map(|region| PageMap::new(region.pages())).collect();
        let dead = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let (next, last_scan) = (RoundReport::default(), Instant::now());
        let mut scanner = Self {
            memory,
            tracker,
            holes,
            pending: Vec::new(),
            dead,
            owed: Vec::new(),
            unseen: Vec::new(),
            next,
            last_scan,
        };
        scanner.look(None, &empty)?;
        let all: u64 = scanner.memory.regions().iter().map(Region::pages).sum();
        scanner.next.hole = all - scanner.next.written; // the scan reported everything
        Ok(scanner)
    }

    /// As `begin`, for a guest that stands still: all that it holds is in the one round.
    pub(crate) fn standing_still(memory: GuestMemory) -> Result<Self, Error> {
        let tracker = Everything(memory.regions().iter().map(Region::pages).collect());
        Self::begin(memory, Box::new(tracker), Freeing::Never)
    }

    /// By region: what the next round sends.
    pub(crate) fn pending(&self) -> &[Pending] {
        &self.pending
    }

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.iter().map(|pending| pending.send.count()).sum::<u64>() * PAGE_BYTES as u64
    }

    /// By region: what the guest can do without and nobody has sent. It may differ from what the other end holds there, which is zero.
    pub(crate) fn dead(&self) -> &[PageSet] {
        &self.dead
    }

    /// Leaves pages out of the first round: those of them that it has. By region: what the guest can do without, as it has said since the scan.
    pub(crate) fn leave_out(&mut self, free: &[PageSet]) {
        let mut out = free.to_vec();
        for (pending, out) in self.pending.iter_mut().zip(&mut out) {
            out.intersect_with(&pending.send);
            pending.send.subtract(out);
        }
        self.left_out(&out);
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
        self.look(None, content)?;
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

    /// The last look, with the guest standing still: what the scan before it found and was not sent yet, and what came since.
    pub(crate) fn scan_again(&mut self, content: &[PageMap]) -> Result<(), Error> {
        let earlier = std::mem::take(&mut self.pending);
        let dirty_rate = self.next.dirty_pages_per_s;
        self.look(Some(earlier), content)?;
        self.next.dirty_pages_per_s = dirty_rate;
        Ok(())
    }

    /// Scans all regions, then looks for holes. `earlier`: what an earlier scan found and nobody has sent.
    fn look(&mut self, earlier: Option<Vec<Pending>>, content: &[PageMap]) -> Result<(), Error> {
        let mut earlier = earlier.into_iter().flatten();
        let mut pending = Vec::new();
        let regions = self.memory.regions().iter().zip(&mut self.holes).zip(content);
        for (index, ((region, holes), content)) in regions.enumerate() {
            let mut send = self.tracker.scan(index)?;
            self.owed.iter().filter(|place| place.region == index).for_each(|place| send.insert(place.pages));
            if let Some(before) = earlier.next() {
                send.union_with(&before.send);
                let unseen = self.unseen.iter().filter(|place| place.region == index);
                unseen.for_each(|place| send.insert(place.pages));
            }
            self.dead[index].subtract(&send);
            let data = holes.look(region, &send)?;
            send.intersect_with(data);
            let mut gone = content.to_set(region.pages());
            gone.subtract(data);
            pending.push(Pending { send, gone });
        }
        self.owed.clear();
        self.next = describe(&self.memory, &pending);
        self.pending = pending;
        Ok(())
    }
}

fn describe(memory: &GuestMemory, pending: &[Pending]) -> RoundReport {
    let scanned = memory.regions().iter().map(Region::pages).sum();
    let written = pending.iter().map(|p| p.send.count()).sum();
    let hole = pending.iter().map(|p| p.gone.count()).sum();
    RoundReport { scanned, written, hole, ..RoundReport::default() }
}

/// Those of the wanted pages of a window that are holes now: reading them would fill them again. What can't be told is none.
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
