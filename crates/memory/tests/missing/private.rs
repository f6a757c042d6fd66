//! Memory that a process has for itself: it gives its pages back, and they come when they are touched.
use std::{os::fd::OwnedFd, sync::Arc, thread};

use transship_memory::{
    Access, Claims, Flaw, InProcess, Keep, Missing, PageCount, PageNumber, PageRange, PageSet, Process, Region,
};

use super::{LONG, fault, missing, pages_of, there, word_of};
use crate::common::{HUGE, PAGE, file, huge_file, page_of, process::Guest};

fn region_of(guest: &Guest, page_bytes: u64, below: Option<&OwnedFd>) -> Region {
    let process = Arc::new(Process::open(std::process::id() as i32, Access::ReadWrite).unwrap());
    let file = below.map(|file| (rustix::io::dup(file).unwrap(), 0));
    let (address, bytes) = (guest.area().address, guest.bytes);
    Region::in_process("ram", InProcess { process, address, bytes, page_bytes, file }, Access::ReadWrite).unwrap()
}

fn ranges(set: &PageSet) -> Vec<(u64, u64)> {
    set.ranges().map(|range| (range.first.get(), range.count.get())).collect()
}

/// All of it is watched first, and given back then, as a VMM is made to.
fn emptied(guest: &Guest, region: &Region) -> Missing {
    region.empty().unwrap();
    let missing = missing(guest);
    guest.give_back(0, guest.pages());
    assert_eq!(ranges(&region.not_missing().unwrap()), []);
    missing
}

/// Touched pages wait, each comes once, and what was given back later is zero.
fn comes_once(guest: &Guest, region: &Region, unit: u64) {
    let (missing, claims) = (emptied(guest, region), Claims::new(&[PageCount::new(guest.pages())]).unwrap());
    assert_eq!(missing.unit_pages(0), PageCount::new(unit));
    thread::scope(|scope| {
        let missing = missing;
        let reader = scope.spawn(|| (guest.read(unit), guest.read(unit)));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(unit));
        assert_eq!(
            missing.fill_once(&claims, 0, PageNumber::new(unit), &pages_of(unit..2 * unit)).unwrap(),
            PageCount::new(unit)
        );
        assert_eq!(reader.join().unwrap(), (word_of(unit), word_of(unit)));
        guest.give_back(unit, unit);
        let rest = missing.fill_once(&claims, 0, PageNumber::FIRST, &pages_of(0..guest.pages())).unwrap();
        assert_eq!(rest, PageCount::new(guest.pages() - unit), "what was given back is not put again");
        assert_eq!(there(region), [(0, unit), (2 * unit, guest.pages() - 2 * unit)]);
        let reader = scope.spawn(|| guest.read(unit));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(unit));
        assert_eq!(missing.fill_zero(0, PageRange::new(unit, unit)).unwrap(), PageCount::new(unit));
        assert_eq!(reader.join().unwrap(), 0);
        missing.release(0, PageRange::new(0, guest.pages())).unwrap();
    });
    (0..guest.pages()).filter(|page| page / unit != 1).for_each(|page| assert_eq!(guest.read(page), word_of(page)));
}

#[test]
fn private_pages_come_once_and_when_they_are_touched() {
    for huge in [false, true] {
        let guest = Guest::private(4 << 20, huge);
        (0..guest.pages()).for_each(|page| guest.write(page, 7));
        comes_once(&guest, &region_of(&guest, PAGE, None), 1);
    }
}

/// Whoever has written there has left a page of zeros in the file, too, which nobody would wait for.
#[test]
fn private_pages_over_a_file_without_a_name_come_once() {
    let below = file(64 * PAGE);
    let guest = Guest::private_over(&below, 64 * PAGE);
    (3..20).for_each(|page| guest.write(page, 7));
    comes_once(&guest, &region_of(&guest, PAGE, Some(&below)), 1);
}

#[test]
fn private_huge_pages_come_once() {
    let Some(below) = huge_file(3 * HUGE) else { return };
    let guest = Guest::private_over(&below, 3 * HUGE);
    guest.write(1000, 7);
    comes_once(&guest, &region_of(&guest, HUGE, Some(&below)), HUGE / PAGE);
}

/// A page that was only read is there, although it holds nothing.
#[test]
fn a_page_that_was_only_read_is_not_missing() {
    let guest = Guest::private(64 * PAGE, false);
    assert_eq!(guest.read(5), 0);
    guest.write(9, 1);
    let region = region_of(&guest, PAGE, None);
    assert_eq!(there(&region), [(9, 1)]);
    assert_eq!(ranges(&region.not_missing().unwrap()), [(5, 1), (9, 1)]);
}

#[test]
fn private_memory_that_must_stay_is_not_emptied() {
    let guest = Guest::private(64 * PAGE, false);
    for keep in [Keep::All, Keep::AllOnTheirNodes] {
        let error = region_of(&guest, PAGE, None).keeping(keep).empty().unwrap_err();
        assert_eq!(error.flaw(), Some(Flaw::MustStay), "{error}");
    }
    // A file that others can find, and that shows through.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("ram");
    std::fs::write(&path, vec![0; 64 * PAGE as usize]).unwrap();
    let below = OwnedFd::from(std::fs::File::open(&path).unwrap());
    let guest = Guest::private_over(&below, 64 * PAGE);
    let region = region_of(&guest, PAGE, Some(&below));
    rustix::io::pwrite(std::fs::File::options().write(true).open(&path).unwrap(), &page_of(3), 3 * PAGE).unwrap();
    let error = region.empty().unwrap_err();
    assert_eq!(error.flaw(), Some(Flaw::Below), "{error}");
    assert_eq!(guest.read(3), word_of(3));
    // Or one in which nobody would wait.
    let below = OwnedFd::from(tempfile::tempfile_in(std::env::current_dir().unwrap()).unwrap());
    rustix::fs::ftruncate(&below, 64 * PAGE).unwrap();
    let guest = Guest::private_over(&below, 64 * PAGE);
    let error = region_of(&guest, PAGE, Some(&below)).empty().unwrap_err();
    assert_eq!(error.flaw(), Some(Flaw::Below), "{error}");
}
