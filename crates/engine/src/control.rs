//! The control connection: messages out, messages in.
use std::{
    io::{self, Read, Write},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};
use transship_wire::{FRAME_BYTES, Frame, Message, Refusal};

use crate::{Error, Progress, Rule, transport::Connection};

/// The number of messages that may wait to be read; after that the peer has to wait.
const QUEUE: usize = 8;
/// How long a peer that ended the session may take to say why.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a waiting thread checks whether the user has cancelled.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// One side's end of the control connection. A thread reads, so that an `Abort` is heard whatever this side is doing.
pub(crate) struct Control {
    connection: Connection,
    pub(crate) peer: String,
    next_id: u64,
    pub(crate) incoming: Receiver<Result<Message, Error>>,
}

impl Control {
    /// Takes over a connection whose preamble has been dealt with.
    pub(crate) fn new(connection: Connection, peer: String) -> Result<Self, Error> {
        let failed = |source| Error::Io { what: format!("set up the connection with {peer}"), source };
        connection.set_read_timeout(None).map_err(failed)?;
        let reading = connection.try_clone().map_err(failed)?;
        let (sender, incoming) = bounded(QUEUE);
        let reader = MessageReader { connection: reading, peer: peer.clone(), next_id: 1 };
        thread::Builder::new().name("control".into()).spawn(move || reader.run(&sender)).map_err(failed)?;
        Ok(Self { connection, peer, next_id: 1, incoming })
    }

    /// The user at the other end: [`Connection::user`].
    pub(crate) fn user(&self) -> Option<u32> {
        self.connection.user()
    }

    pub(crate) fn send(&mut self, message: &Message) -> Result<(), Error> {
        let bytes = message.encode(self.next_id);
        self.next_id += 1;
        self.connection
            .write_all(&bytes)
            .map_err(|source| Error::Io { what: format!("send {} to {}", message.name(), self.peer), source })
    }

    /// The same. A peer that has ended the session is heard first: an error says why it did so, if it says so itself.
    pub(crate) fn send_or_hear(&mut self, message: &Message) -> Result<(), Error> {
        self.send(message).map_err(|error| self.explain(error))
    }

    /// Sends a message that is either taken by the system whole, or not at all: an error means that the peer can't have
    /// got a byte of it. What was taken may still be lost on its way, and later writes then fail.
    pub(crate) fn send_whole(&mut self, message: &Message) -> Result<(), Error> {
        let bytes = message.encode(self.next_id);
        self.next_id += 1;
        let failed = |source| Error::Io { what: format!("send {} to {}", message.name(), self.peer), source };
        self.connection.write_whole(&bytes).map_err(failed)
    }

    /// Sends the peer the reason why this side ends the session. The peer may be gone already.
    pub(crate) fn abort(&mut self, reason: &Error) {
        if let Error::Refused(_) = reason {
            return; // it was the peer's own word
        }
        let _ = self.send(&Message::Abort(Refusal { reason: reason.to_string() }));
    }

    /// The next message, within `limit`, unless the user cancels. An `Abort` is an error here.
    pub(crate) fn receive(&self, waiting_for: &str, limit: Duration, progress: &Progress) -> Result<Message, Error> {
        let cancelled = || if progress.is_cancelled() { Err(Error::CANCELLED) } else { Ok(()) };
        self.receive_while(waiting_for, limit, cancelled)
    }

    /// The same, for as long as `check`, which is asked again and again, has nothing against it.
    pub(crate) fn receive_while(
        &self,
        waiting_for: &str,
        limit: Duration,
        mut check: impl FnMut() -> Result<(), Error>,
    ) -> Result<Message, Error> {
        let deadline = Instant::now() + limit;
        loop {
            check()?;
            match self.incoming.recv_timeout(TICK) {
                Ok(message) => return self.unless_abort(message?),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    let what = format!("has not sent {waiting_for} within {} s", limit.as_secs());
                    return Err(Error::breach(&self.peer, Rule::Answers, what));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.gone()),
            }
        }
    }

    /// The reason why the peer has ended the session, if it says one, in the place of an error that may be a
    /// consequence.
    pub(crate) fn explain(&self, error: Error) -> Error {
        match self.incoming.recv_timeout(REASON_TIMEOUT) {
            Ok(Ok(Message::Abort(refusal))) => Error::Refused(refusal.reason),
            _ => error,
        }
    }

    /// What the peer has said and nobody has heard yet. An `Abort` is an error here.
    pub(crate) fn hear(&self) -> Result<Option<Message>, Error> {
        match self.incoming.try_recv() {
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.gone()),
            Ok(message) => self.unless_abort(message?).map(Some),
        }
    }

    /// An error if the peer has spoken: nothing is expected from it now but an `Abort`.
    pub(crate) fn check_silence(&self) -> Result<(), Error> {
        let unexpected = |message: Message| self.unexpected(&message, "while pages are on their way");
        self.hear()?.map_or(Ok(()), |message| Err(unexpected(message)))
    }

    pub(crate) fn unless_abort(&self, message: Message) -> Result<Message, Error> {
        match message {
            Message::Abort(Refusal { reason }) => Err(Error::Refused(reason)),
            other => Ok(other),
        }
    }

    pub(crate) fn unexpected(&self, message: &Message, when: &str) -> Error {
        Error::breach(&self.peer, Rule::Turn, format!("sent {} {when}", message.name()))
    }

    pub(crate) fn gone(&self) -> Error {
        Error::breach(&self.peer, Rule::Stays, "has closed the connection")
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.connection.shutdown(); // also ends the reading thread
    }
}

struct MessageReader {
    connection: Connection,
    peer: String,
    next_id: u64,
}

impl MessageReader {
    fn run(mut self, to: &Sender<Result<Message, Error>>) {
        loop {
            let message = self.read();
            let last = message.is_err();
            if to.send(message).is_err() || last {
                return;
            }
        }
    }

    fn read(&mut self) -> Result<Message, Error> {
        let mut head = [0; FRAME_BYTES];
        self.fill(&mut head)?;
        let wire = |source| Error::Wire { peer: self.peer.clone(), source };
        let frame = Frame::decode(&head).map_err(wire)?;
        if frame.id != self.next_id {
            let what = format!("numbered its message {} where {} was next", frame.id, self.next_id);
            return Err(Error::breach(&self.peer, Rule::Order, what));
        }
        self.next_id += 1;
        let mut payload = vec![0; frame.payload as usize]; // bounded by Frame::decode
        self.fill(&mut payload)?;
        Message::decode(&frame, &payload).map_err(|source| Error::Wire { peer: self.peer.clone(), source })
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.connection.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                Error::breach(&self.peer, Rule::Stays, "has closed the connection")
            }
            _ => Error::Io { what: format!("read from {}", self.peer), source },
        })
    }
}
