//! Peers that break the protocol get an error that says which rule they broke, and nothing of what they want.
#![allow(clippy::unwrap_used)]
use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use crate::common::{
    self, Scripted, Waiting, describe,
    errors::{field, place},
};
use rustix::{
    cmsg_space,
    fs::{MemfdFlags, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use transship_engine::{
    Actor, Error, Listener, MoveOptions, Progress, Report, Rule, Setting, Uri, move_guest, receive_guest,
};
use transship_memory::make_slots;
use transship_wire::{FRAME_BYTES, Frame, Message, Packet, Preamble, Refusal, Role, SessionId};

const PAGES: [u64; 1] = [300];
const SESSION: SessionId = SessionId([7; 16]);

/// A source that says what a test wants.
struct Peer {
    control: UnixStream,
    data: Vec<UnixStream>,
    path: PathBuf,
    next_id: u64,
}

fn connect(path: &Path, session: SessionId, role: Role) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(&Preamble { session, role }.encode()).unwrap();
    stream
}

impl Peer {
    fn connect(path: &Path) -> Self {
        Self { control: connect(path, SESSION, Role::Control), data: Vec::new(), path: path.into(), next_id: 1 }
    }

    /// Writes may fail: the other side may have hung up, which is what the tests are about.
    fn say(&mut self, message: &Message) {
        let _ = self.control.write_all(&message.encode(self.next_id));
        self.next_id += 1;
    }

    fn hear(&mut self) -> Option<Message> {
        let mut head = [0; FRAME_BYTES];
        self.control.read_exact(&mut head).ok()?;
        let frame = Frame::decode(&head).unwrap();
        let mut payload = vec![0; frame.payload as usize];
        self.control.read_exact(&mut payload).ok()?;
        Some(Message::decode(&frame, &payload).unwrap())
    }

    /// As a good source does it.
    fn open(&mut self, waiting: &Waiting, channels: u8, lends: bool) {
        let guest = describe(&waiting.memory);
        self.say(&Message::Hello { channels, verify: false, post_copy: false, lends, guest });
        assert_eq!(self.hear(), Some(if lends { Message::Lend } else { Message::Welcome }));
        self.data = (0..channels).map(|n| connect(&self.path, SESSION, Role::Data(n))).collect();
    }

    fn send(&mut self, channel: usize, packet: Packet, payload: usize) {
        let _ = self.data[channel]
            .write_all(&packet.encode())
            .and_then(|()| self.data[channel].write_all(&vec![1; payload]));
    }
}

/// Runs a destination with some channels against `peer` and gives the destination's error.
fn against(channels: u8, peer: impl FnOnce(&mut Peer)) -> (Error, Waiting) {
    against_who(channels, false, peer)
}

/// The same, with one that would lend its memory.
fn against_lender(peer: impl FnOnce(&mut Peer)) -> Error {
    against_who(1, true, peer).0
}

fn against_who(channels: u8, lends: bool, peer: impl FnOnce(&mut Peer)) -> (Error, Waiting) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sock");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let mut waiting = Waiting::new(&PAGES);
    let described = Waiting { memory: waiting.memory.clone(), ..Waiting::new(&PAGES) };
    let result = thread::scope(|scope| {
        let destination =
            scope.spawn(|| receive_guest(&mut waiting, listener, None, &Progress::new(), &mut Report::default()));
        let mut attacker = Peer::connect(&path);
        attacker.open(&described, channels, lends);
        peer(&mut attacker);
        let result = destination.join().unwrap();
        drop(attacker);
        result
    });
    assert_eq!(waiting.started, None, "it must not run");
    let error = result.unwrap_err();
    assert_eq!(error.actor(), Actor::Peer, "{error}");
    (error, waiting)
}

fn pages(round: u32, region: u16, first: u64, present: u128) -> Packet {
    Packet::Pages { round, region, first, present, zero: 0 }
}

const END: Packet = Packet::RoundEnd { round: 0, packets: 0 };

#[test]
fn pages_that_the_guest_does_not_have_are_refused() {
    let cases = [
        pages(0, 1, 0, 1),
        pages(0, 0, 256, 1 << 44),
        pages(0, 0, 384, 1),
        Packet::Hole { round: 0, region: 0, first: 299, count: 2 },
        Packet::Pages { round: 0, region: 0, first: 256, present: 0, zero: 1 << 100 },
    ];
    for packet in cases {
        let (error, _) = against(1, |peer| peer.send(0, packet, packet.payload_bytes()));
        assert_eq!(error.rule(), Some(Rule::Bounds), "{packet:?}: {error}");
    }
}

#[test]
fn rounds_come_in_order_and_wait_for_each_other() {
    let (error, _) = against(1, |peer| peer.send(0, pages(1, 0, 0, 1), 4096));
    assert_eq!(error.rule(), Some(Rule::Order), "{error}");
    // Channel 0 is done with round 0, channel 1 is not: round 1 must not begin.
    let (error, _) = against(2, |peer| {
        peer.send(0, END, 0);
        peer.send(0, pages(1, 0, 0, 1), 4096);
    });
    assert_eq!(error.rule(), Some(Rule::Order), "{error}");
    let (error, _) = against(1, |peer| peer.send(0, Packet::RoundEnd { round: 0, packets: 5 }, 0));
    assert_eq!(error.rule(), Some(Rule::Count), "{error}");
}

#[test]
fn bytes_that_are_no_packet_end_the_session_with_field_and_offset() {
    let (error, _) = against(1, |peer| peer.data[0].write_all(&[0x41; 64]).unwrap());
    assert_eq!(place(&error), Some(("packet magic", 0)), "{error}");
    let (error, _) = against(1, |peer| {
        let mut bytes = pages(0, 0, 0, 1).encode();
        bytes[63] = 1;
        peer.data[0].write_all(&bytes).unwrap();
    });
    assert_eq!(place(&error), Some(("packet reserved", 63)), "{error}");
}

/// With the files, each of which is for one region.
fn pass(peer: &Peer, files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
    sendmsg(&peer.data[0], &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).unwrap();
}

fn lent(offsets: &[Option<u64>]) -> Message {
    Message::Lent { offsets: offsets.to_vec(), slots: 0 }
}

const LENT: Packet = Packet::Lent { round: 0, region: 0, first: 0, wanted: 1, zero: 0, look: true };

#[test]
fn what_can_not_be_read_as_the_memory_is_not_borrowed() {
    let memory = common::memory(&PAGES);
    let (whole, _) = memory.regions()[0].lent().unwrap();
    let on_disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    on_disk.set_len(PAGES[0] * 4096).unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    type Case<'a> = (&'a [Option<u64>], &'a [BorrowedFd<'a>], Rule, &'a str);
    let cases: [Case<'_>; 7] = [
        (&[Some(0), Some(0)], &[whole, whole], Rule::Count, "lends 2 regions, but there are 1"),
        (&[Some(0), Some(0)], &[], Rule::Count, "lends 2 regions, but there are 1"),
        (&[Some(0)], &[whole, whole], Rule::Count, "passed 2"),
        (
            &[Some(4096)],
            &[whole],
            Rule::Bounds,
            "1228800 bytes from 4096 on were lent for it, of a file that has 1228800",
        ),
        (&[Some(u64::MAX - 4095)], &[whole], Rule::Bounds, "of a file that has"),
        (&[Some(0)], &[on_disk.as_fd()], Rule::Bounds, "no file in memory"),
        (&[Some(0)], &[socket.as_fd()], Rule::Bounds, "no file in memory"),
    ];
    for (offsets, files, rule, words) in cases {
        let error = against_lender(|peer| {
            peer.say(&lent(offsets));
            pass(peer, files);
        });
        assert_eq!(error.rule(), Some(rule), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    // It waits for the word on what is lent, and for the files.
    let error = against_lender(|peer| peer.control.shutdown(std::net::Shutdown::Both).unwrap());
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
    let error = against_lender(|peer| {
        peer.say(&lent(&[Some(0)]));
        peer.data.clear();
    });
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
}

#[test]
fn pages_that_were_not_lent_are_not_read() {
    let (error, _) = against(1, |peer| peer.send(0, LENT, 0));
    assert_eq!(error.rule(), Some(Rule::Bounds), "{error}");
    let lending = |offsets: &[Option<u64>], files: &[BorrowedFd<'_>], packet: Packet| {
        against_lender(|peer| {
            peer.say(&lent(offsets));
            pass(peer, files);
            peer.send(0, packet, 0);
        })
    };
    let error = lending(&[None], &[], LENT);
    assert!(error.to_string().contains("region 0, which was not lent"), "{error}");
    let memory = common::memory(&PAGES);
    let (whole, _) = memory.regions()[0].lent().unwrap();
    let beyond = Packet::Lent { round: 0, region: 0, first: 256, wanted: 1 << 44, zero: 0, look: false };
    assert_eq!(lending(&[Some(0)], &[whole], beyond).rule(), Some(Rule::Bounds));
    // Shorter than when it was lent.
    let short = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&short, PAGES[0] * 4096).unwrap();
    let error = against_lender(|peer| {
        peer.say(&lent(&[Some(0)]));
        pass(peer, &[short.as_fd()]);
        peer.send(0, LENT, 0);
        peer.send(0, Packet::RoundEnd { round: 0, packets: 1 }, 0);
        assert_eq!(peer.hear(), Some(Message::Borrowed { is_readable: true }));
        assert_eq!(peer.hear(), Some(Message::RoundDone { round: 0, pages: 0, zero: 1 }));
        ftruncate(&short, 0).unwrap();
        peer.send(0, Packet::Lent { round: 1, region: 0, first: 0, wanted: 1, zero: 0, look: true }, 0);
    });
    assert_eq!(error.rule(), Some(Rule::Bounds), "{error}");
    assert!(error.to_string().contains("cut the file short"), "{error}");
}

#[test]
fn slots_that_are_not_there_are_not_emptied() {
    let slot = |slot, first| Packet::Slot { round: 0, region: 0, first, present: 1, zero: 0, slot };
    let (error, _) = against(1, |peer| peer.send(0, slot(0, 0), 0));
    assert_eq!(error.rule(), Some(Rule::Bounds), "{error}");
    let (file, _rooms) = make_slots(2).unwrap();
    let lending = |slots, packet: Packet| {
        against_lender(|peer| {
            peer.say(&Message::Lent { offsets: vec![None], slots });
            pass(peer, &[file.as_fd()]);
            peer.send(0, packet, 0);
        })
    };
    let error = lending(2, slot(2, 0));
    assert!(error.to_string().contains("named slot 2, which there is not"), "{error}");
    assert_eq!(lending(2, slot(1, 384)).rule(), Some(Rule::Bounds));
    let error = lending(3, slot(2, 0));
    assert!(error.to_string().contains("their file is too short"), "{error}");
}

#[test]
fn encoded_packets_that_are_wrong_end_the_session() {
    let encoded =
        |method, bytes| Packet::Encoded { round: 0, region: 0, first: 0, present: 0xff, zero: 0, method, bytes };
    for (method, name) in [(1, "zlib"), (2, "zstd"), (3, "qatzip"), (4, "lz4")] {
        // Ones are no packet of any method.
        let (error, _) = against(1, |peer| peer.send(0, encoded(method, 100), 100));
        assert_eq!(error.rule(), Some(Rule::Encoding), "{error}");
        let words = format!("{name} packet");
        assert!(error.to_string().contains(&words), "the decoder of that method says it: {error}");
    }
    let (error, _) = against(1, |peer| peer.send(0, encoded(200, 100), 100));
    assert_eq!(error.rule(), Some(Rule::Encoding), "{error}");
    // A bomb: a frame that makes more pages than it announces.
    let mut bomb = Vec::new();
    let _ = "zstd:1".parse::<Setting>().unwrap().encoder().encode(&[7; 128 * 4096], &mut bomb);
    let (error, _) = against(1, |peer| {
        let _ = peer.data[0]
            .write_all(&encoded(2, bomb.len() as u32).encode())
            .and_then(|()| peer.data[0].write_all(&bomb));
    });
    assert_eq!(error.rule(), Some(Rule::Encoding), "{error}");
}

#[test]
fn a_connection_that_ends_in_the_middle_is_an_error() {
    let (error, _) = against(1, |peer| {
        peer.data[0].write_all(&pages(0, 0, 0, 3).encode()).unwrap();
        peer.data[0].write_all(&[0; 5000]).unwrap();
        peer.data.clear();
    });
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
    let (error, _) = against(1, |peer| peer.control.shutdown(std::net::Shutdown::Both).unwrap());
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
}

#[test]
fn messages_out_of_turn_are_named() {
    let state = || Message::State { bytes: vec![1] };
    let end = || Message::StateEnd { bytes: 0, digest: [0; 32] };
    let early: [(&str, Message); 6] = [
        ("DigestWanted", Message::DigestWanted),
        ("Go", Message::Go { run: true }),
        ("Welcome", Message::Welcome),
        ("State", state()),
        ("StateEnd", end()),
        ("Digest", Message::Digest { digest: [0; 32] }),
    ];
    for (name, message) in early {
        let (error, _) = against(1, |peer| peer.say(&message));
        assert_eq!(error.rule(), Some(Rule::Turn), "{error}");
        assert!(error.to_string().contains(&format!("sent {name} ")), "{error}");
    }
    // After the round a state may come, but not `Go` in its middle.
    let (error, _) = against(1, |peer| {
        peer.send(0, END, 0);
        assert!(matches!(peer.hear(), Some(Message::RoundDone { round: 0, pages: 0, zero: 0 })));
        peer.say(&state());
        peer.say(&Message::Go { run: true });
    });
    assert_eq!(error.rule(), Some(Rule::Turn), "{error}");
}

#[test]
fn a_device_state_of_another_length_or_hash_is_not_loaded() {
    let (error, waiting) = against(1, |peer| {
        peer.send(0, END, 0);
        peer.hear();
        peer.say(&Message::State { bytes: vec![1, 2, 3] });
        peer.say(&Message::StateEnd { bytes: 3, digest: [0; 32] });
    });
    assert_eq!(error.rule(), Some(Rule::Digest), "{error}");
    assert_eq!(waiting.state, [1, 2, 3], "what came was fed, its end was not");
}

#[test]
fn a_message_that_announces_too_much_is_refused_before_it_is_read() {
    let (error, _) = against(1, |peer| {
        let mut head = Frame { kind: 6, payload: 1, id: 2 }.encode();
        head[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        peer.control.write_all(&head).unwrap();
    });
    assert_eq!(field(&error), Some("frame payload"), "{error}");
    let (error, _) = against(1, |peer| {
        peer.next_id = 9;
        peer.say(&Message::Go { run: true });
    });
    assert_eq!(error.rule(), Some(Rule::Order), "{error}");
}

#[test]
fn strangers_are_turned_away_and_the_source_still_gets_in() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("move.sock");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    let mut waiting = Waiting::new(&PAGES);
    thread::scope(|scope| {
        let destination =
            scope.spawn(|| receive_guest(&mut waiting, listener, None, &Progress::new(), &mut Report::default()));
        for garbage in [&b""[..], b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", &[0xff; 32]] {
            let mut stranger = UnixStream::connect(&path).unwrap();
            let _ = stranger.write_all(garbage);
        }
        drop(connect(&path, SessionId([9; 16]), Role::Data(0)));
        let to = Uri::Unix(path.clone());
        move_guest(&mut source, None, None, &to, &MoveOptions::default(), &Progress::new(), &mut Report::default())
            .unwrap();
        destination.join().unwrap().unwrap();
    });
    assert_eq!(waiting.started, Some(true));
}

/// A destination that says what a test wants, and a real source.
fn source_against(peer: impl FnOnce(UnixStream, &UnixListener) + Send) -> (Error, Scripted) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let mut control = listener.accept().unwrap().0;
            control.read_exact(&mut [0; transship_wire::PREAMBLE_BYTES]).unwrap();
            peer(control, &listener);
        });
        let options = MoveOptions { channels: 1, ..MoveOptions::default() };
        move_guest(
            &mut source,
            None,
            None,
            &Uri::Unix(path.clone()),
            &options,
            &Progress::new(),
            &mut Report::default(),
        )
        .unwrap_err()
    });
    (error, source)
}

#[test]
fn a_source_does_not_believe_its_destination() {
    let answers = [
        (Message::Running, Some(Rule::Turn)),
        (Message::RoundDone { round: 0, pages: 0, zero: 0 }, Some(Rule::Turn)),
        (Message::Lend, Some(Rule::Turn)),
        (Message::Abort(Refusal { reason: "no room".into() }), None),
    ];
    for (answer, rule) in answers {
        let (error, source) = source_against(|mut control, _| {
            control.write_all(&answer.encode(1)).unwrap();
            let _ = control.read_to_end(&mut Vec::new());
        });
        assert_eq!(error.rule(), rule, "{error}");
        assert!(rule.is_some() || matches!(&error, Error::Refused(reason) if reason == "no room"), "{error}");
        assert!(!source.script.lock().unwrap().stopped);
    }
    // It counts otherwise than we do: pages may be missing there.
    let (error, source) = source_against(|mut control, listener| {
        control.write_all(&Message::Welcome.encode(1)).unwrap();
        let mut data = listener.accept().unwrap().0;
        control.write_all(&Message::RoundDone { round: 0, pages: 1, zero: 0 }.encode(2)).unwrap();
        let _ = data.read_to_end(&mut Vec::new());
        let _ = control.read_to_end(&mut Vec::new());
    });
    assert_eq!(error.rule(), Some(Rule::Count), "{error}");
    assert!(!source.script.lock().unwrap().stopped, "the guest was never stopped");
}

#[test]
fn a_destination_that_vanishes_is_noticed() {
    let (error, source) = source_against(|mut control, listener| {
        control.write_all(&Message::Welcome.encode(1)).unwrap();
        drop(listener.accept().unwrap());
    });
    assert!(!matches!(error, Error::Cancelled(_) | Error::Unknown(_)), "{error}");
    assert!(!source.script.lock().unwrap().stopped);
}
