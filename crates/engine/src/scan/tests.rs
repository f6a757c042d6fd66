//! What is to be sent, of memory whose data, holes and writes are known.
#![allow(clippy::unwrap_used)]
use std::collections::VecDeque;

use rustix::fs::MemfdFlags;
use transship_memory::{Access, ByteRange, PageRange, WindowPages};

use super::*;

const PAGES: [u64; 2] = [300, 2000];

/// Says what it was told to: of each scan of all regions, what it finds in each. Nothing after that.
struct Told(VecDeque<[PageSet; 2]>);

impl Tracker for Told {
    fn scan(&mut self, region: usize) -> Result<PageSet, MemoryError> {
        let found = self.0.front().map_or(PageSet::empty(PageCount::new(PAGES[region])), |found| found[region].clone());
        if region + 1 == PAGES.len() {
            self.0.pop_front();
        }
        Ok(found)
    }
}

fn set(region: usize, ranges: &[(u64, u64)]) -> PageSet {
    let mut set = PageSet::empty(PageCount::new(PAGES[region]));
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
        let region = Region::map("scan", file, ByteRange::sized(0, bytes), Access::ReadWrite).unwrap();
        for &(first, count) in data[index] {
            for page in first..first + count {
                region.write_pages(WindowPages::new(page, 1), &[7; PAGE_BYTES]).unwrap();
            }
        }
        region
    };
    GuestMemory::new(vec![region(0), region(1)])
}

/// After the first scan, which finds everything, these are found.
fn scanner(memory: &GuestMemory, later: Vec<[PageSet; 2]>) -> Scanner {
    scanner_of(Freeing::Possible, memory, later)
}

fn scanner_of(freeing: Freeing, memory: &GuestMemory, later: Vec<[PageSet; 2]>) -> Scanner {
    let all = [PageSet::full(PageCount::new(PAGES[0])), PageSet::full(PageCount::new(PAGES[1]))];
    let told = Told([vec![all], later].concat().into());
    Scanner::begin(memory.clone(), Box::new(told), freeing).unwrap()
}

fn content(ranges: [&[(u64, u64)]; 2]) -> [PageMap; 2] {
    [0, 1].map(|region| {
        let map = PageMap::new(PageCount::new(PAGES[region]));
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

/// Has all that is pending read, as a round does.
fn read(scanner: &Scanner) {
    scanner.pending().iter().flat_map(Pending::batches).for_each(drop);
}

/// A round, and the scan after it.
fn scan(scanner: &mut Scanner, content: &[PageMap]) {
    read(scanner);
    scanner.scan(&mut || Ok(false), content, &mut Report::default(), &Progress::default()).unwrap();
}

#[test]
fn the_first_round_is_what_is_no_hole() {
    let memory = memory([&[(0, 1), (299, 1)], &[(100, 1200)]]);
    let mut scanner = scanner(&memory, vec![]);
    assert_eq!(
        sent(&scanner),
        [PageSet::full(PageCount::new(300)), PageSet::full(PageCount::new(2000))],
        "before anybody has looked"
    );
    scanner.plan_first_round(None).unwrap();
    assert_eq!(sent(&scanner), sets([&[(0, 1), (299, 1)], &[(100, 1200)]]));
    assert_eq!(scanner.pending_bytes(), 1202 * 4096);
    let report = scanner.take_report();
    assert_eq!((report.scanned, report.written, report.hole, report.free), (2300, 1202, 2300 - 1202, 0));
    let batches: Vec<_> = scanner.pending()[1].batches().collect();
    assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [8, 3]);
    assert_eq!(batches.concat(), scanner.pending()[1].send.windows().collect::<Vec<_>>());
    let from_the_end: Vec<_> = Pending::from_the_end(scanner.pending()[1].send.clone()).batches().collect();
    assert_eq!(from_the_end.iter().map(Vec::len).collect::<Vec<_>>(), [8, 3]);
    assert!(from_the_end.concat().into_iter().rev().eq(batches.concat()));

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
    read(&scanner);
    scanner.scan(&mut || Ok(false), &content, &mut report, &progress).unwrap();
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
    scanner.scan_on(&mut || Ok(false), &content, &progress).unwrap();
    let more = sets([&[(0, 3)], &[(119, 1)]]);
    assert_eq!(sent(&scanner), more);
    assert!(progress.dirty_rate.load(Relaxed) > 0, "two pages more");
    scanner.scan_on(&mut || Ok(false), &content, &progress).unwrap();
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
    memory.regions()[1].write_pages(WindowPages::new(1001, 1), &[7; PAGE_BYTES]).unwrap();
    scanner.scan_again(&held).unwrap();
    let [first, second] = sets([&[(1, 1), (3, 1), (44, 1)], &[(2, 1), (30, 2), (1001, 1)]]);
    let gone = sets([&[], &[(1000, 1), (1002, 1)]]);
    assert_eq!(pending(&scanner), [(first, gone[0].clone()), (second, gone[1].clone())]);
    assert_eq!(scanner.take_report().dirty_pages_per_s, rate);
    // All of that is sent. What comes now is late.
    read(&scanner);
    let held = content([&[(0, 50)], &[(1000, 1)]]);
    assert_eq!(scanner.scan_once_more(&held).unwrap(), PageCount::new(2 + 1));
    assert_eq!(sent(&scanner), sets([&[(4, 2)], &[]]));
    assert_eq!(scanner.scan_once_more(&content([&[], &[]])).unwrap(), PageCount::ZERO);
}

#[test]
fn what_was_given_back_and_comes_back_as_zeros_is_sent_again() {
    let memory = memory([&[], &[(100, 20)]]);
    let mut scanner = scanner(&memory, vec![sets([&[], &[]]); 3]);
    scanner.plan_first_round(None).unwrap();
    let held = content([&[], &[(100, 20)]]);
    scan(&mut scanner, &held);
    assert_eq!(pending(&scanner), [(set(0, &[]), set(0, &[])), (set(1, &[]), set(1, &[]))]);
    // Nobody writes to any of them. The guest looks at one before the next scan.
    memory.regions()[1].clear(PageRange::new(105, 2)).unwrap();
    memory.regions()[1].copy_out(WindowPages::new(105, 1), &mut Vec::new()).unwrap();
    scan(&mut scanner, &held);
    assert_eq!(pending(&scanner)[1], (set(1, &[(105, 1)]), set(1, &[(106, 1)])));
}

#[test]
fn a_guest_that_tells_is_searched_when_it_has_given_memory_back() {
    let memory = memory([&[], &[(100, 20)]]);
    let mut scanner = scanner_of(Freeing::Announced, &memory, Vec::new());
    scanner.plan_first_round(None).unwrap();
    let held = content([&[], &[(100, 20)]]);
    read(&scanner);
    let gone = |scanner: &Scanner| scanner.pending()[1].gone.clone();
    memory.regions()[1].clear(PageRange::new(105, 2)).unwrap();
    for (gave_back, found) in [(false, set(1, &[])), (true, set(1, &[(105, 2)]))] {
        scanner.scan(&mut || Ok(gave_back), &held, &mut Report::default(), &Progress::default()).unwrap();
        assert_eq!(gone(&scanner), found, "{gave_back}");
    }
    memory.regions()[1].clear(PageRange::new(110, 1)).unwrap();
    scanner.ask_what_it_gave_back(&mut || Ok(true)).unwrap();
    scanner.scan_again(&held).unwrap();
    assert_eq!(gone(&scanner), set(1, &[(105, 2), (110, 1)]));
    let mut nobody = || -> Result<bool, GuestError> { panic!("it stands still") };
    scanner.ask_what_it_gave_back(&mut nobody).unwrap();
    assert_eq!(scanner.freeing(), Freeing::Never);
}

#[test]
fn holes_of_a_window_are_told_from_data() {
    let memory = memory([&[], &[(128, 1), (131, 2), (255, 1)]]);
    let region = &memory.regions()[1];
    let data = 1 | 0b11 << 3 | 1 << 127;
    for wanted in [u128::MAX, data, !data, 0, 0xff, 1 << 127, 0b11 << 126] {
        assert_eq!(new_holes(region, WindowPages::new(128, wanted)), wanted & !data, "{wanted:#x}");
    }
    assert_eq!(new_holes(region, WindowPages::new(256, u128::MAX)), u128::MAX);
}
