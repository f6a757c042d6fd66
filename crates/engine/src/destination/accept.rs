//! Accepts connections: one source with a control connection, then its data connections. Strangers are turned away and
//! do no harm.
use std::time::{Duration, Instant};

use transship_wire::{PREAMBLE_BYTES, Preamble, Role, Session};

use crate::{
    Error, Listener, Progress,
    control::{Control, TICK},
    door::{Door, Line, Words, take, take_place, turn_away},
};

/// How long somebody who connects may take for its first words.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a source may take to open all its data connections.
const CHANNELS_TIMEOUT: Duration = Duration::from_secs(30);

/// Everybody who comes while a move is under way.
pub(super) struct Arrivals<'a> {
    listener: &'a Listener,
    door: Door<'a, Preamble>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(listener: &'a Listener, progress: &'a Progress) -> Self {
        Self { listener, door: Door::new(listener, progress, GREETING_TIMEOUT, understand) }
    }

    /// Waits, for as long as it takes, for a source to open a session.
    pub(super) fn source(&mut self) -> Result<(Control, Session), Error> {
        loop {
            match self.door.next(TICK)? {
                None => {}
                Some((Preamble { session, role: Role::Control }, (connection, peer))) => {
                    return Ok((Control::new(connection, peer)?, session));
                }
                Some((_, (_, peer))) => turn_away(&peer, "a data connection of a session that does not exist"),
            }
        }
    }

    /// Collects the session's data connections, in the order of their numbers.
    pub(super) fn channels(&mut self, session: Session, count: u8, control: &Control) -> Result<Vec<Line>, Error> {
        let deadline = Instant::now() + CHANNELS_TIMEOUT;
        let mut found: Vec<Option<Line>> = (0..count).map(|_| None).collect();
        while let Some(missing) = found.iter().position(Option::is_none) {
            control.check_silence()?; // a source that died opens no more
            if Instant::now() > deadline {
                let what = format!("has not opened data channel {missing} within {} s", CHANNELS_TIMEOUT.as_secs());
                return Err(Error::Protocol { peer: self.listener.uri().to_string(), what });
            }
            match self.door.next(TICK)? {
                None => {}
                Some((Preamble { session: theirs, role: Role::Data(number) }, line)) if theirs == session => {
                    take_place(&mut found, number, line, "channel")?;
                }
                Some((_, (_, peer))) => turn_away(&peer, "it belongs to another session"),
            }
        }
        Ok(found.into_iter().flatten().collect())
    }
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
