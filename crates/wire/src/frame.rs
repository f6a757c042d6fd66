//! The header of a control message: what comes, how long it is, and which one it is.
use crate::Error;
use crate::kind::{Kind, MAX_MESSAGE_BYTES};
use crate::reader::{Header, Reader};

/// Size of a frame header: kind u16, reserved u16, payload length u32, id u64.
pub const FRAME_BYTES: usize = 16;

/// The header of a message.
///
/// | offset | bytes | field |
/// | ---: | ---: | --- |
/// | 0 | 2 | kind: the number of the [`Message`](crate::Message) |
/// | 2 | 2 | reserved, zero |
/// | 4 | 4 | bytes of payload that follow |
/// | 8 | 8 | id: counts up by one on each side, from 1 |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// The number of the message.
    pub kind: u16,
    /// Bytes of payload that follow the header.
    pub payload: u32,
    /// Counts up by one on each side, from 1. Whether it's the next one is the receiver's to check.
    pub id: u64,
}

impl Frame {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut header = Header::new();
        header.put(self.kind.to_le_bytes()).put([0; 2]).put(self.payload.to_le_bytes()).put(self.id.to_le_bytes());
        header.done()
    }

    /// What it returns can be believed as far as the size of the payload goes: it is one that the kind can have.
    ///
    /// # Errors
    /// An unknown kind, reserved bits, a payload that the kind can't have (so never one longer than
    /// [`MAX_MESSAGE_BYTES`]), an id of 0.
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, Error> {
        let mut reader = Reader::new(bytes, 0);
        let number = reader.u16("frame kind")?;
        let Some(kind) = Kind::of_number(number) else {
            return Err(reader.invalid("frame kind", number.into(), "unknown message"));
        };
        reader.reserved::<2>("frame reserved")?;
        let payload = reader.u32("frame payload")?;
        let sizes = kind.payload_sizes();
        debug_assert!(*sizes.end() <= MAX_MESSAGE_BYTES, "every kind keeps the common bound");
        if !sizes.contains(&(payload as usize)) {
            return Err(reader.invalid("frame payload", payload.into(), "a length that this message can't have"));
        }
        let id = reader.u64("frame id")?;
        if id == 0 {
            return Err(reader.invalid("frame id", id, "ids begin at 1"));
        }
        reader.end("frame")?;
        Ok(Frame { kind: number, payload, id })
    }
}
