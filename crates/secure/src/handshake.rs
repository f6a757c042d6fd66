//! The handshake: it goes as far as it can with what is there, so that a host can have many of them under way.
//!
//! Records are read one by one, and none behind the last one of the handshake: what comes then is for the [`Opener`].
use std::{
    io::{self, ErrorKind, Read, Write},
    sync::Arc,
};

use rustls::{
    Error, InvalidMessage,
    client::UnbufferedClientConnection,
    server::UnbufferedServerConnection,
    unbuffered::{ConnectionState, UnbufferedStatus},
};

use crate::{
    Caller, Host, Opener, Sealer, SecureError,
    cipher::{Cipher, HEADER_BYTES, Kernel, Keys},
    ends::{Means, Word},
    failure::{Side, View},
};

/// Most bytes of what came and is not used up: one message of a handshake may be in several records. Ours have less
/// than 1 KiB, and those with certificates a few.
const MOST: usize = 64 << 10;
/// Room for one record that goes out.
const OUTGOING: usize = (1 << 14) + 512;
/// What a host says first, behind the handshake: the caller is the one that it expects. A caller can't know before: in
/// TLS 1.3 it is done with the handshake when the host has not seen yet who it is.
pub(crate) const ACCEPTED: u8 = 1;

/// The two directions of a connection that is trusted.
#[derive(Debug)]
pub struct Halves {
    /// For what goes out.
    pub sealer: Sealer,
    /// For what comes in.
    pub opener: Opener,
}

/// How far it is.
#[derive(Debug)]
pub enum Progress {
    /// The other side has to say more. Nothing else can be done.
    Waiting,
    /// It is over, and the other side is who it has to be.
    Done(Box<Halves>),
}

/// A handshake that is under way.
pub struct Handshake {
    end: End,
    view: View,
    /// What came and is not used up yet.
    incoming: Vec<u8>,
    /// Where the record begins in it that is being read: rustls has not seen it yet.
    start: usize,
}

enum End {
    Caller(UnbufferedClientConnection),
    Host(UnbufferedServerConnection),
    Over,
}

/// What rustls wants next.
enum Next {
    /// A record of the other side.
    Input,
    /// This goes out, and may not be all.
    Output(Vec<u8>),
    Nothing,
    Done,
}

impl Handshake {
    /// Of a connection that this side has made.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn calling(caller: &Caller) -> Result<Self, SecureError> {
        let (connection, means) = caller.connection()?;
        Ok(Self::new(End::Caller(connection), Side::Caller, means, caller.word))
    }

    /// Of a connection that somebody else has made.
    ///
    /// # Errors
    /// As [`Handshake::calling`].
    pub fn hosting(host: &Host) -> Result<Self, SecureError> {
        let (connection, means) = host.connection()?;
        Ok(Self::new(End::Host(connection), Side::Host, means, host.word))
    }

    fn new(end: End, side: Side, means: Means, word: Word) -> Self {
        Self { end, view: View { side, means, word }, incoming: Vec::new(), start: 0 }
    }

    /// Goes on. A connection whose reads don't wait leads to [`Progress::Waiting`] when nothing is there; one with a
    /// limit on its reads is waited for until then. What is written must be taken at once: it is little.
    ///
    /// # Errors
    /// The other side is not to be trusted, or has gone. It has been told why, as far as TLS has a word for it.
    pub fn advance(&mut self, connection: &mut (impl Read + Write)) -> Result<Progress, SecureError> {
        loop {
            match self.step() {
                Ok(Next::Done) => return self.finish(connection),
                Ok(Next::Output(bytes)) => {
                    if let Err(error) = connection.write_all(&bytes) {
                        return Err(self.last_words(connection, error));
                    }
                }
                Ok(Next::Input) if !self.read_record(connection)? => return Ok(Progress::Waiting),
                Ok(Next::Input | Next::Nothing) => {}
                Err(error) => {
                    self.say_why(connection);
                    self.end = End::Over;
                    return Err(self.view.failure(error));
                }
            }
        }
    }

    /// Somebody who reads no more may have said why.
    fn last_words(&mut self, connection: &mut impl Read, error: io::Error) -> SecureError {
        loop {
            match self.read_record(connection) {
                Ok(true) => {}
                Ok(false) => return error.into(),
                Err(failure) => return failure,
            }
            match self.step() {
                Err(error) => return self.view.failure(error),
                Ok(Next::Input | Next::Nothing) => {}
                Ok(_) => return error.into(),
            }
        }
    }

    /// One step of rustls. What it has used up is gone then, also after an error: it counts on that.
    fn step(&mut self) -> Result<Next, Error> {
        let (discard, next) = match &mut self.end {
            End::Caller(caller) => next(caller.process_tls_records(&mut self.incoming)),
            End::Host(host) => next(host.process_tls_records(&mut self.incoming)),
            End::Over => (0, Err(Error::HandshakeNotComplete)),
        };
        self.incoming.drain(..discard);
        self.start = self.incoming.len();
        next
    }

    /// Reads on in the next record. False: nothing more is there.
    fn read_record(&mut self, connection: &mut impl Read) -> Result<bool, SecureError> {
        loop {
            let record = &self.incoming[self.start..];
            let length = match record.get(..HEADER_BYTES) {
                None => HEADER_BYTES,
                Some(&[20..=23, 3, _, high, low]) => HEADER_BYTES + usize::from(u16::from_be_bytes([high, low])),
                Some(_) => {
                    return Err(self.view.failure(InvalidMessage::InvalidContentType.into()));
                }
            };
            let (there, wanted) = (self.incoming.len(), self.start + length);
            if record.len() == length && length > HEADER_BYTES {
                return Ok(true);
            }
            if wanted > MOST || record.len() == length {
                return Err(self.view.failure(InvalidMessage::InvalidEmptyPayload.into()));
            }
            self.incoming.resize(wanted, 0);
            let read = connection.read(&mut self.incoming[there..]);
            self.incoming.truncate(there + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) if self.view.word == Word::None && self.view.side == Side::Caller => {
                    let why = "it has no tls-creds, or has ended, and its own output says why";
                    let what = format!("it has closed the connection in the middle of the handshake: {why}");
                    return Err(io::Error::new(ErrorKind::UnexpectedEof, what).into());
                }
                Ok(0) => return Err(gone()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends what rustls still has to say after an error. The other side may be gone.
    fn say_why(&mut self, connection: &mut impl Write) {
        // With nothing to say it would look at what came once more, and that is wrong.
        while self.has_words() {
            match self.step() {
                Ok(Next::Output(bytes)) if connection.write_all(&bytes).is_ok() => {}
                _ => return,
            }
        }
    }

    fn has_words(&self) -> bool {
        match &self.end {
            End::Caller(caller) => caller.wants_write(),
            End::Host(host) => host.wants_write(),
            End::Over => false,
        }
    }

    fn finish(&mut self, connection: &mut impl Write) -> Result<Progress, SecureError> {
        let (secrets, kernel) = match std::mem::replace(&mut self.end, End::Over) {
            End::Caller(caller) => caller.dangerous_into_kernel_connection().map(|(s, k)| (s, Kernel::Client(k))),
            End::Host(host) => host.dangerous_into_kernel_connection().map(|(s, k)| (s, Kernel::Server(k))),
            End::Over => return Err(gone()),
        }
        .map_err(|error| self.view.failure(error))?;
        let keys = Arc::new(Keys::new(kernel));
        let mut sealer = Sealer::new(Cipher::new(secrets.tx)?, Arc::clone(&keys));
        let opener = Opener::new(Cipher::new(secrets.rx)?, keys, self.view.clone());
        if self.view.side == Side::Host && self.view.word == Word::Due {
            sealer.write(connection, &[ACCEPTED])?;
        }
        Ok(Progress::Done(Box::new(Halves { sealer, opener })))
    }
}

fn gone() -> SecureError {
    io::Error::new(ErrorKind::UnexpectedEof, "it has closed the connection in the middle of the handshake").into()
}

/// What rustls wants, and how many bytes of what came are used up.
fn next<D>(UnbufferedStatus { discard, state }: UnbufferedStatus<'_, '_, D>) -> (usize, Result<Next, Error>) {
    let next = match state {
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let mut bytes = vec![0; OUTGOING];
            data.encode(&mut bytes).map_err(|error| Error::General(error.to_string())).map(|made| {
                bytes.truncate(made);
                Next::Output(bytes)
            })
        }
        Ok(ConnectionState::TransmitTlsData(sent)) => {
            sent.done();
            Ok(Next::Nothing)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Input),
        // For a host, too, this is the end: what it could say before is not offered to a caller that has not shown who
        // it is.
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Next::Done),
        Ok(_) => Err(Error::HandshakeNotComplete),
        Err(error) => Err(error),
    };
    (discard, next)
}
