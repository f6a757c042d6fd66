//! Several regions, and a process that is not this one.
use std::{fs::File, thread, time::Duration};

use transship_memory::{Area, Error, Fault, Missing, PageCount, PageNumber, PageRange};

use super::{LONG, fault, pages_of, word_of};
use crate::common::{
    PAGE, file, page_of,
    process::{CHILD_PAGES, Faults, Guest, Tracked, userfaultfd},
};

#[test]
fn regions_and_parts_of_them_are_kept_apart() {
    let (one, two) = (Guest::map(file(64 * PAGE), 64 * PAGE), Guest::map(file(96 * PAGE), 96 * PAGE));
    // Region 1 is mapped in two parts, the second before the first.
    let first = Area { region: 1, bytes: 32 * PAGE, address: two.area().address + 64 * PAGE, ..two.area() };
    let second = Area { region: 1, first_page: PageNumber::new(32), bytes: 64 * PAGE, ..two.area() };
    let uffd = userfaultfd(Faults::User).unwrap();
    let missing =
        Missing::new(uffd, vec![first, one.area(), second], &[PageCount::new(64), PageCount::new(96)]).unwrap();
    assert_eq!(missing.fill(1, PageNumber::new(30), &pages_of(30..36)).unwrap(), PageCount::new(6));
    assert_eq!([64 + 30, 64 + 31, 0, 3].map(|at| two.read(at)), [30, 31, 32, 35].map(word_of));
    thread::scope(|scope| {
        let missing = missing;
        let (one, two) = (&one, &two);
        let reader = scope.spawn(|| (two.read(64 + 5), two.read(5), one.read(5)));
        for (region, page) in [(1, 5), (1, 37), (0, 5)] {
            assert_eq!(missing.next_fault(LONG).unwrap(), Some(Fault { region, page: PageNumber::new(page) }));
            assert_eq!(
                missing.fill(region, PageNumber::new(page), &page_of(100 * region as u64 + page)).unwrap(),
                PageCount::ONE
            );
        }
        assert_eq!(reader.join().unwrap(), (word_of(105), word_of(137), word_of(5)));
    });
}

/// As it is with a VMM: another process, whose userfaultfd we fetch; later it dies.
#[test]
fn another_process_is_served_until_it_dies() {
    let mut vmm = Tracked::start();
    let (pid, area, uffd) = vmm.attach();
    let missing = Missing::new(uffd, vec![area], &[PageCount::new(CHILD_PAGES)]).unwrap();
    vmm.begin_to_write(77);
    assert_eq!(missing.next_fault(LONG).unwrap(), fault(77));
    assert_eq!(missing.fill(0, PageNumber::new(77), &page_of(77)).unwrap(), PageCount::ONE);
    assert_eq!(vmm.answer(), ["done"]);
    // Its memory is the page with what it has written at the start.
    let memory = File::open(format!("/proc/{}/mem", pid.as_raw_nonzero())).unwrap();
    let mut page = vec![0; PAGE as usize];
    rustix::io::pread(&memory, &mut page, area.address + 77 * PAGE).unwrap();
    assert!(page[8..] == page_of(77)[8..] && page[..8] == 1_u64.to_ne_bytes());
    vmm.begin_to_write(78);
    assert_eq!(missing.next_fault(LONG).unwrap(), fault(78));
    vmm.kill();
    let gone = |result: Result<PageCount, Error>| matches!(result, Err(Error::Gone { region: 0, .. }));
    assert!(gone(missing.fill(0, PageNumber::new(78), &page_of(78))));
    assert!(gone(missing.fill_zero(0, PageRange::new(78, 1))));
    assert!(gone(missing.release(0, PageRange::new(78, 1)).map(|()| PageCount::ZERO)));
    assert!(gone(missing.next_fault(Duration::from_millis(1)).map(|_| PageCount::ZERO)));
    let held = rustix::io::dup(missing.fd()).unwrap();
    assert!(gone(Missing::taken_over(held, vec![area], &[PageCount::new(CHILD_PAGES)]).map(|_| PageCount::ZERO)));
}
