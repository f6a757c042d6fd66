//! What is said on the control connection of a link.
use super::MAX_CONNECTIONS;
use crate::control::fitting;
use crate::kind::MAX_REASON_BYTES;
use crate::reader::{Header, Reader};
use crate::{Error, Refusal};

/// Size of a message in bytes, without what follows an `Open` or an `Abort`.
pub const MESSAGE_BYTES: usize = 16;
/// The most that one message may allow: far more than any relay has room for.
pub const MAX_CREDIT: u32 = 1 << 30;
/// The most that `Open` has of a connection: what a multifd channel greets with.
pub const MAX_FIRST_BYTES: usize = 64;

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const OPEN: u8 = 3;
const CREDIT: u8 = 4;
const DONE: u8 = 5;
const ABORT: u8 = 6;

/// Whether the QEMU that waits may have the end of the stream, with which it runs the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TheEnd {
    /// It has not, and never will.
    Withheld,
    /// It has, or may have, or this side can't know.
    Given,
}

/// A message. `S` is the relay near the source, `D` the one near the destination.
///
/// | offset | bytes | field |
/// | ---: | ---: | --- |
/// | 0 | 1 | kind: the number of the message |
/// | 1 | 1 | `Hello`: channels; `Abort`: 1 if the end was given; else 0 |
/// | 2 | 2 | connection, of `Open` and `Credit`; else 0 |
/// | 4 | 4 | `Credit`: how much; `Open`, `Abort`: bytes that follow; else 0 |
/// | 8 | 8 | reserved, zero |
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// 1, S to D, first: so many data connections are to come; not 0.
    Hello {
        /// How many.
        channels: u8,
    },
    /// 2, D to S: they may come.
    Welcome,
    /// 3, S to D: QEMU has opened a connection; open one of this number to the QEMU that waits, and say at once what it
    /// says first: a QEMU that accepts a connection does nothing else until it has heard something. Numbers begin at 0,
    /// the main connection, and have no gaps.
    Open {
        /// Its number, below [`MAX_CONNECTIONS`].
        connection: u16,
        /// 1 to [`MAX_FIRST_BYTES`], which no packet has.
        first: Vec<u8>,
    },
    /// 4, both: so much more may be sent to me on this connection. The first one is the size of the window; each later
    /// one says that so much of it was written to my QEMU.
    Credit {
        /// Which one.
        connection: u16,
        /// Not 0, at most [`MAX_CREDIT`].
        amount: u32,
    },
    /// 5, both: all connections have ended in both directions; the session is over.
    Done,
    /// 6, both: I end the session and break all of my QEMU's connections, because.
    Abort {
        /// From D: whether its QEMU may have the end. From S it means nothing, and is `Withheld`.
        end: TheEnd,
        /// Why.
        refusal: Refusal,
    },
}

impl Message {
    /// The bytes to send. A text that is too long is cut, and control characters in it become spaces.
    pub fn encode(&self) -> Vec<u8> {
        let behind = match self {
            Message::Abort { refusal, .. } => fitting(&refusal.reason).as_bytes().to_vec(),
            Message::Open { first, .. } => first.clone(),
            _ => Vec::new(),
        };
        // The text fits: it has at most 4096 bytes. The other side refuses first bytes that don't.
        let length = u32::try_from(behind.len()).unwrap_or(u32::MAX);
        let (kind, small, connection, amount) = match *self {
            Message::Hello { channels } => (HELLO, channels, 0, 0),
            Message::Welcome => (WELCOME, 0, 0, 0),
            Message::Open { connection, .. } => (OPEN, 0, connection, length),
            Message::Credit { connection, amount } => (CREDIT, 0, connection, amount),
            Message::Done => (DONE, 0, 0, 0),
            Message::Abort { end, .. } => (ABORT, u8::from(end == TheEnd::Given), 0, length),
        };
        let mut header = Header::<MESSAGE_BYTES>::new();
        header.put([kind, small]).put(connection.to_le_bytes()).put(amount.to_le_bytes()).put([0; 8]);
        [&header.done()[..], &behind].concat()
    }

    /// How many bytes follow these: at most 4096.
    ///
    /// # Errors
    /// The bytes are no message.
    pub fn payload_bytes(header: &[u8; MESSAGE_BYTES]) -> Result<usize, Error> {
        Self::read(header).map(|(_, payload)| payload)
    }

    /// # Errors
    /// The bytes are no message; what follows is not as long as they say, or not a text where it should be one.
    pub fn decode(header: &[u8; MESSAGE_BYTES], payload: &[u8]) -> Result<Self, Error> {
        let (mut message, length) = Self::read(header)?;
        let mut reader = Reader::new(payload, MESSAGE_BYTES);
        match &mut message {
            Message::Abort { refusal, .. } => refusal.reason = reader.printable("Abort reason", length)?.to_owned(),
            Message::Open { first, .. } => *first = reader.bytes("Open first bytes", length)?.to_vec(),
            _ => {}
        }
        reader.end("message")?;
        Ok(message)
    }

    fn read(header: &[u8; MESSAGE_BYTES]) -> Result<(Self, usize), Error> {
        let mut reader = Reader::new(header, 0);
        let kind = reader.u8("message kind")?;
        if !(HELLO..=ABORT).contains(&kind) {
            return Err(reader.invalid("message kind", kind.into(), "unknown"));
        }
        let small = reader.u8("message flags")?;
        let fits = match kind {
            HELLO => small != 0,
            ABORT => small <= 1,
            _ => small == 0,
        };
        if !fits {
            return Err(reader.invalid("message flags", small.into(), "a value that this message can't have"));
        }
        let connection = reader.u16("message connection")?;
        if connection != 0 && !matches!(kind, OPEN | CREDIT) || connection >= MAX_CONNECTIONS {
            return Err(reader.invalid("message connection", connection.into(), "no such connection"));
        }
        let amount = reader.u32("message amount")?;
        let fits = match kind {
            CREDIT => (1..=MAX_CREDIT).contains(&amount),
            OPEN => (1..=MAX_FIRST_BYTES).contains(&(amount as usize)),
            ABORT => amount as usize <= MAX_REASON_BYTES,
            _ => amount == 0,
        };
        if !fits {
            return Err(reader.invalid("message amount", amount.into(), "a value that this message can't have"));
        }
        reader.reserved::<8>("message reserved")?;
        reader.end("message")?;
        let end = if small == 0 { TheEnd::Withheld } else { TheEnd::Given };
        Ok(match kind {
            HELLO => (Message::Hello { channels: small }, 0),
            WELCOME => (Message::Welcome, 0),
            OPEN => (Message::Open { connection, first: Vec::new() }, amount as usize),
            CREDIT => (Message::Credit { connection, amount }, 0),
            DONE => (Message::Done, 0),
            _ => (Message::Abort { end, refusal: Refusal { reason: String::new() } }, amount as usize),
        })
    }
}
