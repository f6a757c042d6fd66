//! The end of a move: what is still sent when the guest stands, what the other end may say or leave unsaid then, and
//! the figures of all of it.
#![allow(clippy::unwrap_used)]
use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::{self, Op, Scripted, Waiting, contents, errors::cause, run, wait_until};
use transship_engine::{
    Error, Listener, MoveOptions, MoveTerms, Outcome, Progress, Report, Rule, Status, Uri, guest::SourceGuest,
    move_guest, receive_guest,
};
use transship_wire::{FRAME_BYTES, Frame, Message, PACKET_BYTES, PREAMBLE_BYTES, Packet, Refusal};

const PAGES: [u64; 2] = [300, 1000];

/// Every page has content, and there are two rounds while it runs.
fn guest() -> Scripted {
    let fill = |byte| Op::FillRun { region: 1, first: 100, count: 300, byte };
    let source = Scripted::new(&PAGES, vec![vec![fill(3)], vec![fill(4)]]);
    for region in 0..2 {
        let op = Op::FillRun { region, first: 0, count: 1000, byte: 7 };
        common::apply(&source.memory, &op, &mut source.script.lock().unwrap().history);
    }
    source
}

fn patient() -> MoveOptions {
    let terms = MoveTerms { downtime: Duration::from_nanos(1), max_rounds: 1000, ..MoveTerms::default() };
    MoveOptions { verify: true, terms, ..MoveOptions::default() }
}

/// A device that is not at rest when the guest stands.
#[test]
fn what_is_written_when_the_state_is_saved_arrives_and_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let late = vec![
        Op::Fill { region: 1, page: 999, byte: 0x99 },
        Op::FillRun { region: 0, first: 126, count: 4, byte: 0x98 },
        Op::Fill { region: 1, page: 5, byte: 0 },
    ];
    for (late, count) in [(vec![], 0), (late, 6)] {
        let mut source = guest();
        source.script.lock().unwrap().late = late;
        let mut destination = Waiting::new(&PAGES);
        let ended = run(&mut source, &mut destination, &patient(), folder.path());
        ended.source.unwrap();
        ended.destination.unwrap();
        assert_eq!(ended.report.late_pages, count);
        assert!(contents(&source.memory) == contents(&destination.memory));
        assert_eq!(ended.report.verified, Some(true));
    }
}

/// Moves through a hall that holds the pages back for a while when the first round has begun. How long all of it took.
fn slowly(source: &mut Scripted, takes: Duration, progress: &Arc<Progress>) -> (Report, f64) {
    let folder = tempfile::tempdir().unwrap();
    let (hall, there) = (folder.path().join("hall"), folder.path().join("there"));
    let listener = Listener::bind(&Uri::Unix(there.clone())).unwrap();
    let doors = UnixListener::bind(&hall).unwrap();
    let options = MoveOptions { channels: 1, ..patient() };
    let (mut report, mut destination) = (Report::default(), Waiting::new(&PAGES));
    let begin = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            receive_guest(&mut destination, listener, None, &Progress::new(), &mut Report::default()).unwrap()
        });
        scope.spawn(|| {
            // The first one is the control connection.
            for held in [false, true] {
                let (near, far) = (doors.accept().unwrap().0, UnixStream::connect(&there).unwrap());
                let (back, forth) = ((far.try_clone().unwrap(), near.try_clone().unwrap()), (near, far));
                scope.spawn(|| pass(back));
                scope.spawn(move || {
                    let (mut from, mut to) = forth;
                    if held {
                        io::copy(&mut (&mut from).take(PREAMBLE_BYTES as u64), &mut to).unwrap();
                        wait_until("the first round", || progress.round.load(Relaxed) > 0);
                        thread::sleep(takes);
                    }
                    pass((from, to));
                });
            }
        });
        move_guest(source, None, None, &Uri::Unix(hall.clone()), &options, progress, &mut report).unwrap();
    });
    (report, begin.elapsed().as_secs_f64() * 1e3)
}

fn pass((mut from, mut to): (UnixStream, UnixStream)) {
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(std::net::Shutdown::Write);
}

#[test]
fn the_times_of_a_move_are_parts_of_it() {
    let takes = Duration::from_millis(20);
    let mut source = guest();
    source.script.lock().unwrap().takes = takes;
    let (report, all_ms) = slowly(&mut source, takes, &Progress::new());
    // Tracking, the first round and saving the state take at least so long each.
    for ms in [report.setup_ms, report.rounds[0].ms, report.downtime_ms] {
        assert!(ms >= 20.0, "{report:?}");
    }
    let last = report.rounds.len() - 1;
    let rounds: f64 = report.rounds[..last].iter().map(|round| round.ms).sum();
    assert!(report.setup_ms + rounds + report.downtime_ms <= report.total_ms, "{report:?}");
    assert!(report.rounds[last].ms <= report.downtime_ms, "{report:?}");
    assert!(report.total_ms <= all_ms, "{report:?}");
}

#[test]
fn rounds_are_numbered_and_all_that_was_sent_is_counted() {
    let mut source = guest();
    source.script.lock().unwrap().late = vec![Op::Fill { region: 0, page: 1, byte: 1 }];
    let progress = Progress::new();
    let (report, _) = slowly(&mut source, Duration::ZERO, &progress);
    // What the guest held, what it wrote twice, the last round without a page, and what its devices wrote.
    let numbers: Vec<_> = report.rounds.iter().map(|round| round.number).collect();
    assert_eq!(numbers, (1..=report.rounds.len() as u32).collect::<Vec<_>>(), "{report:?}");
    assert_eq!(progress.round.load(Relaxed), report.rounds.len() as u32);
    assert_eq!(report.late_pages, 1);
    assert_eq!(report.pages.normal, 1300 + 2 * 300 + 1, "{report:?}");
    let pages: u64 = report.rounds.iter().map(|round| round.bytes).sum();
    assert_eq!(report.bytes.wire, pages + source.state.len() as u64);
    assert!(report.cpu.channels > 0.0, "{report:?}");
    let throughput = report.bytes.wire as f64 / (report.total_ms / 1e3);
    assert!((report.throughput / throughput - 1.0).abs() < 1e-6, "{report:?}");
}

/// A destination of a guest without a page, by hand.
struct Destination {
    control: UnixStream,
    data: UnixStream,
    next_id: u64,
}

impl Destination {
    fn accept(listener: &UnixListener) -> Self {
        let mut control = listener.accept().unwrap().0;
        control.read_exact(&mut [0; PREAMBLE_BYTES]).unwrap();
        control.write_all(&Message::Welcome.encode(1)).unwrap();
        let mut data = listener.accept().unwrap().0;
        data.read_exact(&mut [0; PREAMBLE_BYTES]).unwrap();
        let mut destination = Self { control, data, next_id: 2 };
        assert!(matches!(destination.hear(), Some(Message::Hello { .. })));
        destination
    }

    fn hear(&mut self) -> Option<Message> {
        let mut head = [0; FRAME_BYTES];
        self.control.read_exact(&mut head).ok()?;
        let frame = Frame::decode(&head).unwrap();
        let mut payload = vec![0; frame.payload as usize];
        self.control.read_exact(&mut payload).ok()?;
        Some(Message::decode(&frame, &payload).unwrap())
    }

    /// All at once.
    fn say(&mut self, messages: &[Message]) {
        let bytes: Vec<u8> = (self.next_id..).zip(messages).flat_map(|(id, message)| message.encode(id)).collect();
        self.next_id += messages.len() as u64;
        self.control.write_all(&bytes).unwrap();
    }

    /// Has all of it but the word to go.
    fn load(&mut self) -> Vec<u8> {
        for round in 0..2 {
            let mut packet = [0; PACKET_BYTES];
            self.data.read_exact(&mut packet).unwrap();
            assert_eq!(Packet::decode(&packet).unwrap(), Packet::RoundEnd { round, packets: 0 });
            self.say(&[Message::RoundDone { round, pages: 0, zero: 0 }]);
        }
        let mut state = Vec::new();
        loop {
            match self.hear().unwrap() {
                Message::State { bytes } => state.extend(bytes),
                Message::StateEnd { .. } => return state,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A move to one that has loaded, and then says these. Whether it was told to go.
fn to_one_that_says(messages: &[Message]) -> (Error, Scripted, bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut source = Scripted::new(&PAGES, vec![]);
    let told = AtomicBool::new(false);
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let mut there = Destination::accept(&listener);
            let state = there.load();
            assert_eq!(state.len(), 4 * 700_000);
            there.say(messages);
            told.store(there.hear() == Some(Message::Go { run: true }), Relaxed);
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
    (error, source, told.into_inner())
}

fn refuses() -> Message {
    Message::Abort(Refusal { reason: "the disk is gone".into() })
}

#[test]
fn who_takes_its_word_back_is_not_told_to_go() {
    // The second word may come too late to be heard.
    for _ in 0..1000 {
        let (error, source, told) = to_one_that_says(&[Message::Loaded, refuses()]);
        let resumed = source.script.lock().unwrap().resumed;
        if error.outcome() == Outcome::NothingLost {
            assert!(matches!(error, Error::Refused(_)) && !told, "{error}");
            assert_eq!(resumed, Some(true));
            return;
        }
        assert!(told && resumed.is_none(), "{error}");
    }
    panic!("it was never heard");
}

#[test]
fn what_is_said_instead_of_the_answer_to_go_needs_a_person() {
    for (instead, rule) in
        [(vec![], Some(Rule::Stays)), (vec![refuses()], None), (vec![Message::Loaded], Some(Rule::Turn))]
    {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut source = Scripted::new(&PAGES, vec![]);
        let mut report = Report::default();
        let error = thread::scope(|scope| {
            scope.spawn(|| {
                let mut there = Destination::accept(&listener);
                there.load();
                there.say(&[Message::Loaded]);
                assert_eq!(there.hear(), Some(Message::Go { run: true }));
                there.say(&instead);
            });
            let options = MoveOptions { channels: 1, ..MoveOptions::default() };
            let to = Uri::Unix(path.clone());
            move_guest(&mut source, None, None, &to, &options, &Progress::new(), &mut report).unwrap_err()
        });
        assert_eq!((error.outcome(), report.status), (Outcome::NeedsPerson, Status::Unknown), "{error}");
        let cause = cause(&error).expect("it is known what went wrong");
        assert!(cause.rule() == rule && (rule.is_some() || matches!(cause, Error::Refused(_))), "{cause}");
        // What a person needs.
        for words in [&cause.to_string(), "the guest was handed over", &source.resume_hint()] {
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(source.script.lock().unwrap().resumed, None, "it may run there");
    }
}

#[test]
fn a_guest_that_can_not_be_resumed_needs_a_person() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = Scripted { broken_state: true, ..Scripted::new(&PAGES, vec![]) };
    source.script.lock().unwrap().stands_for_good = true;
    let ended = run(&mut source, &mut Waiting::new(&PAGES), &patient(), folder.path());
    let error = ended.source.unwrap_err();
    assert_eq!((error.outcome(), ended.report.status), (Outcome::NeedsPerson, Status::Unknown), "{error}");
    for words in ["can't be saved", "the disk is locked", "resume it with: resume it"] {
        assert!(error.to_string().contains(words), "{error}");
    }
}
