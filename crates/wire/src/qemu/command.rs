//! Commands: what the source says to the destination beside the state itself (section 1.4).
use super::Name;
use super::fields::put_name;
use crate::Error;
use crate::reader::Reader;

/// Type byte of the record (section 1.2).
pub(super) const TYPE: u8 = 0x08;

// Section 1.4.
const OPEN_RETURN_PATH: u16 = 1;
const PING: u16 = 2;
const POSTCOPY_ADVISE: u16 = 3;
const POSTCOPY_LISTEN: u16 = 4;
const POSTCOPY_RUN: u16 = 5;
const POSTCOPY_RAM_DISCARD: u16 = 6;
const PACKAGED: u16 = 7;
const ENABLE_COLO: u16 = 8;
const POSTCOPY_RESUME: u16 = 9;
const RECV_BITMAP: u16 = 10;
const SWITCHOVER_START: u16 = 11;

/// One command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// The destination may answer from now on.
    OpenReturnPath,
    /// The destination answers with the same number.
    Ping(u32),
    /// Pages may come after the guest has started: which page sizes blocks have (all of them or'ed), and the
    /// guest's. Without these only dirty bitmaps come late.
    PostcopyAdvise(Option<PageSizes>),
    /// From here on the stream brings pages while the guest runs.
    PostcopyListen,
    /// Start the guest.
    PostcopyRun,
    /// Pages of a block that are not, or no longer, what the source has.
    PostcopyRamDiscard(RamDiscard),
    /// So many bytes follow, which are a stream of their own.
    Packaged {
        /// How many.
        bytes: u32,
    },
    /// Keep two machines in step.
    EnableColo,
    /// A broken connection goes on.
    PostcopyResume,
    /// The destination says which pages of the block it has.
    RecvBitmap {
        /// The block.
        block: Name,
    },
    /// The guest has been stopped; device state follows (QEMU 10.0 or newer).
    SwitchoverStart,
}

/// The page sizes that [`Command::PostcopyAdvise`] announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSizes {
    /// Those of all blocks, or'ed.
    pub blocks: u64,
    /// The guest's.
    pub guest: u64,
}

/// Pages to forget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamDiscard {
    /// The block.
    pub block: Name,
    /// Where each range begins, and its length, in bytes.
    pub ranges: Vec<(u64, u64)>,
}

impl Command {
    /// QEMU's name for it.
    pub fn name(&self) -> &'static str {
        match self {
            Command::OpenReturnPath => "OPEN_RETURN_PATH",
            Command::Ping(_) => "PING",
            Command::PostcopyAdvise(_) => "POSTCOPY_ADVISE",
            Command::PostcopyListen => "POSTCOPY_LISTEN",
            Command::PostcopyRun => "POSTCOPY_RUN",
            Command::PostcopyRamDiscard(_) => "POSTCOPY_RAM_DISCARD",
            Command::Packaged { .. } => "PACKAGED",
            Command::EnableColo => "ENABLE_COLO",
            Command::PostcopyResume => "POSTCOPY_RESUME",
            Command::RecvBitmap { .. } => "RECV_BITMAP",
            Command::SwitchoverStart => "SWITCHOVER_START",
        }
    }

    /// Reads a command behind its type byte.
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let number = reader.be16("command")?;
        if !(OPEN_RETURN_PATH..=SWITCHOVER_START).contains(&number) {
            return Err(reader.invalid("command", number.into(), "unknown; this stream is of a newer or foreign QEMU"));
        }
        let length = reader.be16("command length")?;
        let length_error = reader.invalid("command length", length.into(), "not the length that this command has");
        let data = reader.bytes("command data", length.into())?;
        let mut data = Reader::new(data, reader.field_start());
        let command = Self::read_data(number, length, &mut data).map_err(|error| match error {
            // The data ends where its length says, so what is missing will not come.
            Error::Truncated { .. } => length_error.clone(),
            other => other,
        })?;
        if data.rest().is_empty() { Ok(command) } else { Err(length_error) }
    }

    fn read_data(number: u16, length: u16, data: &mut Reader<'_>) -> Result<Self, Error> {
        Ok(match number {
            OPEN_RETURN_PATH => Command::OpenReturnPath,
            PING => Command::Ping(data.be32("ping")?),
            POSTCOPY_ADVISE if length == 0 => Command::PostcopyAdvise(None),
            POSTCOPY_ADVISE => {
                let blocks = data.be64("block page sizes")?;
                Command::PostcopyAdvise(Some(PageSizes { blocks, guest: data.be64("guest page size")? }))
            }
            POSTCOPY_LISTEN => Command::PostcopyListen,
            POSTCOPY_RUN => Command::PostcopyRun,
            POSTCOPY_RAM_DISCARD => Command::PostcopyRamDiscard(RamDiscard::read(data)?),
            PACKAGED => Command::Packaged { bytes: data.be32("package length")? },
            ENABLE_COLO => Command::EnableColo,
            POSTCOPY_RESUME => Command::PostcopyResume,
            RECV_BITMAP => Command::RecvBitmap { block: data.name("block name")? },
            _ => Command::SwitchoverStart,
        })
    }

    /// Appends the record with its type byte.
    ///
    /// # Panics
    /// When a [`RamDiscard`] has more ranges than its 16-bit length can say (about 4000; QEMU sends 12 at most).
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let mut data = Vec::new();
        let number = match self {
            Command::OpenReturnPath => OPEN_RETURN_PATH,
            Command::Ping(value) => put(&mut data, &[value.to_be_bytes()], PING),
            Command::PostcopyAdvise(None) => POSTCOPY_ADVISE,
            Command::PostcopyAdvise(Some(PageSizes { blocks, guest })) => {
                put(&mut data, &[blocks.to_be_bytes(), guest.to_be_bytes()], POSTCOPY_ADVISE)
            }
            Command::PostcopyListen => POSTCOPY_LISTEN,
            Command::PostcopyRun => POSTCOPY_RUN,
            Command::PostcopyRamDiscard(discard) => {
                discard.write(&mut data);
                POSTCOPY_RAM_DISCARD
            }
            Command::Packaged { bytes } => put(&mut data, &[bytes.to_be_bytes()], PACKAGED),
            Command::EnableColo => ENABLE_COLO,
            Command::PostcopyResume => POSTCOPY_RESUME,
            Command::RecvBitmap { block } => {
                put_name(&mut data, block);
                RECV_BITMAP
            }
            Command::SwitchoverStart => SWITCHOVER_START,
        };
        let length = u16::try_from(data.len()).expect("only a RamDiscard with thousands of ranges is longer");
        out.push(TYPE);
        out.extend(number.to_be_bytes());
        out.extend(length.to_be_bytes());
        out.extend(data);
    }
}

fn put<const N: usize>(data: &mut Vec<u8>, fields: &[[u8; N]], number: u16) -> u16 {
    data.extend(fields.as_flattened());
    number
}

impl RamDiscard {
    fn read(data: &mut Reader<'_>) -> Result<Self, Error> {
        Self::zero(data, "discard version")?;
        let block = data.name("block name")?;
        Self::zero(data, "end of the block name")?;
        let mut ranges = Vec::new();
        while !data.rest().is_empty() {
            ranges.push((data.be64("discard start")?, data.be64("discard length")?));
        }
        Ok(RamDiscard { block, ranges })
    }

    fn zero(data: &mut Reader<'_>, field: &'static str) -> Result<(), Error> {
        match data.u8(field)? {
            0 => Ok(()),
            byte => Err(data.invalid(field, byte.into(), "it is 0 in all versions")),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.push(0);
        put_name(out, &self.block);
        out.push(0);
        for (start, length) in &self.ranges {
            out.extend(start.to_be_bytes());
            out.extend(length.to_be_bytes());
        }
    }
}
