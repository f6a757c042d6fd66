//! More than one holds the userfaultfd: whoever is left goes on.
use std::{os::fd::OwnedFd, thread};

use transship_memory::{Area, Error, Flaw, Missing, PageCount, PageNumber, PageRange};

use super::{LONG, NONE, fault, missing, pages_of, word_of};
use crate::common::{
    HUGE, PAGE, counts, file, huge_file, page_of,
    process::{Faults, Guest, userfaultfd},
};

#[test]
fn huge_pages_are_filled_as_a_whole() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    let guest = Guest::map(&file, 4 * HUGE);
    let huge = |number: u64| pages_of(number..number + 512);
    thread::scope(|scope| {
        let missing = missing(&guest);
        assert_eq!(missing.unit_pages(0), PageCount::new(512));
        let parts = |error: Result<PageCount, Error>| error.unwrap_err().flaw() == Some(Flaw::PartOfHugePage);
        assert!(parts(missing.fill(0, PageNumber::FIRST, &page_of(0))));
        assert!(parts(missing.fill(0, PageNumber::new(1), &huge(1))));
        assert!(parts(missing.fill_zero(0, PageRange::new(512, 513))));
        assert!(parts(missing.release(0, PageRange::new(512, 1)).map(|()| PageCount::ZERO)));
        let guest = &guest;
        let reader = scope.spawn(move || guest.read(512 + 77));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(512));
        assert_eq!(missing.fill(0, PageNumber::new(512), &huge(512)).unwrap(), PageCount::new(512));
        assert_eq!(reader.join().unwrap(), word_of(512 + 77));
        // The second of three is there.
        assert_eq!(
            missing.fill(0, PageNumber::FIRST, &[huge(0), huge(9000), huge(1024)].concat()).unwrap(),
            PageCount::new(1024)
        );
        assert_eq!([1, 600, 1030].map(|page| guest.read(page)), [1, 600, 1030].map(word_of));
        assert_eq!(missing.fill_zero(0, PageRange::new(0, 2048)).unwrap(), PageCount::new(512));
        assert_eq!((guest.read(1030), guest.read(2000)), (word_of(1030), 0));
    });
}

#[test]
fn another_holder_takes_over() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    thread::scope(|scope| {
        let first = missing(&guest);
        // Held from before anything happens until after the first is gone.
        let held = rustix::io::dup(first.fd()).unwrap();
        let guest = &guest;
        first.release(0, PageRange::new(0, 8)).unwrap();
        first.fill(0, PageNumber::new(8), &page_of(8)).unwrap();
        let told = scope.spawn(|| guest.read(30));
        assert_eq!(first.next_fault(LONG).unwrap(), fault(30));
        drop(first);
        let not_told = scope.spawn(|| guest.read(31));
        let second = Missing::taken_over(held, vec![guest.area()], &[PageCount::new(64)]).unwrap();
        assert_eq!(second.next_fault(LONG).unwrap(), fault(31));
        assert_eq!(second.next_fault(NONE).unwrap(), None);
        assert!(!told.is_finished());
        assert_eq!(second.fill(0, PageNumber::new(8), &pages_of(8..64)).unwrap(), PageCount::new(55));
        assert_eq!((told.join().unwrap(), not_told.join().unwrap()), (word_of(30), word_of(31)));
        assert_eq!(guest.read(3), 0);
    });
}

/// Which pages go together is found out although the first are released.
#[test]
fn another_holder_takes_huge_pages_over() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    let guest = Guest::map(&file, 4 * HUGE);
    let first = missing(&guest);
    first.release(0, PageRange::new(0, 1024)).unwrap();
    let held = rustix::io::dup(first.fd()).unwrap();
    drop(first);
    let second = Missing::taken_over(held, vec![guest.area()], &[PageCount::new(2048)]).unwrap();
    assert_eq!(second.unit_pages(0), PageCount::new(512));
    assert_eq!(second.fill(0, PageNumber::new(1024), &pages_of(1024..2048)).unwrap(), PageCount::new(1024));
    assert_eq!(guest.read(2000), word_of(2000));
    second.release(0, PageRange::new(0, 2048)).unwrap();
    let held = rustix::io::dup(second.fd()).unwrap();
    Missing::taken_over(held, vec![guest.area()], &[PageCount::new(2048)]).unwrap();
}

#[test]
fn what_was_not_in_use_is_not_taken_over() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    let over = |uffd: OwnedFd, areas: Vec<Area>, pages: &[u64]| Missing::taken_over(uffd, areas, &counts(pages)).err();
    let fresh = over(userfaultfd(Faults::User).unwrap(), vec![guest.area()], &[64]).unwrap();
    assert_eq!(fresh.flaw(), Some(Flaw::NotOurs), "{fresh}");
    assert!(over(file(PAGE), vec![guest.area()], &[64]).is_some());
    let missing = missing(&guest);
    let dup = || rustix::io::dup(missing.fd()).unwrap();
    assert_eq!(over(dup(), vec![guest.area()], &[65]).unwrap().flaw(), Some(Flaw::NotMapped));
    assert!(over(dup(), vec![guest.area()], &[64]).is_none());
}

#[test]
fn with_no_holder_left_holes_are_zero() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    thread::scope(|scope| {
        let missing = missing(&guest);
        let guest = &guest;
        let reader = scope.spawn(|| guest.read(30));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(30));
        drop(missing);
        assert_eq!(reader.join().unwrap(), 0);
    });
    assert_eq!(guest.read(31), 0);
}
