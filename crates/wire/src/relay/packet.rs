//! What travels on a data connection of a link: a fixed header, then the bytes that it announces.
use super::MAX_CONNECTIONS;
use crate::Error;
use crate::reader::{Header, Reader};

/// The most bytes of QEMU's that one packet has.
pub const MAX_BYTES: usize = 512 << 10;
/// Size of an encoded header in bytes.
pub const PACKET_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"TSRP";
const BYTES: u8 = 1;
const END: u8 = 2;
const ENCODING_RAW: u8 = 0;
const GIVES_END: u8 = 1;

/// One header of a data connection.
///
/// | offset | bytes | field | bytes (1) | end (2) |
/// | ---: | ---: | --- | --- | --- |
/// | 0 | 4 | magic | `TSRP` | `TSRP` |
/// | 4 | 1 | kind | 1 | 2 |
/// | 5 | 1 | encoding | 0 (raw), or a method | 0 |
/// | 6 | 2 | connection | its number | its number |
/// | 8 | 8 | sequence | counts up by one, from 0, in each direction of each connection | the same |
/// | 16 | 4 | bytes, decoded | 1 to 524288 | 0 |
/// | 20 | 4 | payload bytes that follow | as many; encoded: fewer, not 0 | 0 |
/// | 24 | 1 | flags | bit 0: gives the end | 0 |
/// | 25 | 7 | reserved | zero | zero |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Below [`MAX_CONNECTIONS`].
    pub connection: u16,
    /// Its place among the packets of this connection and direction.
    pub sequence: u64,
    /// What it is.
    pub content: Content,
}

/// What a packet has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Bytes of QEMU's, as they are.
    Raw {
        /// 1 to [`MAX_BYTES`].
        bytes: u32,
        /// With these bytes the QEMU that waits may run the guest.
        gives_end: bool,
    },
    /// The same, encoded.
    Encoded {
        /// 1 to [`MAX_BYTES`].
        bytes: u32,
        /// As above.
        gives_end: bool,
        /// Number of the method; not 0. Whether there is such a method is the codec's to say.
        method: u8,
        /// Length of the payload: not 0, and less than the bytes' own.
        payload: u32,
    },
    /// Nothing follows in this direction of the connection.
    End,
}

impl Packet {
    /// The header to send; [`Packet::payload_bytes`] of payload follow it.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        let (kind, encoding, bytes, gives_end) = match self.content {
            Content::Raw { bytes, gives_end } => (BYTES, ENCODING_RAW, bytes, gives_end),
            Content::Encoded { bytes, gives_end, method, .. } => (BYTES, method, bytes, gives_end),
            Content::End => (END, ENCODING_RAW, 0, false),
        };
        let mut header = Header::new();
        header.put(MAGIC).put([kind, encoding]).put(self.connection.to_le_bytes()).put(self.sequence.to_le_bytes());
        header.put(bytes.to_le_bytes()).put(self.payload_u32().to_le_bytes());
        header.put([if gives_end { GIVES_END } else { 0 }]).put([0; 7]);
        header.done()
    }

    /// # Errors
    /// Any field that breaks a rule of the layout. Whether there is such a connection, and room for the bytes, is the
    /// engine's to check.
    pub fn decode(header: &[u8; PACKET_BYTES]) -> Result<Self, Error> {
        let mut reader = Reader::new(header, 0);
        let magic = reader.u32("packet magic")?;
        if magic != u32::from_le_bytes(MAGIC) {
            return Err(reader.invalid("packet magic", magic.into(), "no packet of a link begins here"));
        }
        let kind = reader.u8("packet kind")?;
        if !matches!(kind, BYTES | END) {
            return Err(reader.invalid("packet kind", kind.into(), "unknown"));
        }
        let method = reader.u8("packet encoding")?;
        if method != ENCODING_RAW && kind == END {
            return Err(reader.invalid("packet encoding", method.into(), "an end has nothing to encode"));
        }
        let connection = reader.u16("packet connection")?;
        if connection >= MAX_CONNECTIONS {
            return Err(reader.invalid("packet connection", connection.into(), "connection numbers end at 255"));
        }
        let sequence = reader.u64("packet sequence")?;
        let bytes = reader.u32("packet bytes")?;
        if !(kind == END && bytes == 0 || kind == BYTES && (1..=MAX_BYTES).contains(&(bytes as usize))) {
            return Err(reader.invalid("packet bytes", bytes.into(), "a packet has 1 to 524288 bytes, an end none"));
        }
        let payload = reader.u32("packet payload")?;
        let fits = if method == ENCODING_RAW { payload == bytes } else { (1..bytes).contains(&payload) };
        if !fits {
            return Err(reader.invalid(
                "packet payload",
                payload.into(),
                "not as many bytes as the packet has, or fewer if encoded",
            ));
        }
        let flags = reader.u8("packet flags")?;
        if flags & !GIVES_END != 0 || kind == END && flags != 0 {
            return Err(reader.invalid("packet flags", flags.into(), "reserved bits must be zero"));
        }
        reader.reserved::<7>("packet reserved")?;
        reader.end("packet")?;
        let gives_end = flags == GIVES_END;
        let content = match (kind, method) {
            (END, _) => Content::End,
            (_, ENCODING_RAW) => Content::Raw { bytes, gives_end },
            (_, method) => Content::Encoded { bytes, gives_end, method, payload },
        };
        Ok(Self { connection, sequence, content })
    }

    /// Bytes of payload that follow this header: at most [`MAX_BYTES`].
    pub fn payload_bytes(&self) -> usize {
        self.payload_u32() as usize
    }

    fn payload_u32(&self) -> u32 {
        match self.content {
            Content::Raw { bytes, .. } => bytes,
            Content::Encoded { payload, .. } => payload,
            Content::End => 0,
        }
    }
}
