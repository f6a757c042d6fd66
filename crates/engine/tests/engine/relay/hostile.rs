//! Who speaks otherwise than the rules have it, at a QEMU's address or at the link.
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixListener,
    sync::{Arc, atomic::AtomicU64},
    thread,
};

use transship_engine::{
    Actor, Error, Listener, Outcome, Progress, RelayOptions, Report, Rule, Uri, relay_from_qemu, relay_to_qemu,
};
use transship_wire::{
    Preamble, Role, SessionId,
    qemu::{Command, Configuration, Name, StreamWriter},
    relay,
    relay::{Content, MAX_BYTES, MESSAGE_BYTES, Message, Packet, TheEnd},
};

use super::{
    qemus::{PATIENCE, Random, is_closed, main_stream, read_exactly, say},
    relays::{Relays, options},
};

/// What can't be relayed safely is refused before the waiting QEMU is spoken to.
#[test]
fn a_source_without_return_path_is_refused_unless_the_user_says_so() {
    let (bytes, _) = main_stream(&mut Random(3), 10, false);
    let mut postcopy = StreamWriter::new(0, 1);
    postcopy.header().configuration(&Configuration::new(Name::new("pc-q35-10.0").unwrap()));
    postcopy.command(&Command::OpenReturnPath).command(&Command::PostcopyAdvise(None)).raw(&[4; 100]);
    for (bytes, part) in [
        (bytes.clone(), "migrate_set_capability return-path on"),
        (postcopy.take_bytes(), "postcopy"),
        (b"QEVM but nothing that is known".to_vec(), "--without-return-path"),
    ] {
        let relays = Relays::start(options("none"), u64::MAX);
        let main = relays.connect();
        say(&main, &bytes, Random(2), &AtomicU64::new(0));
        assert!(is_closed(&main));
        relays.qemu.set_nonblocking(true).unwrap();
        let qemu = relays.qemu.try_clone().unwrap();
        let (near, far) = relays.end();
        let error = near.result.unwrap_err();
        assert!(error.outcome() == Outcome::NothingLost && error.to_string().contains(part), "{error}");
        assert!(far.result.unwrap_err().to_string().contains(part), "the other relay says why");
        assert!(qemu.accept().is_err(), "the waiting QEMU can still be used");
    }
    let relays = Relays::start(RelayOptions { without_return_path: true, ..options("none") }, u64::MAX);
    let main = relays.connect();
    assert!(say(&main, &bytes, Random(2), &AtomicU64::new(0)));
    drop(main); // all is written: to this source that is success
    let (there, _) = relays.accept();
    assert_eq!(read_exactly(&there, bytes.len() - 4), bytes[4..]);
    drop(there);
    let (near, far) = relays.end();
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
}

/// A link as somebody else may speak it.
struct Intruder {
    control: TcpStream,
    data: TcpStream,
}

impl Intruder {
    fn new(to: &Uri) -> Self {
        let connect = |role| {
            let mut stream = dial(to);
            stream.write_all(&relay::Greeting(Preamble { session: SessionId([1; 16]), role }).encode()).unwrap();
            stream
        };
        let mut control = connect(Role::Control);
        control.write_all(&Message::Hello { channels: 1 }.encode()).unwrap();
        assert_eq!(hear(&mut control), Some(Message::Welcome));
        Self { control, data: connect(Role::Data(0)) }
    }

    fn open(&mut self) {
        let open = Message::Open { connection: 0, first: b"QEVM".to_vec() };
        self.control.write_all(&open.encode()).unwrap();
        assert_eq!(hear(&mut self.control), Some(Message::Credit { connection: 0, amount: 16 << 20 }));
    }

    fn raw(&mut self, connection: u16, sequence: u64, bytes: &[u8]) {
        let content = Content::Raw { bytes: bytes.len() as u32, gives_end: false };
        self.packet(&Packet { connection, sequence, content }, bytes);
    }

    /// The other side may have closed it by now.
    fn packet(&mut self, packet: &Packet, payload: &[u8]) {
        let _ = self.data.write_all(&packet.encode()).and_then(|()| self.data.write_all(payload));
    }
}

fn dial(to: &Uri) -> TcpStream {
    let Uri::Tcp { port, .. } = *to else { panic!("{to}") };
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn hear(from: &mut TcpStream) -> Option<Message> {
    let mut header = [0; MESSAGE_BYTES];
    from.read_exact(&mut header).ok()?;
    let mut payload = vec![0; Message::payload_bytes(&header).unwrap()];
    from.read_exact(&mut payload).ok()?;
    Some(Message::decode(&header, &payload).unwrap())
}

/// What a peer on the link says is not believed. Each of these ends the session with a reason, and breaks what it had
/// opened.
#[test]
fn a_hostile_relay_is_refused() {
    type Attack = fn(&mut Intruder);
    let attacks: [(Option<Rule>, &str, Attack); 10] = [
        (Some(Rule::Bounds), "connection 7, which is not open", |link| link.raw(7, 0, b"bytes")),
        (Some(Rule::Order), "packet 0 of connection 0 twice", |link| {
            link.raw(0, 0, b"bytes");
            link.raw(0, 0, b"bytes");
        }),
        (Some(Rule::Bounds), "beyond its window", |link| {
            // Nothing is at 0, so nothing can be written.
            (1..40).for_each(|sequence| link.raw(0, sequence, &vec![0; MAX_BYTES]));
        }),
        (Some(Rule::Bounds), "beyond its window", |link| (1..70_000).for_each(|sequence| link.raw(0, sequence, b"b"))),
        (Some(Rule::Encoding), "can't be decoded", |link| {
            let content = Content::Encoded { bytes: 4096, gives_end: false, method: 2, payload: 9 };
            link.packet(&Packet { connection: 0, sequence: 0, content }, b"no frame!");
        }),
        (Some(Rule::Encoding), "method 99 is not known", |link| {
            let content = Content::Encoded { bytes: 4096, gives_end: false, method: 99, payload: 9 };
            link.packet(&Packet { connection: 0, sequence: 0, content }, b"no frame!");
        }),
        (None, "packet magic", |link| drop(link.data.write_all(&[0xa5; 64]))),
        (Some(Rule::Turn), "out of turn", |link| {
            let open = Message::Open { connection: 2, first: b"QEVM".to_vec() };
            link.control.write_all(&open.encode()).unwrap();
        }),
        (Some(Rule::Bounds), "returned more credit on connection 0 than was used", |link| {
            for amount in [1000, 1] {
                link.control.write_all(&Message::Credit { connection: 0, amount }.encode()).unwrap();
            }
        }),
        (Some(Rule::Turn), "not allowed here", |link| link.control.write_all(&Message::Welcome.encode()).unwrap()),
    ];
    for (rule, part, attack) in attacks {
        let folder = tempfile::tempdir().unwrap();
        let qemu_uri = folder.path().join("qemu");
        let qemu = UnixListener::bind(&qemu_uri).unwrap();
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let uri = listener.uri().clone();
        let far = thread::spawn(move || {
            relay_to_qemu(listener, &Uri::Unix(qemu_uri), &Progress::new(), &mut Report::default())
        });
        let mut link = Intruder::new(&uri);
        link.open();
        let (there, _) = qemu.accept().unwrap();
        attack(&mut link);
        assert!(is_closed(&there), "{part}");
        let error = far.join().unwrap().unwrap_err();
        assert_eq!((error.outcome(), error.actor()), (Outcome::NothingLost, Actor::Peer), "{part}: {error}");
        assert_eq!(error.rule(), rule, "{part}: {error}");
        assert!(rule.is_some() || matches!(error, Error::Wire { .. }), "{error}");
        let told =
            std::iter::from_fn(|| hear(&mut link.control)).find(|message| matches!(message, Message::Abort { .. }));
        let Some(Message::Abort { end, refusal }) = told else { panic!("{part}: {told:?}") };
        assert!(end == TheEnd::Withheld && refusal.reason.contains(part), "the other relay is told: {refusal:?}");
    }
}

/// Strangers come and go, and the relay still serves.
#[test]
fn strangers_at_the_link_are_turned_away() {
    let folder = tempfile::tempdir().unwrap();
    let qemu_uri = folder.path().join("qemu");
    let _qemu = UnixListener::bind(&qemu_uri).unwrap();
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let uri = listener.uri().clone();
    let progress = Progress::new();
    let watched = Arc::clone(&progress);
    let far = thread::spawn(move || relay_to_qemu(listener, &Uri::Unix(qemu_uri), &watched, &mut Report::default()));
    let preamble = Preamble { session: SessionId([2; 16]), role: Role::Control };
    for bytes in [
        &[b'x'; 32][..],
        &preamble.encode(),
        b"QEVM\0\0\0\x03 and what a QEMU says then, in all of its length",
        b"short",
    ] {
        let mut stranger = dial(&uri);
        stranger.write_all(bytes).unwrap();
        let _ = stranger.shutdown(Shutdown::Write);
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
    }
    // Of another version.
    let mut other = dial(&uri);
    let mut greeting = relay::Greeting(preamble).encode();
    greeting[4] = 2;
    other.write_all(&greeting).unwrap();
    let Some(Message::Abort { refusal, .. }) = hear(&mut other) else { panic!("it is told why") };
    assert!(refusal.reason.contains("preamble version") && refusal.reason.contains("same transship"), "{refusal:?}");
    drop(Intruder::new(&uri));
    assert!(far.join().unwrap().is_err());
}

/// What listens there is no relay: the user is told what to start.
#[test]
fn a_relay_that_meets_none_says_what_to_type() {
    for answer in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let to: Uri = format!("tcp:127.0.0.1:{}", other.local_addr().unwrap().port()).parse().unwrap();
        let answering = thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.read_exact(&mut [0; 48]).unwrap();
            stream.write_all(answer).unwrap();
        });
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&Uri::Unix(folder.path().join("near"))).unwrap();
        let error =
            relay_from_qemu(&listener, &to, &options("none"), &Progress::new(), &mut Report::default()).unwrap_err();
        assert!(error.to_string().contains(&format!("transship relay --listen relay:{to}")), "{error}");
        answering.join().unwrap();
    }
}
