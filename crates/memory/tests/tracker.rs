//! The tracker against the real kernel: no write to tracked memory may be missed, whatever the state of the page.
//!
//! The tracked process is this one, through a mapping of its own, or a child where it has to die. Writes elsewhere (by
//! `Region`, which has another mapping) are what a tracker does not see; the tests use them for what must not matter.
mod converging;

use std::{fs::File, os::fd::OwnedFd, sync::atomic::Ordering};

use rustix::mm::{MapFlags, ProtFlags};
use transship_memory::{
    Access, Area, Error, Flaw, PageCount, PageNumber, PageRange, PageSet, Tracker, UffdTracker, WindowPages,
};

use crate::common::{
    HUGE, PAGE, counts, file, huge_file, map, page_of,
    process::{CHILD_PAGES, Faults, Guest, Tracked, once_free},
};

fn track(guest: &Guest) -> UffdTracker {
    let (areas, pages) = (vec![guest.area()], vec![PageCount::new(guest.pages())]);
    once_free(|| UffdTracker::new(userfaultfd(), own_pagemap(), areas.clone(), pages.clone()))
        .with_memory(&guest.memory())
}

fn userfaultfd() -> OwnedFd {
    crate::common::process::userfaultfd(Faults::User).unwrap()
}

fn own_pagemap() -> OwnedFd {
    File::open("/proc/self/pagemap").unwrap().into()
}

fn set(pages: u64, ranges: &[(u64, u64)]) -> PageSet {
    let mut set = PageSet::empty(PageCount::new(pages));
    ranges.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
    set
}

/// Scans until nothing is reported any more, as it must be when nobody writes.
fn settle(tracker: &mut UffdTracker) {
    let settled = (0..5).any(|_| tracker.scan(0).unwrap().is_empty());
    assert!(settled, "pages are reported that nobody wrote");
}

fn missing(tracker: &mut UffdTracker, written: &PageSet) -> PageSet {
    let mut missing = written.clone();
    missing.subtract(&tracker.scan(0).unwrap());
    missing
}

#[test]
fn the_first_scan_reports_everything_and_the_next_what_was_written() {
    let pages = 5000;
    let guest = Guest::map(file(pages * PAGE), pages * PAGE);
    (0..pages).for_each(|page| guest.write(page, 1));
    let mut tracker = track(&guest);
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(pages)));
    assert!(tracker.scan(0).unwrap().is_empty());
    assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::ZERO));
    [0, 7, 8, 511].iter().for_each(|&page| guest.write(page, 2));
    assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::new(4)));
    [512, 4999, 7].iter().for_each(|&page| guest.write(page, 3));
    assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::new(6)), "a look changes nothing");
    assert_eq!(tracker.scan(0).unwrap(), set(pages, &[(0, 1), (7, 2), (511, 2), (4999, 1)]));
    assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::ZERO));
    assert!(tracker.scan(0).unwrap().is_empty());
    assert_eq!(tracker.written_so_far(1).unwrap(), None, "there is no such region");
    drop(tracker);
    assert_eq!(track(&guest).written_so_far(0).unwrap(), None, "it was not scanned");
    // More stretches than one call of the kernel reports is tested with twice as many pages below.
}

/// A second process, as far as the kernel is asked: another mapping, with a userfaultfd of its own.
#[test]
fn what_another_process_writes_is_found_until_it_maps_the_memory_anew() {
    let (pages, part) = (1000, 600);
    let file = file(pages * PAGE);
    let (guest, other) = (Guest::map(&file, pages * PAGE), Guest::map(&file, part * PAGE));
    (0..part).for_each(|page| other.write(page, 1));
    let mut tracker = track(&guest).with_other(userfaultfd(), own_pagemap(), vec![other.area()]).unwrap();
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(pages)));
    settle(&mut tracker);
    guest.write(3, 2);
    guest.write(999, 2);
    [4, 100, 599].iter().for_each(|&page| other.write(page, 2));
    assert_eq!(tracker.scan(0).unwrap(), set(pages, &[(3, 2), (100, 1), (599, 1), (999, 1)]));
    assert!(tracker.scan(0).unwrap().is_empty());

    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    // SAFETY: in the place of a mapping of this test's, of which there are no references.
    let anew = unsafe { rustix::mm::mmap(other.base.cast(), other.bytes as usize, prot, flags, &file, 0) }.unwrap();
    assert_eq!(anew, other.base.cast());
    other.write(5, 3);
    assert!(matches!(tracker.scan(0), Err(Error::Gone { region: 0, .. })));
    assert!(tracker.scan(0).is_err(), "it stays so");

    let outside = Area { first_page: PageNumber::new(pages - 1), ..other.area() };
    let refused = track(&Guest::map(&file, pages * PAGE)).with_other(userfaultfd(), own_pagemap(), vec![outside]);
    assert_eq!(refused.err().unwrap().flaw(), Some(Flaw::Outside));
}

#[test]
fn more_stretches_than_one_call_reports_all_come() {
    let pages = 20_000;
    let guest = Guest::map(file(pages * PAGE), pages * PAGE);
    (0..pages).for_each(|page| guest.write(page, 1));
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    let mut every_second = PageSet::empty(PageCount::new(pages));
    for page in (0..pages).step_by(2) {
        guest.write(page, 2);
        every_second.insert(PageRange::new(page, 1));
    }
    assert_eq!(tracker.scan(0).unwrap(), every_second);
    assert!(tracker.scan(0).unwrap().is_empty());
}

/// Enough memory that several threads scan it, each a part.
#[test]
fn parts_that_several_threads_scan_make_a_whole() {
    const PART: u64 = (64 << 20) / PAGE;
    let pages = 5 * PART + 77;
    let guest = Guest::map(file(pages * PAGE), pages * PAGE);
    // Parts end at round addresses, wherever the memory begins.
    let begins = PART - guest.area().address / PAGE % PART;
    let ends: Vec<_> = (0..5).map(|part| begins + part * PART).collect();
    ends.iter().for_each(|end| guest.write(*end, 1));
    let mut tracker = track(&guest);
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(pages)));
    settle(&mut tracker);
    let ranges: Vec<_> = ends.iter().map(|end| (end - 1, 2)).chain([(0, 1), (pages - 1, 1)]).collect();
    let written = set(pages, &ranges);
    for round in 2..5 {
        written
            .ranges()
            .flat_map(|range| range.first.get()..range.end().get())
            .for_each(|page| guest.write(page, round));
        assert!(missing(&mut tracker, &written).is_empty(), "round {round}");
        settle(&mut tracker);
    }

    // Other memory in the middle is an error of one thread, and of the scan.
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: takes the place of a page of the mapping as it was made, which nothing uses any more.
    unsafe { rustix::mm::mmap_anonymous(guest.at(ends[2]).cast(), PAGE as usize, prot, flags) }.unwrap();
    for _ in 0..2 {
        let error = tracker.scan(0).unwrap_err();
        assert!(matches!(error, Error::Gone { region: 0, .. }), "{error}");
    }
}

/// Pages that nobody had touched when the tracking was armed: some have no page table, some have one.
#[test]
fn writes_to_untouched_pages_are_seen() {
    let pages = 4096;
    let guest = Guest::map(file(pages * PAGE), pages * PAGE);
    guest.write(1000, 1);
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    for round in 1..20 {
        let written = set(pages, &[(999 + round, 1), (1100 + round, 1), (2000 + 77 * round, 2), (20, 1)]);
        written
            .ranges()
            .flat_map(|range| range.first.get()..range.end().get())
            .for_each(|page| guest.write(page, round));
        assert!(missing(&mut tracker, &written).is_empty(), "round {round}");
        settle(&mut tracker);
    }
}

/// Pages that are in the file, and that the process has not mapped when the tracking is armed; it reads some of them
/// before.
#[test]
fn writes_to_pages_that_only_the_file_has_are_seen() {
    let pages = 2048;
    let file = file(pages * PAGE);
    let region = map(&file, pages * PAGE, Access::ReadWrite);
    (0..pages).for_each(|page| region.write_pages(WindowPages::new(page, 1), &page_of(page)).unwrap());
    let guest = Guest::map(&file, pages * PAGE);
    let mut tracker = track(&guest);
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(pages)), "they hold something");
    settle(&mut tracker);
    (300..340).for_each(|page| assert_ne!(guest.word(page).load(Ordering::Relaxed), 0));
    settle(&mut tracker);
    let written = set(pages, &[(0, 1), (310, 2), (900, 40)]);
    written.ranges().flat_map(|range| range.first.get()..range.end().get()).for_each(|page| guest.write(page, 5));
    assert!(missing(&mut tracker, &written).is_empty());
}

/// Whether the page table has it that the page is protected from writes (bit 57).
fn is_protected(guest: &Guest, page: u64) -> bool {
    let mut entry = [0; 8];
    let at = guest.at(page).addr() as u64 / PAGE * 8;
    assert_eq!(rustix::io::pread(own_pagemap(), &mut entry, at), Ok(8));
    u64::from_ne_bytes(entry) >> 57 & 1 == 1
}

#[test]
fn blocks_of_which_the_file_has_nothing_are_not_tracked_until_it_has() {
    const BLOCK: u64 = HUGE / PAGE;
    let pages = 40 * BLOCK;
    let file = file(pages * PAGE);
    let region = map(&file, pages * PAGE, Access::ReadWrite);
    let (guest, other) = (Guest::map(&file, pages * PAGE), Guest::map(&file, 8 * BLOCK * PAGE));
    guest.write(5, 1);
    guest.write(3 * BLOCK + 7, 1);
    let mut tracker = track(&guest).with_other(userfaultfd(), own_pagemap(), vec![other.area()]).unwrap();
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(pages)));
    settle(&mut tracker);
    let protected = |guest: &Guest| [0, 1, 2, 3, 4, 7].map(|block| is_protected(guest, block * BLOCK + 1));
    assert_eq!(
        protected(&guest),
        [true, false, false, true, false, false],
        "a hole in a block of which there is more is"
    );
    assert_eq!(protected(&other), protected(&guest));

    // Those that are new are told apart page by page.
    guest.write(BLOCK + 9, 2);
    guest.write(39 * BLOCK + 511, 2);
    other.write(7 * BLOCK, 2);
    assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::new(3)));
    let new = set(pages, &[(BLOCK + 9, 1), (7 * BLOCK, 1), (39 * BLOCK + 511, 1)]);
    assert_eq!(tracker.scan(0).unwrap(), new);
    assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::ZERO));
    assert_eq!(protected(&guest), [true, true, false, true, false, true]);
    assert_eq!(protected(&other), protected(&guest));
    guest.write(BLOCK + 9, 3);
    other.write(BLOCK + 10, 3);
    guest.write(7 * BLOCK + 1, 3);
    assert_eq!(tracker.scan(0).unwrap(), set(pages, &[(BLOCK + 9, 2), (7 * BLOCK + 1, 1)]));

    // What was given back before anybody saw it is as if it had never been.
    guest.write(4 * BLOCK, 4);
    region.clear(PageRange::new(4 * BLOCK, 1)).unwrap();
    assert!(tracker.scan(0).unwrap().is_empty());
    assert!(!is_protected(&guest, 4 * BLOCK));
    guest.write(4 * BLOCK, 5);
    assert_eq!(tracker.scan(0).unwrap(), set(pages, &[(4 * BLOCK, 1)]));
    // What is tracked stays so when the file has nothing of it any more.
    region.clear(PageRange::new(4 * BLOCK, BLOCK)).unwrap();
    settle(&mut tracker);
    other.write(4 * BLOCK + 3, 6);
    assert!(missing(&mut tracker, &set(pages, &[(4 * BLOCK + 3, 1)])).is_empty());
}

/// What the kernel writes for the process (here by read(2) into tracked memory) counts as the process's own.
#[test]
fn writes_by_the_kernel_are_seen() {
    let pages = 64;
    let guest = Guest::map(file(pages * PAGE), pages * PAGE);
    guest.write(9, 1);
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    let zero = File::open("/dev/zero").unwrap();
    for page in [9, 33] {
        // SAFETY: a page of the mapping, which is used by nothing else now.
        let buffer = unsafe { std::slice::from_raw_parts_mut(guest.base.add((page * PAGE) as usize), 4096) };
        assert_eq!(rustix::io::read(&zero, buffer).unwrap(), 4096);
    }
    assert!(missing(&mut tracker, &set(pages, &[(9, 1), (33, 1)])).is_empty());
}

/// Free page reporting gives pages back while we track; the guest takes them again later.
fn holes_are_written_again(file: OwnedFd, pages: u64, hole: PageRange) {
    let region = map(&file, pages * PAGE, Access::ReadWrite);
    let guest = Guest::map(&file, pages * PAGE);
    (0..pages).for_each(|page| guest.write(page, 1));
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    for round in 2..6 {
        region.clear(hole).unwrap();
        // In every second round the hole is scanned before it is written again.
        if round % 2 == 0 {
            settle(&mut tracker);
        }
        let (first, middle) = (hole.first.get(), hole.first.get() + hole.count.get() / 2);
        guest.write(middle, round);
        assert!(missing(&mut tracker, &set(pages, &[(middle, 1)])).is_empty(), "round {round}");
        assert_eq!(guest.word(first).load(Ordering::Relaxed), 0);
        guest.write(first, round);
        assert!(missing(&mut tracker, &set(pages, &[(first, 1)])).is_empty(), "round {round}");
    }
}

#[test]
fn writes_to_holes_punched_while_tracked_are_seen() {
    holes_are_written_again(file(2048 * PAGE), 2048, PageRange::new(300, 900));
}

#[test]
fn writes_to_huge_pages_are_seen() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    holes_are_written_again(rustix::io::dup(&file).unwrap(), 2048, PageRange::new(512, 1024));
    let guest = Guest::map(&file, 4 * HUGE);
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    settle(&mut tracker);
    guest.write(600, 1);
    assert_eq!(tracker.scan(0).unwrap(), set(2048, &[(512, 512)]), "the whole huge page");
}

/// The only test that can tell whether pages behind one huge mapping are told apart or reported together.
#[test]
fn writes_to_transparent_huge_pages_are_seen() {
    let file = file(4 * HUGE);
    let region = map(&file, 4 * HUGE, Access::ReadWrite);
    let guest = Guest::map(&file, 4 * HUGE);
    region.advise_huge();
    // SAFETY: advice for the mapping as it was made; it changes no contents. A kernel without huge pages on tmpfs
    // refuses.
    let _ = unsafe { rustix::mm::madvise(guest.base.cast(), guest.bytes as usize, rustix::mm::Advice::LinuxHugepage) };
    guest.write(0, 1);
    guest.write(1024, 1);
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    for round in 1..10 {
        let written = set(2048, &[(3 * round, 1), (700, 1), (1024 + round, 2)]);
        written
            .ranges()
            .flat_map(|range| range.first.get()..range.end().get())
            .for_each(|page| guest.write(page, round));
        assert!(missing(&mut tracker, &written).is_empty(), "round {round}");
        settle(&mut tracker);
    }
}

#[test]
fn regions_and_parts_of_them_are_kept_apart() {
    let (one, two) = (Guest::map(file(64 * PAGE), 64 * PAGE), Guest::map(file(96 * PAGE), 96 * PAGE));
    // Region 1 is mapped in two parts, the second before the first.
    let first = Area { region: 1, bytes: 32 * PAGE, address: two.area().address + 64 * PAGE, ..two.area() };
    let second = Area { region: 1, first_page: PageNumber::new(32), bytes: 64 * PAGE, ..two.area() };
    let areas = vec![first, one.area(), second];
    let mut tracker =
        UffdTracker::new(userfaultfd(), own_pagemap(), areas, vec![PageCount::new(64), PageCount::new(96)]).unwrap();
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(64)));
    assert_eq!(tracker.scan(1).unwrap(), PageSet::full(PageCount::new(96)));
    (0..64).for_each(|page| one.write(page, 1));
    (0..96).for_each(|page| two.write(page, 1));
    assert_eq!(tracker.scan(1).unwrap(), PageSet::full(PageCount::new(96)));
    one.write(5, 2);
    two.write(0, 2);
    two.write(64, 2);
    assert_eq!(tracker.scan(1).unwrap(), set(96, &[(0, 1), (32, 1)]));
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(64)));
    assert!(matches!(tracker.scan(2), Err(Error::Untrackable { region: 2, .. })));
}

#[test]
fn areas_that_do_not_fit_are_refused() {
    let guest = Guest::map(file(16 * PAGE), 16 * PAGE);
    let area = guest.area();
    let refusal = |areas: &[Area], pages: &[u64]| {
        UffdTracker::new(userfaultfd(), own_pagemap(), areas.to_vec(), counts(pages)).err().unwrap()
    };
    let flaw = |areas: &[Area], pages: &[u64]| refusal(areas, pages).flaw().unwrap();
    assert_eq!(flaw(&[Area { region: 1, ..area }], &[16]), Flaw::NoRegion);
    assert_eq!(flaw(&[Area { bytes: 100, ..area }], &[16]), Flaw::Shape);
    assert_eq!(flaw(&[Area { bytes: 0, ..area }], &[16]), Flaw::Shape);
    assert_eq!(flaw(&[Area { address: area.address + 8, ..area }], &[16]), Flaw::Shape);
    assert_eq!(flaw(&[Area { first_page: PageNumber::new(1), ..area }], &[16]), Flaw::Outside);
    assert_eq!(flaw(&[Area { first_page: PageNumber::new(u64::MAX), ..area }], &[16]), Flaw::Outside);
    assert_eq!(flaw(&[Area { address: 0_u64.wrapping_sub(PAGE), ..area }], &[16]), Flaw::Outside);
    assert_eq!(flaw(&[area], &[17]), Flaw::NotMapped);
    let missing = refusal(&[area], &[16, 1]);
    assert!(matches!(missing, Error::Untrackable { region: 1, flaw: Flaw::NotMapped, .. }), "{missing}");

    let used = userfaultfd();
    let tracker =
        UffdTracker::new(rustix::io::dup(&used).unwrap(), own_pagemap(), vec![area], vec![PageCount::new(16)]).unwrap();
    let again = UffdTracker::new(used, own_pagemap(), vec![area], vec![PageCount::new(16)]).err().unwrap();
    assert!(matches!(again, Error::Kernel { .. }), "{again}");
    assert_eq!(flaw(&[area], &[16]), Flaw::Taken);
    drop(tracker);
}

/// Nothing of the tracker stays when it goes, and another can take its place.
#[test]
fn a_dropped_tracker_leaves_memory_as_it_was() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    for round in 1..4 {
        let mut tracker = track(&guest);
        assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(64)));
        guest.write(round, 1);
        assert!(missing(&mut tracker, &set(64, &[(round, 1)])).is_empty());
        settle(&mut tracker);
        drop(tracker);
        guest.write(round, 7);
        assert_eq!(guest.word(round).load(Ordering::Relaxed), 7);
    }
}

#[test]
fn memory_that_is_unmapped_is_no_clean_memory() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    let mut tracker = track(&guest);
    tracker.scan(0).unwrap();
    // SAFETY: the mapping as it was made; nothing uses it any more.
    unsafe { rustix::mm::munmap(guest.base.cast(), guest.bytes as usize) }.unwrap();
    let error = tracker.scan(0).unwrap_err();
    assert!(matches!(error, Error::Gone { region: 0, .. }), "{error}");
}

/// As it is with a VMM: another process, whose userfaultfd we fetch; later it dies.
#[test]
fn another_process_is_tracked_until_it_dies() {
    let mut tracked = Tracked::start();
    let (pid, area, uffd) = tracked.attach();
    let pagemap = File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())).unwrap();
    let mut tracker = UffdTracker::new(uffd, pagemap.into(), vec![area], vec![PageCount::new(CHILD_PAGES)]).unwrap();
    assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(CHILD_PAGES)));
    for page in [0, 17, 600, 600, 1023] {
        tracked.write(page);
        assert!(missing(&mut tracker, &set(CHILD_PAGES, &[(page, 1)])).is_empty(), "page {page}");
        settle(&mut tracker);
    }
    tracked.kill();
    for _ in 0..2 {
        let error = tracker.scan(0).unwrap_err();
        assert!(matches!(error, Error::Gone { region: 0, .. }), "{error}");
    }
}
