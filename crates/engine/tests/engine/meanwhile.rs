//! What is done while pages are on their way: what can't go with the guest is unplugged, and the device state is saved.
#![allow(clippy::unwrap_used)]
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use crate::common::{self, Ended, LastScan, Op, Script, Scripted, Waiting, contents, wait_until};
use transship_engine::{
    Error, Listener, MoveOptions, Progress, Report, Uri,
    guest::{GuestError, Hint, Hints, RegionPages},
    move_guest, receive_guest,
};
use transship_memory::Error as MemoryError;

const PAGES: [u64; 2] = [300, 1000];
const CHANNELS: u8 = 2;

fn guest() -> Scripted {
    let source = Scripted::new(&PAGES, vec![]);
    for (region, pages) in PAGES.into_iter().enumerate() {
        for page in 0..pages {
            let op = Op::Fill { region, page, byte: 1 + (page % 250) as u8 };
            common::apply(&source.memory, &op, &mut source.script.lock().unwrap().history);
        }
    }
    source
}

/// Names nothing, and says so, or says nothing.
struct Frees(VecDeque<Hint>);

impl Hints for Frees {
    fn start(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, GuestError> {
        if self.0.is_empty() {
            thread::sleep(deadline.saturating_duration_since(Instant::now()));
        }
        Ok(self.0.pop_front())
    }
    fn stop(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    fn done(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    fn taken_back(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    fn writes_to(&mut self) -> Vec<RegionPages> {
        Vec::new()
    }
}

/// What becomes of the data connections when the guest was asked to let go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    Passes,
    Breaks,
}

/// Moves through a hall that lets no data through before the guest was asked to let go of what can't go with it.
fn run(source: &mut Scripted, destination: &mut Waiting, data: Data) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let (hall, there) = (folder.path().join("hall"), folder.path().join("there"));
    let listener = Listener::bind(&Uri::Unix(there.clone())).unwrap();
    let doors = UnixListener::bind(&hall).unwrap();
    let script = Arc::clone(&source.script);
    let options = MoveOptions { channels: CHANNELS, verify: true, ..MoveOptions::default() };
    let mut report = Report::default();
    thread::scope(|scope| {
        let received =
            scope.spawn(|| receive_guest(destination, listener, None, &Progress::new(), &mut Report::default()));
        scope.spawn(|| {
            // The first one is the control connection.
            for number in 0..=CHANNELS {
                let (near, _) = doors.accept().unwrap();
                let far = UnixStream::connect(&there).unwrap();
                let (back, forth) = ((far.try_clone().unwrap(), near.try_clone().unwrap()), (near, far));
                let held = (number > 0).then(|| (Arc::clone(&script), data));
                scope.spawn(|| pass(back, None));
                scope.spawn(|| pass(forth, held));
            }
        });
        let source = move_guest(source, None, None, &Uri::Unix(hall.clone()), &options, &Progress::new(), &mut report);
        Ended { source, destination: received.join().unwrap(), report }
    })
}

/// Passes on what comes, from the moment when the guest was asked.
fn pass((mut from, mut to): (UnixStream, UnixStream), held: Option<(Arc<Mutex<Script>>, Data)>) {
    if let Some((script, data)) = held {
        let mut preamble = [0; 1];
        if from.read_exact(&mut preamble).is_ok() && to.write_all(&preamble).is_ok() {
            wait_until("unplugging", || script.lock().unwrap().unplugs > 0);
        }
        if data == Data::Breaks {
            let _ = (from.shutdown(std::net::Shutdown::Both), to.shutdown(std::net::Shutdown::Both));
            return;
        }
    }
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(std::net::Shutdown::Write);
}

#[test]
fn what_cannot_go_along_is_unplugged_while_the_first_round_is_sent() {
    for hints in [None, Some(Frees([Hint::NamedAll].into()))] {
        let mut source = guest();
        source.hints = hints.map(|hints| Box::new(hints) as Box<dyn Hints>);
        let mut destination = Waiting::new(&PAGES);
        let ended = run(&mut source, &mut destination, Data::Passes);
        ended.source.unwrap();
        ended.destination.unwrap();
        assert_eq!(ended.report.verified, Some(true));
        assert!(contents(&source.memory) == contents(&destination.memory));
        let script = source.script.lock().unwrap();
        assert_eq!((script.unplugs, script.plugged_back), (2, 0));
    }
}

#[test]
fn a_round_that_breaks_off_ends_the_unplugging() {
    let mut source = guest();
    source.script.lock().unwrap().keeps = true;
    let begin = Instant::now();
    let ended = run(&mut source, &mut Waiting::new(&PAGES), Data::Breaks);
    let error = ended.source.unwrap_err();
    assert!(!matches!(error, Error::Unfit { .. } | Error::Cancelled(_)), "the devices are not why: {error}");
    ended.destination.unwrap_err();
    let script = source.script.lock().unwrap();
    assert_eq!((script.plugged_back, script.stopped), (1, false));
    // Otherwise it would go on for 20 s.
    assert!(begin.elapsed() < Duration::from_secs(19));
}

fn moved(source: &mut Scripted, destination: &mut Waiting) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    common::run(source, destination, &MoveOptions::default(), folder.path())
}

#[test]
fn the_device_state_is_saved_while_the_last_round_is_sent() {
    let mut source = guest();
    // More than is kept until the round has arrived.
    source.state = (0..20 << 20).map(|byte| (byte % 253) as u8).collect();
    source.script.lock().unwrap().last_scan = Some(LastScan::GoesOn);
    let mut destination = Waiting::new(&PAGES);
    let ended = moved(&mut source, &mut destination);
    ended.source.unwrap();
    ended.destination.unwrap();
    assert!(destination.state == source.state);
    assert!(contents(&source.memory) == contents(&destination.memory));
}

/// More lists than there are scans while it runs: the next one is done right before it stands still.
#[test]
fn the_last_scan_comes_before_the_device_state_of_a_guest_whose_other_writers_end_by_it() {
    let mut source = guest();
    source.script.lock().unwrap().ends_writers = true;
    let list = |page| vec![Op::Fill { region: 0, page, byte: 251 }];
    source.script.lock().unwrap().meanwhile = (0..100).map(list).collect();
    let mut destination = Waiting::new(&PAGES);
    let ended = moved(&mut source, &mut destination);
    ended.source.unwrap();
    ended.destination.unwrap();
    assert!(!source.script.lock().unwrap().meanwhile.is_empty());
    assert_eq!(ended.report.late_pages, 0);
    assert!(contents(&source.memory) == contents(&destination.memory));
}

#[test]
fn a_last_round_that_fails_leaves_the_guest_here_however_much_was_saved() {
    for state_bytes in [0, 1 << 10, 20 << 20] {
        let mut source = guest();
        source.state = vec![7; state_bytes];
        source.script.lock().unwrap().last_scan = Some(LastScan::Fails);
        let mut destination = Waiting::new(&PAGES);
        let ended = moved(&mut source, &mut destination);
        let error = ended.source.unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::Untrackable { .. })), "{error}");
        ended.destination.unwrap_err();
        assert_eq!((source.script.lock().unwrap().resumed, destination.started), (Some(true), None));
    }
}

#[test]
fn a_state_that_is_not_saved_leaves_the_guest_here() {
    let mut source = guest();
    source.broken_state = true;
    let mut destination = Waiting::new(&PAGES);
    let ended = moved(&mut source, &mut destination);
    let error = ended.source.unwrap_err();
    assert!(matches!(error, Error::Guest(GuestError::Unfit(_))), "{error}");
    ended.destination.unwrap_err();
    assert_eq!((source.script.lock().unwrap().resumed, destination.started), (Some(true), None));
}
