//! Pages that a VMM gives back and its guest reads again, unwritten: memory of zeros in the place of what was read from
//! outside before. The guest is this process, through a mapping of its own.
use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::fs::FallocateFlags;
use transship_memory::{
    Access, Freeing, Holes, PageCount, PageNumber, PageRange, PageSet, Region, Tracker, UffdTracker, WindowPages,
};

use crate::common::{
    HUGE, PAGE, file, huge_file, map,
    process::{Faults, Guest, once_free, userfaultfd},
};

fn set(pages: u64, ranges: &[(u64, u64)]) -> PageSet {
    let mut set = PageSet::empty(PageCount::new(pages));
    ranges.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
    set
}

fn track(guest: &Guest) -> UffdTracker {
    let make = || {
        let (pagemap, pages) = (std::fs::File::open("/proc/self/pagemap").unwrap(), PageCount::new(guest.pages()));
        UffdTracker::new(userfaultfd(Faults::User).unwrap(), pagemap.into(), vec![guest.area()], vec![pages])
    };
    once_free(make).with_memory(&guest.memory())
}

fn holes(region: &Region) -> Holes {
    let mut holes = Holes::new(Freeing::Possible);
    holes.keep_note(region).unwrap();
    holes
}

/// Of pages that would be read now.
fn note(holes: &mut Holes, pages: &PageSet) {
    holes.note().keep(&pages.windows().collect::<Vec<_>>()).unwrap();
}

/// As a VMM does it, also on a hugetlbfs.
fn give_back(file: &OwnedFd, first: u64, count: u64) {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, how, first * PAGE, count * PAGE).unwrap();
}

/// With pages of `unit`, in a file of 4096.
fn no_tracker_sees_it_but_the_note_does(file: OwnedFd, unit: u64) {
    let pages = 4096;
    let source = map(&file, pages * PAGE, Access::Read);
    let guest = Guest::map(&file, pages * PAGE);
    (0..pages).for_each(|page| guest.write(page, 7));
    let (mut tracker, mut holes) = (track(&guest), holes(&source));
    tracker.scan(0).unwrap();
    let mut content = PageSet::full(PageCount::new(pages));
    content.remove(PageRange::new(3 * unit, unit));
    note(&mut holes, &content);
    assert!(holes.came_back(&content).unwrap().is_empty());

    give_back(&file, unit, unit);
    give_back(&file, 3 * unit, unit);
    assert_eq!((guest.read(unit), guest.read(3 * unit)), (0, 0));
    let hole = set(pages, &[(unit, 1)]);
    assert!(holes.look(&source, &hole).unwrap().contains(PageNumber::new(unit)), "it is memory again");
    let came_back = holes.came_back(&content).unwrap();
    assert_eq!(came_back, set(pages, &[(unit, unit)]), "what was not read before does not matter");
    // Should this fail one day, the kernel has learned to report it, and there is less to do.
    let mut written = tracker.scan(0).unwrap();
    written.intersect_with(&hole);
    assert!(written.is_empty());

    // It is read from outside, and given back once more. The first half of it is a hole this time.
    note(&mut holes, &came_back);
    assert!(holes.came_back(&content).unwrap().is_empty());
    give_back(&file, unit, unit);
    assert_eq!(holes.came_back(&content).unwrap(), came_back);
    note(&mut holes, &came_back);
    assert_eq!(holes.came_back(&content).unwrap(), came_back, "a hole is not noted");
    assert!(!source.is_data(PageRange::new(unit, 1)).unwrap(), "nor filled");
}

#[test]
fn no_tracker_sees_that_a_page_came_back_but_the_note_does() {
    no_tracker_sees_it_but_the_note_does(file(4096 * PAGE), 1);
}

#[test]
fn no_tracker_sees_that_a_huge_page_came_back_but_the_note_does() {
    let Some(file) = huge_file(4096 * PAGE) else { return };
    no_tracker_sees_it_but_the_note_does(file, HUGE / PAGE);
}

/// Whoever keeps note need not look at what is noted, however much that is.
#[test]
fn what_is_noted_is_not_looked_at() {
    let file = file(8 * PAGE);
    let source = map(&file, 8 * PAGE, Access::Read);
    let guest = Guest::map(&file, 8 * PAGE);
    (0..6).for_each(|page| guest.write(page, 7));
    let mut holes = holes(&source);
    let all = PageSet::full(PageCount::new(8));
    note(&mut holes, &set(8, &[(0, 4)]));
    assert!(holes.came_back(&set(8, &[(0, 4)])).unwrap().is_empty());
    give_back(&file, 3, 2);
    assert_eq!(*holes.look(&source, &all).unwrap(), set(8, &[(0, 4), (5, 1)]), "page 3 was there when that was asked");
    assert_eq!(*holes.look(&source, &set(8, &[(1, 6)])).unwrap(), set(8, &[(1, 3), (5, 1)]), "only what is wanted");
    assert_eq!(holes.came_back(&all).unwrap(), set(8, &[(3, 5)]));
    assert_eq!(*holes.look(&source, &all).unwrap(), set(8, &[(0, 3), (5, 1)]));
}

/// What is noted without being read would count as read. In pages of `unit`.
fn only_what_is_to_be_read_is_noted_in(file: OwnedFd, unit: u64) {
    let pages = 8 * unit;
    let source = map(&file, pages * PAGE, Access::Read);
    let guest = Guest::map(&file, pages * PAGE);
    (0..pages).for_each(|page| guest.write(page, 7));
    let mut holes = holes(&source);
    let all = PageSet::full(PageCount::new(pages));
    note(&mut holes, &all);
    // Once more changes nothing.
    note(&mut holes, &all);
    assert!(holes.came_back(&all).unwrap().is_empty());

    give_back(&file, 0, pages);
    assert!((0..pages).all(|page| guest.read(page) == 0));
    assert_eq!(holes.came_back(&all).unwrap(), all);
    // One page is enough to note a huge one, whichever of its pages it is.
    let first = [2 * unit, 4 * unit + unit / 2, 6 * unit - 1];
    note(&mut holes, &set(pages, &first.map(|page| (page, 1))));
    let noted = first.map(|page| (page / unit * unit, unit));
    let mut left = all.clone();
    left.subtract(&set(pages, &noted));
    assert_eq!(holes.came_back(&all).unwrap(), left);
}

#[test]
fn only_what_is_to_be_read_is_noted() {
    only_what_is_to_be_read_is_noted_in(file(8 * PAGE), 1);
}

#[test]
fn only_the_huge_pages_that_are_to_be_read_are_noted() {
    let Some(file) = huge_file(8 * HUGE) else { return };
    only_what_is_to_be_read_is_noted_in(file, HUGE / PAGE);
}

#[test]
fn a_file_that_was_cut_short_can_not_be_noted() {
    let file = file(16 * PAGE);
    let source = map(&file, 16 * PAGE, Access::Read);
    let mut holes = holes(&source);
    rustix::fs::ftruncate(&file, 8 * PAGE).unwrap();
    let windows: Vec<_> = set(16, &[(10, 1)]).windows().collect();
    let refused = holes.note().keep(&windows).unwrap_err().to_string();
    assert!(refused.contains("can't keep note of pages"), "{refused}");
}

#[test]
fn a_file_on_a_disk_is_refused_and_a_vm_that_gives_nothing_back_is_left_alone() {
    let disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    disk.set_len(16 * PAGE).unwrap();
    let region = map(&disk, 16 * PAGE, Access::ReadWrite);
    let refused = Holes::new(Freeing::Possible).keep_note(&region).unwrap_err().to_string();
    assert!(refused.contains("can't keep note of the pages of region \"ram\""), "{refused}");
    let mut holes = Holes::new(Freeing::Never);
    holes.keep_note(&region).unwrap();
    note(&mut holes, &PageSet::full(PageCount::new(16)));
    assert!(holes.came_back(&PageSet::full(PageCount::new(16))).unwrap().is_empty());
}

#[derive(Debug, Clone)]
enum Op {
    Write(u64),
    Read(u64),
    GiveBack(u64, u64),
    Round,
}

fn op() -> impl Strategy<Value = Op> {
    // Few pages, so that things happen to the same one.
    let page = || 500..524_u64;
    prop_oneof![
        3 => page().prop_map(Op::Write),
        3 => page().prop_map(Op::Read),
        2 => (page(), 1..12_u64).prop_map(|(first, count)| Op::GiveBack(first, count)),
        2 => Just(Op::Round),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// After the last round, the other end has what the guest has, whatever happened between the rounds.
    #[test]
    fn what_was_given_back_and_read_arrives_as_zeros(ops in prop::collection::vec(op(), 1..60)) {
        let file = file(1024 * PAGE);
        let source = map(&file, 1024 * PAGE, Access::Read);
        let guest = Guest::map(&file, 1024 * PAGE);
        let (mut tracker, mut holes) = (track(&guest), holes(&source));
        let (mut words, mut content) = (vec![0; 1024], PageSet::empty(PageCount::new(1024)));
        for (number, op) in ops.iter().chain([&Op::Round]).enumerate() {
            match *op {
                Op::Write(page) => guest.write(page, number as u64 + 1),
                Op::Read(page) => drop(guest.read(page)),
                Op::GiveBack(first, count) => give_back(&file, first, count),
                Op::Round => {
                    let mut send = tracker.scan(0).unwrap();
                    send.union_with(&holes.came_back(&content).unwrap());
                    let data = holes.look(&source, &PageSet::full(PageCount::new(1024))).unwrap();
                    send.intersect_with(data);
                    let mut gone = PageSet::full(PageCount::new(1024));
                    gone.subtract(data);
                    note(&mut holes, &send);
                    content.union_with(&send);
                    content.subtract(&gone);
                    gone.ranges().flat_map(|range| range.iter()).for_each(|page| words[page.get() as usize] = 0);
                    let mut sent = Vec::new();
                    source.copy_out(WindowPages::new(384, send.window(PageNumber::new(384))), &mut sent).unwrap();
                    source.copy_out(WindowPages::new(512, send.window(PageNumber::new(512))), &mut sent).unwrap();
                    let numbers = send.ranges().flat_map(|range| range.first.get()..range.end().get());
                    let numbers = numbers.filter(|page| (384..640).contains(page));
                    for (page, bytes) in numbers.zip(sent.as_chunks::<4096>().0) {
                        words[page as usize] = u64::from_ne_bytes(*bytes.first_chunk().unwrap());
                    }
                }
            }
        }
        for page in 0..1024 {
            prop_assert_eq!(words[page as usize], if (500..536).contains(&page) { guest.read(page) } else { 0 }, "{}", page);
        }
    }
}
