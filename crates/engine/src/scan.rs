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
    Error as MemoryError, Freeing, GuestMemory, Holes, PAGE_BYTES, PageRange, PageSet, Region, Tracker, Waited, Waits,
    WindowPages,
};

use crate::{Error, Progress, Report, RoundReport, TrackerName, TrackerReport, guest::RegionPages, page_map::PageMap};

/// The windows that are passed between threads as one piece of work: 4 MiB.
const WINDOWS_PER_BATCH: usize = 8;

/// One region's part of a round.
pub(crate) struct Pending {
    /// To be sent: written, and not holes.
    pub(crate) send: PageSet,
    /// Sent with content in an earlier round, and holes now.
    pub(crate) gone: PageSet,
}

impl Pending {
    /// The windows that have something to send, several at a time.
    pub(crate) fn batches(&self) -> impl Iterator<Item = Vec<WindowPages>> + '_ {
        let mut windows = self.send.windows();
        std::iter::from_fn(move || {
            let batch: Vec<_> = windows.by_ref().take(WINDOWS_PER_BATCH).collect();
            (!batch.is_empty()).then_some(batch)
        })
    }
}

/// Scans a guest's memory again and again. The parameter `content` always has, by region, the pages for which the other
/// end (or the file) holds content.
pub(crate) struct Scanner {
    memory: GuestMemory,
    tracker: Box<dyn Tracker>,
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
        let holes = memory.regions().iter().map(|_| Holes::new(freeing)).collect();
        let dead = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let (next, last_scan) = (RoundReport::default(), Instant::now());
        let (pending, owed, unseen) = (Vec::new(), Vec::new(), Vec::new());
        let (waits, held) = (tracker.waits(), Duration::ZERO);
        let mut scanner = Self { memory, tracker, holes, pending, dead, owed, unseen, next, last_scan, waits, held };
        for index in 0..scanner.memory.regions().len() {
            let send = scanner.find_written(index, None)?;
            scanner.pending.push(Pending { gone: PageSet::empty(send.pages()), send });
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

    /// Bytes of the pages that the next round sends.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending.iter().map(|pending| pending.send.count()).sum::<u64>() * PAGE_BYTES as u64
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
        self.next.free += free.iter().map(PageSet::count).sum::<u64>();
    }

    /// Notes pages that were pending and were not sent. Most likely the next search finds them to be holes.
    pub(crate) fn not_sent(&mut self, places: Vec<RegionPages>) {
        self.owed = places;
    }

    /// Notes pages that may be written without being tracked: they count as written in the last scan.
    pub(crate) fn not_seen(&mut self, places: &[RegionPages]) {
        self.unseen.extend(places);
    }

    /// The pending round's report, to be completed once the round is sent.
    pub(crate) fn take_report(&mut self) -> RoundReport {
        std::mem::take(&mut self.next)
    }

    /// Finds the pages that were written since the last scan. They are the next round.
    pub(crate) fn scan(&mut self, content: &[PageMap], report: &mut Report, progress: &Progress) -> Result<(), Error> {
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

    /// Adds to what was found and not sent the pages that were written since the last scan.
    pub(crate) fn scan_on(&mut self, content: &[PageMap], progress: &Progress) -> Result<(), Error> {
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
    /// since.
    pub(crate) fn scan_again(&mut self, content: &[PageMap]) -> Result<(), Error> {
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
    pub(crate) fn scan_once_more(&mut self, content: &[PageMap]) -> Result<u64, Error> {
        self.scan_and_look(None, content)?;
        let late = self.pending.iter().map(|pending| pending.send.count() + pending.gone.count()).sum();
        if late > 0 {
            tracing::info!(late, "pages were written after the last round, while the guest stood still");
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
            // memory of zeros, and does not count as written.
            written.union_with(&before.gone);
            let unseen = self.unseen.iter().filter(|place| place.region == index);
            unseen.for_each(|place| written.insert(place.pages));
        }
        self.dead[index].subtract(&written);
        Ok(written)
    }

    /// Searches for holes where it matters: in the pages found, and where the other end holds content. The rest is to
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

/// The wanted pages of a window that are holes now, because reading them would fill them again. If that is unknown,
/// none.
pub(crate) fn new_holes(memory: &Region, first: u64, wanted: u128) -> u128 {
    let is_data = |range| memory.is_data(range).unwrap_or(true);
    let mut holes = 0;
    for run in WindowPages::new(first, wanted).runs().filter(|run| !is_data(*run)) {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::VecDeque;

    use rustix::fs::MemfdFlags;
    use transship_memory::Access;

    use super::*;

    const PAGES: [u64; 2] = [300, 2000];

    /// Says what it was told to: of each scan of all regions, what it finds in each. Nothing after that.
    struct Told(VecDeque<[PageSet; 2]>);

    impl Tracker for Told {
        fn scan(&mut self, region: usize) -> Result<PageSet, MemoryError> {
            let found = self.0.front().map_or(PageSet::empty(PAGES[region]), |found| found[region].clone());
            if region + 1 == PAGES.len() {
                self.0.pop_front();
            }
            Ok(found)
        }
    }

    fn set(region: usize, ranges: &[(u64, u64)]) -> PageSet {
        let mut set = PageSet::empty(PAGES[region]);
        ranges.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
        set
    }

    fn sets(ranges: [&[(u64, u64)]; 2]) -> [PageSet; 2] {
        [set(0, ranges[0]), set(1, ranges[1])]
    }

    fn place(region: usize, first: u64, count: u64) -> RegionPages {
        RegionPages { region, pages: PageRange::new(first, count) }
    }

    /// Memory that holds something where `data` says so.
    fn memory(data: [&[(u64, u64)]; 2]) -> GuestMemory {
        let region = |index: usize| {
            let (file, bytes) = (rustix::fs::memfd_create("scan", MemfdFlags::CLOEXEC).unwrap(), PAGES[index] * 4096);
            rustix::fs::ftruncate(&file, bytes).unwrap();
            let region = Region::map("scan", file, 0, bytes, Access::ReadWrite).unwrap();
            for &(first, count) in data[index] {
                for page in first..first + count {
                    region.write_pages(page, 1, &[7; PAGE_BYTES]).unwrap();
                }
            }
            region
        };
        GuestMemory::new(vec![region(0), region(1)])
    }

    /// After the first scan, which finds everything, these are found.
    fn scanner(memory: &GuestMemory, later: Vec<[PageSet; 2]>) -> Scanner {
        let all = [PageSet::full(PAGES[0]), PageSet::full(PAGES[1])];
        let told = Told([vec![all], later].concat().into());
        Scanner::begin(memory.clone(), Box::new(told), Freeing::Possible).unwrap()
    }

    fn content(ranges: [&[(u64, u64)]; 2]) -> [PageMap; 2] {
        [0, 1].map(|region| {
            let map = PageMap::new(PAGES[region]);
            ranges[region].iter().for_each(|&(first, count)| map.insert_range(PageRange::new(first, count)));
            map
        })
    }

    fn pending(scanner: &Scanner) -> Vec<(PageSet, PageSet)> {
        scanner.pending().iter().map(|pending| (pending.send.clone(), pending.gone.clone())).collect()
    }

    fn sent(scanner: &Scanner) -> Vec<PageSet> {
        scanner.pending().iter().map(|pending| pending.send.clone()).collect()
    }

    fn scan(scanner: &mut Scanner, content: &[PageMap]) {
        scanner.scan(content, &mut Report::default(), &Progress::default()).unwrap();
    }

    #[test]
    fn the_first_round_is_what_is_no_hole() {
        let memory = memory([&[(0, 1), (299, 1)], &[(100, 1200)]]);
        let mut scanner = scanner(&memory, vec![]);
        assert_eq!(sent(&scanner), [PageSet::full(300), PageSet::full(2000)], "before anybody has looked");
        scanner.plan_first_round(None).unwrap();
        assert_eq!(sent(&scanner), sets([&[(0, 1), (299, 1)], &[(100, 1200)]]));
        assert_eq!(scanner.pending_bytes(), 1202 * 4096);
        let report = scanner.take_report();
        assert_eq!((report.scanned, report.written, report.hole, report.free), (2300, 1202, 2300 - 1202, 0));
        let batches: Vec<_> = scanner.pending()[1].batches().collect();
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [8, 3]);
        assert_eq!(batches.concat(), scanner.pending()[1].send.windows().collect::<Vec<_>>());

        let mut still = Scanner::standing_still(memory).unwrap();
        assert_eq!(sent(&still), sent(&scanner));
        assert_eq!(still.take_report().written, 1202);
    }

    #[test]
    fn what_the_guest_can_do_without_is_left_out_until_it_is_written() {
        let memory = memory([&[(0, 10)], &[(100, 20)]]);
        let mut scanner = scanner(&memory, vec![sets([&[(3, 1)], &[]])]);
        scanner.plan_first_round(Some(&sets([&[(2, 4)], &[(500, 30)]]))).unwrap();
        assert_eq!(sent(&scanner), sets([&[(0, 2), (6, 4)], &[(100, 20)]]));
        // More that it says while the round is sent.
        scanner.left_out(&sets([&[], &[(100, 1)]]));
        assert_eq!(scanner.dead(), sets([&[(2, 4)], &[(100, 1), (500, 30)]]));
        let report = scanner.take_report();
        assert_eq!((report.written, report.free, report.hole), (26 + 34, 35, 2300 - 60));
        scan(&mut scanner, &content([&[], &[]]));
        assert_eq!(sent(&scanner), sets([&[(3, 1)], &[]]));
        assert_eq!(scanner.dead(), sets([&[(2, 1), (4, 2)], &[(100, 1), (500, 30)]]));
    }

    #[test]
    fn a_later_round_is_what_was_written_and_what_is_gone() {
        let begin = Instant::now();
        let memory = memory([&[(0, 10)], &[(100, 20)]]);
        let mut scanner = scanner(&memory, vec![sets([&[(0, 2)], &[(119, 5)]])]);
        scanner.plan_first_round(None).unwrap();
        let (mut report, progress) =
            (Report { rounds: vec![RoundReport::default()], ..Report::default() }, Progress::new());
        let content = content([&[(0, 10)], &[(90, 20), (1999, 1)]]);
        scanner.scan(&content, &mut report, &progress).unwrap();
        let gone = sets([&[], &[(90, 10), (1999, 1)]]);
        let [first, second] = sets([&[(0, 2)], &[(119, 1)]]);
        assert_eq!(pending(&scanner), [(first, gone[0].clone()), (second, gone[1].clone())]);
        let next = scanner.take_report();
        assert_eq!((next.scanned, next.written, next.hole), (2300, 3, 11));
        // It is of no longer a time than there has been.
        let rate = next.dirty_pages_per_s;
        assert!(rate * begin.elapsed().as_secs_f64() >= 3.0 && rate == report.rounds[0].dirty_pages_per_s, "{rate}");
    }

    #[test]
    fn what_was_found_and_not_sent_is_still_to_be_sent() {
        let memory = memory([&[(0, 10)], &[(100, 20)]]);
        let later = vec![sets([&[(0, 2)], &[]]), sets([&[(1, 2)], &[(119, 5)]]), sets([&[], &[]])];
        let mut scanner = scanner(&memory, later);
        scanner.plan_first_round(None).unwrap();
        let content = content([&[(0, 10)], &[(100, 20), (130, 1)]]);
        scan(&mut scanner, &content);
        assert_eq!(sent(&scanner), sets([&[(0, 2)], &[]]));
        let progress = Progress::new();
        scanner.scan_on(&content, &progress).unwrap();
        let more = sets([&[(0, 3)], &[(119, 1)]]);
        assert_eq!(sent(&scanner), more);
        assert!(progress.dirty_rate.load(Relaxed) > 0, "two pages more");
        scanner.scan_on(&content, &progress).unwrap();
        assert_eq!(sent(&scanner), more);
        assert_eq!(progress.dirty_rate.load(Relaxed), 0);
        assert_eq!(pending(&scanner)[1].1, set(1, &[(130, 1)]), "it is announced when they are sent");
        assert_eq!(scanner.take_report().written, 4);
    }

    /// Each in its own region, and once.
    #[test]
    fn pages_that_are_owed_are_in_the_next_round() {
        let memory = memory([&[(0, 300)], &[(0, 300)]]);
        let mut scanner = scanner(&memory, vec![sets([&[(7, 1)], &[]])]);
        scanner.plan_first_round(None).unwrap();
        scanner.not_sent(vec![place(0, 20, 2), place(1, 40, 1)]);
        let content = content([&[], &[]]);
        scan(&mut scanner, &content);
        assert_eq!(sent(&scanner), sets([&[(7, 1), (20, 2)], &[(40, 1)]]));
        scan(&mut scanner, &content);
        assert_eq!(sent(&scanner), sets([&[], &[]]));
    }

    #[test]
    fn the_last_round_has_all_that_was_not_sent_or_not_seen() {
        let memory = memory([&[(0, 50)], &[(0, 50)]]);
        let later = vec![sets([&[(1, 1)], &[(2, 1)]]), sets([&[(3, 1)], &[]]), sets([&[(4, 2)], &[]])];
        let mut scanner = scanner(&memory, later);
        scanner.plan_first_round(None).unwrap();
        scanner.not_seen(&[place(1, 30, 2)]);
        scanner.not_seen(&[place(0, 44, 1)]);
        let held = content([&[], &[(1000, 3)]]);
        scan(&mut scanner, &held);
        assert_eq!(sent(&scanner), sets([&[(1, 1)], &[(2, 1)]]), "not yet");
        let rate = scanner.next.dirty_pages_per_s;
        // One of the pages that were gone holds something by now.
        memory.regions()[1].write_pages(1001, 1, &[7; PAGE_BYTES]).unwrap();
        scanner.scan_again(&held).unwrap();
        let [first, second] = sets([&[(1, 1), (3, 1), (44, 1)], &[(2, 1), (30, 2), (1001, 1)]]);
        let gone = sets([&[], &[(1000, 1), (1002, 1)]]);
        assert_eq!(pending(&scanner), [(first, gone[0].clone()), (second, gone[1].clone())]);
        assert_eq!(scanner.take_report().dirty_pages_per_s, rate);
        // All of that is sent. What comes now is late.
        let held = content([&[(0, 50)], &[(1000, 1)]]);
        assert_eq!(scanner.scan_once_more(&held).unwrap(), 2 + 1);
        assert_eq!(sent(&scanner), sets([&[(4, 2)], &[]]));
        assert_eq!(scanner.scan_once_more(&content([&[], &[]])).unwrap(), 0);
    }

    #[test]
    fn holes_of_a_window_are_told_from_data() {
        let memory = memory([&[], &[(128, 1), (131, 2), (255, 1)]]);
        let region = &memory.regions()[1];
        let data = 1 | 0b11 << 3 | 1 << 127;
        for wanted in [u128::MAX, data, !data, 0, 0xff, 1 << 127, 0b11 << 126] {
            assert_eq!(new_holes(region, 128, wanted), wanted & !data, "{wanted:#x}");
        }
        assert_eq!(new_holes(region, 256, u128::MAX), u128::MAX);
    }
}
