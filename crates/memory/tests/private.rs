//! Memory that a process has for itself: read, written and tracked from outside.
//!
//! The process is this one: what it is asked, by its number, the kernel answers as it does for any other.
use std::{
    fs::File,
    io::Read,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use proptest::prelude::*;
use transship_memory::{
    Access, Area, FileIo, FileQueue, Freeing, GuestMemory, Holes, InProcess, PageCount, PageRange, PageSet, Process,
    Region, Tracker, UffdTracker, WindowBuffer, WindowPages,
};

use crate::common::{
    PAGE, clear_all, file, is_read_as_it_is,
    process::{Faults, Guest, Stop, Tracked, once_free, userfaultfd},
};

fn ourselves(access: Access) -> Arc<Process> {
    Arc::new(Process::open(std::process::id() as i32, access).unwrap())
}

pub(crate) fn region_of(guest: &Guest, access: Access) -> Region {
    let memory = InProcess {
        process: ourselves(access),
        address: guest.area().address,
        bytes: guest.bytes,
        page_bytes: PAGE,
        file: None,
    };
    Region::in_process("pc.ram", memory, access).unwrap()
}

fn track(guest: &Guest) -> UffdTracker {
    let make = || {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let uffd = userfaultfd(Faults::User).unwrap();
        UffdTracker::new(uffd, pagemap.into(), vec![guest.area()], vec![PageCount::new(guest.pages())])
    };
    once_free(make).with_memory(&GuestMemory::new(vec![region_of(guest, Access::Read)]))
}

fn set(pages: u64, ranges: &[(u64, u64)]) -> PageSet {
    let mut set = PageSet::empty(PageCount::new(pages));
    ranges.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
    set
}

#[test]
fn pages_that_were_never_touched_are_holes_and_stay_so_when_they_are_tracked() {
    for huge in [false, true] {
        let guest = Guest::private(64 << 20, huge);
        let region = region_of(&guest, Access::Read);
        assert!(region.data().unwrap().is_empty());
        guest.write(5, 1);
        guest.write(9000, 1);
        // A page that was only read is one of zeros.
        assert_eq!(guest.read(4000), 0);
        let data = region.data().unwrap();
        let wanted =
            if huge { set(guest.pages(), &[(0, 512), (8704, 512)]) } else { set(guest.pages(), &[(5, 1), (9000, 1)]) };
        assert_eq!(data, wanted, "huge: {huge}");
        let mut tracker = track(&guest);
        assert_eq!(tracker.scan(0).unwrap(), PageSet::full(PageCount::new(guest.pages())));
        assert_eq!(region.data().unwrap(), wanted, "the scan made no pages");
        assert!(tracker.scan(0).unwrap().is_empty());
        guest.write(5, 2);
        guest.write(9001, 2);
        assert_eq!(tracker.scan(0).unwrap(), set(guest.pages(), &[(5, 1), (9001, 1)]), "huge: {huge}");
        assert!(region.is_data(PageRange::new(5, 1)).unwrap());
        assert!(!region.is_data(PageRange::new(5, 600)).unwrap());
        guest.give_back(5, 1);
        assert!(!region.is_data(PageRange::new(5, 1)).unwrap());
        let mut data = region.data_among(&set(guest.pages(), &[(0, 10), (9001, 1)])).unwrap();
        data.intersect_with(&set(guest.pages(), &[(5, 1), (9001, 1)]));
        assert_eq!(data, set(guest.pages(), &[(9001, 1)]));
        guest.write(5, 3);
        assert_eq!(tracker.scan(0).unwrap(), set(guest.pages(), &[(5, 1)]));
    }
}

/// The word of each page, as the other end of a move has it.
struct Copy {
    region: Region,
    tracker: UffdTracker,
    holes: Holes,
    words: Vec<u64>,
    content: PageSet,
}

impl Copy {
    fn of(guest: &Guest) -> Self {
        let (region, tracker) = (region_of(guest, Access::Read), track(guest));
        let pages = guest.pages();
        let holes = Holes::new(Freeing::Possible);
        Self { region, tracker, holes, words: vec![0; pages as usize], content: PageSet::empty(PageCount::new(pages)) }
    }

    /// A round: scan, look, read.
    fn round(&mut self) {
        let written = self.tracker.scan(0).unwrap();
        let mut wanted = written.clone();
        wanted.union_with(&self.content);
        let data = self.holes.look(&self.region, &wanted).unwrap();
        let (mut send, mut gone) = (written, self.content.clone());
        send.intersect_with(data);
        gone.subtract(data);
        for page in gone.ranges().flat_map(|range| range.first.get()..range.end().get()) {
            self.words[page as usize] = 0;
        }
        self.content.subtract(&gone);
        let mut bytes = Vec::new();
        for WindowPages { first, mask: present } in send.windows() {
            bytes.clear();
            self.region.copy_out(first.masked(present), &mut bytes).unwrap();
            for (page, bit) in bytes.as_chunks::<4096>().0.iter().zip((0..128).filter(|bit| present >> bit & 1 == 1)) {
                let word = u64::from_ne_bytes(*page.first_chunk().unwrap());
                self.words[(first + PageCount::new(bit)).get() as usize] = word;
            }
        }
        self.content.union_with(&send);
    }
}

#[derive(Debug, Clone)]
enum Op {
    Write(u64, u64),
    Read(u64),
    GiveBack(u64, u64),
    Round,
}

const PAGES: u64 = 4096;

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..PAGES, 1..u64::MAX).prop_map(|(page, value)| Op::Write(page, value)),
        2 => (0..PAGES).prop_map(Op::Read),
        2 => (0..PAGES, 1..1024_u64).prop_map(|(first, count)| Op::GiveBack(first, count.min(PAGES - first))),
        2 => Just(Op::Round),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever a guest does between the rounds: when it stands still, the other end has what it has.
    #[test]
    fn no_write_and_no_page_given_back_is_missed(huge in any::<bool>(), ops in prop::collection::vec(op(), 1..120)) {
        let guest = Guest::private(PAGES * PAGE, huge);
        let mut copy = Copy::of(&guest);
        for op in ops {
            match op {
                Op::Write(page, value) => guest.write(page, value),
                Op::Read(page) => drop(guest.read(page)),
                Op::GiveBack(first, count) => guest.give_back(first, count),
                Op::Round => copy.round(),
            }
        }
        copy.round();
        for page in 0..PAGES {
            prop_assert_eq!(copy.words[page as usize], guest.read(page), "page {}", page);
        }
    }
}

/// The same with a guest that writes while the rounds go on.
#[test]
fn a_guest_that_writes_all_the_time_is_copied_whole_when_it_stops() {
    for huge in [false, true] {
        let guest = Guest::private(PAGES * PAGE, huge);
        let mut copy = Copy::of(&guest);
        let stop = Stop(AtomicBool::new(false));
        thread::scope(|scope| {
            let _ends = stop.on_drop();
            scope.spawn(|| {
                let mut seed = 1_u64;
                while !stop.0.load(Ordering::Relaxed) {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let page = (seed >> 33) % PAGES;
                    match seed >> 60 {
                        0 => guest.give_back(page, 1),
                        _ => guest.write(page, seed | 1),
                    }
                }
            });
            (0..200).for_each(|_| copy.round());
        });
        copy.round();
        (0..PAGES)
            .for_each(|page| assert_eq!(copy.words[page as usize], guest.read(page), "page {page}, huge: {huge}"));
    }
}

#[test]
fn a_window_is_looked_at_copied_and_sent() {
    let guest = Guest::private(256 * PAGE, false);
    let region = region_of(&guest, Access::Read);
    assert!(region.is_private() && region.shared_file().is_none());
    [3, 4, 70, 130].iter().for_each(|&page| guest.write(page, page));
    let wanted = 1 << 3 | 1 << 4 | 1 << 60 | 1 << 70 | 1 << 127;
    assert_eq!(region.zero_mask(WindowPages::new(0, wanted)).unwrap(), 1 << 60 | 1 << 127);
    for (first, mask) in [(0, wanted), (0, u128::MAX), (2, 0b110), (100, u128::MAX), (5, 0b111), (70, 1), (9, 0)] {
        is_read_as_it_is(&region, WindowPages::new(first, mask));
    }
    let mut out = vec![9];
    region.copy_out(WindowPages::new(0, 1 << 3 | 1 << 70), &mut out).unwrap();
    assert_eq!((out[0], out.len()), (9, 1 + 2 * 4096));
    assert_eq!((out[1], out[1 + 4096]), (3, 70));
    let mut page = [1; 4096];
    region.copy_to(PageRange::new(130, 1), &mut page).unwrap();
    assert_eq!((page[0], page[8]), (130, 0));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (pages, mut buffer) = (WindowPages::new(2, 1 << 1 | 1 << 2), WindowBuffer::default());
    region.read_window(pages, true, &mut buffer).unwrap().send(ours.as_fd(), b"head", pages).unwrap();
    let mut sent = vec![0; 4 + 2 * 4096];
    theirs.read_exact(&mut sent).unwrap();
    assert_eq!((&sent[..4], sent[4], sent[4 + 4096]), (&b"head"[..], 3, 4));
    let woven = tempfile::tempfile().unwrap();
    let read = region.read_window(WindowPages::new(2, 1 << 1 | 1 << 58 | 1 << 68), true, &mut buffer).unwrap();
    read.write_woven(woven.as_fd(), 0, b"onetwo.", &[3, 6]).unwrap();
    let mut written = vec![0; 7 + 2 * 4096 + 1];
    assert_eq!(rustix::io::pread(&woven, &mut written, 0).unwrap(), 7 + 2 * 4096);
    assert_eq!((&written[..3], written[3]), (&b"one"[..], 3));
    assert_eq!((&written[3 + 4096..6 + 4096], written[6 + 4096]), (&b"two"[..], 70));
    assert_eq!(written[6 + 2 * 4096], b'.');
    let beyond = region.copy_out(WindowPages::new(200, 1 << 100), &mut out).unwrap_err();
    assert!(matches!(beyond, transship_memory::Error::OutOfRange { .. }), "{beyond}");
    let written = region.write_pages(WindowPages::new(0, 1), &[0; 4096]).unwrap_err();
    assert_eq!(written.flaw(), Some(transship_memory::Flaw::ReadOnly), "{written}");
}

#[test]
fn a_destination_is_cleared_written_and_cleared_again() {
    for huge in [false, true] {
        let guest = Guest::private(8 << 20, huge);
        [0, 1, 100, 2047].iter().for_each(|&page| guest.write(page, 7));
        let region = region_of(&guest, Access::ReadWrite);
        assert!(!region.gives_back());
        clear_all(&region).unwrap();
        (0..guest.pages()).for_each(|page| assert_eq!(guest.read(page), 0, "page {page}"));
        let bytes: Vec<u8> = (1..=3).flat_map(|number| [number; 4096]).collect();
        region.write_pages(WindowPages::new(10, 1 | 1 << 5 | 1 << 6), &bytes).unwrap();
        let first = |page| guest.read(page) & 0xff;
        assert_eq!([10, 15, 16, 11].map(first), [1, 2, 3, 0]);
        region.clear(PageRange::new(10, 6)).unwrap();
        assert_eq!([10, 15, 16].map(first), [0, 0, 3]);
    }
}

/// What is not there is not made by being cleared.
#[test]
fn clearing_makes_no_pages() {
    let guest = Guest::private(8 << 20, false);
    guest.write(3, 1);
    let region = region_of(&guest, Access::ReadWrite);
    region.clear(PageRange::new(0, 2048)).unwrap();
    clear_all(&region).unwrap();
    assert_eq!(region.data().unwrap(), set(2048, &[(3, 1)]));
}

/// Where the process has not written, the file shows.
#[test]
fn private_memory_over_a_file_is_what_the_file_has_and_the_process_has_changed() {
    let below = file(64 * PAGE);
    rustix::io::pwrite(&below, &[5; 4096], 10 * PAGE).unwrap();
    let guest = Guest::private_over(&below, 64 * PAGE);
    guest.write(20, 6);
    let memory = InProcess {
        process: ourselves(Access::ReadWrite),
        address: guest.area().address,
        bytes: guest.bytes,
        page_bytes: PAGE,
        file: Some((rustix::io::dup(&below).unwrap(), 0)),
    };
    let region = Region::in_process("mem0", memory, Access::ReadWrite).unwrap();
    assert_eq!(region.data().unwrap(), set(64, &[(10, 1), (20, 1)]));
    assert!(region.is_data(PageRange::new(10, 1)).unwrap());
    clear_all(&region).unwrap();
    assert_eq!((guest.read(10), guest.read(20)), (0, 0));
    let mut untouched = [0; 1];
    rustix::io::pread(&below, &mut untouched, 10 * PAGE).unwrap();
    assert_eq!(untouched, [5], "the file is not ours to change");
}

#[test]
fn pages_go_to_a_file_and_back() {
    for how in [FileIo::Plain, FileIo::Uring] {
        let guest = Guest::private(512 * PAGE, false);
        (0..512).for_each(|page| guest.write(page, page + 1));
        let saved = file(512 * PAGE);
        let memory = GuestMemory::new(vec![region_of(&guest, Access::ReadWrite)]);
        let Ok(mut queue) = FileQueue::new(memory.clone(), rustix::io::dup(&saved).unwrap(), 4, how) else {
            eprintln!("skipped: io_uring can't be used here");
            continue;
        };
        queue.write(0, PageRange::new(0, 512), 0).unwrap();
        queue.finish().unwrap();
        clear_all(&memory.regions()[0]).unwrap();
        assert_eq!(guest.read(100), 0);
        queue.read(0, PageRange::new(0, 512), 0).unwrap();
        queue.finish().unwrap();
        (0..512).for_each(|page| assert_eq!(guest.read(page), page + 1, "{how:?}"));
    }
}

#[test]
fn a_process_that_has_ended_is_an_error_and_no_memory_of_another() {
    let mut tracked = Tracked::start();
    let (pid, Area { address, bytes, .. }, _uffd) = tracked.attach();
    let process = Arc::new(Process::open(pid.as_raw_nonzero().get(), Access::ReadWrite).unwrap());
    assert_eq!(process.pid(), pid.as_raw_nonzero().get());
    let memory = InProcess { process, address, bytes, page_bytes: PAGE, file: None };
    let region = Region::in_process("pc.ram", memory, Access::ReadWrite).unwrap();
    let mut page = [0; 4096];
    region.copy_to(PageRange::new(0, 1), &mut page).unwrap();
    tracked.kill();
    for result in [
        region.copy_to(PageRange::new(0, 1), &mut page),
        region.write_pages(WindowPages::new(0, 1), &page),
        region.zero_mask(WindowPages::new(0, 1)).map(drop),
        region.read_window(WindowPages::new(0, 1), true, &mut WindowBuffer::default()).map(drop),
        region.data().map(drop),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("\"pc.ram\"") && error.contains("it has ended"), "{error}");
    }
    assert!(Process::open(pid.as_raw_nonzero().get(), Access::Read).is_err());
    assert!(Process::open(0, Access::Read).is_err());
}

#[test]
fn memory_that_is_no_pages_is_refused() {
    for (address, bytes, page_bytes) in
        [(1, PAGE, PAGE), (PAGE, 0, PAGE), (PAGE, 5, PAGE), (PAGE, PAGE, 5), (u64::MAX - PAGE + 1, PAGE, PAGE)]
    {
        let memory = InProcess { process: ourselves(Access::Read), address, bytes, page_bytes, file: None };
        assert!(Region::in_process("x", memory, Access::Read).is_err(), "{address:#x} {bytes} {page_bytes}");
    }
}
