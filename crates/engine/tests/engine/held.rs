//! A guest that is held ready: what it writes then, and a destination that does not wait as long.
#![allow(clippy::unwrap_used)]
use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    thread,
    time::Duration,
};

use crate::common::{Op, Scripted, Waiting, contents, wait_until};
use transship_engine::{
    Error, HoldOptions, Listener, MoveOptions, MoveTerms, Phase, Progress, ReleasedBy, Report, Uri, move_guest,
    receive_guest,
};
use transship_wire::{FRAME_BYTES, Frame, Message, PACKET_BYTES, PREAMBLE_BYTES, Packet, Refusal};

const PAGES: [u64; 2] = [300, 1000];

/// Nothing may be left when it is stopped.
fn held(hold: HoldOptions) -> MoveOptions {
    let downtime = Duration::from_nanos(1);
    let terms = MoveTerms { downtime, max_rounds: 1000, hold: Some(hold), ..MoveTerms::default() };
    MoveOptions { channels: 1, terms, ..MoveOptions::default() }
}

#[test]
fn what_it_writes_while_it_is_held_is_sent_before_it_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let uri = Uri::Unix(folder.path().join("move.sock"));
    let listener = Listener::bind(&uri).unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    let mut destination = Waiting::new(&PAGES);
    let (progress, mut report) = (Progress::new(), Report::default());
    let script = source.script.clone();
    thread::scope(|scope| {
        scope.spawn(|| {
            receive_guest(&mut destination, listener, None, &Progress::new(), &mut Report::default()).unwrap();
        });
        scope.spawn(|| {
            wait_until("the hold", || progress.phase() == Phase::Held);
            let list = vec![Op::FillRun { region: 1, first: 100, count: 300, byte: 3 }];
            script.lock().unwrap().meanwhile.push_back(list);
            progress.release();
        });
        move_guest(&mut source, None, None, &uri, &held(HoldOptions::default()), &progress, &mut report).unwrap();
    });
    assert!(contents(&source.memory) == contents(&destination.memory));
    assert_eq!(report.hold.unwrap().released_by, Some(ReleasedBy::Go));
    let written: Vec<_> = report.rounds.iter().map(|round| round.bytes / 4096).collect();
    assert_eq!(written, [0, 300, 0], "{report:?}");
}

fn hear(control: &mut UnixStream) -> Option<Message> {
    let mut head = [0; FRAME_BYTES];
    control.read_exact(&mut head).ok()?;
    let frame = Frame::decode(&head).unwrap();
    let mut payload = vec![0; frame.payload as usize];
    control.read_exact(&mut payload).ok()?;
    Some(Message::decode(&frame, &payload).unwrap())
}

/// It is heard at once, and not when the next round is sent.
#[test]
fn a_destination_that_gives_up_while_it_is_held_is_sent_nothing_more() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    let progress = Progress::new();
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let mut control = listener.accept().unwrap().0;
            control.read_exact(&mut [0; PREAMBLE_BYTES]).unwrap();
            control.write_all(&Message::Welcome.encode(1)).unwrap();
            let mut data = listener.accept().unwrap().0;
            data.read_exact(&mut [0; PREAMBLE_BYTES]).unwrap();
            assert!(matches!(hear(&mut control), Some(Message::Hello { .. })));
            let mut packet = [0; PACKET_BYTES];
            data.read_exact(&mut packet).unwrap();
            assert_eq!(Packet::decode(&packet).unwrap(), Packet::RoundEnd { round: 0, packets: 0 });
            control.write_all(&Message::RoundDone { round: 0, pages: 0, zero: 0 }.encode(2)).unwrap();
            wait_until("the hold", || progress.phase() == Phase::Held);
            let refusal = Refusal { reason: "the disk is gone".into() };
            control.write_all(&Message::Abort(refusal).encode(3)).unwrap();
            let mut more = Vec::new();
            data.read_to_end(&mut more).unwrap();
            assert!(more.is_empty(), "another round");
        });
        let options = held(HoldOptions::default());
        let to = Uri::Unix(path.clone());
        move_guest(&mut source, None, None, &to, &options, &progress, &mut Report::default()).unwrap_err()
    });
    assert!(matches!(&error, Error::Refused(why) if why == "the disk is gone"), "{error}");
    assert_eq!(source.script.lock().unwrap().resumed, None, "it was never stopped");
}
