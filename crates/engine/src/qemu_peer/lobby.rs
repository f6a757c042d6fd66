//! Accepts connections: the main connection and the multifd channels, which differ in their first bytes. They come in
//! any order, and whoever is silent keeps nobody waiting.
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use transship_wire::qemu::{GREETING_BYTES, Greeting};

use crate::{
    Error, Listener, Progress, Rule,
    control::TICK,
    door::{Door, Line, Words, take, turn_away},
};

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

/// Everybody who has come and has no place yet.
pub(in crate::qemu_peer) struct Lobby<'a> {
    listener: &'a Listener,
    door: Door<'a, Caller>,
    mains: Vec<Line>,
    channels: BTreeMap<u8, Line>,
    /// That of the first channel.
    uuid: Option<[u8; 16]>,
    /// How many channels there have to be, if that is known.
    expected: Option<u8>,
}

enum Caller {
    Main,
    Channel(Greeting),
}

impl<'a> Lobby<'a> {
    pub(in crate::qemu_peer) fn new(listener: &'a Listener, progress: &'a Progress) -> Self {
        let (door, mains, channels) =
            (Door::new(listener, progress, SILENCE, understand, |_, _| ()), Vec::new(), BTreeMap::new());
        Self { listener, door, mains, channels, uuid: None, expected: None }
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

    /// The channels, by their numbers. The source has said on the main connection that all of them are there. `count`:
    /// how many there have to be; none: as many as have come.
    pub(super) fn channels(&mut self, count: Option<u8>) -> Result<Vec<Line>, Error> {
        self.expected = count;
        let begin = Instant::now();
        let limit = if count.is_some() { CHANNELS_TIMEOUT } else { GREETING_TIMEOUT };
        loop {
            while self.look(Duration::ZERO)? {} // there may be more at the door
            let silent = begin.elapsed() < GREETING_TIMEOUT && !self.door.is_empty();
            let expected = count.map_or(self.channels.len(), usize::from);
            let missing = (0..=u8::MAX).take(expected).find(|number| !self.channels.contains_key(number));
            if let Some(what) = self.channels.keys().find_map(|&number| self.one_too_many(number)) {
                return Err(Error::breach(self.listener.uri().to_string(), Rule::Channels, what));
            }
            match missing {
                None if !silent || count.is_some() => break,
                Some(missing) if begin.elapsed() > limit => {
                    let what = format!(
                        "has not opened channel {missing} within {} s; give its multifd-channels with --channels",
                        limit.as_secs()
                    );
                    return Err(Error::breach(self.listener.uri().to_string(), Rule::Channels, what));
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
                let late = || format!("opened channel {number} too late; give its multifd-channels with --channels");
                Err(Error::breach(peer, Rule::Channels, self.one_too_many(number).unwrap_or_else(late)))
            }
        }
    }

    /// What is wrong with a channel that there can't be, whenever it comes.
    fn one_too_many(&self, number: u8) -> Option<String> {
        let expected = self.expected.filter(|expected| number >= *expected)?;
        Some(format!("opened channel {number}, but --channels says that there are {expected}"))
    }

    /// Lets in who stands at the door, waiting for somebody for `timeout`, and looks who has said what. Whether
    /// somebody came.
    fn look(&mut self, timeout: Duration) -> Result<bool, Error> {
        let came = self.door.look(timeout)?;
        while let Some((caller, line)) = self.door.known() {
            match caller {
                Caller::Main => self.mains.insert(0, line),
                Caller::Channel(greeting) => self.add_channel(greeting, line)?,
            }
        }
        Ok(came)
    }

    fn add_channel(&mut self, greeting: Greeting, line: Line) -> Result<(), Error> {
        let Greeting { uuid, channel } = greeting;
        if *self.uuid.get_or_insert(uuid) != uuid {
            turn_away(&line.1, "its VM has another UUID than the other channels");
            return Ok(());
        }
        match self.channels.insert(channel, line) {
            None => Ok(()),
            // Of an attempt that was given up before it began.
            Some((old, peer)) if old.is_closed() => {
                tracing::info!("{peer} has closed channel {channel} and opened it again");
                Ok(())
            }
            Some((_, peer)) => {
                let what = format!("opened channel {channel} twice, or two sources came");
                Err(Error::breach(peer, Rule::Channels, what))
            }
        }
    }
}

/// Takes none of the words, but a channel's greeting.
fn understand((connection, _): &mut Line, words: &[u8]) -> Words<Caller> {
    let strange = |why: &str| Words::Strange(why.into());
    match kind(words) {
        Words::Known(Kind::Main) => Words::Known(Caller::Main),
        Words::Known(Kind::Channel) => {
            let mut bytes = [0; GREETING_BYTES];
            match take(connection, &mut bytes).map(|()| Greeting::decode(&bytes)) {
                Ok(Ok(greeting)) => Words::Known(Caller::Channel(greeting)),
                Ok(Err(error)) => strange(&error.to_string()),
                Err(error) => strange(&error.to_string()),
            }
        }
        Words::Unfinished => Words::Unfinished,
        Words::Strange(why) => Words::Strange(why),
    }
}

/// What connections a source of QEMU's opens.
pub(in crate::qemu_peer) enum Kind {
    Main,
    /// All of its greeting is there.
    Channel,
}

/// By its first words.
pub(in crate::qemu_peer) fn kind(words: &[u8]) -> Words<Kind> {
    let strange = |why: &str| Words::Strange(why.into());
    match words.first_chunk() {
        Some(&MAIN) => Words::Known(Kind::Main),
        Some(&CHANNEL) if words.len() >= GREETING_BYTES => Words::Known(Kind::Channel),
        Some(&CHANNEL) | None => Words::Unfinished,
        Some([0x16, 3, ..]) => strange("it speaks TLS: use --tls DIR here, or turn its tls-creds off"),
        Some(_) => strange("it did not send a migration of QEMU"),
    }
}
