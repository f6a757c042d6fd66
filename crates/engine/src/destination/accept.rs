//! Accepts connections: one source with a control connection, then its data connections. Strangers are turned away and
//! do no harm.
use std::{
    io::Write,
    time::{Duration, Instant},
};

use transship_wire::{Message, PREAMBLE_BYTES, Preamble, Refusal, Role, SessionId};

use super::probed::Probed;
use crate::{
    Error, Listener, Progress, Rule,
    control::{Control, TICK},
    door::{Door, Line, Words, take, take_place, turn_away},
    transport::Connection,
};

/// How long somebody who connects may take for its first words.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a source may take to open all its data connections.
const CHANNELS_TIMEOUT: Duration = Duration::from_secs(30);

/// Everybody who comes while a move is under way.
pub(super) struct Arrivals<'a> {
    listener: &'a Listener,
    door: Door<'a, Preamble>,
    probed: Probed,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(listener: &'a Listener, progress: &'a Progress) -> Self {
        let door = Door::new(listener, progress, GREETING_TIMEOUT, understand, refuse);
        Self { listener, door, probed: Probed::default() }
    }

    /// Where they come.
    pub(super) fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// Waits, for as long as it takes or its token is good, for a source to open a session.
    pub(super) fn source(&mut self) -> Result<(Control, SessionId), Error> {
        loop {
            self.listener.check_lifetime()?;
            match self.door.next(TICK)? {
                None => {}
                Some((Preamble { session, role: Role::Control }, (connection, peer))) => {
                    return Ok((Control::new(connection, peer)?, session));
                }
                Some((Preamble { role: Role::Probe, .. }, line)) => self.probed.answer(line),
                Some((_, (_, peer))) => turn_away(&peer, "a data connection of a session that does not exist"),
            }
        }
    }

    /// Collects the session's data connections, in the order of their numbers.
    pub(super) fn channels(&mut self, session: SessionId, count: u8, control: &Control) -> Result<Vec<Line>, Error> {
        let deadline = Instant::now() + CHANNELS_TIMEOUT;
        let mut found: Vec<Option<Line>> = (0..count).map(|_| None).collect();
        while let Some(missing) = found.iter().position(Option::is_none) {
            control.check_silence()?; // a source that died opens no more
            if Instant::now() > deadline {
                let what = format!("has not opened data channel {missing} within {} s", CHANNELS_TIMEOUT.as_secs());
                return Err(Error::breach(self.listener.uri().to_string(), Rule::Answers, what));
            }
            match self.door.next(TICK)? {
                None => {}
                Some((Preamble { session: theirs, role: Role::Data(number) }, line)) if theirs == session => {
                    take_place(&mut found, number, line, "channel")?;
                }
                Some((Preamble { role: Role::Control, .. }, (mut connection, peer))) => {
                    refuse(&mut connection, "another move has begun here; a receiver, and its token, is good for one");
                    turn_away(&peer, "another move has begun here");
                }
                Some((_, (_, peer))) => turn_away(&peer, "it belongs to another session"),
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// Looks for the connections of a supply line for at most `timeout`; it may take less. They may come in any order,
    /// and a line that is not whole yet gives way to one that is newer.
    pub(super) fn supply(
        &mut self,
        session: SessionId,
        gathering: &mut Gathering,
        timeout: Duration,
    ) -> Result<Option<Supply>, Error> {
        let Some((Preamble { session: theirs, role }, mut line)) = self.door.next(timeout)? else { return Ok(None) };
        if theirs != session {
            if role == Role::Control {
                refuse(&mut line.0, "a guest has been received here; a receiver, and its token, is good for one");
            }
            turn_away(&line.1, "it belongs to another session");
            return Ok(None);
        }
        match role {
            Role::Supply(number) if gathering.is_for(number) => gathering.urgent = Some(line),
            Role::Push { line: number, channel } if gathering.is_for(number) => {
                // One that is named wrongly is its own loss: the line never becomes whole.
                if let Err(error) = take_place(&mut gathering.push, channel, line, "channel") {
                    tracing::warn!("{error}");
                }
            }
            _ => turn_away(&line.1, "the session has gone on without it"),
        }
        Ok(gathering.take_whole())
    }

    /// All who have business here have come.
    pub(super) fn close(&self) {
        self.listener.close();
    }
}

/// The connections of a supply line, as they come.
pub(super) struct Gathering {
    number: u32,
    urgent: Option<Line>,
    push: Vec<Option<Line>>,
}

/// A whole supply line.
pub(super) struct Supply {
    pub(super) urgent: Line,
    pub(super) push: Vec<Line>,
}

impl Gathering {
    /// Lines of so many channels.
    pub(super) fn new(channels: u8) -> Self {
        Self { number: 0, urgent: None, push: (0..channels).map(|_| None).collect() }
    }

    /// Whether it belongs to the newest line that anybody knows of. Those of the one before are dropped.
    fn is_for(&mut self, number: u32) -> bool {
        if number > self.number {
            self.number = number;
            self.urgent = None;
            self.push.iter_mut().for_each(|place| *place = None);
        }
        number == self.number
    }

    fn take_whole(&mut self) -> Option<Supply> {
        if self.urgent.is_none() || self.push.iter().any(Option::is_none) {
            return None;
        }
        let urgent = self.urgent.take()?;
        Some(Supply { urgent, push: self.push.iter_mut().filter_map(Option::take).collect() })
    }
}

/// To a source, before its session has begun.
fn refuse(connection: &mut Connection, why: &str) {
    let _ = connection.write_all(&Message::Abort(Refusal { reason: why.into() }).encode(1)); // it may be gone
}

fn understand((connection, _): &mut Line, words: &[u8]) -> Words<Preamble> {
    if words.len() < PREAMBLE_BYTES {
        return Words::Unfinished;
    }
    let mut bytes = [0; PREAMBLE_BYTES];
    match take(connection, &mut bytes).map(|()| Preamble::decode(&bytes)) {
        Ok(Ok(preamble)) => Words::Known(preamble),
        Ok(Err(error)) => Words::Strange(error.to_string()),
        Err(error) => Words::Strange(error.to_string()),
    }
}
