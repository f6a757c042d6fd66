//! What a destination says to its source, on the main connection (section 7).
use super::fields::put_name;
use super::{Name, Step};
use crate::Error;
use crate::reader::Reader;

// Section 7.
const SHUT: u16 = 1;
const PONG: u16 = 2;
const REQUEST_NAMED: u16 = 3;
const REQUEST: u16 = 4;
const RECEIVED_BITMAP: u16 = 5;
const RESUME_ACK: u16 = 6;
const SWITCHOVER_ACK: u16 = 7;
/// The only value of [`Reply::ResumeAck`].
const RESUMED: u32 = 1;

/// One message of the return path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The last one. 0: everything has been loaded.
    Shut(u32),
    /// The answer to [`Command::Ping`](super::Command::Ping), with its number.
    Pong(u32),
    /// The guest waits for these bytes (postcopy).
    RequestPages {
        /// The block; `None`: that of the request before.
        block: Option<Name>,
        /// Where they begin in it.
        offset: u64,
        /// How many.
        bytes: u32,
    },
    /// Which pages of a block have been received. The bitmap, little-endian, and then [`Reply::BITMAP_END`] follow.
    ReceivedBitmap {
        /// The block.
        block: Name,
        /// Length of the bitmap.
        bitmap_bytes: u64,
    },
    /// A broken connection may go on.
    ResumeAck,
    /// The source may stop the guest.
    SwitchoverAck,
}

impl Reply {
    /// The 64 bits behind a bitmap, as they are read.
    pub const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

    /// Reads a message from `bytes`, which begin at `position` of what the destination has said.
    ///
    /// # Errors
    /// An unknown type, or a length that its type can't have.
    pub fn read(bytes: &[u8], position: u64) -> Result<Step<Self>, Error> {
        let mut reader = Reader::at(bytes, position);
        match Self::read_message(&mut reader) {
            Ok(record) => Ok(Step::Done { record, used: bytes.len() - reader.rest().len() }),
            Err(Error::Truncated { missing, .. }) => Ok(Step::More { at_least: bytes.len() + missing }),
            Err(error) => Err(error),
        }
    }

    fn read_message(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let kind = reader.be16("reply type")?;
        let unknown =
            reader.invalid("reply type", kind.into(), "unknown; the destination is of a newer or foreign QEMU");
        let length = reader.be16("reply length")?;
        let fits = match kind {
            SHUT | PONG | RESUME_ACK => length == 4,
            REQUEST_NAMED => (13 + 1..=13 + 255).contains(&length),
            REQUEST => length == 12,
            RECEIVED_BITMAP => (1 + 1..=1 + 255).contains(&length),
            SWITCHOVER_ACK => length == 0,
            _ => return Err(unknown),
        };
        if !fits {
            return Err(reader.invalid("reply length", length.into(), "not the length that this reply has"));
        }
        Ok(match kind {
            SHUT => Reply::Shut(reader.be32("reply status")?),
            PONG => Reply::Pong(reader.be32("pong")?),
            REQUEST_NAMED | REQUEST => {
                let offset = reader.be64("requested offset")?;
                let bytes = reader.be32("requested length")?;
                let block = (kind == REQUEST_NAMED).then(|| read_name(reader, length - 12)).transpose()?;
                Reply::RequestPages { block, offset, bytes }
            }
            RECEIVED_BITMAP => {
                let block = read_name(reader, length)?;
                Reply::ReceivedBitmap { block, bitmap_bytes: reader.be64("bitmap length")? }
            }
            RESUME_ACK => {
                reader.constant("resume acknowledgement", RESUMED, "it is 1 in all versions")?;
                Reply::ResumeAck
            }
            _ => Reply::SwitchoverAck,
        })
    }

    /// The bytes to send.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        let mut behind = None;
        let kind = match self {
            Reply::Shut(status) => {
                data.extend(status.to_be_bytes());
                SHUT
            }
            Reply::Pong(value) => {
                data.extend(value.to_be_bytes());
                PONG
            }
            Reply::RequestPages { block, offset, bytes } => {
                data.extend(offset.to_be_bytes());
                data.extend(bytes.to_be_bytes());
                block.iter().for_each(|name| put_name(&mut data, name));
                if block.is_some() { REQUEST_NAMED } else { REQUEST }
            }
            Reply::ReceivedBitmap { block, bitmap_bytes } => {
                put_name(&mut data, block);
                behind = Some(bitmap_bytes.to_be_bytes());
                RECEIVED_BITMAP
            }
            Reply::ResumeAck => {
                data.extend(RESUMED.to_be_bytes());
                RESUME_ACK
            }
            Reply::SwitchoverAck => SWITCHOVER_ACK,
        };
        let length = u16::try_from(data.len()).expect("the longest is a request with a name of 255 bytes");
        let mut bytes = Vec::from(kind.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        bytes.extend(behind.into_iter().flatten());
        bytes
    }
}

/// A name that fills the rest of a message, its own length included.
fn read_name(reader: &mut Reader<'_>, length: u16) -> Result<Name, Error> {
    let name = reader.name("block name")?;
    if name.len() + 1 != usize::from(length) {
        return Err(reader.named("reply length", &name, length.into(), "the name does not fill the message"));
    }
    Ok(name)
}
