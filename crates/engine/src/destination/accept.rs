//! Who connects: one source with a control connection, then its data connections. Strangers are turned away and do no harm.
use std::{
    io::Read,
    time::{Duration, Instant},
};

use transship_wire::{PREAMBLE_BYTES, Preamble, Role, Session};

use crate::{
    Error, Listener, Progress,
    control::{Control, TICK},
    transport::Connection,
};

/// How long somebody who connects may take for its first words.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a source may take to open all its data connections.
const CHANNELS_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits, for as long as it takes, for a source to open a session.
pub(super) fn source(listener: &Listener, progress: &Progress) -> Result<(Control, Session), Error> {
    loop {
        if progress.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let Some((connection, peer)) = listener.accept(TICK)? else { continue };
        match greet(connection, &peer) {
            Ok((connection, Preamble { session, role: Role::Control })) => {
                return Ok((Control::new(connection, peer)?, session));
            }
            Ok(_) => tracing::warn!("turned {peer} away: a data connection of a session that is not open"),
            Err(error) => tracing::warn!("turned {peer} away: {error}"),
        }
    }
}

/// Collects the session's data connections, in the order of their numbers.
pub(super) fn channels(
    listener: &Listener,
    session: Session,
    count: u8,
    control: &Control,
    progress: &Progress,
) -> Result<Vec<(Connection, String)>, Error> {
    let deadline = Instant::now() + CHANNELS_TIMEOUT;
    let mut found: Vec<Option<(Connection, String)>> = (0..count).map(|_| None).collect();
    while let Some(missing) = found.iter().position(Option::is_none) {
        if progress.is_cancelled() {
            return Err(Error::Cancelled);
        }
        control.check_silence()?; // a source that died opens no more
        if Instant::now() > deadline {
            let what = format!("has not opened data channel {missing} within {} s", CHANNELS_TIMEOUT.as_secs());
            return Err(Error::Protocol { peer: listener.uri().to_string(), what });
        }
        let Some((connection, peer)) = listener.accept(TICK)? else { continue };
        match greet(connection, &peer) {
            Ok((connection, Preamble { session: theirs, role: Role::Data(number) })) if theirs == session => {
                match found.get_mut(usize::from(number)) {
                    Some(place @ None) => *place = Some((connection, peer)),
                    _ => {
                        let what =
                            format!("opened data channel {number} twice or beyond the {count} that it announced");
                        return Err(Error::Protocol { peer, what });
                    }
                }
            }
            Ok(_) => tracing::warn!("turned {peer} away: it is not of the session that is open"),
            Err(error) => tracing::warn!("turned {peer} away: {error}"),
        }
    }
    Ok(found.into_iter().flatten().collect())
}

fn greet(mut connection: Connection, peer: &str) -> Result<(Connection, Preamble), Error> {
    let bytes = first_bytes(&mut connection, peer)?;
    let preamble = Preamble::decode(&bytes).map_err(|source| Error::Wire { peer: peer.to_owned(), source })?;
    Ok((connection, preamble))
}

/// The preamble of somebody who connects, who has a bounded time for it.
pub(crate) fn first_bytes(connection: &mut Connection, peer: &str) -> Result<[u8; PREAMBLE_BYTES], Error> {
    let failed = |source| Error::Io { what: format!("read the preamble of {peer}"), source };
    let mut bytes = [0; PREAMBLE_BYTES];
    let deadline = Instant::now() + GREETING_TIMEOUT;
    let mut have = 0;
    while have < bytes.len() {
        // The timeout of each read shrinks, so that single bytes don't buy time.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        connection.set_read_timeout(Some(left)).map_err(failed)?;
        match connection.read(&mut bytes[have..]).map_err(failed)? {
            0 => return Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
            read => have += read,
        }
        if Instant::now() > deadline && have < bytes.len() {
            return Err(failed(std::io::ErrorKind::TimedOut.into()));
        }
    }
    connection.set_read_timeout(None).map_err(failed)?;
    Ok(bytes)
}
