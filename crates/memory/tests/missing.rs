//! Memory that is brought when it is touched, against the real kernel: who touches a page sees what was filled, and nobody waits for ever.
//!
//! The guest is this process, through a mapping of its own, or a child where it has to die.
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs::File,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use common::{
    HUGE, PAGE, contents, file, huge_file, map,
    mounts::with_mounts_of_its_own,
    page_of,
    process::{CHILD_PAGES, Faults, Guest, Stop, Tracked, userfaultfd},
};
use rustix::{
    fs::{Mode, OFlags},
    mount::MountFlags,
};
use transship_memory::{Access, Area, Error, Fault, Missing, PageRange, Region};

/// Longer than anything takes on a machine that does anything at all.
const LONG: Duration = Duration::from_secs(120);
const NONE: Duration = Duration::ZERO;

fn missing(guest: &Guest) -> Missing {
    Missing::new(userfaultfd(Faults::User).unwrap(), vec![guest.area()], &[guest.pages()]).unwrap()
}

fn fault(page: u64) -> Option<Fault> {
    Some(Fault { region: 0, page })
}

/// The first word of the page of this number.
fn word_of(number: u64) -> u64 {
    u64::from_ne_bytes(page_of(number)[..8].try_into().unwrap())
}

fn pages_of(numbers: std::ops::Range<u64>) -> Vec<u8> {
    numbers.flat_map(page_of).collect()
}

/// The pages that the file has.
fn there(region: &Region) -> Vec<(u64, u64)> {
    region.data().unwrap().ranges().map(|range| (range.first, range.count)).collect()
}

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
        assert_eq!(missing.fill(0, 4, &pages_of(4..8)).unwrap(), 4);
        assert_eq!(missing.fill_zero(0, PageRange::new(1, 2)).unwrap(), 2);
        assert_eq!(missing.next_fault(NONE).unwrap(), None);
        assert!(!reader.is_finished());
        assert_eq!(missing.fill(0, 3, &page_of(3)).unwrap(), 1);
        assert_eq!(reader.join().unwrap(), word_of(3));

        let writer = scope.spawn(|| guest.word(9).fetch_add(1, Ordering::Relaxed));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(9));
        assert_eq!(missing.fill(0, 9, &page_of(9)).unwrap(), 1);
        assert_eq!(writer.join().unwrap(), word_of(9));
        assert_eq!(guest.read(9), word_of(9) + 1);

        let reader = scope.spawn(|| guest.read(12));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(12));
        assert_eq!(missing.fill_zero(0, PageRange::new(12, 1)).unwrap(), 1);
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
    assert_eq!(missing.fill(0, 10, &pages_of(100..105)).unwrap(), 5);
    // By another way, and mapped in the guest or not.
    region.write_pages(20, 0b11, &pages_of(200..202)).unwrap();
    assert_eq!(guest.read(20), word_of(200));
    guest.write(12, 7);
    assert_eq!(missing.fill(0, 0, &pages_of(0..64)).unwrap(), 64 - 7);
    assert_eq!(missing.fill(0, 0, &pages_of(300..364)).unwrap(), 0);
    assert_eq!(missing.fill_zero(0, PageRange::new(0, 64)).unwrap(), 0);
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

/// Who waited before it came by another way does not see it by himself.
#[test]
fn who_waits_for_a_page_that_came_another_way_is_woken() {
    let file = file(64 * PAGE);
    let (region, guest) = (map(&file, 64 * PAGE, Access::ReadWrite), Guest::map(&file, 64 * PAGE));
    type Wake = fn(&Missing);
    let ways: [Wake; 3] = [
        |missing| missing.wake(0, PageRange::new(5, 1)).unwrap(),
        |missing| assert_eq!(missing.fill(0, 4, &pages_of(4..7)).unwrap(), 2),
        |missing| assert_eq!(missing.fill_zero(0, PageRange::new(5, 1)).unwrap(), 0),
    ];
    for wake in ways {
        region.clear(PageRange::new(0, 64)).unwrap();
        thread::scope(|scope| {
            let missing = missing(&guest);
            let guest = &guest;
            let reader = scope.spawn(|| guest.read(5));
            assert_eq!(missing.next_fault(LONG).unwrap(), fault(5));
            // Woken too early, it waits again, and is told of again.
            missing.wake(0, PageRange::new(0, 64)).unwrap();
            assert_eq!(missing.next_fault(LONG).unwrap(), fault(5));
            region.write_pages(5, 1, &page_of(55)).unwrap();
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
        missing.fill(0, 5, &page_of(5)).unwrap();
        let guest = &guest;
        let readers: Vec<_> = [20, 40].map(|page| scope.spawn(move || guest.read(page))).into();
        let mut waiting: Vec<_> = (0..2).map(|_| missing.next_fault(LONG).unwrap().unwrap().page).collect();
        waiting.sort_unstable();
        assert_eq!(waiting, [20, 40]);
        missing.release(0, PageRange::new(0, 30)).unwrap();
        missing.release(0, PageRange::new(0, 30)).unwrap();
        let mut readers = readers.into_iter();
        assert_eq!(readers.next().unwrap().join().unwrap(), 0, "who waited goes on");
        assert_eq!((guest.read(5), guest.read(6)), (word_of(5), 0));
        assert_eq!(there(&region), [(5, 2), (20, 1)], "the others are holes still");
        // The rest is as before.
        assert_eq!(missing.fill(0, 40, &page_of(40)).unwrap(), 1);
        assert_eq!(readers.next().unwrap().join().unwrap(), word_of(40));
        assert_eq!(missing.fill(0, 8, &page_of(8)).unwrap(), 0, "a thread that is late does no harm");
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
        missing.fill(0, 150, &page_of(150)).unwrap();
        let filled = match zero {
            true => missing.fill_zero(0, PageRange::new(0, 300)),
            false => missing.fill(0, 0, &pages_of(0..300)),
        };
        assert_eq!(filled.unwrap(), 300 - 112 - 1);
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
        return eprintln!("skipped: only root may see the faults of the kernel, or set vm.unprivileged_userfaultfd=1");
    };
    let guest = Guest::map(file(8 * PAGE), 8 * PAGE);
    thread::scope(|scope| {
        let missing = Missing::new(uffd, vec![guest.area()], &[8]).unwrap();
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
            missing.fill(0, page, &page_of(page)).unwrap();
        }
        assert!(writer.join().unwrap() == pages_of(3..5));
    });
}

/// What a saved guest was, and who brings it.
struct Restore<'a> {
    missing: Missing,
    bytes: &'a [u8],
}

impl Restore<'_> {
    /// Brings `count` pages from `first`, in whole units.
    fn bring(&self, first: u64, count: u64) -> u64 {
        let bytes = &self.bytes[(first * PAGE) as usize..][..(count * PAGE) as usize];
        if bytes.iter().all(|&byte| byte == 0) {
            return self.missing.fill_zero(0, PageRange::new(first, count)).unwrap();
        }
        self.missing.fill(0, first, bytes).unwrap()
    }
}

/// The law of lazy restores: threads read and add all over, pages are brought to who waits and unasked, and each page is what was saved, and
/// what was added to it.
fn a_guest_runs_before_its_memory_is_there(file: impl Fn() -> OwnedFd, bytes: u64) {
    const THREADS: u64 = 3;
    let pages = bytes / PAGE;
    let mut saved = vec![0; bytes as usize];
    for page in (0..pages).filter(|page| page / 16 % 3 != 0) {
        saved[(page * PAGE) as usize..][..PAGE as usize].copy_from_slice(&page_of(page));
    }
    let saved = &saved;
    let word = |page: u64| u64::from_ne_bytes(saved[(page * PAGE) as usize..][..8].try_into().unwrap());
    for round in 0..3_u64 {
        let file = file();
        let (region, guest) = (map(&file, bytes, Access::Read), Guest::map(&file, bytes));
        let added: Vec<_> = (0..pages).map(|_| AtomicU64::new(0)).collect();
        let (stop, brought) = (Stop(AtomicBool::new(false)), AtomicU64::new(0));
        let (guest, stop, brought, added, word) = (&guest, &stop, &brought, &added, &word);
        thread::scope(|scope| {
            let _stop_on_panic = stop.on_drop();
            let restore = Arc::new(Restore { missing: missing(guest), bytes: saved });
            let unit = restore.missing.unit_pages(0);
            let touchers = (0..THREADS).map(|thread| {
                scope.spawn(move || {
                    let mut random = 1000 * round + thread;
                    for _ in 0..3000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let page = (random >> 33) % pages;
                        if random >> 63 == 1 {
                            guest.word(page).fetch_add(1 << 32, Ordering::Relaxed);
                            added[page as usize].fetch_add(1 << 32, Ordering::Relaxed);
                        } else {
                            assert_eq!(guest.read(page) as u32, word(page) as u32, "page {page}");
                        }
                    }
                })
            });
            let touchers: Vec<_> = touchers.collect();
            for _ in 0..2 {
                let restore = restore.clone();
                scope.spawn(move || {
                    let mut faults = Vec::new();
                    while !stop.0.load(Ordering::Relaxed) {
                        restore.missing.next_faults(Duration::from_millis(10), &mut faults).unwrap();
                        for fault in faults.drain(..) {
                            brought.fetch_add(restore.bring(fault.page, unit), Ordering::Relaxed);
                        }
                    }
                });
            }
            // Unasked: all, in stretches that overlap, so that pages are found that are there.
            for first in (0..pages).step_by((8 * unit) as usize) {
                brought.fetch_add(restore.bring(first, (16 * unit).min(pages - first)), Ordering::Relaxed);
                thread::yield_now();
            }
            restore.missing.release(0, PageRange::new(0, pages)).unwrap();
            touchers.into_iter().for_each(|toucher| toucher.join().unwrap());
        });
        assert_eq!(brought.load(Ordering::Relaxed), pages, "each page was put once");
        let bytes = contents(&region);
        for page in 0..pages {
            let mut expected = saved[(page * PAGE) as usize..][..PAGE as usize].to_vec();
            let first = word(page).wrapping_add(added[page as usize].load(Ordering::Relaxed));
            expected[..8].copy_from_slice(&first.to_ne_bytes());
            assert!(bytes[(page * PAGE) as usize..][..PAGE as usize] == expected, "round {round}, page {page}");
        }
    }
}

#[test]
fn a_guest_of_small_pages_runs_before_its_memory_is_there() {
    a_guest_runs_before_its_memory_is_there(|| file(1000 * PAGE), 1000 * PAGE);
}

#[test]
fn a_guest_of_huge_pages_runs_before_its_memory_is_there() {
    let Some(first) = huge_file(8 * HUGE) else { return };
    let again = || {
        // The same file, made holes again: there may not be enough huge pages for three.
        map(&first, 8 * HUGE, Access::ReadWrite).clear(PageRange::new(0, 8 * HUGE / PAGE)).unwrap();
        rustix::io::dup(&first).unwrap()
    };
    a_guest_runs_before_its_memory_is_there(again, 8 * HUGE);
}

#[test]
fn huge_pages_are_filled_as_a_whole() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    let guest = Guest::map(&file, 4 * HUGE);
    let huge = |number: u64| pages_of(number..number + 512);
    thread::scope(|scope| {
        let missing = missing(&guest);
        assert_eq!(missing.unit_pages(0), 512);
        let parts = |error: Result<u64, Error>| {
            error.unwrap_err().to_string().contains("not whole huge pages, of 512 pages each")
        };
        assert!(parts(missing.fill(0, 0, &page_of(0))));
        assert!(parts(missing.fill(0, 1, &huge(1))));
        assert!(parts(missing.fill_zero(0, PageRange::new(512, 513))));
        assert!(parts(missing.release(0, PageRange::new(512, 1)).map(|()| 0)));
        let guest = &guest;
        let reader = scope.spawn(move || guest.read(512 + 77));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(512));
        assert_eq!(missing.fill(0, 512, &huge(512)).unwrap(), 512);
        assert_eq!(reader.join().unwrap(), word_of(512 + 77));
        // The second of three is there.
        assert_eq!(missing.fill(0, 0, &[huge(0), huge(9000), huge(1024)].concat()).unwrap(), 1024);
        assert_eq!([1, 600, 1030].map(|page| guest.read(page)), [1, 600, 1030].map(word_of));
        assert_eq!(missing.fill_zero(0, PageRange::new(0, 2048)).unwrap(), 512);
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
        first.fill(0, 8, &page_of(8)).unwrap();
        let told = scope.spawn(|| guest.read(30));
        assert_eq!(first.next_fault(LONG).unwrap(), fault(30));
        drop(first);
        let not_told = scope.spawn(|| guest.read(31));
        let second = Missing::taken_over(held, vec![guest.area()], &[64]).unwrap();
        assert_eq!(second.next_fault(LONG).unwrap(), fault(31));
        assert_eq!(second.next_fault(NONE).unwrap(), None);
        assert!(!told.is_finished());
        assert_eq!(second.fill(0, 8, &pages_of(8..64)).unwrap(), 55);
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
    let second = Missing::taken_over(held, vec![guest.area()], &[2048]).unwrap();
    assert_eq!(second.unit_pages(0), 512);
    assert_eq!(second.fill(0, 1024, &pages_of(1024..2048)).unwrap(), 1024);
    assert_eq!(guest.read(2000), word_of(2000));
    second.release(0, PageRange::new(0, 2048)).unwrap();
    let held = rustix::io::dup(second.fd()).unwrap();
    Missing::taken_over(held, vec![guest.area()], &[2048]).unwrap();
}

#[test]
fn what_was_not_in_use_is_not_taken_over() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    let over = |uffd: OwnedFd, areas: Vec<Area>, pages: &[u64]| {
        Missing::taken_over(uffd, areas, pages).err().map(|e| e.to_string())
    };
    let fresh = over(userfaultfd(Faults::User).unwrap(), vec![guest.area()], &[64]).unwrap();
    assert!(fresh.contains("this userfaultfd is not in use for it"), "{fresh}");
    let none = over(file(PAGE), vec![guest.area()], &[64]).unwrap();
    assert!(!none.is_empty());
    let missing = missing(&guest);
    let dup = || rustix::io::dup(missing.fd()).unwrap();
    assert!(over(dup(), vec![guest.area()], &[65]).unwrap().contains("pages 64..65 are not mapped"));
    assert_eq!(over(dup(), vec![guest.area()], &[64]), None);
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

#[test]
fn what_does_not_fit_is_refused() {
    let guest = Guest::map(file(16 * PAGE), 16 * PAGE);
    let missing = missing(&guest);
    assert!(matches!(missing.fill(0, 0, &[1; 4097]), Err(Error::WrongLength { expected: 4096, given: 4097, .. })));
    assert!(matches!(missing.fill(0, 15, &pages_of(0..2)), Err(Error::OutOfRange { pages: 16, .. })));
    assert!(matches!(missing.fill_zero(0, PageRange::new(u64::MAX, 2)), Err(Error::OutOfRange { pages: 16, .. })));
    assert!(matches!(missing.release(0, PageRange::new(0, 17)), Err(Error::OutOfRange { pages: 16, .. })));
    assert!(matches!(missing.wake(1, PageRange::new(0, 1)), Err(Error::Untrackable { region: 1, .. })));
    assert_eq!(missing.fill(0, 16, &[]).unwrap(), 0);
    let new = |areas: &[Area], pages: &[u64]| {
        Missing::new(userfaultfd(Faults::User).unwrap(), areas.to_vec(), pages).err().unwrap().to_string()
    };
    assert!(new(&[guest.area()], &[17]).contains("pages 16..17 are not mapped"));
    assert!(new(&[guest.area()], &[16]).contains("another userfaultfd tracks it already"));
}

#[test]
fn a_full_file_system_is_an_error() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=256k")).unwrap();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(dir.join("ram"), flags, Mode::from_raw_mode(0o600)).unwrap();
        rustix::fs::ftruncate(&file, 1024 * PAGE).unwrap();
        let guest = Guest::map(&file, 1024 * PAGE);
        let missing = missing(&guest);
        for fill in [&|| missing.fill(0, 0, &pages_of(0..1024)), &|| missing.fill_zero(0, PageRange::new(0, 1024))]
            as [&dyn Fn() -> Result<u64, Error>; 2]
        {
            let error = fill().unwrap_err().to_string();
            assert!(error.contains("no memory is left, or no room in the file system"), "{error}");
        }
        // What was put is there.
        assert_eq!(guest.read(3), word_of(3));
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            0,
            8 * PAGE,
        )
        .unwrap();
        assert_eq!(missing.fill(0, 3, &page_of(33)).unwrap(), 1);
        assert_eq!(guest.read(3), word_of(33));
        // The mapping ends with its file system, which ends with this thread.
        missing.release(0, PageRange::new(0, 1024)).unwrap();
    });
}

#[test]
fn regions_and_parts_of_them_are_kept_apart() {
    let (one, two) = (Guest::map(file(64 * PAGE), 64 * PAGE), Guest::map(file(96 * PAGE), 96 * PAGE));
    // Region 1 is mapped in two parts, the second before the first.
    let first = Area { region: 1, bytes: 32 * PAGE, address: two.area().address + 64 * PAGE, ..two.area() };
    let second = Area { region: 1, first_page: 32, bytes: 64 * PAGE, ..two.area() };
    let uffd = userfaultfd(Faults::User).unwrap();
    let missing = Missing::new(uffd, vec![first, one.area(), second], &[64, 96]).unwrap();
    assert_eq!(missing.fill(1, 30, &pages_of(30..36)).unwrap(), 6);
    assert_eq!([64 + 30, 64 + 31, 0, 3].map(|at| two.read(at)), [30, 31, 32, 35].map(word_of));
    thread::scope(|scope| {
        let missing = missing;
        let (one, two) = (&one, &two);
        let reader = scope.spawn(|| (two.read(64 + 5), two.read(5), one.read(5)));
        for (region, page) in [(1, 5), (1, 37), (0, 5)] {
            assert_eq!(missing.next_fault(LONG).unwrap(), Some(Fault { region, page }));
            assert_eq!(missing.fill(region, page, &page_of(100 * region as u64 + page)).unwrap(), 1);
        }
        assert_eq!(reader.join().unwrap(), (word_of(105), word_of(137), word_of(5)));
    });
}

#[test]
fn child() {
    common::process::child();
}

/// As it is with a VMM: another process, whose userfaultfd we fetch; later it dies.
#[test]
fn another_process_is_served_until_it_dies() {
    let mut vmm = Tracked::start();
    let (pid, area, uffd) = vmm.attach();
    let missing = Missing::new(uffd, vec![area], &[CHILD_PAGES]).unwrap();
    vmm.begin_to_write(77);
    assert_eq!(missing.next_fault(LONG).unwrap(), fault(77));
    assert_eq!(missing.fill(0, 77, &page_of(77)).unwrap(), 1);
    assert_eq!(vmm.answer(), ["done"]);
    // Its memory is the page with what it has written at the start.
    let memory = File::open(format!("/proc/{}/mem", pid.as_raw_nonzero())).unwrap();
    let mut page = vec![0; PAGE as usize];
    rustix::io::pread(&memory, &mut page, area.address + 77 * PAGE).unwrap();
    assert!(page[8..] == page_of(77)[8..] && page[..8] == 1_u64.to_ne_bytes());
    vmm.begin_to_write(78);
    assert_eq!(missing.next_fault(LONG).unwrap(), fault(78));
    vmm.kill();
    let gone = |result: Result<u64, Error>| matches!(result, Err(Error::Gone { region: 0, .. }));
    assert!(gone(missing.fill(0, 78, &page_of(78))));
    assert!(gone(missing.fill_zero(0, PageRange::new(78, 1))));
    assert!(gone(missing.release(0, PageRange::new(78, 1)).map(|()| 0)));
    assert!(gone(missing.next_fault(Duration::from_millis(1)).map(|_| 0)));
    let held = rustix::io::dup(missing.fd()).unwrap();
    assert!(gone(Missing::taken_over(held, vec![area], &[CHILD_PAGES]).map(|_| 0)));
}
