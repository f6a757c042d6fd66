//! Whoever probes a receiver that waits gets its numbers, and nothing else; whoever breaks the rules is hung up on. The
//! receiver waits on for its source.
#![allow(clippy::unwrap_used)]
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::Duration,
};

use transship_engine::{Error, Listener, MoveOptions, Progress, Report, Rule, Uri, move_guest, probe, receive_guest};
use transship_wire::{MAX_FILLING_BYTES, PROBE_BYTES, Preamble, Probe, Role, SessionId};

use crate::common::{Scripted, Waiting};

const PAGES: [u64; 1] = [300];

/// One that probes, and has been told to begin.
struct Prober {
    stream: UnixStream,
    most: u64,
}

fn hear(stream: &mut UnixStream) -> Option<Probe> {
    let mut record = [0; PROBE_BYTES];
    stream.read_exact(&mut record).ok()?;
    Some(Probe::decode(&record).unwrap())
}

fn call(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(&Preamble { session: SessionId([9; 16]), role: Role::Probe }.encode()).unwrap();
    stream
}

impl Prober {
    fn begin(path: &Path) -> Self {
        let mut stream = call(path);
        let Some(Probe::Ready(most)) = hear(&mut stream) else { panic!("it is not ready") };
        Self { stream, most }
    }

    /// Writes may fail: the other side may have hung up.
    fn fill(&mut self, bytes: u64) {
        let _ = self.stream.write_all(&Probe::Filling(bytes).encode());
        let _ = self.stream.write_all(&vec![7; bytes as usize]);
    }

    fn count(&mut self) -> Option<Probe> {
        let _ = self.stream.write_all(&Probe::Filling(0).encode());
        hear(&mut self.stream)
    }
}

/// A receiver that waits meanwhile, and that a guest then moves to.
fn before_a_move(meanwhile: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("move.sock");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let (mut source, mut waiting) = (Scripted::new(&PAGES, vec![]), Waiting::new(&PAGES));
    thread::scope(|scope| {
        let destination =
            scope.spawn(|| receive_guest(&mut waiting, listener, None, &Progress::new(), &mut Report::default()));
        meanwhile(&path);
        let to = Uri::Unix(path.clone());
        move_guest(&mut source, None, None, &to, &MoveOptions::default(), &Progress::new(), &mut Report::default())
            .unwrap();
        destination.join().unwrap().unwrap();
    });
    assert_eq!(waiting.started, Some(true));
}

#[test]
fn what_is_sent_is_counted() {
    before_a_move(|path| {
        let mut prober = Prober::begin(path);
        assert_eq!(prober.count(), Some(Probe::Count(0)));
        prober.fill(1000);
        prober.fill(MAX_FILLING_BYTES);
        assert_eq!(prober.count(), Some(Probe::Count(1000 + MAX_FILLING_BYTES)));
        let speed = probe(&Uri::Unix(path.to_owned()), None, 2, &Progress::new()).unwrap();
        assert!(speed.bytes > 0 && speed.bytes_per_s > 0.0 && speed.round_trip_ms > 0.0, "{speed:?}");
    });
}

#[test]
fn whoever_breaks_the_rules_is_hung_up_on() {
    before_a_move(|path| {
        let mut too_much_at_once = Probe::Filling(1).encode();
        too_much_at_once[8..16].copy_from_slice(&(MAX_FILLING_BYTES + 1).to_le_bytes());
        for words in [[0; PROBE_BYTES], too_much_at_once, Probe::Count(1).encode(), Probe::Ready(1).encode()] {
            let mut prober = Prober::begin(path);
            prober.stream.write_all(&words).unwrap();
            assert_eq!(prober.count(), None, "{words:?}");
        }
        let mut prober = Prober::begin(path);
        for _ in 0..prober.most / MAX_FILLING_BYTES {
            prober.fill(MAX_FILLING_BYTES);
        }
        assert_eq!(prober.count(), Some(Probe::Count(prober.most)));
        prober.fill(1);
        assert_eq!(prober.count(), None, "it takes no more");
        // One that breaks off in the middle is no matter at all.
        let mut prober = Prober::begin(path);
        prober.stream.write_all(&Probe::Filling(100).encode()).unwrap();
    });
}

#[test]
fn not_everybody_may_probe_at_the_same_time_nor_for_ever() {
    before_a_move(|path| {
        let silent: Vec<_> = (0..8).map(|_| Prober::begin(path)).collect();
        assert_eq!(hear(&mut call(path)), Some(Probe::Refused));
        let refused = probe(&Uri::Unix(path.to_owned()), None, 1, &Progress::new()).unwrap_err();
        assert!(matches!(&refused, Error::Refused(_)), "{refused}");
        drop(silent);
        // It needs a moment to notice that they are gone.
        let mut probers = 0;
        for _ in 0..10_000 {
            match hear(&mut call(path)) {
                Some(Probe::Ready(_)) => probers += 1,
                Some(Probe::Refused) => {}
                other => panic!("{other:?}"),
            }
            if probers == 248 {
                break;
            }
        }
        assert_eq!(probers, 248, "with those before, as many as it answers");
        assert_eq!(hear(&mut call(path)), Some(Probe::Refused));
    });
}

/// A receiver that does not know of probes hangs up.
#[test]
fn an_older_receiver_is_named_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("move.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| listener.accept().unwrap().0.read_exact(&mut [0; transship_wire::PREAMBLE_BYTES]));
        let error = probe(&Uri::Unix(path.clone()), None, 1, &Progress::new()).unwrap_err();
        assert_eq!(error.rule(), Some(Rule::Abilities), "{error}");
    });
}
