//! The tracker for which writers wait, against the real kernel: it may miss no write either, and lets everybody go on.
//!
//! The guest is this process, through a mapping of its own, or a child where it has to die.
mod pace;

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use transship_memory::{
    Access, Area, Error, Flaw, Freeing, Holes, InProcess, PageCount, PageRange, PageSet, Process, Region, SyncTracker,
    Tracker, WindowPages, WriterPace,
};

use crate::common::{
    HUGE, PAGE, file, map, page_of,
    process::{CHILD_PAGES, Faults, Guest, Stop, Tracked, once_free, userfaultfd},
};

/// What a writer may be held for.
const HOLD: Duration = Duration::from_millis(3);

/// How the kernel is asked which pages were written: as the present one has it, or an older one.
const KERNELS: [bool; 2] = [false, true];

fn track(guest: &Guest, private: &[usize], old: bool) -> SyncTracker {
    let tracker = once_free(|| {
        let (uffd, pages) = (userfaultfd(Faults::User).unwrap(), [PageCount::new(guest.pages())]);
        SyncTracker::new(uffd, own_pagemap(), vec![guest.area()], &pages, private, Box::new(HOLD))
    });
    if old { tracker.by_entries() } else { tracker }
}

/// Lets that many pages go.
struct AtMost(u64);

impl WriterPace for AtMost {
    fn may_pass(&self, passed: u64) -> bool {
        passed < self.0
    }
}

fn own_pagemap() -> OwnedFd {
    File::open("/proc/self/pagemap").unwrap().into()
}

fn set(pages: u64, ranges: &[(u64, u64)]) -> PageSet {
    let mut set = PageSet::empty(PageCount::new(pages));
    ranges.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
    set
}

/// Memory of one kind, and how it is read from outside.
struct Kind {
    guest: Guest,
    region: Region,
    /// Gives pages back, as a VMM does for a balloon; rounded to whole pages of its kind.
    give_back: Box<dyn Fn(u64, u64) + Sync>,
    private: &'static [usize],
}

impl Kind {
    fn shared(file: OwnedFd, bytes: u64, unit: u64) -> Self {
        let region = map(&file, bytes, Access::Read);
        let puncher = map(&file, bytes, Access::ReadWrite);
        let guest = Guest::map(&file, bytes);
        let pages = guest.pages();
        let give_back = move |first: u64, count: u64| {
            let (first, end) = (first / unit * unit, (first + count).next_multiple_of(unit).min(pages));
            puncher.clear(PageRange::new(first, end - first)).unwrap();
        };
        Self { guest, region, give_back: Box::new(give_back), private: &[] }
    }

    fn private(bytes: u64, huge: bool) -> Self {
        let guest = Guest::private(bytes, huge);
        let process = Arc::new(Process::open(std::process::id() as i32, Access::Read).unwrap());
        let memory =
            InProcess { process, address: guest.area().address, bytes: guest.bytes, page_bytes: PAGE, file: None };
        let region = Region::in_process("pc.ram", memory, Access::Read).unwrap();
        let there = guest.prefix(bytes);
        Self { guest, region, give_back: Box::new(move |first, count| there.give_back(first, count)), private: &[0] }
    }

    /// All that can be had here.
    fn all() -> Vec<Self> {
        // Not on a hugetlbfs: what is given back there and taken again is not found for certain.
        vec![
            Self::shared(file(PAGES * PAGE), PAGES * PAGE, 1),
            Self::private(PAGES * PAGE, false),
            Self::private(PAGES * PAGE, true),
        ]
    }
}

const PAGES: u64 = 4096;

/// The word of each page, as the other end of a move has it.
struct Copy<'a> {
    region: &'a Region,
    tracker: SyncTracker,
    holes: Holes,
    words: Vec<u64>,
    content: PageSet,
}

impl<'a> Copy<'a> {
    fn of(kind: &'a Kind, old: bool) -> Self {
        let (tracker, pages) = (track(&kind.guest, kind.private, old), kind.guest.pages());
        let mut holes = Holes::new(Freeing::Possible);
        holes.keep_note(&kind.region).unwrap();
        Self {
            region: &kind.region,
            tracker,
            holes,
            words: vec![0; pages as usize],
            content: PageSet::empty(PageCount::new(pages)),
        }
    }

    /// A round: scan, look, read.
    fn round(&mut self) {
        let mut written = self.tracker.scan(0).unwrap();
        written.union_with(&self.holes.came_back(&self.content).unwrap());
        let mut wanted = written.clone();
        wanted.union_with(&self.content);
        let data = self.holes.look(self.region, &wanted).unwrap();
        let (mut send, mut gone) = (written, self.content.clone());
        send.intersect_with(data);
        gone.subtract(data);
        self.holes.note().keep(&send.windows().collect::<Vec<_>>()).unwrap();
        for page in gone.ranges().flat_map(|range| range.first.get()..range.end().get()) {
            self.words[page as usize] = 0;
        }
        self.content.subtract(&gone);
        let mut bytes = Vec::new();
        for WindowPages { first, mask: present } in send.windows() {
            bytes.clear();
            self.region.copy_out(first.masked(present), &mut bytes).unwrap();
            for (page, bit) in bytes.as_chunks::<4096>().0.iter().zip((0..128).filter(|bit| present >> bit & 1 == 1)) {
                self.words[(first + PageCount::new(bit)).get() as usize] =
                    u64::from_ne_bytes(*page.first_chunk().unwrap());
            }
        }
        self.content.union_with(&send);
    }

    fn assert_equal(&self, guest: &Guest, story: &str) {
        (0..guest.pages()).for_each(|page| {
            assert_eq!(self.words[page as usize], guest.read(page), "page {page}: {story}");
        });
    }
}

#[derive(Debug, Clone)]
enum Op {
    Write(u64, u64),
    Read(u64),
    GiveBack(u64, u64),
    Round,
}

fn op() -> impl Strategy<Value = Op> {
    let pages = 4 * HUGE / PAGE;
    prop_oneof![
        6 => (0..pages, 1..u64::MAX).prop_map(|(page, value)| Op::Write(page, value)),
        2 => (0..pages).prop_map(Op::Read),
        2 => (0..pages, 1..1024_u64).prop_map(move |(first, count)| Op::GiveBack(first, count.min(pages - first))),
        2 => Just(Op::Round),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever a guest does between the rounds: when it stands still, the other end has what it has.
    #[test]
    fn no_write_and_no_page_given_back_is_missed(old in any::<bool>(), ops in prop::collection::vec(op(), 1..120)) {
        for (number, kind) in Kind::all().into_iter().enumerate() {
            let mut copy = Copy::of(&kind, old);
            for op in &ops {
                match *op {
                    Op::Write(page, value) => kind.guest.write(page, value),
                    Op::Read(page) => drop(kind.guest.read(page)),
                    Op::GiveBack(first, count) => (kind.give_back)(first, count),
                    Op::Round => copy.round(),
                }
            }
            copy.round();
            copy.assert_equal(&kind.guest, &format!("kind {number}"));
        }
    }
}

/// The same with threads that write while the rounds go on, and while another pace is set all the time.
#[test]
fn a_guest_that_writes_all_the_time_is_copied_whole_when_it_stops() {
    for (number, kind) in Kind::all().into_iter().enumerate() {
        for old in KERNELS {
            let (mut copy, pages) = (Copy::of(&kind, old), kind.guest.pages());
            let (stop, writes, kind) = (&Stop(AtomicBool::new(false)), &AtomicU64::new(0), &kind);
            thread::scope(|scope| {
                let _ends = stop.on_drop();
                for thread in 1..3_u64 {
                    scope.spawn(move || {
                        let mut seed = thread;
                        while !stop.0.load(Ordering::Relaxed) {
                            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                            let page = (seed >> 33) % pages;
                            match seed >> 58 {
                                0 => (kind.give_back)(page, 1),
                                _ => kind.guest.write(page, seed | 1),
                            }
                            writes.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                // On a busy machine it may take more rounds until somebody writes so much in one that he is held.
                for round in 0.. {
                    if round >= 60 && copy.tracker.waits().unwrap().so_far().held > 0 {
                        break;
                    }
                    let before = writes.load(Ordering::Relaxed);
                    while writes.load(Ordering::Relaxed) < before + 50 {
                        thread::yield_now();
                    }
                    let pace: Option<Box<dyn WriterPace>> =
                        (round % 3 == 0).then(|| Box::new(AtMost(100)) as Box<dyn WriterPace>);
                    copy.tracker.waits().unwrap().set_pace(pace);
                    copy.round();
                }
                stop.0.store(true, Ordering::Relaxed);
            });
            copy.round();
            copy.assert_equal(&kind.guest, &format!("kind {number}, old kernel: {old}"));
            let waited = copy.tracker.waits().unwrap().so_far();
            assert!(waited.held > 0 && waited.writes > waited.held, "{waited:?}");
        }
    }
}

#[test]
fn exactly_what_was_written_is_reported_and_once() {
    for (number, kind) in Kind::all().into_iter().enumerate().take(3) {
        for old in KERNELS {
            let guest = &kind.guest;
            [0, 7, 8, 511, 512, 4095].iter().for_each(|&page| guest.write(page, 1));
            let mut tracker = track(guest, kind.private, old);
            assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(PAGES)));
            let story = format!("kind {number}, old kernel: {old}");
            assert_eq!(tracker.scan(0).unwrap(), set(PAGES, &[]), "{story}");
            // Twice each: the second write does not wait.
            [0, 7, 8, 0, 7, 512, 4095].iter().for_each(|&page| guest.write(page, 2));
            let written = set(PAGES, &[(0, 1), (7, 2), (512, 1), (4095, 1)]);
            assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::new(5)), "{story}");
            assert_eq!(tracker.scan(0).unwrap(), written, "{story}");
            assert_eq!(tracker.written_so_far(0).unwrap(), Some(PageCount::ZERO), "{story}");
            assert_eq!(tracker.waits().unwrap().so_far().writes, 5, "{story}");
            assert_eq!(tracker.scan(0).unwrap(), set(PAGES, &[]), "{story}");
            guest.write(9, 3);
            let kept = guest.read(7);
            drop(tracker);
            guest.write(8, 4);
            assert_eq!((guest.read(7), guest.read(8), guest.read(9)), (kept, 4, 3), "{story}");
        }
    }
}

/// Pages that only the file has, and such that nobody has: a write to them waits, or they are found because they are
/// there.
#[test]
fn pages_that_the_process_does_not_have_yet_are_seen_when_it_writes_them() {
    for old in KERNELS {
        let file = file(2048 * PAGE);
        let region = map(&file, 2048 * PAGE, Access::ReadWrite);
        (0..1024).for_each(|page| region.write_pages(WindowPages::new(page, 1), &page_of(page)).unwrap());
        for (guest, private) in [(Guest::map(&file, 2048 * PAGE), &[][..]), (Guest::private(2048 * PAGE, true), &[0])] {
            let mut tracker = track(&guest, private, old);
            tracker.scan(0).unwrap();
            assert!((300..340).map(|page| guest.read(page)).all(|word| word == guest.read(300) || private.is_empty()));
            for round in 1..5 {
                let written = set(2048, &[(0, 1), (310, 2), (900 + round, 4), (1500, 1), (1600 + 3 * round, 2)]);
                written
                    .ranges()
                    .flat_map(|range| range.first.get()..range.end().get())
                    .for_each(|page| guest.write(page, round));
                let mut missing = written;
                missing.subtract(&tracker.scan(0).unwrap());
                assert!(missing.is_empty(), "round {round}, old kernel: {old}: {missing:?}");
            }
        }
    }
}

#[test]
fn a_process_that_has_ended_is_an_error_however_often_it_is_scanned() {
    for old in KERNELS {
        let mut tracked = Tracked::start();
        let (pid, area, uffd) = tracked.attach();
        let pagemap = File::open(format!("/proc/{}/pagemap", pid.as_raw_nonzero())).unwrap();
        let tracker =
            SyncTracker::new(uffd, pagemap.into(), vec![area], &[PageCount::new(CHILD_PAGES)], &[], Box::new(HOLD))
                .unwrap();
        let mut tracker = if old { tracker.by_entries() } else { tracker };
        tracker.scan(0).unwrap();
        tracked.write(5);
        assert_eq!(tracker.scan(0).unwrap(), set(CHILD_PAGES, &[(5, 1)]));
        tracked.kill();
        for _ in 0..2 {
            let error = tracker.scan(0).unwrap_err();
            assert!(matches!(error, Error::Gone { region: 0, .. }), "{error}");
        }
    }
}

/// Takes memory into use with a userfaultfd that is in use already, and has writers there wait.
fn protect_by(uffd: &OwnedFd, area: Area) {
    const REGISTER: u32 = 0xc020_aa00;
    const WRITEPROTECT: u32 = 0xc018_aa06;
    let call = |number: u32, mode: u64| {
        // Start, length, mode, and what can be done with it, which only the first call tells.
        let mut request = [area.address, area.bytes, mode, 0];
        // SAFETY: the kernel reads and writes no more than the four numbers; what the memory holds is not changed.
        assert_eq!(unsafe { libc::ioctl(uffd.as_raw_fd(), number as libc::Ioctl, request.as_mut_ptr()) }, 0);
    };
    call(REGISTER, 1 << 1);
    call(WRITEPROTECT, 1 << 0);
}

/// A thread that waits where the tracker knows no memory ends the one that lets writers go.
#[test]
fn when_nobody_lets_writers_go_any_more_a_scan_says_so_and_protects_nothing() {
    let [guest, strange]: [&Guest; 2] = [(); 2].map(|()| &*Box::leak(Box::new(Guest::private(16 * PAGE, false))));
    (0..16).for_each(|page| [guest, strange].iter().for_each(|guest| guest.write(page, 1)));
    let uffd = userfaultfd(Faults::User).unwrap();
    let other = rustix::io::dup(&uffd).unwrap();
    let mut tracker =
        SyncTracker::new(uffd, own_pagemap(), vec![guest.area()], &[PageCount::new(16)], &[0], Box::new(HOLD)).unwrap();
    tracker.scan(0).unwrap();
    protect_by(&other, strange.area());
    // It waits until both descriptors are closed, also if this test fails.
    thread::spawn(move || strange.write(3, 2));
    let deadline = Instant::now() + Duration::from_secs(30);
    // Without a pause, so that the thread ends while a scan runs.
    let error = loop {
        match tracker.scan(0) {
            Ok(_) => assert!(Instant::now() < deadline, "nobody has noticed"),
            Err(error) => break error,
        }
    };
    let Error::System { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.kind(), std::io::ErrorKind::InvalidData, "an address in no area: {error}");
    goes_on_writing(guest, 2);
    assert!(matches!(tracker.scan(0), Err(Error::Gone { region: 0, .. })), "it stays so");
    goes_on_writing(guest, 3);
}

/// Whoever is not let go waits for ever, also after the test.
fn goes_on_writing(guest: &'static Guest, value: u64) {
    let (wrote, written) = mpsc::channel();
    thread::spawn(move || {
        (0..16).for_each(|page| guest.write(page, value));
        let _ = wrote.send(());
    });
    written.recv_timeout(Duration::from_secs(30)).expect("it goes on");
}

#[test]
fn memory_that_is_not_that_of_the_regions_is_refused() {
    let guest = Guest::private(16 * PAGE, false);
    let area = Area { bytes: 8 * PAGE, ..guest.area() };
    let uffd = userfaultfd(Faults::User).unwrap();
    let refused =
        SyncTracker::new(uffd, own_pagemap(), vec![area], &[PageCount::new(16)], &[0], Box::new(HOLD)).err().unwrap();
    assert_eq!(refused.flaw(), Some(Flaw::NotMapped), "{refused}");
}
