//! Who connects: the main connection, told by its first bytes, and the multifd channels, by theirs. They come in any order, and whoever is silent
//! keeps nobody waiting.
use std::{
    collections::BTreeMap,
    io::{self, Read},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use transship_wire::qemu::{GREETING_BYTES, Greeting};

use crate::{Error, Listener, Progress, control::TICK, transport::Connection};

/// The first bytes of a stream.
const MAIN: [u8; 4] = *b"QEVM";
/// The first bytes of a channel.
const CHANNEL: [u8; 4] = 0x1122_3344_u32.to_be_bytes();
/// How long somebody who connects may be silent. A source's main connection is until all of its channels are there.
const SILENCE: Duration = Duration::from_secs(60);
/// How long the channels may take once the main stream has begun, if it is known how many there are.
const CHANNELS_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait for the first bytes of connections that may be channels.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Silent connections at most: all that a source can have, and some strangers.
const MOST_WAITING: usize = 300;

/// A connection and the address of who made it.
pub(in crate::qemu_peer) type Line = (Connection, String);

/// Everybody who has come and has no place yet.
pub(in crate::qemu_peer) struct Lobby<'a> {
    listener: &'a Listener,
    progress: &'a Progress,
    waiting: Vec<Waiting>,
    mains: Vec<Line>,
    channels: BTreeMap<u8, Line>,
    /// That of the first channel.
    uuid: Option<[u8; 16]>,
    /// How many channels there have to be, if that is known.
    expected: Option<u8>,
}

struct Waiting {
    line: Line,
    since: Instant,
}

enum Knock {
    Silent,
    Main,
    Channel(Greeting),
    Stranger(String),
}

impl<'a> Lobby<'a> {
    pub(in crate::qemu_peer) fn new(listener: &'a Listener, progress: &'a Progress) -> Self {
        let (waiting, mains, channels) = (Vec::new(), Vec::new(), BTreeMap::new());
        Self { listener, progress, waiting, mains, channels, uuid: None, expected: None }
    }

    /// Waits, for as long as it takes, for a source to begin its stream.
    pub(super) fn main(&mut self) -> Result<Line, Error> {
        loop {
            if let Some(main) = self.main_within(TICK)? {
                return Ok(main);
            }
        }
    }

    /// A main connection that has said its first bytes, if one does so within the time.
    pub(in crate::qemu_peer) fn main_within(&mut self, time: Duration) -> Result<Option<Line>, Error> {
        if self.mains.is_empty() {
            self.look(time)?;
        }
        Ok(self.mains.pop())
    }

    /// The channels that have come so far, or do within the time, with what they have said.
    pub(in crate::qemu_peer) fn channels_within(&mut self, time: Duration) -> Result<Vec<(Greeting, Line)>, Error> {
        self.look(time)?;
        let uuid = self.uuid.unwrap_or_default();
        Ok(std::mem::take(&mut self.channels)
            .into_iter()
            .map(|(channel, line)| (Greeting { uuid, channel }, line))
            .collect())
    }

    /// The channels, by their numbers. The source has said on the main connection that all of them are there. `count`: how many there have to
    /// be; none: as many as have come.
    pub(super) fn channels(&mut self, count: Option<u8>) -> Result<Vec<Line>, Error> {
        self.expected = count;
        let begin = Instant::now();
        let limit = if count.is_some() { CHANNELS_TIMEOUT } else { GREETING_TIMEOUT };
        loop {
            while self.look(Duration::ZERO)? {} // there may be more at the door
            let silent = begin.elapsed() < GREETING_TIMEOUT && !self.waiting.is_empty();
            let expected = count.map_or(self.channels.len(), usize::from);
            let missing = (0..=u8::MAX).take(expected).find(|number| !self.channels.contains_key(number));
            if let Some(what) = self.channels.keys().find_map(|&number| self.one_too_many(number)) {
                return Err(Error::Protocol { peer: self.listener.uri().to_string(), what });
            }
            match missing {
                None if !silent || count.is_some() => break,
                Some(missing) if begin.elapsed() > limit => {
                    let what = format!(
                        "has not opened channel {missing} within {} s; say by --channels what its multifd-channels is",
                        limit.as_secs()
                    );
                    return Err(Error::Protocol { peer: self.listener.uri().to_string(), what });
                }
                _ => drop(self.look(TICK)?),
            }
        }
        Ok(std::mem::take(&mut self.channels).into_values().collect())
    }

    /// To be asked at the end of the memory: nobody has read the pages of a channel that came after the others.
    ///
    /// # Errors
    /// There is one.
    pub(super) fn check_nobody_was_missed(&mut self) -> Result<(), Error> {
        while self.look(Duration::ZERO)? {}
        match self.channels.pop_first() {
            None => Ok(()),
            Some((number, (_, peer))) => {
                let late =
                    || format!("opened channel {number} too late; say by --channels what its multifd-channels is");
                Err(Error::Protocol { peer, what: self.one_too_many(number).unwrap_or_else(late) })
            }
        }
    }

    /// What is wrong with a channel that there can't be, whenever it comes.
    fn one_too_many(&self, number: u8) -> Option<String> {
        let expected = self.expected.filter(|expected| number >= *expected)?;
        Some(format!("opened channel {number}, where --channels says that there are {expected}"))
    }

    /// Lets in who stands at the door, waiting for somebody for `timeout`, and looks who has said what. Whether somebody came.
    fn look(&mut self, timeout: Duration) -> Result<bool, Error> {
        if self.progress.is_cancelled() {
            return Err(Error::Cancelled);
        }
        // Those who are there may speak while nobody comes.
        let timeout = if self.waiting.is_empty() { timeout } else { timeout.min(Duration::from_millis(5)) };
        let came = self.listener.accept(timeout)?;
        let somebody = came.is_some();
        if let Some(line) = came {
            if self.waiting.len() >= MOST_WAITING {
                let (_, peer) = self.waiting.remove(0).line;
                tracing::warn!("turned {peer} away: too many are silent");
            }
            self.waiting.push(Waiting { line, since: Instant::now() });
        }
        for Waiting { line: (mut connection, peer), since } in std::mem::take(&mut self.waiting) {
            match knock(&mut connection, since) {
                Knock::Silent => self.waiting.push(Waiting { line: (connection, peer), since }),
                Knock::Main => self.mains.insert(0, (connection, peer)),
                Knock::Channel(greeting) => self.add_channel(greeting, (connection, peer))?,
                Knock::Stranger(why) => tracing::warn!("turned {peer} away: {why}"),
            }
        }
        Ok(somebody)
    }

    fn add_channel(&mut self, greeting: Greeting, line: Line) -> Result<(), Error> {
        let Greeting { uuid, channel } = greeting;
        if *self.uuid.get_or_insert(uuid) != uuid {
            tracing::warn!("turned {} away: its VM has another UUID than the other channels", line.1);
            return Ok(());
        }
        match self.channels.insert(channel, line) {
            None => Ok(()),
            // Of an attempt that was given up before it began.
            Some((old, peer)) if is_closed(&old) => {
                tracing::warn!("{peer} has closed channel {channel} and opened it anew");
                Ok(())
            }
            Some((_, peer)) => {
                Err(Error::Protocol { peer, what: format!("opened channel {channel} twice, or two sources came") })
            }
        }
    }
}

/// Whether the other side has closed it, and all was read that came before. One that has more to say counts as open.
pub(in crate::qemu_peer) fn is_closed(connection: &Connection) -> bool {
    match recv(connection.as_fd(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((there, _)) => there == 0,
        Err(Errno::AGAIN | Errno::INTR) => false,
        Err(_) => true,
    }
}

/// Looks at the first bytes without taking any, but those of a channel's greeting.
fn knock(connection: &mut Connection, since: Instant) -> Knock {
    let mut bytes = [0; GREETING_BYTES];
    let there = match recv(connection.as_fd(), &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((0, _)) => return Knock::Stranger("it has closed the connection".into()),
        Ok((there, _)) => there,
        Err(Errno::AGAIN | Errno::INTR) => 0,
        Err(errno) => return Knock::Stranger(errno.to_string()),
    };
    match bytes[..there].first_chunk() {
        Some(&MAIN) => Knock::Main,
        Some(&CHANNEL) if there == GREETING_BYTES => match take(connection, &mut bytes) {
            Ok(()) => Greeting::decode(&bytes).map_or_else(|error| Knock::Stranger(error.to_string()), Knock::Channel),
            Err(error) => Knock::Stranger(error.to_string()),
        },
        Some(&CHANNEL) | None if since.elapsed() < SILENCE => Knock::Silent,
        Some(&CHANNEL) | None => Knock::Stranger(format!("it has said nothing for {} s", SILENCE.as_secs())),
        Some([0x16, 3, ..]) => Knock::Stranger("it speaks TLS, which is not supported: turn tls-creds off".into()),
        Some(_) => Knock::Stranger("what it says is no migration of QEMU's".into()),
    }
}

fn take(connection: &mut Connection, bytes: &mut [u8]) -> io::Result<()> {
    connection.read_exact(bytes)
}
