//! Finds the pages to send, or to write to a file, next: those that were written and are not holes.
//!
//! Order matters: first the scan, which re-arms the tracking; then the search for holes; then the reading of pages. If
//! a page changes after its scan, the next scan reports it. If a page becomes a hole after the search, the next search
//! finds it, at the latest when the guest is stopped. Hints about free pages are requested between the first scan and
//! its search for holes, which skips the named pages.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use transship_memory::{
    Error as MemoryError, Freeing, GuestMemory, Holes, Note, PAGE_BYTES, PageCount, PageSet, Region, Tracker, Waited,
    Waits, WindowPages,
};

use crate::{
    Error, Progress, Report, RoundReport, TrackerName, TrackerReport,
    guest::{GuestError, RegionPages},
    page_map::PageMap,
};

/// The windows that are passed between threads as one piece of work: 4 MiB.
const WINDOWS_PER_BATCH: usize = 8;

/// Asks a guest as [`SourceGuest::gave_back`] does.
///
/// [`SourceGuest::gave_back`]: crate::SourceGuest::gave_back
pub(crate) type GaveBack<'a> = &'a mut dyn FnMut() -> Result<bool, GuestError>;

/// One region's part of a round.
pub(crate) struct Pending {
    /// To be sent: written, and not holes.
    pub(crate) send: PageSet,
    /// Sent with content in an earlier round, and holes now.
    pub(crate) gone: PageSet,
    /// Of what is sent.
    note: Note,
    order: Order,
}

/// In which order a round's windows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Ascending,
    FromTheEnd,
}

impl Pending {
    /// To be sent, all of it.
    pub(crate) fn all(send: PageSet) -> Self {
        Self { gone: PageSet::empty(send.pages()), send, note: Note::default(), order: Order::Ascending }
    }

    /// The same, the last windows first.
    pub(crate) fn from_the_end(send: PageSet) -> Self {
        Self { order: Order::FromTheEnd, ..Self::all(send) }
    }

    /// The windows that have something to send, several at a time. Each is to be read after it was returned here: only
    /// then is a page noticed that is given back and comes back.
    pub(crate) fn batches(&self) -> impl Iterator<Item = Vec<WindowPages>> + '_ {
        let mut windows = self.send.windows();
        let mut next = move || match self.order {
            Order::Ascending => windows.next(),
            Order::FromTheEnd => windows.next_back(),
        };
        std::iter::from_fn(move || {
            let batch: Vec<_> = std::iter::from_fn(&mut next).take(WINDOWS_PER_BATCH).collect();
            if let Err(error) = self.note.keep(&batch) {
                tracing::debug!(%error, "these pages are sent once more");
            }
            (!batch.is_empty()).then_some(batch)
        })
    }
}

/// Scans a guest's memory again and again. The parameter `content` always has, by region, the pages for which the other
/// end (or the file) holds content.
pub(crate) struct Scanner {
    memory: GuestMemory,
    tracker: Box<dyn Tracker>,
    /// Whether the guest may give memory back from now on.
    freeing: Freeing,
    /// By region.
    holes: Vec<Holes>,
    pending: Vec<Pending>,
    /// By region: pages that were left out because the guest does not need them, and that no scan has found written
    /// since.
    dead: Vec<PageSet>,
    /// Pages that were not sent when it was their turn: they count as written in the next scan.
    owed: Vec<RegionPages>,
    /// Pages whose writes the tracker does not see; they count as written in the last scan.
    unseen: Vec<RegionPages>,
    /// The report of the pending round, so far.
    next: RoundReport,
    last_scan: Instant,
    /// Of a tracker for which writers wait.
    waits: Option<Arc<Waits>>,
    /// For how long writers were held up to the last scan.
    held: Duration,
}

impl Scanner {
    /// Arms the tracking. All memory is then pending, until `plan_first_round` or `scan_again` has searched it for
    /// holes.
    pub(crate) fn begin(memory: GuestMemory, tracker: Box<dyn Tracker>, freeing: Freeing) -> Result<Self, Error> {
        let holes = memory.regions().iter().map(|region| holes_of(region, freeing)).collect();
        let dead = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let (next, last_scan) = (RoundReport::default(), Instant::now());
        let (pending, owed, unseen) = (Vec::new(), Vec::new(), Vec::new());
        let (waits, held) = (tracker.waits(), Duration::ZERO);
        let mut scanner =
            Self { memory, tracker, freeing, holes, pending, dead, owed, unseen, next, last_scan, waits, held };
        for index in 0..scanner.memory.regions().len() {
            let send = scanner.find_written(index, None)?;
            scanner.pending.push(Pending::all(send));
        }
        Ok(scanner)
    }

    /// As `begin`, for a stopped guest: all its data is in a single round.
    pub(crate) fn standing_still(memory: GuestMemory) -> Result<Self, Error> {
        let tracker = Everything(memory.regions().iter().map(Region::pages).collect());
        let mut scanner = Self::begin(memory, Box::new(tracker), Freeing::Never)?;
        scanner.plan_first_round(None)?;
        Ok(scanner)
    }

    /// Processes beside the VMM have written their last, and may end.
    pub(crate) fn let_others_end(&mut self) {
        self.tracker.let_others_end();
    }

    /// The writers that wait for the tracker, if they do.
    pub(crate) fn waits(&self) -> Option<Arc<Waits>> {
        self.waits.clone()
    }

    /// Notes in the report what tracking has cost the guest so far.
    pub(crate) fn note_tracker(&self, report: &mut Report) {
        let waited = self.waits.as_ref().map(|waits| waits.so_far());
        let name = if waited.is_some() { TrackerName::Sync } else { TrackerName::Async };
        let before = report.tracker.map_or(0.0, |tracker| tracker.longest_ms);
        let Waited { writes: waits, held, held_time, longest } = waited.unwrap_or_default();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (held_ms, longest_ms) = (ms(held_time), ms(longest).max(before));
        report.tracker = Some(TrackerReport { name, waits, held, held_ms, longest_ms });
    }

    /// By region: the pages that the next round sends.
    pub(crate) fn pending(&self) -> &[Pending] {
        &self.pending
    }

    /// The same, and the tracker to be looked at while they are sent, with the time of its last scan.
    pub(crate) fn pending_and_tracker(&mut self) -> (&[Pending], &mut dyn Tracker, Instant) {
        (&self.pending, self.tracker.as_mut(), self.last_scan)
    }

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.iter().map(|pending| pending.send.bytes()).sum()
    }

    /// By region: pages that the guest does not need and that were never sent. Their contents may differ from the other
    /// end, where they are zero.
    pub(crate) fn dead(&self) -> &[PageSet] {
        &self.dead
    }

    /// After `begin`: plans the first round, with all pages that are neither holes nor in `free`. `free` has, by
    /// region, the pages that the guest has named since the scan.
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

    /// Notes pages of the first round, by region, that were not sent because the guest does not need them.
    pub(crate) fn left_out(&mut self, free: &[PageSet]) {
        self.dead.iter_mut().zip(free).for_each(|(dead, free)| dead.union_with(free));
        self.next.free += PageCount::of(free).get();
    }

    /// Notes pages that were pending and were not sent. Most likely the next search finds them to be holes.
    pub(crate) fn not_sent(&mut self, places: Vec<RegionPages>) {
        if !places.is_empty() {
            self.search_again();
        }
        self.owed = places;
    }

    /// Whether the guest may give memory back from now on.
    pub(crate) fn freeing(&self) -> Freeing {
        self.freeing
    }

    /// Before a scan, or before the stop that the last one follows: if the guest says when it gives memory back, and
    /// has, that scan searches for holes. A guest that runs is asked by its scans.
    pub(crate) fn ask_what_it_gave_back(&mut self, gave_back: GaveBack<'_>) -> Result<(), Error> {
        if self.freeing == Freeing::Announced && gave_back()? {
            self.search_again();
        }
        Ok(())
    }

    fn search_again(&mut self) {
        self.holes.iter_mut().for_each(Holes::look_again);
    }

    /// Notes pages that may be written without being tracked: they count as written in the last scan.
    pub(crate) fn not_seen(&mut self, places: &[RegionPages]) {
        self.unseen.extend(places);
    }

    /// The pending round's report, to be completed once the round is sent.
    pub(crate) fn take_report(&mut self) -> RoundReport {
        std::mem::take(&mut self.next)
    }

    /// Finds the pages that a guest that runs has written since the last scan. They are the next round.
    pub(crate) fn scan(
        &mut self,
        gave_back: GaveBack<'_>,
        content: &[PageMap],
        report: &mut Report,
        progress: &Progress,
    ) -> Result<(), Error> {
        self.ask_what_it_gave_back(gave_back)?;
        self.scan_and_look(None, content)?;
        let now = Instant::now();
        let seconds = now.duration_since(self.last_scan).as_secs_f64();
        self.last_scan = now;
        self.next.dirty_pages_per_s = self.next.written as f64 / seconds;
        let held_ms = self.held_ms();
        if let Some(done) = report.rounds.last_mut() {
            done.dirty_pages_per_s = self.next.dirty_pages_per_s;
            done.held_ms = held_ms;
        }
        progress.dirty_rate.store(self.next.dirty_pages_per_s as u64, Relaxed);
        Ok(())
    }

    /// Adds to what was found and not sent the pages that a guest that runs has written since the last scan.
    pub(crate) fn scan_on(
        &mut self,
        gave_back: GaveBack<'_>,
        content: &[PageMap],
        progress: &Progress,
    ) -> Result<(), Error> {
        self.ask_what_it_gave_back(gave_back)?;
        let before = self.pending_bytes();
        let earlier = std::mem::take(&mut self.pending);
        self.scan_and_look(Some(earlier), content)?;
        let now = Instant::now();
        let seconds = now.duration_since(self.last_scan).as_secs_f64();
        self.last_scan = now;
        // Pages that are pending already may have been written again, which makes no difference.
        let grown = self.pending_bytes().saturating_sub(before) / PAGE_BYTES as u64;
        self.next.dirty_pages_per_s = grown as f64 / seconds;
        progress.dirty_rate.store(self.next.dirty_pages_per_s as u64, Relaxed);
        Ok(())
    }

    /// The last scan, while the guest is stopped: pages of the previous scan that were not sent yet, and pages written
    /// since. From now on it gives no memory back.
    pub(crate) fn scan_again(&mut self, content: &[PageMap]) -> Result<(), Error> {
        self.freeing = Freeing::Never;
        let earlier = std::mem::take(&mut self.pending);
        let dirty_rate = self.next.dirty_pages_per_s;
        self.scan_and_look(Some(earlier), content)?;
        self.next.dirty_pages_per_s = dirty_rate;
        self.next.held_ms = self.held_ms();
        Ok(())
    }

    /// For how long writers were held since this was asked last.
    fn held_ms(&mut self) -> f64 {
        let held = self.waits.as_ref().map_or(Duration::ZERO, |waits| waits.held_time());
        held.saturating_sub(std::mem::replace(&mut self.held, held)).as_secs_f64() * 1e3
    }

    /// One more scan after the last round has been sent. Returns how many pages have changed since.
    pub(crate) fn scan_once_more(&mut self, content: &[PageMap]) -> Result<PageCount, Error> {
        self.scan_and_look(None, content)?;
        let late = self.pending.iter().map(|pending| pending.send.count() + pending.gone.count()).sum::<PageCount>();
        if !late.is_zero() {
            tracing::info!(%late, "pages were written after the last round, while the guest stood still");
        }
        Ok(late)
    }

    /// Scans all regions, and searches each for holes after its scan. `earlier` has pages that an earlier scan found
    /// and that were not sent.
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
            // Pages that had become holes, which were not announced to the other end. If one was read since, it is
            // memory of zeros, and does not count as written. The others still are holes.
            if !before.gone.is_empty() {
                written.union_with(&before.gone);
                self.holes[index].look_again();
            }
            let unseen = self.unseen.iter().filter(|place| place.region == index);
            unseen.for_each(|place| written.insert(place.pages));
        }
        self.dead[index].subtract(&written);
        Ok(written)
    }

    /// Searches for holes where it matters: in the pages found, and where the other end holds content. The rest is to
    /// be sent.
    fn look(&mut self, index: usize, found: PageSet, content: &PageMap) -> Result<Pending, Error> {
        let (region, holes) = (&self.memory.regions()[index], &mut self.holes[index]);
        let (mut send, mut gone) = (found, content.to_set(region.pages()));
        send.union_with(&holes.came_back(&gone)?);
        let mut wanted = gone.clone();
        wanted.union_with(&send);
        let data = holes.look(region, &wanted)?;
        send.intersect_with(data);
        gone.subtract(data);
        Ok(Pending { send, gone, note: holes.note(), order: Order::Ascending })
    }
}

/// What is known of the holes of a region: nothing yet.
fn holes_of(region: &Region, freeing: Freeing) -> Holes {
    let mut holes = Holes::new(freeing);
    if let Err(why) = holes.keep_note(region) {
        tracing::warn!(
            "memory {:?} that the guest gives back and reads again before it writes it may arrive with its old content: \
             {why}",
            region.name()
        );
    }
    holes
}

fn describe(memory: &GuestMemory, pending: &[Pending]) -> RoundReport {
    let scanned = memory.regions().iter().map(Region::pages).sum::<PageCount>().get();
    let written = pending.iter().map(|p| p.send.count()).sum::<PageCount>().get();
    let hole = pending.iter().map(|p| p.gone.count()).sum::<PageCount>().get();
    RoundReport { scanned, written, hole, ..RoundReport::default() }
}

/// The mask of the wanted pages that are holes now, because reading them would fill them again. If that is unknown,
/// none.
pub(crate) fn new_holes(memory: &Region, wanted: WindowPages) -> u128 {
    let is_data = |range| memory.is_data(range).unwrap_or(true);
    let mut holes = 0;
    for run in wanted.runs().filter(|run| !is_data(*run)) {
        for page in run.iter().filter(|page| !is_data(page.run(PageCount::ONE))) {
            holes |= 1 << (page - wanted.first).get();
        }
    }
    holes
}

/// Reports all pages of regions of these sizes.
struct Everything(Vec<PageCount>);

impl Tracker for Everything {
    fn scan(&mut self, region: usize) -> Result<PageSet, MemoryError> {
        Ok(PageSet::full(self.0[region]))
    }
}

#[cfg(test)]
mod tests;
