//! Two synthetic guests in this process and everything between them real: the socket, the tracker, the memory files.
//! The moving itself is done here by hand, page by page, so that it can also be done wrong.
#![allow(clippy::unwrap_used)]
use std::{
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, channel},
    thread::JoinHandle,
    time::Duration,
};

use transship_guest::{DestinationGuest, LastWill, SourceGuest};
use transship_memory::{GuestMemory, PAGE_BYTES, PageRange, PageSet, WindowPages};

use super::*;
use crate::handoff::{CheckResult, HandoffDestination, HandoffSource, check};

const PATIENCE: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

/// A guest on a thread.
struct Running {
    path: PathBuf,
    shutdown: Shutdown,
    events: Receiver<Event>,
    thread: JoinHandle<Result<Summary, Error>>,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start(change: impl FnOnce(&mut SyntheticOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest.sock");
        let mut options = SyntheticOptions::new(&path, 8 * MIB);
        change(&mut options);
        let shutdown = Shutdown::new().unwrap();
        let (send, events) = channel();
        let send = Mutex::new(send);
        let events_out: Events = Arc::new(move |event| drop(lock(&send).send(event)));
        let asked = shutdown.clone();
        let thread = std::thread::spawn(move || run(&options, &asked, &events_out));
        let running = Self { path, shutdown, events, thread, _folder: folder };
        running.wait_for(|event| matches!(event, Event::Listening(_)));
        running
    }

    fn wait_for(&self, wanted: impl Fn(&Event) -> bool) -> Event {
        loop {
            let event = self.events.recv_timeout(PATIENCE).unwrap();
            if wanted(&event) {
                return event;
            }
        }
    }

    fn end(self) -> Summary {
        self.shutdown.request();
        self.thread.join().unwrap().unwrap()
    }
}

fn busy(options: &mut SyntheticOptions) {
    (options.write_rate, options.threads, options.regions) = (WriteRate::Max, 2, 2);
    (options.touched, options.hot_set_bytes) = (0.5, Some(2 * MIB));
}

fn waiting(options: &mut SyntheticOptions) {
    (options.incoming, options.regions) = (true, 2);
}

/// Copies pages, bypassing everything that the engine does.
fn copy(from: &GuestMemory, to: &GuestMemory, region: usize, pages: &PageSet) {
    for WindowPages { first, mask: bits } in pages.windows() {
        let mut bytes = Vec::new();
        from.regions()[region].copy_out(first.masked(bits), &mut bytes).unwrap();
        to.regions()[region].write_pages(first.masked(bits), &bytes).unwrap();
    }
}

/// Moves the memory in rounds while the guest writes, then stops it, moves the rest and the state.
fn bring(source: &mut HandoffSource, destination: &mut HandoffDestination, spoil: impl FnOnce(&GuestMemory)) {
    assert_eq!(source.description(), destination.description());
    let (from, to) = (source.memory(), destination.memory());
    let mut tracker = source.track().unwrap();
    for round in 0..4 {
        for (i, region) in from.regions().iter().enumerate() {
            let mut pages = tracker.scan(i).unwrap();
            if round == 0 {
                pages.intersect_with(&region.data().unwrap());
            }
            copy(&from, &to, i, &pages);
        }
    }
    assert!(source.is_running().unwrap());
    wait_for_a_write(&from);
    source.stop().unwrap();
    assert!(!source.is_running().unwrap());
    let mut rest = 0;
    for i in 0..from.regions().len() {
        let pages = tracker.scan(i).unwrap();
        rest += pages.count().get();
        copy(&from, &to, i, &pages);
    }
    assert!(rest > 0, "the write after the last scan was seen");
    spoil(&to);
    destination.load_state(&mut source.save_state().unwrap()).unwrap();
    source.state_saved().unwrap();
}

fn attach(from: &Path, to: &Path) -> (HandoffSource, HandoffDestination) {
    (HandoffSource::attach(from).unwrap(), HandoffDestination::attach(to).unwrap())
}

#[test]
fn a_guest_moves_while_it_writes_and_every_page_is_right() {
    let (a, b) = (Running::start(busy), Running::start(waiting));
    let (mut source, mut destination) = attach(&a.path, &b.path);
    bring(&mut source, &mut destination, |_| {});
    destination.start(true).unwrap();
    drop((source, destination));

    let arrived = b.wait_for(|event| matches!(event, Event::Checked(_)));
    let Event::Checked(CheckResult { pages: 2048, wrong: 0, .. }) = arrived else { panic!("{arrived:?}") };
    let there = check(&b.path).unwrap();
    assert_eq!((there.pages, there.wrong), (2048, 0));
    let here = check(&a.path).unwrap();
    assert_eq!(here.wrong, 0);
    assert!(there.writes >= here.writes && here.writes > 0, "{there:?} goes on from {here:?}");
    assert_eq!(a.end().state, GuestState::Stopped);
    let summary = b.end();
    assert_eq!((summary.state, summary.check.unwrap().wrong), (GuestState::Running, 0));
}

/// Copies page `page` of region 1.
fn page_of(memory: &GuestMemory, page: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    memory.regions()[1].copy_out(WindowPages::new(0, 1 << page), &mut bytes).unwrap();
    bytes
}

/// A page of the hot set as it was, whole, before it was written again.
fn old_page(source: &mut HandoffSource, page: u64) -> Vec<u8> {
    source.stop().unwrap();
    let old = page_of(&source.memory(), page);
    source.resume(true).unwrap();
    wait_until(|| page_of(&source.memory(), page) != old);
    old
}

/// Waits until the guest has written a page of its hot set.
fn wait_for_a_write(memory: &GuestMemory) {
    let before = page_of(memory, 5);
    wait_until(|| page_of(memory, 5) != before);
}

fn wait_until(written: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !written() {
        assert!(Instant::now() < deadline, "the guest does not write");
        std::thread::yield_now();
    }
}

#[test]
fn one_page_of_an_older_version_is_found() {
    let (a, b) = (Running::start(busy), Running::start(waiting));
    let (mut source, mut destination) = attach(&a.path, &b.path);
    let old = old_page(&mut source, 5);
    bring(&mut source, &mut destination, |to| to.regions()[1].write_pages(WindowPages::new(0, 1 << 5), &old).unwrap());
    destination.start(true).unwrap();
    drop((source, destination));
    let Event::Checked(arrived) = b.wait_for(|event| matches!(event, Event::Checked(_))) else { unreachable!() };
    assert_eq!(arrived.wrong, 1);
    // It counts also when it has been overwritten since.
    assert_eq!(check(&b.path).unwrap().wrong, 1);
    assert_eq!(check(&a.path).unwrap().wrong, 0);
    b.end();
    a.end();
}

#[test]
fn torn_moved_and_lost_pages_are_found() {
    let (a, b) = (Running::start(busy), Running::start(waiting));
    let (mut source, mut destination) = attach(&a.path, &b.path);
    let old = old_page(&mut source, 5);
    bring(&mut source, &mut destination, |to| {
        let mut torn = page_of(to, 5);
        torn[PAGE_BYTES / 2..].copy_from_slice(&old[PAGE_BYTES / 2..]);
        let region = &to.regions()[1];
        region.write_pages(WindowPages::new(0, 1 << 5), &torn).unwrap();
        region.write_pages(WindowPages::new(0, 1 << 6), &page_of(to, 7)).unwrap();
        region.clear(PageRange::new(8, 1)).unwrap();
        // Touched at first and never written again: half of region 1 is touched, a quarter is hot.
        region.write_pages(WindowPages::new(384, 1), &[0x55; PAGE_BYTES]).unwrap();
        // Never touched.
        region.write_pages(WindowPages::new(896, 1), &[1; PAGE_BYTES]).unwrap();
    });
    // It stands there, loaded; the check does not need it to run.
    drop((source, destination));
    assert_eq!(check(&b.path).unwrap().wrong, 5);
    assert_eq!(b.end().state, GuestState::Loaded);
    a.end();
}

#[test]
fn every_content_is_the_same_after_a_move_and_holes_stay_holes() {
    let corpus = tempfile::tempdir().unwrap();
    std::fs::write(corpus.path().join("words"), "to be or not to be ".repeat(1000)).unwrap();
    for content in [Content::Zero, Content::Random, Content::Mixed, Content::Corpus(corpus.path().into())] {
        let quiet = |o: &mut SyntheticOptions| (o.content, o.touched, o.regions) = (content.clone(), 0.25, 2);
        let (a, b) = (Running::start(quiet), Running::start(waiting));
        let (mut source, mut destination) = attach(&a.path, &b.path);
        source.stop().unwrap();
        let (from, to) = (source.memory(), destination.memory());
        for (i, region) in from.regions().iter().enumerate() {
            assert_eq!(region.data().unwrap().count(), PageCount::new(256));
            copy(&from, &to, i, &region.data().unwrap());
        }
        destination.load_state(&mut source.save_state().unwrap()).unwrap();
        source.state_saved().unwrap();
        destination.start(true).unwrap();
        drop((source, destination));
        assert_eq!(check(&b.path).unwrap(), CheckResult { pages: 2048, wrong: 0, writes: 0 });
        assert!(to.regions().iter().all(|r| r.data().unwrap().count() == PageCount::new(256)), "{content:?}");
        b.end();
        a.end();
    }
}

#[test]
fn a_guest_whose_client_dies_stays_stopped_until_the_next_one_resumes_it() {
    let (a, b) = (Running::start(busy), Running::start(waiting));
    let mut source = HandoffSource::attach(&a.path).unwrap();
    let mut tracker = source.track().unwrap();
    tracker.scan(0).unwrap();
    source.stop().unwrap();
    drop((source, tracker));

    let is_running = || HandoffSource::attach(&a.path).unwrap().is_running().unwrap();
    assert!(!is_running());
    // It was not the next one that stopped it.
    HandoffSource::attach(&a.path).unwrap().resume(true).unwrap();
    assert!(!is_running());
    crate::settle_abandoned(&crate::VmAddress::Handoff(a.path.clone()), LastWill::default(), true).unwrap();
    let mut source = HandoffSource::attach(&a.path).unwrap();
    assert!(source.is_running().unwrap());
    // A second attempt, with a tracker of its own, succeeds.
    let mut destination = HandoffDestination::attach(&b.path).unwrap();
    bring(&mut source, &mut destination, |_| {});
    destination.start(true).unwrap();
    drop((source, destination));
    assert_eq!(check(&b.path).unwrap().wrong, 0);
    b.end();
    a.end();
}

#[test]
fn a_paced_guest_writes() {
    let guest = Running::start(|o| (o.write_rate, o.threads) = (WriteRate::BytesPerSecond(64 * MIB), 2));
    wait_until(|| check(&guest.path).unwrap().writes > 100);
    let summary = guest.end();
    assert_eq!((summary.state, summary.check.unwrap().wrong), (GuestState::Running, 0));
}

#[test]
fn a_guest_ends_by_itself() {
    let guest = Running::start(|o| o.duration = Some(Duration::from_millis(1)));
    let path = guest.path.clone();
    assert_eq!(guest.thread.join().unwrap().unwrap(), Summary { state: GuestState::Running, writes: 0, check: None });
    assert!(!path.exists());
}

#[test]
fn memory_can_lie_in_a_file_system() {
    let guest = Running::start(|o| o.huge = Some("/dev/shm".into()));
    assert_eq!(check(&guest.path).unwrap(), CheckResult { pages: 2048, wrong: 0, writes: 0 });
    guest.end();
    let folder = tempfile::tempdir().unwrap();
    let mut options = SyntheticOptions::new(folder.path().join("guest.sock"), MIB);
    options.huge = Some("/nowhere".into());
    let error = run(&options, &Shutdown::new().unwrap(), &print_events()).unwrap_err().to_string();
    assert!(error.contains("/nowhere"), "{error}");
}
