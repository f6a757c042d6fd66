//! A thread that touches a page waits until it is filled, and for nothing else.
use std::{sync::atomic::Ordering, thread, time::Duration};

use transship_lab::lacks;
use transship_memory::{Access, Missing, PageCount, PageNumber, PageRange, WindowPages};

use super::{LONG, NONE, fault, missing, pages_of, there, word_of};
use crate::common::{
    PAGE, contents, file, map, page_of,
    process::{Faults, Guest, userfaultfd},
};

#[test]
fn who_touches_a_page_waits_until_it_is_filled() {
    let file = file(16 * PAGE);
    let (region, guest) = (map(&file, 16 * PAGE, Access::Read), Guest::map(&file, 16 * PAGE));
    thread::scope(|scope| {
        let missing = missing(&guest);
        let guest = &guest;
        let reader = scope.spawn(|| guest.read(3));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(3));
        assert_eq!(missing.next_fault(Duration::from_millis(50)).unwrap(), None, "it is told of once");
        assert!(!reader.is_finished());
        // Its neighbours are not its matter.
        assert_eq!(missing.fill(0, PageNumber::new(4), &pages_of(4..8)).unwrap(), PageCount::new(4));
        assert_eq!(missing.fill_zero(0, PageRange::new(1, 2)).unwrap(), PageCount::new(2));
        assert_eq!(missing.next_fault(NONE).unwrap(), None);
        assert!(!reader.is_finished());
        assert_eq!(missing.fill(0, PageNumber::new(3), &page_of(3)).unwrap(), PageCount::ONE);
        assert_eq!(reader.join().unwrap(), word_of(3));

        let writer = scope.spawn(|| guest.word(9).fetch_add(1, Ordering::Relaxed));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(9));
        assert_eq!(missing.fill(0, PageNumber::new(9), &page_of(9)).unwrap(), PageCount::ONE);
        assert_eq!(writer.join().unwrap(), word_of(9));
        assert_eq!(guest.read(9), word_of(9) + 1);

        let reader = scope.spawn(|| guest.read(12));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(12));
        assert_eq!(missing.fill_zero(0, PageRange::new(12, 1)).unwrap(), PageCount::ONE);
        assert_eq!(reader.join().unwrap(), 0);
        assert_eq!(guest.read(2), 0);
        assert_eq!((4..8).map(|page| guest.read(page)).collect::<Vec<_>>(), (4..8).map(word_of).collect::<Vec<_>>());
        assert_eq!(there(&region), [(1, 7), (9, 1), (12, 1)]);
    });
}

#[test]
fn pages_that_are_there_stay_as_they_are() {
    let file = file(64 * PAGE);
    let (region, guest) = (map(&file, 64 * PAGE, Access::ReadWrite), Guest::map(&file, 64 * PAGE));
    let missing = missing(&guest);
    assert_eq!(missing.fill(0, PageNumber::new(10), &pages_of(100..105)).unwrap(), PageCount::new(5));
    // By another way, and mapped in the guest or not.
    region.write_pages(WindowPages::new(20, 0b11), &pages_of(200..202)).unwrap();
    assert_eq!(guest.read(20), word_of(200));
    guest.write(12, 7);
    assert_eq!(missing.fill(0, PageNumber::FIRST, &pages_of(0..64)).unwrap(), PageCount::new(64 - 7));
    assert_eq!(missing.fill(0, PageNumber::FIRST, &pages_of(300..364)).unwrap(), PageCount::ZERO);
    assert_eq!(missing.fill_zero(0, PageRange::new(0, 64)).unwrap(), PageCount::ZERO);
    let bytes = contents(&region);
    for page in 0..64 {
        let number = match page {
            12 => continue,
            10..15 => page + 90,
            20 | 21 => page + 180,
            _ => page,
        };
        assert!(bytes[(page * PAGE) as usize..][..PAGE as usize] == page_of(number), "page {page}");
    }
    assert_eq!(guest.read(12), 7);
}

/// A thread that waited before it came by another way does not see it by itself.
#[test]
fn who_waits_for_a_page_that_came_another_way_is_woken() {
    let file = file(64 * PAGE);
    let region = map(&file, 64 * PAGE, Access::ReadWrite);
    type Wake = fn(&Missing);
    let ways: [Wake; 3] = [
        |missing| missing.wake(0, PageRange::new(5, 1)).unwrap(),
        |missing| assert_eq!(missing.fill(0, PageNumber::new(4), &pages_of(4..7)).unwrap(), PageCount::new(2)),
        |missing| assert_eq!(missing.fill_zero(0, PageRange::new(5, 1)).unwrap(), PageCount::ZERO),
    ];
    for wake in ways {
        region.clear(PageRange::new(0, 64)).unwrap();
        // A mapping that nobody has watched: a process that another test starts may hold the last one's watch for a
        // moment.
        let guest = Guest::map(&file, 64 * PAGE);
        thread::scope(|scope| {
            let missing = missing(&guest);
            let guest = &guest;
            let reader = scope.spawn(|| guest.read(5));
            assert_eq!(missing.next_fault(LONG).unwrap(), fault(5));
            // Woken too early, it waits again, and is reported again.
            missing.wake(0, PageRange::new(0, 64)).unwrap();
            assert_eq!(missing.next_fault(LONG).unwrap(), fault(5));
            region.write_pages(WindowPages::new(5, 1), &page_of(55)).unwrap();
            wake(&missing);
            assert_eq!(reader.join().unwrap(), word_of(55));
        });
    }
}

#[test]
fn released_pages_are_the_kernels_again() {
    let file = file(64 * PAGE);
    let (region, guest) = (map(&file, 64 * PAGE, Access::Read), Guest::map(&file, 64 * PAGE));
    thread::scope(|scope| {
        let missing = missing(&guest);
        missing.fill(0, PageNumber::new(5), &page_of(5)).unwrap();
        let guest = &guest;
        let readers: Vec<_> = [20, 40].map(|page| scope.spawn(move || guest.read(page))).into();
        let mut waiting: Vec<_> = (0..2).map(|_| missing.next_fault(LONG).unwrap().unwrap().page).collect();
        waiting.sort_unstable();
        assert_eq!(waiting, [20, 40].map(PageNumber::new));
        missing.release(0, PageRange::new(0, 30)).unwrap();
        missing.release(0, PageRange::new(0, 30)).unwrap();
        let mut readers = readers.into_iter();
        assert_eq!(readers.next().unwrap().join().unwrap(), 0, "who waited goes on");
        assert_eq!((guest.read(5), guest.read(6)), (word_of(5), 0));
        assert_eq!(there(&region), [(5, 2), (20, 1)], "the others are holes still");
        // The rest is as before.
        assert_eq!(missing.fill(0, PageNumber::new(40), &page_of(40)).unwrap(), PageCount::ONE);
        assert_eq!(readers.next().unwrap().join().unwrap(), word_of(40));
        assert_eq!(
            missing.fill(0, PageNumber::new(8), &page_of(8)).unwrap(),
            PageCount::ZERO,
            "a thread that is late does no harm"
        );
        assert_eq!(guest.read(8), 0);
        missing.release(0, PageRange::new(0, 64)).unwrap();
        assert_eq!(guest.read(63), 0);
    });
}

/// Released pages in the middle, and on both ends, do not keep the others from being filled.
#[test]
fn what_lies_between_released_pages_is_filled() {
    const RELEASED: [(u64, u64); 5] = [(0, 3), (10, 1), (12, 100), (200, 7), (299, 1)];
    let is_released = |page| RELEASED.iter().any(|&(first, count)| (first..first + count).contains(&page));
    for zero in [false, true] {
        let file = file(300 * PAGE);
        let (region, guest) = (map(&file, 300 * PAGE, Access::Read), Guest::map(&file, 300 * PAGE));
        let missing = missing(&guest);
        RELEASED.iter().for_each(|&(first, count)| missing.release(0, PageRange::new(first, count)).unwrap());
        missing.fill(0, PageNumber::new(150), &page_of(150)).unwrap();
        let filled = match zero {
            true => missing.fill_zero(0, PageRange::new(0, 300)),
            false => missing.fill(0, PageNumber::FIRST, &pages_of(0..300)),
        };
        assert_eq!(filled.unwrap(), PageCount::new(300 - 112 - 1));
        assert_eq!(there(&region), [(3, 7), (11, 1), (112, 88), (207, 92)]);
        for page in 0..300 {
            let expected = if is_released(page) || zero && page != 150 { 0 } else { word_of(page) };
            assert_eq!(guest.read(page), expected, "page {page}");
        }
    }
}

#[test]
fn the_kernel_waits_too() {
    let Ok(uffd) = userfaultfd(Faults::Kernel) else {
        return lacks("root, or vm.unprivileged_userfaultfd=1, to see the faults of the kernel");
    };
    let guest = Guest::map(file(8 * PAGE), 8 * PAGE);
    thread::scope(|scope| {
        let missing = Missing::new(uffd, vec![guest.area()], &[PageCount::new(8)]).unwrap();
        let guest = &guest;
        let writer = scope.spawn(move || {
            let out = tempfile::tempfile().unwrap();
            // SAFETY: pages of the mapping, which nobody writes but the kernel, before they are read.
            let bytes = unsafe { std::slice::from_raw_parts(guest.at(3), 2 * PAGE as usize) };
            assert_eq!(rustix::io::write(&out, bytes).unwrap(), 2 * PAGE as usize);
            let mut back = vec![0; 2 * PAGE as usize];
            assert_eq!(rustix::io::pread(&out, &mut back, 0).unwrap(), back.len());
            back
        });
        for page in [3, 4] {
            assert_eq!(missing.next_fault(LONG).unwrap(), fault(page));
            missing.fill(0, PageNumber::new(page), &page_of(page)).unwrap();
        }
        assert!(writer.join().unwrap() == pages_of(3..5));
    });
}
