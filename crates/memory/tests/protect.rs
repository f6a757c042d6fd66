//! Write protection against the real kernel: a protected page is what it was until it is let go of, whoever writes, and
//! nobody waits for ever.
//!
//! The guest is this process, through a mapping of its own, or a child where it has to die. What is protected is told
//! apart from what the file holds by looking at it through another mapping.
use std::{
    collections::HashSet,
    fs::File,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::fs::OFlags;
use transship_lab::lacks;
use transship_memory::{
    Access, Area, Error, Fault, Flaw, PageCount, PageNumber, PageRange, PageSet, Protection, Region, WindowPages,
};

use crate::common::{
    HUGE, PAGE, contents, counts, file, huge_file, map, page_of,
    process::{CHILD_PAGES, Faults, Guest, Stop, Tracked, once_free, userfaultfd},
};

/// Longer than anything takes on a machine that does anything at all.
const LONG: Duration = Duration::from_secs(120);
const NONE: Duration = Duration::ZERO;

fn protection(guest: &Guest) -> Protection {
    let pages = [PageCount::new(guest.pages())];
    once_free(|| Protection::new(userfaultfd(Faults::User).unwrap(), vec![guest.area()], &pages))
}

fn all(guest: &Guest) -> PageRange {
    PageRange::new(0, guest.pages())
}

fn fault(page: u64) -> Option<Fault> {
    Some(Fault { region: 0, page: PageNumber::new(page) })
}

#[test]
fn a_writer_waits_until_its_page_is_let_go_of() {
    let file = file(16 * PAGE);
    let region = map(&file, 16 * PAGE, Access::ReadWrite);
    // Page 3 is in the mapping, page 5 only in the file, page 7 nowhere; page 9 was read, and is a hole mapped as zeros
    // or a page.
    let guest = Guest::map(&file, 16 * PAGE);
    guest.write(3, 33);
    region.write_pages(WindowPages::new(5, 1), &page_of(5)).unwrap();
    assert_eq!(guest.read(9), 0);
    for page in [3, 5, 7, 9] {
        thread::scope(|scope| {
            let protection = protection(&guest);
            protection.protect(0, all(&guest)).unwrap();
            let before = guest.read(page);
            assert_eq!(protection.next_fault(NONE).unwrap(), None, "nobody waits to read");
            let (guest, done) = (&guest, Arc::new(AtomicBool::new(false)));
            let is_done = done.clone();
            let writer = scope.spawn(move || {
                guest.write(page, 1000 + page);
                done.store(true, Ordering::SeqCst);
            });
            assert_eq!(protection.next_fault(LONG).unwrap(), fault(page));
            assert_eq!(guest.read(page), before);
            // Its neighbours are not its matter.
            protection.allow(0, PageRange::new(page - 1, 1)).unwrap();
            protection.allow(0, PageRange::new(page + 1, 3)).unwrap();
            assert_eq!(protection.next_fault(Duration::from_millis(50)).unwrap(), None, "it is told of once");
            assert!(!is_done.load(Ordering::SeqCst));
            assert_eq!(guest.read(page), before);
            protection.allow(0, PageRange::new(page, 1)).unwrap();
            writer.join().unwrap();
            assert_eq!(guest.read(page), 1000 + page);
        });
    }
}

#[test]
fn letting_go_twice_and_of_what_is_free_is_harmless() {
    let guest = Guest::map(file(8 * PAGE), 8 * PAGE);
    thread::scope(|scope| {
        let protection = protection(&guest);
        protection.allow(0, all(&guest)).unwrap();
        protection.protect(0, PageRange::new(2, 1)).unwrap();
        protection.protect(0, PageRange::new(2, 1)).unwrap();
        let guest = &guest;
        let writer = scope.spawn(move || guest.write(2, 1));
        assert_eq!(protection.next_fault(LONG).unwrap(), fault(2));
        protection.allow(0, PageRange::new(2, 1)).unwrap();
        protection.allow(0, PageRange::new(2, 1)).unwrap();
        writer.join().unwrap();
        protection.allow(0, all(guest)).unwrap();
        (0..8).for_each(|page| guest.write(page, 5));
        // It can be protected again.
        protection.protect(0, PageRange::new(2, 1)).unwrap();
        let writer = scope.spawn(move || guest.write(2, 6));
        assert_eq!(protection.next_fault(LONG).unwrap(), fault(2));
        assert_eq!(guest.read(2), 5);
        protection.allow(0, PageRange::new(0, 8)).unwrap();
        writer.join().unwrap();
        assert_eq!(guest.read(2), 6);
        assert_eq!(protection.next_fault(NONE).unwrap(), None);
    });
}

/// As KVM does for a guest, and QEMU for its devices.
#[test]
fn the_kernel_waits_too() {
    let Ok(uffd) = userfaultfd(Faults::Kernel) else {
        return lacks("root, or vm.unprivileged_userfaultfd=1, to see the faults of the kernel");
    };
    let guest = Guest::map(file(8 * PAGE), 8 * PAGE);
    guest.write(3, 9);
    thread::scope(|scope| {
        let protection = Protection::new(uffd, vec![guest.area()], &[PageCount::new(8)]).unwrap();
        protection.protect(0, all(&guest)).unwrap();
        let guest = &guest;
        let writer = scope.spawn(move || {
            let zero = File::open("/dev/zero").unwrap();
            // SAFETY: pages of the mapping, which are looked at through atomics only meanwhile, and by this thread as
            // bytes.
            let buffer = unsafe { std::slice::from_raw_parts_mut(guest.at(3), 2 * PAGE as usize) };
            assert_eq!(rustix::io::read(&zero, buffer).unwrap(), 2 * PAGE as usize);
        });
        assert_eq!(protection.next_fault(LONG).unwrap(), fault(3));
        assert_eq!(guest.read(3), 9);
        protection.allow(0, PageRange::new(3, 1)).unwrap();
        assert_eq!(protection.next_fault(LONG).unwrap(), fault(4));
        protection.allow(0, PageRange::new(4, 1)).unwrap();
        writer.join().unwrap();
        assert_eq!(guest.read(3), 0);
    });
}

#[test]
fn with_no_protection_left_everybody_goes_on() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    thread::scope(|scope| {
        let protection = protection(&guest);
        protection.protect(0, all(&guest)).unwrap();
        let guest = &guest;
        let writers: Vec<_> = (0..8).map(|page| scope.spawn(move || guest.write(7 * page, page + 1))).collect();
        let mut seen = HashSet::new();
        while seen.len() < 8 {
            seen.extend(protection.next_fault(LONG).unwrap());
        }
        assert_eq!(seen, (0..8).map(|page| Fault { region: 0, page: PageNumber::new(7 * page) }).collect());
        drop(protection);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    (0..64).for_each(|page| guest.write(page, 3));
}

/// Each write is reported to one caller, however many wait for faults.
#[test]
fn callers_share_the_faults() {
    let pages = 400;
    let guest = Guest::map(file(pages * PAGE), pages * PAGE);
    let seen = Mutex::new(Vec::new());
    let (stop, waiting) = (Stop(AtomicBool::new(false)), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop_on_panic = stop.on_drop();
        let protection = Arc::new(protection(&guest));
        protection.protect(0, all(&guest)).unwrap();
        for server in 0..3 {
            let (protection, seen, stop) = (protection.clone(), &seen, &stop);
            scope.spawn(move || {
                while !stop.0.load(Ordering::Relaxed) {
                    let mut some = Vec::new();
                    match server {
                        0 => protection.next_faults(Duration::from_millis(20), &mut some).unwrap(),
                        _ => some.extend(protection.next_fault(Duration::from_millis(20)).unwrap()),
                    }
                    for fault in some {
                        seen.lock().unwrap().push(fault.page);
                        protection.allow(0, fault.page.run(PageCount::ONE)).unwrap();
                    }
                }
            });
        }
        let (guest, waiting) = (&guest, &waiting);
        let writers = (0..4).map(|thread| {
            scope.spawn(move || {
                for page in (thread..pages).step_by(4) {
                    guest.write(page, page + 1);
                    waiting.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        writers.collect::<Vec<_>>().into_iter().for_each(|writer| writer.join().unwrap());
    });
    let mut seen = seen.into_inner().unwrap();
    seen.sort_unstable();
    assert_eq!(seen, PageRange::all(PageCount::new(pages)).iter().collect::<Vec<_>>());
    assert_eq!(waiting.into_inner(), pages);
}

/// What is left to be saved of a snapshot, and what was saved.
struct Snapshot<'a> {
    protection: Protection,
    source: &'a Region,
    copy: &'a Region,
    /// Pages that are saved or holes, or in the hands of a thread that saves them.
    taken: Mutex<PageSet>,
    saved: Mutex<PageSet>,
}

impl Snapshot<'_> {
    /// Saves the unit of this page and lets go of it, unless another thread has taken it; then the unit is let go of
    /// when that is saved.
    fn save(&self, page: u64) {
        let unit = self.protection.unit_pages(0);
        let range = PageNumber::new(page).unit(unit).run(unit);
        let mine = {
            let mut taken = self.taken.lock().unwrap();
            let mine = !taken.contains(range.first);
            taken.insert(range);
            mine
        };
        if mine {
            for first in (range.first.get()..range.end().get()).step_by(128) {
                let bits = u128::MAX >> (128 - unit.get().min(128));
                let mut bytes = Vec::new();
                self.source.copy_out(WindowPages::new(first, bits), &mut bytes).unwrap();
                self.copy.write_pages(WindowPages::new(first, bits), &bytes).unwrap();
            }
            self.saved.lock().unwrap().insert(range);
        }
        if mine || self.saved.lock().unwrap().contains(range.first) {
            self.protection.allow(0, range).unwrap();
        }
    }
}

/// The law of background snapshots: threads write all over, and what is saved is the memory of the one moment when it
/// was protected.
fn a_snapshot_is_of_one_moment(file: OwnedFd, bytes: u64, prepare: impl Fn(&Guest)) {
    let pages = bytes / PAGE;
    let (source, guest) = (map(&file, bytes, Access::Read), Guest::map(&file, bytes));
    prepare(&guest);
    // Every second stretch of 64 pages holds something, the others are holes or share a huge page.
    (0..pages).filter(|page| page / 64 % 2 == 0).for_each(|page| guest.write(page, page + 1));
    for round in 0..3 {
        let copy = map(crate::common::file(bytes), bytes, Access::ReadWrite);
        let (stop, writes) = (Stop(AtomicBool::new(false)), AtomicU64::new(0));
        let (guest, stop, writes, source, copy) = (&guest, &stop, &writes, &source, &copy);
        let mut truth = Vec::new();
        thread::scope(|scope| {
            let _stop_on_panic = stop.on_drop();
            let protection = protection(guest);
            let data = source.data().unwrap();
            protection.protect(0, all(guest)).unwrap();
            // Nobody runs at that moment. The holes are known to be zero and are not read, which would make them pages.
            let zero = vec![0; PAGE as usize];
            for page in 0..pages {
                match data.contains(PageNumber::new(page)) {
                    true => source.copy_out(WindowPages::new(page, 1), &mut truth).unwrap(),
                    false => truth.extend_from_slice(&zero),
                }
            }
            let mut holes = PageSet::full(PageCount::new(pages));
            holes.subtract(&data);
            let snapshot =
                Snapshot { protection, source, copy, taken: Mutex::new(holes.clone()), saved: Mutex::new(holes) };
            let snapshot = Arc::new(snapshot);
            for thread in 1..3_u64 {
                scope.spawn(move || {
                    let mut random = thread + round;
                    while !stop.0.load(Ordering::Relaxed) {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        guest.word((random >> 33) % pages).fetch_add(1 + thread, Ordering::Relaxed);
                        writes.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..2 {
                let snapshot = snapshot.clone();
                scope.spawn(move || {
                    let mut faults = Vec::new();
                    while !stop.0.load(Ordering::Relaxed) {
                        snapshot.protection.next_faults(Duration::from_millis(10), &mut faults).unwrap();
                        faults.drain(..).for_each(|fault| snapshot.save(fault.page.get()));
                    }
                });
            }
            for page in (0..pages).step_by(snapshot.protection.unit_pages(0).index()) {
                snapshot.save(page);
                // Something happens meanwhile, however the threads are scheduled.
                let before = writes.load(Ordering::Relaxed);
                while page % 64 == 0 && writes.load(Ordering::Relaxed) < before + 20 {
                    thread::yield_now();
                }
            }
        });
        let bytes = contents(copy);
        for page in 0..pages as usize {
            let page = page * PAGE as usize..(page + 1) * PAGE as usize;
            assert!(bytes[page.clone()] == truth[page.clone()], "round {round}, page {}", page.start as u64 / PAGE);
        }
    }
}

#[test]
fn a_snapshot_of_small_pages_is_of_one_moment() {
    a_snapshot_is_of_one_moment(file(2048 * PAGE), 2048 * PAGE, |_| ());
}

#[test]
fn a_snapshot_of_huge_pages_is_of_one_moment() {
    let Some(file) = huge_file(8 * HUGE) else { return };
    a_snapshot_is_of_one_moment(file, 8 * HUGE, |_| ());
}

/// On kernels that have huge pages on tmpfs they are split where needed.
#[test]
fn a_snapshot_of_transparent_huge_pages_is_of_one_moment() {
    a_snapshot_is_of_one_moment(file(4 * HUGE), 4 * HUGE, |guest| {
        // SAFETY: advice for the mapping as it was made; it changes no contents. A kernel without huge pages on tmpfs
        // refuses.
        let _ =
            unsafe { rustix::mm::madvise(guest.base.cast(), guest.bytes as usize, rustix::mm::Advice::LinuxHugepage) };
    });
}

#[test]
fn huge_pages_are_protected_as_a_whole() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    let guest = Guest::map(&file, 4 * HUGE);
    thread::scope(|scope| {
        let protection = protection(&guest);
        assert_eq!(protection.unit_pages(0), PageCount::new(512));
        for (first, count) in [(0, 1), (512, 511), (511, 512), (1, 512)] {
            let error = protection.protect(0, PageRange::new(first, count)).unwrap_err();
            assert_eq!(error.flaw(), Some(Flaw::PartOfHugePage), "{error}");
            assert!(protection.allow(0, PageRange::new(first, count)).is_err());
        }
        protection.protect(0, PageRange::new(512, 1024)).unwrap();
        let guest = &guest;
        guest.write(1, 1);
        let writer = scope.spawn(move || guest.write(1024 + 300, 1));
        assert_eq!(protection.next_fault(LONG).unwrap(), fault(1024));
        protection.allow(0, PageRange::new(1024, 512)).unwrap();
        writer.join().unwrap();
    });
}

#[test]
fn regions_and_parts_of_them_are_kept_apart() {
    let (one, two) = (Guest::map(file(64 * PAGE), 64 * PAGE), Guest::map(file(96 * PAGE), 96 * PAGE));
    // Region 1 is mapped in two parts, the second before the first; its pages 32 to 40 are in both.
    let first = Area { region: 1, bytes: 40 * PAGE, address: two.area().address + 56 * PAGE, ..two.area() };
    let second = Area { region: 1, first_page: PageNumber::new(32), bytes: 56 * PAGE, ..two.area() };
    thread::scope(|scope| {
        let uffd = userfaultfd(Faults::User).unwrap();
        let protection =
            Protection::new(uffd, vec![first, one.area(), second], &[PageCount::new(64), PageCount::new(88)]).unwrap();
        assert_eq!((protection.unit_pages(0), protection.unit_pages(1)), (PageCount::ONE, PageCount::ONE));
        protection.protect(1, PageRange::new(20, 40)).unwrap();
        let (one, two) = (&one, &two);
        (0..64).for_each(|page| one.write(page, 1));
        // The first part is pages 56.. of the mapping, the second is pages 0.. of it.
        for (at, page) in [(56 + 20, 20), (56 + 39, 39), (0, 32), (27, 59)] {
            let writer = scope.spawn(move || two.write(at, 1));
            assert_eq!(protection.next_fault(LONG).unwrap(), Some(Fault { region: 1, page: PageNumber::new(page) }));
            protection.allow(1, PageRange::new(page, 1)).unwrap();
            writer.join().unwrap();
        }
        for at in [56 + 19, 28, 55] {
            two.write(at, 1);
        }
        assert!(matches!(protection.protect(2, PageRange::new(0, 1)), Err(Error::Untrackable { region: 2, .. })));
        for (first, count) in [(88, 1), (87, 2), (u64::MAX, 1), (1, u64::MAX)] {
            let error = protection.protect(1, PageRange::new(first, count)).unwrap_err();
            assert!(matches!(&error, Error::OutOfRange { pages, .. } if pages.get() == 88), "{error}");
        }
    });
}

#[test]
fn what_can_not_be_protected_is_refused() {
    let guest = Guest::map(file(16 * PAGE), 16 * PAGE);
    let new = |areas: &[Area], pages: &[u64]| {
        Protection::new(userfaultfd(Faults::User).unwrap(), areas.to_vec(), &counts(pages)).err().unwrap()
    };
    assert_eq!(new(&[guest.area()], &[17]).flaw(), Some(Flaw::NotMapped));
    assert_eq!(new(&[Area { region: 1, ..guest.area() }], &[16]).flaw(), Some(Flaw::NoRegion));
    // Memory that is nowhere.
    let nowhere = new(&[Area { address: 1 << 45, ..guest.area() }], &[16]);
    assert!(matches!(nowhere, Error::Gone { .. } | Error::Untrackable { .. }), "{nowhere}");
    let _one = protection(&guest);
    assert_eq!(new(&[guest.area()], &[16]).flaw(), Some(Flaw::Taken));
    let no_uffd = Protection::new(file(PAGE), vec![guest.area()], &[PageCount::new(16)]).err().unwrap();
    assert!(matches!(no_uffd, Error::System { .. }), "{no_uffd}");
}

/// A userfaultfd that was made by somebody else may block: reading it must not.
#[test]
fn asking_for_faults_does_not_block() {
    let guest = Guest::map(file(PAGE), PAGE);
    let protection = protection(&guest);
    let flags = rustix::fs::fcntl_getfl(protection.fd()).unwrap();
    assert!(flags.contains(OFlags::NONBLOCK));
    assert_eq!(protection.next_fault(NONE).unwrap(), None);
    assert_eq!(protection.next_fault(Duration::from_millis(5)).unwrap(), None);
}

/// As it is with a VMM: another process, whose userfaultfd we fetch; later it dies.
#[test]
fn another_process_waits_until_it_dies() {
    let mut vmm = Tracked::start();
    let (_, area, uffd) = vmm.attach();
    let protection = Protection::new(uffd, vec![area], &[PageCount::new(CHILD_PAGES)]).unwrap();
    protection.protect(0, PageRange::new(0, CHILD_PAGES)).unwrap();
    vmm.begin_to_write(77);
    assert_eq!(protection.next_fault(LONG).unwrap(), fault(77));
    protection.allow(0, PageRange::new(77, 1)).unwrap();
    assert_eq!(vmm.answer(), ["done"]);
    vmm.begin_to_write(78);
    assert_eq!(protection.next_fault(LONG).unwrap(), fault(78));
    vmm.kill();
    let gone = |result: Result<(), Error>| matches!(result, Err(Error::Gone { region: 0, .. }));
    assert!(gone(protection.allow(0, PageRange::new(78, 1))));
    assert!(gone(protection.protect(0, PageRange::new(78, 1))));
    assert!(gone(protection.next_fault(Duration::from_millis(1)).map(drop)));
}
