//! Background snapshots of a guest that writes as fast as it can: each page is saved as it was when the guest was
//! stopped, and the guest itself is never harmed.
//!
//! The guest knows what every page must hold, so one page that is saved too late, too early or twice is found when it
//! is restored.
use std::{
    cell::RefCell,
    fs,
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::fs::FallocateFlags;
use transship_engine::{
    DirectIo, Error, FileIo, FileUri, Format, Progress, Report, RestoreOptions, SaveOptions, Then, Way,
    guest::{Found, GuestError, LastWill, SourceGuest},
    restore_guest, save_guest,
};
use transship_lines::Shutdown;
use transship_memory::{Freeing, GuestMemory, PageRange, Protection, Region, Tracker};
use transship_vmm::{
    VmAddress,
    handoff::{CheckResult, HandoffDestination, HandoffSource, check},
    settle_abandoned,
    synthetic::{Event, Events, Summary, SyntheticOptions, WriteRate, run},
};
use transship_wire::GuestDescription;

const PATIENCE: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

/// A guest on a thread.
struct Guest {
    path: PathBuf,
    shutdown: Shutdown,
    thread: Option<JoinHandle<Summary>>,
    _folder: tempfile::TempDir,
}

impl Guest {
    fn start(change: impl FnOnce(&mut SyntheticOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guest.sock");
        let mut options = SyntheticOptions::new(&path, 64 * MIB);
        options.regions = 2;
        change(&mut options);
        let shutdown = Shutdown::new().unwrap();
        let (send, events): (_, Receiver<Event>) = channel();
        let send = Mutex::new(send);
        let tell: Events = Arc::new(move |event| drop(send.lock().unwrap().send(event)));
        let asked = shutdown.clone();
        let thread = thread::spawn(move || run(&options, &asked, &tell).unwrap());
        while !matches!(events.recv_timeout(PATIENCE).unwrap(), Event::Listening(_)) {}
        Self { path, shutdown, thread: Some(thread), _folder: folder }
    }

    /// Half of its memory is there, and all of that it writes without a pause.
    fn busy(change: impl FnOnce(&mut SyntheticOptions)) -> Self {
        Self::start(|options| {
            (options.write_rate, options.threads, options.touched) = (WriteRate::Max, 2, 0.5);
            change(options);
        })
    }

    fn attach(&self) -> HandoffSource {
        HandoffSource::attach(&self.path).unwrap()
    }

    fn check(&self) -> CheckResult {
        check(&self.path).unwrap()
    }

    /// It still writes, and every page is what it must be.
    fn assert_runs_on(&self) {
        let before = self.check();
        let begin = Instant::now();
        while self.check().writes == before.writes {
            assert!(begin.elapsed() < PATIENCE, "it writes no more");
        }
        assert!(self.attach().is_running().unwrap());
        assert_eq!((before.wrong, self.check().wrong), (0, 0));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.shutdown.request();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn options() -> SaveOptions {
    SaveOptions { way: Way::Background, channels: 2, ..SaveOptions::default() }
}

/// On a disk.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn save(guest: &Guest, to: &Path, options: &SaveOptions) -> (Result<(), Error>, Report) {
    let mut report = Report::default();
    let saved = save_guest(&mut guest.attach(), None, &FileUri::path(to), options, &Progress::new(), &mut report);
    (saved, report)
}

/// What the guest in the file says about its memory.
fn restored(from: &Path) -> CheckResult {
    let guest = Guest::start(|options| options.incoming = true);
    let mut destination = HandoffDestination::attach(&guest.path).unwrap();
    let options = RestoreOptions { run: Some(true), ..RestoreOptions::default() };
    let mut report = Report::default();
    restore_guest(&mut destination, &FileUri::path(from), &options, None, &Progress::new(), &mut report).unwrap();
    drop(destination);
    guest.check()
}

#[test]
fn the_moment_is_saved_whole_while_the_guest_writes_on() {
    let folder = folder();
    let placed = [(1, DirectIo::Off, FileIo::Plain), (4, DirectIo::Auto, FileIo::Auto)];
    let placed = placed.map(|(channels, direct_io, io)| (channels, direct_io, io, Format::MappedRam));
    let followed = [1, 4].map(|channels| (channels, DirectIo::Off, FileIo::Auto, Format::Stream));
    for (channels, direct_io, io, format) in placed.into_iter().chain(followed) {
        let guest = Guest::busy(|_| ());
        let path = folder.path().join("a");
        let options = SaveOptions { channels, direct_io, io, format, ..options() };
        let mut first = 0;
        // A machine may be so busy that all is saved before the guest gets to write anything.
        for _ in 0..50 {
            let (saved, report) = save(&guest, &path, &options);
            saved.unwrap();
            assert_eq!(restored(&path).wrong, 0);
            let file = report.file.unwrap();
            // Half of 64 MiB, some of it zeros.
            let pages = report.pages;
            assert_eq!((pages.normal + pages.zero, pages.hole, pages.resent), (8192, 8192, 0), "{pages:?}");
            assert_eq!(file.pages_stored, pages.normal);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
            first += file.pages_first;
            if first > 0 {
                break;
            }
        }
        assert!(first > 0, "the guest never had to wait, so nothing was tried");
        guest.assert_runs_on();
    }
}

/// It writes everywhere: before and after the moment it also fills what was holes.
#[test]
fn holes_that_are_filled_meanwhile_are_no_matter() {
    let folder = folder();
    let guest = Guest::busy(|options| (options.touched, options.hot_set_bytes) = (0.9, Some(64 * MIB)));
    let path = folder.path().join("a");
    save(&guest, &path, &options()).0.unwrap();
    guest.assert_runs_on();
    assert_eq!(restored(&path).wrong, 0);
}

/// Not one of the pages was there when the memory was looked at, and all of them are written again as soon as the guest
/// runs on.
#[test]
fn what_was_a_hole_shortly_before_the_moment_is_saved_as_of_the_moment() {
    let folder = folder();
    let guest = Guest::busy(|options| (options.touched, options.hot_set_bytes) = (0.0, Some(8 * MIB)));
    let path = folder.path().join("a");
    let meddling = Meddling { begins_with_holes: true, ..Meddling::default() };
    meddle(&guest, &path, meddling).unwrap();
    guest.assert_runs_on();
    assert_eq!(restored(&path).wrong, 0);
}

/// What a test makes of a guest's answers.
#[derive(Default)]
struct Meddling {
    /// Gives this page of region 1 back after it was protected.
    gives_back: Option<u64>,
    /// Has the guest write all that it has anew, into holes, between the first look at its memory and the moment.
    begins_with_holes: bool,
    cancels: Option<Arc<Progress>>,
    does_not_resume: bool,
}

struct Meddled {
    guest: RefCell<HandoffSource>,
    meddling: Meddling,
}

impl SourceGuest for Meddled {
    fn description(&self) -> GuestDescription {
        self.guest.borrow().description()
    }
    fn memory(&self) -> GuestMemory {
        self.guest.borrow().memory()
    }
    /// Asked when the memory has been looked at.
    fn freeing(&self) -> Freeing {
        if self.meddling.begins_with_holes {
            self.guest.borrow_mut().resume(true).unwrap();
        }
        Freeing::Possible
    }
    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        self.guest.get_mut().track()
    }
    /// Asked before the memory is looked at.
    fn protect(&mut self) -> Result<Protection, GuestError> {
        if self.meddling.begins_with_holes {
            self.guest.get_mut().stop().unwrap();
            let memory = self.memory();
            memory.regions().iter().for_each(|region| punch(region, PageRange::all(region.pages())));
        }
        self.guest.get_mut().protect()
    }
    fn is_running(&mut self) -> Result<bool, GuestError> {
        self.guest.get_mut().is_running()
    }
    fn stop(&mut self) -> Result<Found, GuestError> {
        let filled = |region: &Region| region.is_data(PageRange::new(0, 4 * MIB / 4096)).unwrap();
        let begin = Instant::now();
        while self.meddling.begins_with_holes && !self.memory().regions().iter().all(filled) {
            assert!(begin.elapsed() < PATIENCE, "it does not write all its pages");
            thread::yield_now();
        }
        self.guest.get_mut().stop()
    }
    fn state_estimate(&self) -> Duration {
        self.guest.borrow().state_estimate()
    }
    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
        self.guest.get_mut().save_state()
    }
    /// All was protected by then, and nothing is saved yet.
    fn state_saved(&mut self) -> Result<(), GuestError> {
        if let Some(page) = self.meddling.gives_back {
            punch(&self.memory().regions()[1], PageRange::new(page, 1));
        }
        self.guest.get_mut().state_saved()
    }
    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        if let Some(progress) = &self.meddling.cancels {
            progress.cancel();
        }
        if self.meddling.does_not_resume {
            return Err(GuestError::Unfit("it does not want to".into()));
        }
        self.guest.get_mut().resume(run)
    }
    fn resume_hint(&self) -> String {
        self.guest.borrow().resume_hint()
    }
}

/// As a VMM does it that gives memory back.
fn punch(region: &Region, pages: PageRange) {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(region.file().unwrap(), how, pages.first.offset(), pages.bytes()).unwrap();
}

/// Saves a busy guest; what comes of it, and whether there is a file.
fn meddle(guest: &Guest, path: &Path, meddling: Meddling) -> Result<(), Error> {
    let progress = meddling.cancels.clone().unwrap_or_default();
    let mut guest = Meddled { guest: RefCell::new(guest.attach()), meddling };
    let saved = save_guest(&mut guest, None, &FileUri::path(path), &options(), &progress, &mut Report::default());
    assert_eq!(path.exists(), !matches!(saved, Err(ref error) if !matches!(error, Error::Unknown(_))));
    saved
}

#[test]
fn a_cancelled_save_lets_the_guest_run_on_and_leaves_no_file() {
    let (folder, guest) = (folder(), Guest::busy(|_| ()));
    let meddling = Meddling { cancels: Some(Progress::new()), ..Meddling::default() };
    let saved = meddle(&guest, &folder.path().join("a"), meddling);
    assert!(matches!(saved, Err(Error::Cancelled(_))), "{saved:?}");
    guest.assert_runs_on();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    // And the next one works.
    save(&guest, &folder.path().join("a"), &options()).0.unwrap();
    assert_eq!(restored(&folder.path().join("a")).wrong, 0);
}

#[test]
fn content_that_is_taken_away_before_it_is_saved_fails_the_snapshot() {
    let (folder, guest) = (folder(), Guest::busy(|options| options.hot_set_bytes = Some(4 * MIB)));
    let meddling = Meddling { gives_back: Some(4000), ..Meddling::default() };
    let error = meddle(&guest, &folder.path().join("a"), meddling).unwrap_err().to_string();
    assert!(error.contains("region \"ram1\"") && error.contains("use --live"), "{error}");
    assert!(guest.attach().is_running().unwrap());
    // What is gone is the guest's own affair; no other page is touched.
    assert_eq!(guest.check().wrong, 1);
}

#[test]
fn a_guest_that_does_not_run_again_is_saved_nevertheless() {
    let (folder, guest) = (folder(), Guest::busy(|_| ()));
    let path = folder.path().join("a");
    let meddling = Meddling { does_not_resume: true, ..Meddling::default() };
    let error = meddle(&guest, &path, meddling).unwrap_err().to_string();
    assert!(error.contains("its snapshot is complete") && error.contains("it does not want to"), "{error}");
    assert_eq!(restored(&path).wrong, 0);
    assert!(!guest.attach().is_running().unwrap());
    settle_abandoned(&VmAddress::Handoff(guest.path.clone()), LastWill::default(), true).unwrap();
    guest.assert_runs_on();
}

#[test]
fn what_can_not_be_is_refused_before_the_guest_is_stopped() {
    let (folder, guest) = (folder(), Guest::busy(|_| ()));
    let path = folder.path().join("a");
    for (options, expected) in [
        (SaveOptions { format: Format::Libvirt, ..options() }, "--vm libvirt:DOMAIN"),
        (SaveOptions { then: Then::StayStopped, ..options() }, "use --live or --paused"),
    ] {
        let error = save(&guest, &path, &options).0.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(guest.attach().is_running().unwrap() && !path.exists());
    }
}

/// Nothing writes, so nothing is protected: it is saved as it stands.
#[test]
fn a_guest_that_stands_still_is_saved_and_stands_on() {
    let (folder, guest) = (folder(), Guest::busy(|_| ()));
    guest.attach().stop().unwrap();
    save(&guest, &folder.path().join("a"), &options()).0.unwrap();
    assert!(!guest.attach().is_running().unwrap());
    assert_eq!(restored(&folder.path().join("a")).wrong, 0);
}
