//! The connections between two relays.
use std::{
    io::{self, Read, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use transship_secure::Caller;
use transship_wire::{
    PREAMBLE_BYTES, Preamble, Refusal, Role, SessionId,
    relay::{Greeting, MESSAGE_BYTES, Message, TheEnd},
};

use super::{control_line::ControlLine, session::RelaySession};
use crate::{
    Error, Listener, Progress, Rule, Uri,
    control::TICK,
    door::{Door, Line, Words, take, take_place, turn_away},
    transport::{Connection, random},
};

/// How long the other relay may take to answer a greeting, and to open its data connections.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// A link that is ready.
pub(super) struct Link {
    pub(super) peer: String,
    pub(super) control: ControlLine,
    pub(super) messages: Messages,
    pub(super) data: Vec<Connection>,
}

/// The receiving half of the control connection.
pub(super) struct Messages {
    connection: Connection,
    peer: String,
}

impl Messages {
    /// The next message. None: the connection has ended, or nothing came within its time.
    fn next(&mut self) -> Result<Option<Message>, Error> {
        let mut header = [0; MESSAGE_BYTES];
        if !self.fill(&mut header)? {
            return Ok(None);
        }
        let wire = |source| Error::Wire { peer: self.peer.clone(), source };
        let mut text = vec![0; Message::payload_bytes(&header).map_err(wire)?]; // at most 4096
        if !self.fill(&mut text)? {
            return Ok(None);
        }
        Message::decode(&header, &text).map(Some).map_err(|source| Error::Wire { peer: self.peer.clone(), source })
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<bool, Error> {
        match self.connection.read_exact(bytes) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
                Ok(false)
            }
            Err(source) => Err(Error::Io { what: format!("read from the relay at {}", self.peer), source }),
        }
    }

    /// Obeys messages until the link ends.
    pub(super) fn run(
        mut self,
        session: &Arc<RelaySession>,
        mut obey: impl FnMut(Message) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let result = self.obey_all(session, &mut obey);
        session.control_has_ended();
        result
    }

    fn obey_all(
        &mut self,
        session: &Arc<RelaySession>,
        obey: &mut impl FnMut(Message) -> Result<(), Error>,
    ) -> Result<(), Error> {
        loop {
            match self.next()? {
                None if session.fate.is_over() => return Ok(()),
                None => return Err(session.lost_link()),
                Some(Message::Credit { connection, amount }) => session.stream(connection)?.allow(amount)?,
                Some(Message::Done) => {
                    session.peer_is_done.store(true, std::sync::atomic::Ordering::SeqCst);
                    session.tell();
                }
                Some(Message::Abort { end, refusal }) => {
                    session.heard_abort(refusal.reason, end);
                    return Ok(());
                }
                Some(other) => obey(other)?,
            }
        }
    }
}

/// The error about a message that nothing here asks for.
pub(super) fn unexpected(session: &RelaySession) -> Error {
    session.fate.broke(Rule::Turn, "sent a message that is not allowed here")
}

/// Opens a link to the relay near the destination.
pub(super) fn connect(to: &Uri, caller: Option<&Caller>, channels: u8, progress: &Progress) -> Result<Link, Error> {
    let id = SessionId(random()?);
    let mut connection = Connection::call(to, caller)?;
    // One that turns us away says why, and may have hung up before it has all of this.
    let unsent = match introduce(&mut connection, to, id, channels) {
        Ok(()) => None,
        Err(error @ Error::Io { .. }) => Some(error),
        Err(error) => return Err(error),
    };
    let mut link = split(connection, to.to_string())?;
    match (await_welcome(&mut link.messages, to, progress), unsent) {
        (Ok(()) | Err(Error::Unfit { .. }), Some(unsent)) => return Err(unsent),
        (welcomed, _) => welcomed?,
    }
    for number in 0..channels {
        let mut connection = Connection::call(to, caller)?;
        greet(&mut connection, to, id, Role::Data(number))?;
        link.data.push(connection);
    }
    Ok(link)
}

fn split(connection: Connection, peer: String) -> Result<Link, Error> {
    let handle =
        || connection.try_clone().map_err(|source| Error::Io { what: format!("set up the link with {peer}"), source });
    let control = ControlLine::new(handle()?, handle()?);
    let messages = Messages { connection: handle()?, peer: peer.clone() };
    Ok(Link { peer, control, messages, data: Vec::new() })
}

/// What goes over the control connection before there is an answer.
fn introduce(connection: &mut Connection, to: &Uri, session: SessionId, channels: u8) -> Result<(), Error> {
    greet(connection, to, session, Role::Control)?;
    connection.await_word(to)?;
    let hello = connection.write_all(&Message::Hello { channels }.encode());
    hello.map_err(|source| Error::Io { what: format!("greet {to}"), source })
}

fn greet(connection: &mut Connection, to: &Uri, session: SessionId, role: Role) -> Result<(), Error> {
    connection.greet(to, &Greeting(Preamble { session, role }).encode())
}

/// Whoever is there may be no relay at all.
fn await_welcome(messages: &mut Messages, to: &Uri, progress: &Progress) -> Result<(), Error> {
    let deadline = Instant::now() + GREETING_TIMEOUT;
    let timeout = |connection: &Connection, time| {
        connection
            .set_read_timeout(time)
            .map_err(|source| Error::Io { what: format!("set up the link with {to}"), source })
    };
    let no_relay = || {
        Error::unfit(format!(
            "the program that listens at {to} is not a relay that waits for this one; start one there: transship \
             relay --listen relay:{to} --to URI, where URI is the waiting QEMU's"
        ))
    };
    timeout(&messages.connection, Some(TICK))?;
    let mut first = [0; 1];
    loop {
        match peek(&messages.connection, &mut first) {
            Peek::There => break,
            Peek::Gone => return Err(no_relay()),
            Peek::Nothing if progress.is_cancelled() => return Err(Error::CANCELLED),
            Peek::Nothing if Instant::now() > deadline => return Err(no_relay()),
            Peek::Nothing => {}
        }
    }
    timeout(&messages.connection, Some(GREETING_TIMEOUT))?;
    let answer = match messages.next() {
        Ok(Some(Message::Welcome)) => Ok(()),
        Ok(Some(Message::Abort { refusal, .. })) => Err(Error::Refused(refusal.reason)),
        _ => Err(no_relay()),
    };
    timeout(&messages.connection, None)?;
    answer
}

enum Peek {
    There,
    Nothing,
    Gone,
}

/// Waits for a byte for as long as the connection's timeout says, and leaves it there.
fn peek(connection: &Connection, byte: &mut [u8; 1]) -> Peek {
    use rustix::{
        io::Errno,
        net::{RecvFlags, recv},
    };
    match recv(connection, byte, RecvFlags::PEEK) {
        Ok((0, _)) => Peek::Gone,
        Ok(_) => Peek::There,
        Err(Errno::AGAIN | Errno::INTR) => Peek::Nothing,
        Err(_) => Peek::Gone,
    }
}

/// Waits, for as long as it takes, for the relay near the source.
pub(super) fn accept(listener: &Listener, progress: &Progress) -> Result<Link, Error> {
    let mut door = Door::new(listener, progress, GREETING_TIMEOUT, understand, refuse);
    let (id, mut link, channels) = welcome_one(listener, &mut door)?;
    let deadline = Instant::now() + GREETING_TIMEOUT;
    let mut found: Vec<Option<Line>> = (0..channels).map(|_| None).collect();
    while let Some(missing) = found.iter().position(Option::is_none) {
        if Instant::now() > deadline {
            let what = format!("has not opened data connection {missing} within {} s", GREETING_TIMEOUT.as_secs());
            return Err(Error::breach(link.peer, Rule::Answers, what));
        }
        match door.next(TICK)? {
            None => {}
            Some((Visitor::Data(session, number), line)) if session == id => {
                take_place(&mut found, number, line, "connection")?;
            }
            Some((_, (mut connection, peer))) => {
                refuse(&mut connection, "another relay is served here; start one for each guest");
                turn_away(&peer, "another relay is served");
            }
        }
    }
    link.data = found.into_iter().flatten().map(|(connection, _)| connection).collect();
    Ok(link)
}

fn welcome_one(listener: &Listener, door: &mut Door<'_, Visitor>) -> Result<(SessionId, Link, u8), Error> {
    loop {
        listener.check_lifetime()?;
        match door.next(TICK)? {
            None => {}
            Some((Visitor::Control(session, channels), (connection, peer))) => match welcome(connection, &peer) {
                Ok(link) => return Ok((session, link, channels)),
                Err(error) => turn_away(&peer, &error.to_string()),
            },
            Some((Visitor::Data(..), (_, peer))) => turn_away(&peer, "a data connection of a link that does not exist"),
        }
    }
}

fn welcome(connection: Connection, peer: &str) -> Result<Link, Error> {
    let link = split(connection, peer.to_owned())?;
    let greeted = link.control.send(&Message::Welcome);
    greeted.map_err(|source| Error::Io { what: format!("greet {peer}"), source })?;
    Ok(link)
}

/// A connection of a relay's.
enum Visitor {
    /// Its control connection, and how many data connections it opens.
    Control(SessionId, u8),
    Data(SessionId, u8),
}

/// Takes a greeting, and behind that of a control connection a `Hello`. Tells what can be told to whom: a relay of
/// another version hears why it is turned away, and the user here what somebody else may have meant.
fn understand((connection, _): &mut Line, words: &[u8]) -> Words<Visitor> {
    let strange = |why: &str| Words::Strange(why.into());
    let Some((greeting, hello)) = words.split_first_chunk() else { return Words::Unfinished };
    let Greeting(Preamble { session, role }) = match Greeting::decode(greeting) {
        Ok(greeting) => greeting,
        Err(error) => {
            return match &greeting[..4] {
                b"TSRL" => {
                    let why = format!("{error}; use the same transship on both sides");
                    refuse(connection, &why);
                    Words::Strange(why)
                }
                b"QEVM" => strange(
                    "it is a QEMU that migrates; it must connect to the relay near it: transship relay --listen URI \
                     --to relay:URI",
                ),
                b"TSHP" => {
                    strange("it is a `transship move`; this is a relay's link, for a `transship relay --to relay:URI`")
                }
                _ => Words::Strange(error.to_string()),
            };
        }
    };
    let (caller, used) = match (role, hello.first_chunk()) {
        (Role::Probe, _) => return strange("a relay's link is not probed"),
        (Role::Data(number), _) => (Visitor::Data(session, number), PREAMBLE_BYTES),
        (Role::Control, None) => return Words::Unfinished,
        (Role::Control, Some(hello)) => match Message::decode(hello, &[]) {
            Ok(Message::Hello { channels }) => (Visitor::Control(session, channels), PREAMBLE_BYTES + MESSAGE_BYTES),
            _ => return strange("it has not announced its number of data connections"),
        },
        (Role::Supply(_) | Role::Push { .. }, _) => return strange("a relay has no supply lines"),
    };
    match take(connection, &mut [0; PREAMBLE_BYTES + MESSAGE_BYTES][..used]) {
        Ok(()) => Words::Known(caller),
        Err(error) => Words::Strange(error.to_string()),
    }
}

/// The session that a connection belongs to, and whether it is the one that begins it. Takes nothing of a greeting.
pub(super) fn role(line: &mut Line, words: &[u8]) -> Words<(SessionId, bool)> {
    let Some(greeting) = words.first_chunk() else { return Words::Unfinished };
    match Greeting::decode(greeting) {
        Ok(Greeting(Preamble { session, role })) => Words::Known((session, role == Role::Control)),
        // What is to be said to it is said there.
        Err(error) => match understand(line, words) {
            Words::Strange(why) => Words::Strange(why),
            _ => Words::Strange(error.to_string()),
        },
    }
}

pub(super) fn refuse(connection: &mut Connection, why: &str) {
    let abort = Message::Abort { end: TheEnd::Withheld, refusal: Refusal { reason: why.into() } };
    let _ = connection.write_all(&abort.encode()); // it may be gone
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    /// At whatever moment it hangs up: it is a matter of luck what of ours is written by then.
    #[test]
    fn a_relay_that_refuses_and_hangs_up_is_heard() {
        const TIMES: usize = 200;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("relay");
        let listener = UnixListener::bind(&path).unwrap();
        let refusing = thread::spawn(move || {
            for connection in listener.incoming().take(TIMES) {
                refuse(&mut Connection::Unix(connection.unwrap()), "it is full");
            }
        });
        let to = format!("unix:{}", path.display()).parse().unwrap();
        for time in 0..TIMES {
            let refused = connect(&to, None, 2, &Progress::new()).err().unwrap();
            assert!(matches!(&refused, Error::Refused(why) if why == "it is full"), "{time}: {refused}");
        }
        refusing.join().unwrap();
    }
}
