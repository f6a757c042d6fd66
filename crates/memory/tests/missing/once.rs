//! Each page once, whoever puts it: what is missing again was given back.
use std::{
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
};

use rustix::io::FdFlags;
use transship_memory::{Access, Claims, Missing, PageCount, PageNumber, PageRange, Region, WindowPages};

use super::{LONG, fault, missing, pages_of, there, word_of};
use crate::common::{
    HUGE, PAGE, file, huge_file, map, page_of,
    process::{Faults, Guest, Stop, userfaultfd},
};

/// As the device of a guest takes a page away.
fn give_back(region: &Region, first: u64, count: u64) {
    region.clear(PageRange::new(first, count)).unwrap();
}

#[test]
fn what_was_given_back_stays_missing() {
    let file = file(300 * PAGE);
    let (region, guest) = (map(&file, 300 * PAGE, Access::ReadWrite), Guest::map(&file, 300 * PAGE));
    let (missing, claims) = (missing(&guest), Claims::new(&[PageCount::new(300)]).unwrap());
    assert_eq!(missing.fill_once(&claims, 0, PageNumber::new(10), &pages_of(10..20)).unwrap(), PageCount::new(10));
    give_back(&region, 12, 3);
    assert_eq!(missing.fill_once(&claims, 0, PageNumber::FIRST, &pages_of(0..100)).unwrap(), PageCount::new(90));
    assert_eq!(there(&region), [(0, 12), (15, 85)]);
    assert!(claims.is_done(0, PageNumber::new(13)) && !claims.is_done(0, PageNumber::new(100)));
    // Another holder knows as much.
    let heir = Claims::taken_over(rustix::io::dup(claims.fd()).unwrap(), &[PageCount::new(300)]).unwrap();
    give_back(&region, 50, 1);
    assert_eq!(missing.fill_once(&heir, 0, PageNumber::FIRST, &pages_of(0..300)).unwrap(), PageCount::new(200));
    assert_eq!(there(&region), [(0, 12), (15, 35), (51, 249)]);
    // A thread that touches one is reported, and gets what the guest relies on.
    thread::scope(|scope| {
        let missing = missing;
        let reader = scope.spawn(|| guest.read(13));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(13));
        assert_eq!(missing.fill_once(&heir, 0, PageNumber::new(13), &page_of(13)).unwrap(), PageCount::ZERO);
        assert_eq!(missing.fill_zero(0, PageRange::new(13, 1)).unwrap(), PageCount::ONE);
        assert_eq!(reader.join().unwrap(), 0);
    });
}

#[test]
fn what_came_by_other_means_is_done_as_well() {
    let file = file(64 * PAGE);
    let (region, guest) = (map(&file, 64 * PAGE, Access::ReadWrite), Guest::map(&file, 64 * PAGE));
    let (missing, claims) = (missing(&guest), Claims::new(&[PageCount::new(64)]).unwrap());
    thread::scope(|scope| {
        let missing = missing;
        let reader = scope.spawn(|| guest.read(5));
        assert_eq!(missing.next_fault(LONG).unwrap(), fault(5));
        region.write_pages(WindowPages::new(5, 1), &page_of(55)).unwrap();
        assert_eq!(missing.fill_once(&claims, 0, PageNumber::new(4), &pages_of(4..7)).unwrap(), PageCount::new(2));
        assert_eq!(reader.join().unwrap(), word_of(55), "who waited is woken");
        give_back(&region, 5, 1);
        assert_eq!(missing.fill_once(&claims, 0, PageNumber::FIRST, &pages_of(0..64)).unwrap(), PageCount::new(61));
        assert_eq!(there(&region), [(0, 5), (6, 58)]);
    });
}

#[test]
fn what_can_not_be_put_may_be_tried_again() {
    let guest = Guest::map(file(64 * PAGE), 64 * PAGE);
    let (missing, claims) = (missing(&guest), Claims::new(&[PageCount::new(64)]).unwrap());
    missing.fill_once(&claims, 0, PageNumber::new(60), &pages_of(60..65)).unwrap_err();
    missing.fill_once(&claims, 0, PageNumber::FIRST, &[0; 100]).unwrap_err();
    assert_eq!(missing.fill_once(&claims, 0, PageNumber::FIRST, &pages_of(0..64)).unwrap(), PageCount::new(64));
}

#[test]
fn huge_pages_are_put_once_as_well() {
    let Some(file) = huge_file(2 * HUGE) else { return };
    let (region, guest) = (map(&file, 2 * HUGE, Access::ReadWrite), Guest::map(&file, 2 * HUGE));
    let (missing, claims) = (missing(&guest), Claims::new(&[PageCount::new(1024)]).unwrap());
    assert_eq!(missing.fill_once(&claims, 0, PageNumber::new(512), &pages_of(512..1024)).unwrap(), PageCount::new(512));
    give_back(&region, 512, 512);
    assert_eq!(missing.fill_once(&claims, 0, PageNumber::FIRST, &pages_of(0..1024)).unwrap(), PageCount::new(512));
    assert_eq!((guest.read(7), claims.is_done(0, PageNumber::new(600))), (word_of(7), true));
}

/// Threads bring the same pages over and over, while the guest writes some and gives them back: what it has given back
/// stays zero.
#[test]
fn threads_that_bring_the_same_pages_bring_each_once() {
    const PAGES: u64 = 1000;
    let file = file(PAGES * PAGE);
    let (region, guest) = (map(&file, PAGES * PAGE, Access::ReadWrite), Guest::map(&file, PAGES * PAGE));
    let claims = Claims::new(&[PageCount::new(PAGES)]).unwrap();
    let stop = Stop(false.into());
    thread::scope(|scope| {
        let _stop_on_panic = stop.on_drop();
        // Whoever fails lets go of it, so that nobody waits for ever.
        let missing = Arc::new(missing(&guest));
        let (claims, stop) = (&claims, &stop);
        for _ in 0..3 {
            // As background threads, which have read everything before.
            let missing = Arc::clone(&missing);
            scope.spawn(move || {
                for first in (0..PAGES).step_by(40) {
                    missing.fill_once(claims, 0, PageNumber::new(first), &pages_of(first..first + 40)).unwrap();
                }
            });
        }
        for _ in 0..2 {
            let missing = Arc::clone(&missing);
            scope.spawn(move || {
                while !stop.0.load(std::sync::atomic::Ordering::Relaxed) {
                    let Some(fault) = missing.next_fault(std::time::Duration::from_millis(10)).unwrap() else {
                        continue;
                    };
                    if claims.is_done(0, fault.page) {
                        missing.fill_zero(0, fault.page.run(PageCount::ONE)).unwrap();
                    } else {
                        missing.fill_once(claims, 0, fault.page, &page_of(fault.page.get())).unwrap();
                    }
                }
            });
        }
        let guest = &guest;
        let touchers = (0..2).map(|half| {
            let region = &region;
            scope.spawn(move || {
                for page in (0..PAGES / 2).rev().map(|pair| 2 * pair + half) {
                    assert_eq!(guest.read(page), word_of(page), "page {page}");
                    guest.write(page, 1);
                    give_back(region, page, 1);
                    assert_eq!(guest.read(page), 0, "page {page}");
                    guest.write(page, 2);
                }
            })
        });
        touchers.collect::<Vec<_>>().into_iter().for_each(|toucher| toucher.join().unwrap());
    });
    assert!((0..PAGES).all(|page| guest.read(page) == 2));
}

/// Tells the child what it is to go on with.
const GIVEN: &str = "TRANSSHIP_FILLING_CHILD";
const PAGES: u64 = 4096;
/// Pages of one call.
const AT_ONCE: u64 = 64;

/// A process that brings all pages of our memory, in ascending order, until it is killed. It holds the userfaultfd and
/// the claims as we do.
struct Filler {
    child: Child,
    region: Region,
    missing: Missing,
    claims: OwnedFd,
}

impl Filler {
    fn start() -> Self {
        let file = file(PAGES * PAGE);
        let (region, guest) = (map(&file, PAGES * PAGE, Access::ReadWrite), Guest::map(&file, PAGES * PAGE));
        let uffd = userfaultfd(Faults::User).unwrap();
        let missing =
            Missing::new(rustix::io::dup(&uffd).unwrap(), vec![guest.area()], &[PageCount::new(PAGES)]).unwrap();
        let claims = rustix::io::dup(Claims::new(&[PageCount::new(PAGES)]).unwrap().fd()).unwrap();
        for fd in [uffd.as_fd(), claims.as_fd()] {
            rustix::io::fcntl_setfd(fd, FdFlags::empty()).unwrap();
        }
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "missing::once::filler", "--nocapture", "--test-threads=1"])
            .env(GIVEN, format!("{} {} {}", uffd.as_raw_fd(), claims.as_raw_fd(), guest.area().address))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, region, missing, claims }
    }

    fn killed(mut self) -> (Region, Missing, Claims) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        (self.region, self.missing, Claims::taken_over(self.claims, &[PageCount::new(PAGES)]).unwrap())
    }
}

#[test]
fn filler() {
    let Ok(words) = std::env::var(GIVEN) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let fd = |word: &str| {
        let number: RawFd = word.parse().unwrap();
        // SAFETY: left to us by the test that has started us.
        unsafe { OwnedFd::from_raw_fd(number) }
    };
    let area = transship_memory::Area {
        region: 0,
        first_page: PageNumber::FIRST,
        address: words[2].parse().unwrap(),
        bytes: PAGES * PAGE,
    };
    let missing = Missing::taken_over(fd(words[0]), vec![area], &[PageCount::new(PAGES)]).unwrap();
    let claims = Claims::taken_over(fd(words[1]), &[PageCount::new(PAGES)]).unwrap();
    // So that it hardly does anything but fill.
    let all = pages_of(0..PAGES);
    for (first, bytes) in (0..PAGES).step_by(AT_ONCE as usize).zip(all.chunks((AT_ONCE * PAGE) as usize)) {
        missing.fill_once(&claims, 0, PageNumber::new(first), bytes).unwrap();
    }
}

/// It is killed in the middle of a call, which has put a part of its pages: which, is known all the same.
#[test]
fn what_a_killed_process_has_put_is_known() {
    let mut cut = 0;
    for attempt in 0..12 {
        let filler = Filler::start();
        let put = |region: &Region| region.data().unwrap().count();
        while put(&filler.region) <= PageCount::new(300 * attempt) {
            thread::yield_now();
        }
        let (region, missing, claims) = filler.killed();
        let present = region.data().unwrap();
        for page in 0..PAGES {
            assert_eq!(
                claims.is_done(0, PageNumber::new(page)),
                present.contains(PageNumber::new(page)),
                "page {page}"
            );
        }
        let count = present.count().get();
        cut += u64::from(!count.is_multiple_of(AT_ONCE));
        // And whoever goes on brings the others, but not what was given back since.
        region.clear(PageRange::new(0, 1)).unwrap();
        assert_eq!(
            missing.fill_once(&claims, 0, PageNumber::FIRST, &pages_of(0..PAGES)).unwrap(),
            PageCount::new(PAGES - count)
        );
        assert_eq!(there(&region), [(1, PAGES - 1)]);
    }
    eprintln!("{cut} of 12 were killed in the middle of a call");
}
