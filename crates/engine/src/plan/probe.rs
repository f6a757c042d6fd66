//! Measures the way to a receiver that waits. It stays a receiver that waits: its token is as good as before.
use std::{
    io::{Read, Write},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;
use transship_secure::Caller;
use transship_wire::{MAX_FILLING_BYTES, PROBE_BYTES, Preamble, Probe, Role, SessionId};

use crate::{
    Cancelled, Error, Progress, Rule, Uri,
    transport::{Connection, random},
};

/// How long it is measured.
const TIME: Duration = Duration::from_secs(1);
/// How long the receiver may take for an answer; a slow link first carries what was sent before.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// How often the way there and back is measured.
const ECHOES: u32 = 5;
/// What is sent at a time.
const PIECE: u64 = 256 << 10;

const _: () = assert!(PIECE <= MAX_FILLING_BYTES);

/// What the way to a receiver carries.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LinkSpeed {
    /// On all connections together, encrypted if a move would be.
    pub bytes_per_s: f64,
    /// The shortest way there and back that was seen, in milliseconds.
    pub round_trip_ms: f64,
    /// What it took to find out.
    pub bytes: u64,
}

/// Measures for about a second, with so many connections at a time; 1 to 4 are enough for most links.
///
/// # Errors
/// The receiver can't be reached, does not trust us, refuses, or is of a version that can't be probed. Cancelled.
pub fn probe(to: &Uri, caller: Option<&Caller>, connections: u8, progress: &Progress) -> Result<LinkSpeed, Error> {
    let lines = (0..connections.max(1)).map(|_| Line::open(to, caller)).collect::<Result<Vec<_>, _>>()?;
    let barrier = Barrier::new(lines.len());
    let results: Vec<_> = thread::scope(|scope| {
        let measure = |mut line: Line| {
            let (barrier, progress) = (&barrier, progress);
            scope.spawn(move || {
                let echo = line.echo();
                // All wait here, also one that has failed.
                barrier.wait();
                echo.and_then(|echo| Ok((echo, line.fill(progress)?)))
            })
        };
        let threads: Vec<_> = lines.into_iter().map(measure).collect();
        let join =
            |thread: thread::ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
        threads.into_iter().map(join).collect()
    });
    if progress.is_cancelled() {
        return Err(Error::Cancelled(Cancelled::Look));
    }
    let results = results.into_iter().collect::<Result<Vec<(Duration, Filled)>, Error>>()?;
    let echo = results.iter().map(|(echo, _)| *echo).min().unwrap_or_default();
    let bytes: u64 = results.iter().map(|(_, filled)| filled.bytes).sum();
    let begin = results.iter().map(|(_, filled)| filled.begin).min();
    let end = results.iter().map(|(_, filled)| filled.end).max();
    // The last answer had to come back.
    let time = begin.zip(end).map_or(TIME, |(begin, end)| end.saturating_duration_since(begin + echo / 2));
    let bytes_per_s = bytes as f64 / time.as_secs_f64().max(1e-6);
    Ok(LinkSpeed { bytes_per_s, round_trip_ms: echo.as_secs_f64() * 1e3, bytes })
}

/// One connection.
struct Line {
    connection: Connection,
    peer: String,
    /// What it takes at most.
    most: u64,
}

struct Filled {
    bytes: u64,
    begin: Instant,
    end: Instant,
}

impl Line {
    fn open(to: &Uri, caller: Option<&Caller>) -> Result<Self, Error> {
        let mut connection = Connection::call(to, caller)?;
        let preamble = Preamble { session: SessionId(random()?), role: Role::Probe }.encode();
        let failed = |source| Error::Io { what: format!("greet {to}"), source };
        connection.greet(to, &preamble)?;
        connection.await_word(to)?;
        connection.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(failed)?;
        let mut line = Self { connection, peer: to.to_string(), most: 0 };
        match line.hear() {
            Ok(Probe::Ready(most)) => Ok(Self { most, ..line }),
            Ok(Probe::Refused) => {
                let why = "others probe that receiver just now, or it was probed too often; try again later, or give \
                           the speed of the link with --bandwidth";
                Err(Error::Refused(why.into()))
            }
            Ok(other) => Err(line.unexpected(other)),
            Err(Error::Io { .. }) => Err(Error::Breach {
                peer: line.peer,
                rule: Rule::Abilities,
                what: "does not answer a probe: it is an older transship, or a move has begun there. Give the speed \
                       of the link with --bandwidth instead of --to"
                    .into(),
            }),
            // What a receiver with a token says to those without is no record of a probe.
            Err(Error::Wire { .. }) if caller.is_none() => Err(Error::Refused(
                "a probe needs the token here, too: add --token with what that receiver has printed".into(),
            )),
            Err(error) => Err(error),
        }
    }

    fn hear(&mut self) -> Result<Probe, Error> {
        let mut record = [0; PROBE_BYTES];
        let peer = &self.peer;
        let failed = |source| Error::Io { what: format!("hear the answer to a probe from {peer}"), source };
        self.connection.read_exact(&mut record).map_err(failed)?;
        Probe::decode(&record).map_err(|source| Error::Wire { peer: self.peer.clone(), source })
    }

    fn say(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let peer = &self.peer;
        self.connection.write_all(bytes).map_err(|source| Error::Io { what: format!("probe {peer}"), source })
    }

    /// How many bytes have come there.
    fn count(&mut self) -> Result<u64, Error> {
        self.say(&Probe::Filling(0).encode())?;
        match self.hear()? {
            Probe::Count(bytes) => Ok(bytes),
            other => Err(self.unexpected(other)),
        }
    }

    /// The shortest way there and back.
    fn echo(&mut self) -> Result<Duration, Error> {
        let mut shortest = ANSWER_TIMEOUT;
        for _ in 0..ECHOES {
            let begin = Instant::now();
            self.count()?;
            shortest = shortest.min(begin.elapsed());
        }
        Ok(shortest)
    }

    /// Sends as much as goes, and waits until all of it is there.
    fn fill(&mut self, progress: &Progress) -> Result<Filled, Error> {
        let mut piece = Probe::Filling(PIECE).encode().to_vec();
        piece.extend(noise(PIECE));
        let (begin, mut sent) = (Instant::now(), 0);
        while begin.elapsed() < TIME && sent + PIECE <= self.most && !progress.is_cancelled() {
            self.say(&piece)?;
            sent += PIECE;
        }
        let bytes = self.count()?;
        if bytes != sent {
            let what = format!("has counted {bytes} bytes of a probe that sent {sent}");
            return Err(Error::breach(&self.peer, Rule::Count, what));
        }
        Ok(Filled { bytes, begin, end: Instant::now() })
    }

    fn unexpected(&self, probe: Probe) -> Error {
        Error::breach(&self.peer, Rule::Turn, format!("answered a probe with {probe:?}"))
    }
}

/// Something that no link makes shorter.
fn noise(bytes: u64) -> impl Iterator<Item = u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    (0..bytes).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
}
