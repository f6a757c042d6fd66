//! What comes in.
use std::{
    fmt,
    io::{self, ErrorKind, Read},
    ops::Range,
    sync::Arc,
};

use rustls::AlertDescription;

use crate::{
    Doubt, RECORD_BYTES, SecureError,
    cipher::{Cipher, HEADER_BYTES, Keys, kind, sealed_bytes},
    ends::Word,
    failure::{Side, View},
    handshake::ACCEPTED,
};

/// Most bytes of a sealed record behind its header (RFC 8446, 5.2).
const MOST: usize = RECORD_BYTES + 256;
/// Read at once, if so much is there.
const ROOM: usize = 128 << 10;
/// The messages that may come behind a handshake: a ticket, which is of no use here, and a new key.
const TICKET: u8 = 4;
const NEW_KEY: u8 = 24;
const CLOSE_NOTIFY: u8 = 0;

/// Reads records and opens them. Once one was wrong, it never reads again.
pub struct Opener {
    cipher: Cipher,
    keys: Arc<Keys>,
    view: View,
    /// A host's first word is still to come.
    word_is_due: bool,
    /// Records as they came, but for the one that is open.
    room: Vec<u8>,
    /// Where the next record begins, and where what has come ends.
    next: usize,
    end: usize,
    /// What the open record holds and was not read.
    open: Range<usize>,
    /// What was looked at before it is read.
    early: Vec<u8>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing more comes.
    Ended,
    /// What came can't be trusted.
    Broken,
}

impl Opener {
    pub(crate) fn new(cipher: Cipher, keys: Arc<Keys>, view: View) -> Self {
        Self {
            cipher,
            keys,
            word_is_due: view.side == Side::Caller && view.word == Word::Due,
            view,
            room: Vec::new(),
            next: 0,
            end: 0,
            open: 0..0,
            early: Vec::new(),
            state: State::Open,
        }
    }

    /// Reads as [`Read::read`] does. A connection that ends in the middle of a record is an error, `UnexpectedEof`.
    ///
    /// # Errors
    /// The connection's own, after those of its timeout it can be called again; InvalidData for bytes that the other
    /// side did not send so, and from then on.
    pub fn read(&mut self, from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
        if !self.early.is_empty() {
            let count = self.early.len().min(into.len());
            into[..count].copy_from_slice(&self.early[..count]);
            self.early.drain(..count);
            return Ok(count);
        }
        while self.open.is_empty() && !into.is_empty() {
            if !self.advance(from)? {
                return Ok(0);
            }
        }
        let count = self.open.len().min(into.len());
        into[..count].copy_from_slice(&self.room[self.open.start..self.open.start + count]);
        self.open.start += count;
        Ok(count)
    }

    /// Looks at up to `most` of the bytes that come next, and takes none. Fewer: the connection says that no more are
    /// there now, or it has ended.
    ///
    /// # Errors
    /// As [`Opener::read`], but for those of a timeout.
    pub fn peek(&mut self, from: &mut impl Read, most: usize) -> io::Result<&[u8]> {
        while self.early.len() < most {
            self.early.extend_from_slice(&self.room[self.open.clone()]);
            self.open = 0..0;
            match self.advance(from) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(&self.early[..most.min(self.early.len())])
    }

    /// Whether all was read that has come off the connection: only what comes from now on can be read next.
    pub fn is_empty(&self) -> bool {
        let rest = &self.room[self.next..self.end];
        let has_record = rest
            .first_chunk()
            .is_some_and(|&header| sealed_bytes(header, MOST).is_none_or(|sealed| rest.len() >= HEADER_BYTES + sealed));
        self.early.is_empty() && self.open.is_empty() && !has_record
    }

    /// Whether the other side has said that nothing more comes, or has cut the connection between two records, and all
    /// before that was read or looked at.
    pub fn has_ended(&self) -> bool {
        self.state != State::Open && self.early.is_empty() && self.open.is_empty()
    }

    /// At a caller: waits for the host to say that it accepts it. Before that nothing should be sent that a host need
    /// not know.
    ///
    /// # Errors
    /// It does not, or says nothing in time.
    pub fn await_word(&mut self, from: &mut impl Read) -> Result<(), SecureError> {
        while self.word_is_due {
            match self.advance(from) {
                Ok(true) => {}
                Ok(false) => {
                    return Err(io::Error::new(ErrorKind::UnexpectedEof, "it has closed the connection").into());
                }
                Err(error) => return Err(failure(error)),
            }
        }
        Ok(())
    }

    /// Opens the next record, or reads some of it. False: the connection has ended.
    fn advance(&mut self, from: &mut impl Read) -> io::Result<bool> {
        match self.state {
            State::Open => {}
            State::Ended => return Ok(false),
            State::Broken => return Err(io::Error::new(ErrorKind::InvalidData, "what came before was not right")),
        }
        let stepped = match self.whole_record() {
            Ok(Some(record)) => self.take(record),
            Ok(None) => return self.fill(from),
            Err(failure) => Err(failure),
        };
        stepped.map(|()| true).map_err(|failure| {
            self.state = State::Broken;
            failure.into()
        })
    }

    /// Where the next record is, if all of it has come.
    fn whole_record(&self) -> Result<Option<Range<usize>>, SecureError> {
        let there = &self.room[self.next..self.end];
        let Some(&header) = there.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let sealed = sealed_bytes(header, MOST).ok_or_else(changed)?;
        let length = HEADER_BYTES + sealed;
        Ok((there.len() >= length).then(|| self.next..self.next + length))
    }

    fn fill(&mut self, from: &mut impl Read) -> io::Result<bool> {
        self.room.resize(ROOM, 0);
        // No record is open: this is called only when all of the last one was read.
        self.room.copy_within(self.next..self.end, 0);
        self.end -= std::mem::take(&mut self.next);
        loop {
            match from.read(&mut self.room[self.end..]) {
                Ok(0) if self.end == 0 => {
                    self.state = State::Ended;
                    return Ok(false);
                }
                Ok(0) => {
                    self.state = State::Broken;
                    return Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection has ended within a record"));
                }
                Ok(read) => {
                    self.end += read;
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, record: Range<usize>) -> Result<(), SecureError> {
        self.next = record.end;
        let opened = self.cipher.open(&mut self.room[record.clone()]).ok_or_else(changed)?;
        let start = record.start + HEADER_BYTES;
        // The last byte that is not zero is the kind; zeros behind it are there to hide the length.
        let kind_at = self.room[start..start + opened].iter().rposition(|byte| *byte != 0).ok_or_else(changed)?;
        let (kind, held) = (self.room[start + kind_at], start..start + kind_at);
        if held.len() > RECORD_BYTES {
            return Err(changed());
        }
        match (kind, &self.room[held.clone()]) {
            (kind::DATA, [ACCEPTED, ..]) if self.word_is_due => {
                self.word_is_due = false;
                self.open = held.start + 1..held.end;
                Ok(())
            }
            (kind::DATA, [_, ..]) if self.word_is_due => {
                Err(SecureError::Unsuited("it does not speak as a transship does; use the same on both sides".into()))
            }
            (kind::DATA, _) => {
                self.open = held;
                Ok(())
            }
            (kind::ALERT, [_, CLOSE_NOTIFY]) => {
                self.state = State::Ended;
                Ok(())
            }
            (kind::ALERT, [_, why]) => Err(self.view.refused(AlertDescription::from(*why))),
            (kind::HANDSHAKE, [NEW_KEY, 0, 0, 1, asks @ 0..=1]) => {
                if *asks == 1 {
                    self.keys.want();
                }
                self.cipher = self.keys.next_to_open()?;
                Ok(())
            }
            (kind::HANDSHAKE, [TICKET, ..]) if self.view.side == Side::Caller => Ok(()),
            _ => Err(SecureError::Unsuited("it sent a message of TLS that has no place there".into())),
        }
    }
}

fn changed() -> SecureError {
    SecureError::Untrusted(
        Doubt::Changed,
        "what came was changed on its way, or does not belong to this connection".into(),
    )
}

fn failure(error: io::Error) -> SecureError {
    match error.downcast::<SecureError>() {
        Ok(failure) => failure,
        Err(error) => error.into(),
    }
}

/// Without keys, for logs.
impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener(…)")
    }
}
