//! Both ends of the protocol on one socket, with a guest that is nothing but a state machine, and with peers that break
//! the rules.
#![allow(clippy::unwrap_used)]
use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::{Value, json};
use transship_guest::{DestinationGuest, GuestError, SourceGuest};
use transship_memory::{Access, ByteRange, PageSet, Region, WindowPages};

use transship_lines::{GuestSocket, LineSocket, MAX_LINE_BYTES, Shutdown};

use super::{client::Connection, *};

const BYTES: u64 = 1 << 20;

/// Writes `state` when asked for it, and takes nothing else.
struct TestGuest {
    region: Region,
    address: u64,
    /// Whether it may wait for writes and pages.
    waits: bool,
    state: Vec<u8>,
    calls: Vec<&'static str>,
}

impl TestGuest {
    fn new(state: Vec<u8>) -> Self {
        let file = file(BYTES);
        let inode = rustix::fs::fstat(&file).unwrap().st_ino.to_string();
        let region = Region::map("ram", file, ByteRange::sized(0, BYTES), Access::ReadWrite).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.split_ascii_whitespace().nth(4) == Some(&inode)).unwrap();
        let address = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        Self { region, address, waits: true, state, calls: Vec::new() }
    }

    fn at(self, address: u64) -> Self {
        Self { address, ..self }
    }

    fn never_waits(self) -> Self {
        Self { waits: false, ..self }
    }
}

impl HandoffGuest for TestGuest {
    fn machine(&self) -> String {
        "test".into()
    }
    fn regions(&self) -> Vec<GuestRegion<'_>> {
        let (file, name, address) = (self.region.file().expect("a mapped one"), "ram".into(), self.address);
        vec![GuestRegion { name, bytes: BYTES, file, file_offset: 0, address }]
    }
    fn stop(&mut self) -> Result<(), String> {
        self.calls.push("stop");
        Ok(())
    }
    fn resume(&mut self) -> Result<(), String> {
        self.calls.push("resume");
        Ok(())
    }
    fn save_state(&mut self, to: &mut dyn Write) -> Result<(), String> {
        self.calls.push("save");
        to.write_all(&self.state).map_err(|e| format!("no state:\n{e}"))
    }
    fn load_state(&mut self, from: &mut dyn Read) -> Result<(), String> {
        self.calls.push("load");
        let mut got = vec![0; self.state.len()];
        from.read_exact(&mut got).map_err(|e| e.to_string())?;
        if got == self.state { Ok(()) } else { Err("another state".into()) }
    }
    fn start(&mut self) -> Result<(), String> {
        self.calls.push("start");
        Ok(())
    }
    fn may_wait_for_writes(&self) -> bool {
        self.waits
    }
    fn may_wait_for_pages(&self) -> bool {
        self.waits
    }
    fn wait_for_pages(&mut self) -> Result<(), String> {
        self.calls.push("wait");
        Ok(())
    }
}

/// Serves a guest while `client` runs; returns its last state and what was called.
fn with_guest(guest: TestGuest, state: GuestState, client: impl FnOnce(&Path)) -> (GuestState, Vec<&'static str>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guest.sock");
    let socket = GuestSocket::listen(&path).unwrap();
    let shutdown = Shutdown::new().unwrap();
    let mut guest = guest;
    let state = thread::scope(|scope| {
        let server = scope.spawn(|| serve(&socket, &mut guest, state, &shutdown, None));
        let client = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client(&path)));
        shutdown.request();
        let state = server.join().unwrap().unwrap();
        client.unwrap();
        state
    });
    (state, guest.calls)
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn ask(lines: &mut LineSocket, text: &str) -> Value {
    lines.send(text.as_bytes(), &[], later()).unwrap();
    serde_json::from_slice(&lines.receive(later()).unwrap().text).unwrap()
}

/// Asks on a connection of its own. The one before it may seem to be there a little longer: while another test starts a
/// process, that has a copy of its descriptor.
fn ask_anew(path: &Path, text: &str) -> Value {
    let deadline = later();
    loop {
        let mut lines = connect(path);
        let answer = lines.send(text.as_bytes(), &[], deadline).and_then(|()| lines.receive(deadline));
        match answer.map(|line| serde_json::from_slice::<Value>(&line.text).unwrap()) {
            Ok(answer) if answer["id"] != 0 => return answer,
            refused => assert!(Instant::now() < deadline, "{refused:?}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The text of an error that the user can act on.
#[track_caller]
fn unfit(error: GuestError) -> String {
    assert!(matches!(error, GuestError::Unfit(_)), "{error:?}");
    error.to_string()
}

/// The text of an error that is the VMM's.
#[track_caller]
fn vmm(error: GuestError) -> String {
    assert!(matches!(error, GuestError::Vmm(_)), "{error:?}");
    error.to_string()
}

fn connect(path: &Path) -> LineSocket {
    LineSocket::new(UnixStream::connect(path).unwrap())
}

#[test]
fn the_rules_are_enforced_call_by_call() {
    let (state, calls) = with_guest(TestGuest::new(vec![]), GuestState::Running, |path| {
        let mut lines = connect(path);
        let error = |answer: Value| answer["error"].as_str().unwrap().to_owned();
        assert!(error(ask(&mut lines, r#"{"id":1,"call":"fly"}"#)).contains("no call \"fly\""));
        assert_eq!(ask(&mut lines, r#"{"id":2,"call":"start"}"#), json!({"id": 2, "ok": {}}), "it runs already");
        assert!(error(ask(&mut lines, r#"{"id":3,"call":"save-state"}"#)).contains("none came"));
        assert_eq!(ask(&mut lines, r#"{"id":4,"call":"stop","later":"versions"}"#), json!({"id": 4, "ok": {}}));
        assert_eq!(ask(&mut lines, r#"{"id":4,"call":"stop"}"#), json!({"id": 4, "ok": {}}));
        assert!(error(ask(&mut lines, r#"{"id":5,"call":"start"}"#)).contains("is stopped"));
        assert!(error(ask(&mut lines, r#"{"id":5,"call":"check"}"#)).contains("can't check"));
        let null = std::fs::File::open("/dev/null").unwrap();
        lines.send(br#"{"id":6,"call":"resume"}"#, &[null.as_fd()], later()).unwrap();
        let answer: Value = serde_json::from_slice(&lines.receive(later()).unwrap().text).unwrap();
        assert!(error(answer).contains("takes no file descriptors"));
        lines.send(br#"{"id":7,"call":"save-state"}"#, &[null.as_fd()], later()).unwrap();
        let answer: Value = serde_json::from_slice(&lines.receive(later()).unwrap().text).unwrap();
        assert!(error(answer).contains("neither a pipe nor a socket"));
    });
    assert_eq!((state, calls), (GuestState::Stopped, vec!["stop"]));
}

#[test]
fn what_is_no_request_ends_the_connection_and_harms_nothing() {
    let (state, calls) = with_guest(TestGuest::new(vec![]), GuestState::Running, |path| {
        for bad in ["", "{", "[]", "describe", r#"{"call":"stop"}"#, r#"{"id":"1","call":"stop"}"#, "\u{fffd}"] {
            let mut lines = connect(path);
            let answer = ask(&mut lines, bad);
            assert_eq!(answer["id"], 0, "{bad}");
            assert!(lines.receive(later()).is_err(), "{bad}");
        }
        let mut long = connect(path);
        // The server may hang up before it has read everything.
        let _ = long.stream().write_all(&vec![b'x'; 2 * MAX_LINE_BYTES]);
        let _ = long.receive(later());
        assert!(long.receive(later()).is_err());
        let _half_a_line = connect(path).stream().write_all(b"{\"id\":1,");
        assert_eq!(ask_anew(path, r#"{"id":1,"call":"describe"}"#)["ok"]["running"], true);
    });
    assert_eq!((state, calls), (GuestState::Running, vec![]));
}

#[test]
fn writes_come_to_wait_where_that_is_offered() {
    let (_, calls) = with_guest(TestGuest::new(vec![]), GuestState::Running, |path| {
        let protection = HandoffSource::attach(path).unwrap().protect().unwrap();
        assert_eq!(protection.next_fault(Duration::ZERO).unwrap(), None);
    });
    assert_eq!(calls, Vec::<&str>::new());
    with_guest(TestGuest::new(vec![]).never_waits(), GuestState::Running, |path| {
        let mut guest = HandoffSource::attach(path).unwrap();
        let error = unfit(guest.protect().err().unwrap());
        assert!(error.contains("does not offer \"protect\"") && error.contains("use --live or --paused"), "{error}");
        // Tracking, where nobody waits, is another matter.
        guest.track().unwrap();
        drop(guest);
        let answer = ask_anew(path, r#"{"id":1,"call":"protect"}"#);
        assert_eq!(answer["error"], "this guest's writes can't wait");
    });
}

#[test]
fn pages_come_to_be_waited_for_where_that_is_offered_and_all_are_missing() {
    let (_, calls) = with_guest(TestGuest::new(vec![7]), GuestState::Waiting, |path| {
        let mut guest = HandoffDestination::attach(path).unwrap();
        let missing = guest.missing(&[]).unwrap();
        guest.load_state(&mut [7].as_slice()).unwrap();
        drop(missing);
        assert!(guest.stop().unwrap().contains("its guest is stopped"));
        drop(guest);
        let error = ask_anew(path, r#"{"id":1,"call":"missing"}"#)["error"].as_str().unwrap().to_owned();
        assert!(error.contains("missing is not possible: the guest is loaded"), "{error}");
    });
    assert_eq!(calls, ["wait", "load"]);
    with_guest(TestGuest::new(vec![]).never_waits(), GuestState::Waiting, |path| {
        let error = unfit(HandoffDestination::attach(path).unwrap().missing(&[]).err().unwrap());
        assert!(error.contains("does not offer \"missing\"") && error.contains("leave out --lazy"), "{error}");
    });
    with_guest(TestGuest::new(vec![]).at(1 << 20), GuestState::Waiting, |path| {
        let error = vmm(HandoffDestination::attach(path).unwrap().missing(&[]).err().unwrap());
        assert!(error.contains("maps nothing at 0x100000"), "{error}");
    });
    with_guest(TestGuest::new(vec![]), GuestState::Waiting, |path| {
        let mut guest = HandoffDestination::attach(path).unwrap();
        guest.memory().regions()[0].write_pages(WindowPages::new(5, 1), &[1; 4096]).unwrap();
        let pages = guest.memory().regions()[0].pages();
        let error = unfit(guest.missing(&[PageSet::full(pages)]).err().unwrap());
        assert!(error.contains("is not empty: pages 5..6 are there"), "{error}");
    });
    // A page that is there and is not lacked is nobody's concern.
    with_guest(TestGuest::new(vec![]), GuestState::Waiting, |path| {
        let mut guest = HandoffDestination::attach(path).unwrap();
        guest.memory().regions()[0].write_pages(WindowPages::new(5, 1), &[1; 4096]).unwrap();
        let mut lacks = PageSet::full(guest.memory().regions()[0].pages());
        lacks.remove(transship_memory::PageRange::new(5, 1));
        guest.missing(&[lacks]).unwrap();
    });
}

/// A VMM of before these calls were there.
#[test]
fn a_vmm_that_does_not_know_a_call_is_not_asked() {
    let answers = [1, 2].map(|id| (json!({"id": id, "ok": description()}), vec![file(BYTES)]));
    with_liar(answers.into(), |path| {
        let error = unfit(HandoffDestination::attach(path).unwrap().missing(&[]).err().unwrap());
        assert!(error.contains("does not offer \"missing\""), "{error}");
    });
}

#[test]
fn a_second_client_is_told_so_and_may_come_when_the_first_has_gone() {
    with_guest(TestGuest::new(vec![]), GuestState::Waiting, |path| {
        let first = HandoffDestination::attach(path).unwrap();
        let refusal = vmm(HandoffDestination::attach(path).err().unwrap());
        assert!(refusal.contains("another client"), "{refusal}");
        drop(first);
        HandoffDestination::attach(path).unwrap();
    });
}

#[test]
fn attaching_to_the_wrong_kind_is_refused() {
    with_guest(TestGuest::new(vec![]), GuestState::Running, |path| {
        let error = unfit(HandoffDestination::attach(path).err().unwrap());
        assert!(error.contains("runs a guest already"), "{error}");
    });
    // Writes of a guest that names a wrong address could not be seen.
    with_guest(TestGuest::new(vec![]).at(1 << 20), GuestState::Running, |path| {
        let error = vmm(HandoffSource::attach(path).err().unwrap());
        assert!(error.contains("maps nothing at 0x100000"), "{error}");
    });
    with_guest(TestGuest::new(vec![]), GuestState::Waiting, |path| {
        let error = unfit(HandoffSource::attach(path).err().unwrap());
        assert!(error.contains("waits for a guest"), "{error}");
    });
    let error = unfit(HandoffSource::attach(Path::new("/nowhere/at/all")).err().unwrap());
    assert!(error.contains("no guest listens there"), "{error}");
}

#[test]
fn a_state_is_loaded_once_and_completely() {
    let state = vec![7; 3 << 20];
    let (last, calls) = with_guest(TestGuest::new(state.clone()), GuestState::Waiting, |path| {
        let mut guest = HandoffDestination::attach(path).unwrap();
        let cut = vmm(guest.load_state(&mut &state[..1000]).unwrap_err());
        assert!(cut.contains("load-state failed there"), "{cut}");
        // It reads as far as it knows, and would not notice what comes behind; the byte counts do.
        guest.load_state(&mut state.as_slice()).unwrap();
        let again = vmm(guest.load_state(&mut state.as_slice()).unwrap_err());
        assert!(again.contains("is loaded"), "{again}");
        drop(guest);
        let late = unfit(HandoffDestination::attach(path).err().unwrap());
        assert!(late.contains("holds a guest already"), "{late}");
        Connection::open(path).unwrap().call::<Value>("start", Duration::from_secs(60)).unwrap();
    });
    assert_eq!((last, calls), (GuestState::Running, vec!["load", "load", "start"]));
}

#[test]
fn more_state_than_the_guest_takes_is_an_error() {
    with_guest(TestGuest::new(vec![7; 1000]), GuestState::Waiting, |path| {
        let mut guest = HandoffDestination::attach(path).unwrap();
        let error = vmm(guest.load_state(&mut [7; 1001].as_slice()).unwrap_err());
        assert!(error.contains("1000 bytes of device state, but 1001 were sent"), "{error}");
    });
}

#[test]
fn a_state_that_breaks_off_at_its_source_is_not_loaded() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::ConnectionReset.into())
        }
    }
    let (last, _) = with_guest(TestGuest::new(vec![7; 1000]), GuestState::Waiting, |path| {
        let mut guest = HandoffDestination::attach(path).unwrap();
        let error = vmm(guest.load_state(&mut [7; 10].chain(Broken)).unwrap_err());
        assert!(error.contains("ended early"), "{error}");
    });
    assert_eq!(last, GuestState::Waiting);
}

#[test]
fn a_guest_is_resumed_although_nobody_reads_the_state_that_it_writes() {
    // More than fits into the socket: the guest waits in the middle of it.
    let (last, calls) = with_guest(TestGuest::new(vec![7; 8 << 20]), GuestState::Running, |path| {
        let mut guest = HandoffSource::attach(path).unwrap();
        guest.stop().unwrap();
        let mut state = guest.save_state().unwrap();
        state.read_exact(&mut [0; 1000]).unwrap();
        guest.resume(true).unwrap();
        assert!(guest.is_running().unwrap());
        // And the state can be saved after all, to its end.
        guest.stop().unwrap();
        let mut all = Vec::new();
        guest.save_state().unwrap().read_to_end(&mut all).unwrap();
        guest.state_saved().unwrap();
        assert_eq!(all, vec![7; 8 << 20]);
        guest.resume(false).unwrap();
    });
    assert_eq!((last, calls), (GuestState::Stopped, vec!["stop", "save", "resume", "stop", "save"]));
}

#[test]
fn a_state_that_was_not_read_to_its_end_is_not_called_saved() {
    with_guest(TestGuest::new(vec![7; 1000]), GuestState::Stopped, |path| {
        let mut guest = HandoffSource::attach(path).unwrap();
        assert!(vmm(guest.state_saved().unwrap_err()).contains("not asked for"));
        guest.save_state().unwrap().read_exact(&mut [0; 999]).unwrap();
        let error = vmm(guest.state_saved().unwrap_err());
        assert!(error.contains("announced 1000 bytes of device state, but 999 came"), "{error}");
    });
}

#[test]
fn a_guest_is_resumed_although_the_connection_broke() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guest.sock");
    let socket = GuestSocket::listen(&path).unwrap();
    let mut guest = TestGuest::new(vec![]);
    let (mut state, mut source) = (GuestState::Running, None);
    // The first server ends, and with it the connection; the second one knows nothing of it.
    for attempt in 0..2 {
        let shutdown = Shutdown::new().unwrap();
        state = thread::scope(|scope| {
            let server = scope.spawn(|| serve(&socket, &mut guest, state, &shutdown, None));
            match attempt {
                0 => source.insert(HandoffSource::attach(&path).unwrap()).stop().map(drop).unwrap(),
                _ => source.as_mut().unwrap().resume(true).unwrap(),
            }
            shutdown.request();
            server.join().unwrap().unwrap()
        });
    }
    assert_eq!((state, guest.calls), (GuestState::Running, vec!["stop", "resume"]));
}

/// A peer that says what it wants.
fn with_liar(answers: Vec<(Value, Vec<OwnedFd>)>, client: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guest.sock");
    let listener = UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut lines = LineSocket::new(listener.accept().unwrap().0);
            for (answer, fds) in answers {
                lines.receive(later()).unwrap();
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                lines.send(answer.to_string().as_bytes(), &fds, later()).unwrap();
            }
            // Until the client goes.
            let _ = lines.receive(later());
        });
        client(&path);
    });
}

fn description() -> Value {
    let region = json!({"name": "ram", "bytes": BYTES, "file_offset": 0, "address": 1 << 30});
    let (running, waiting) = (false, true);
    json!({"version": 1, "machine": "m", "running": running, "waiting": waiting, "pid": 1, "regions": [region]})
}

fn file(bytes: u64) -> OwnedFd {
    let file = memfd_create("liar", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

#[test]
fn a_guest_that_lies_is_refused() {
    let described = |fds| vec![(json!({"id": 1, "ok": description()}), fds)];
    let cases = [
        (described(vec![]), "0 file descriptors came with its 1 regions"),
        (described(vec![file(BYTES), file(BYTES)]), "2 file descriptors came with its 1 regions"),
        (described(vec![file(BYTES / 2)]), "its file has 524288"),
        (vec![(json!({"id": 1, "ok": {"version": 1}}), vec![])], "can't understand"),
        (vec![(json!({"id": 2, "ok": description()}), vec![file(BYTES)])], "it answered request 2"),
        (vec![(json!({"id": 1, "error": "I \u{7} won't"}), vec![])], "describe failed there: I   won't"),
        (vec![(json!("hello"), vec![])], "it sent something other than an answer"),
    ];
    for (answers, expected) in cases {
        with_liar(answers, |path| {
            let error = vmm(HandoffDestination::attach(path).err().unwrap());
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        });
    }
}

#[test]
fn what_comes_instead_of_a_userfaultfd_is_not_used() {
    for (fds, expected) in [
        (vec![], "no userfaultfd came"),
        (vec![file(1)], "is not a userfaultfd"),
        (vec![file(1), file(1)], "2 file descriptors came instead"),
    ] {
        with_liar(vec![(json!({"id": 1, "ok": {}}), fds)], |path| {
            let error = vmm(Connection::open(path).unwrap().userfaultfd("track").unwrap_err());
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        });
    }
}

#[test]
fn an_answer_that_comes_too_late_is_dropped() {
    let late = "{\"id\":1,\"ok\":{}}\n{\"id\":2,\"error\":\"second\"}";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("guest.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut connection = Connection::open(&path).unwrap();
    let mut peer = LineSocket::new(listener.accept().unwrap().0);
    let first = vmm(connection.call::<Value>("stop", Duration::ZERO).unwrap_err());
    assert!(first.contains("did not answer in time"), "{first}");
    assert!(!connection.is_broken());
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..2).for_each(|_| drop(peer.receive(later()).unwrap()));
            peer.send(late.as_bytes(), &[], later()).unwrap();
        });
        let second = vmm(connection.call::<Value>("resume", Duration::from_secs(60)).unwrap_err());
        assert!(second.contains("resume failed there: second"), "{second}");
    });
}
