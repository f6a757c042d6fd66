//! What the main stream is made of (section 1.2).
use super::{Block, Command, Configuration, Name, Page};
use crate::Error;
use crate::guest::MAX_REGION_BYTES;
use crate::reader::Reader;

/// The longest that [`Step::More`] ever asks for: a command with 65535 bytes of data.
pub const MAX_RECORD_BYTES: usize = 1 + 2 + 2 + u16::MAX as usize;

// Type bytes of records (section 1.2).
pub(super) const EOF: u8 = 0x00;
pub(super) const START: u8 = 0x01;
pub(super) const PART: u8 = 0x02;
pub(super) const END: u8 = 0x03;
pub(super) const FULL: u8 = 0x04;
pub(super) const VMDESC: u8 = 0x06;
pub(super) const FOOTER: u8 = 0x7e;

/// One record of the main stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record<'a> {
    /// Magic and version of the stream.
    Header,
    /// What the stream says of itself.
    Configuration(Configuration),
    /// A command to the destination. Behind [`Command::Packaged`] come [`Record::Raw`] pieces.
    Command(Command),
    /// The RAM section begins: blocks that have `total` bytes together follow.
    RamStart {
        /// The section's number, by which its parts name it.
        section: u32,
        /// Bytes of all blocks, a multiple of 4096.
        total: u64,
    },
    /// A block of the list. In a mapped-ram file the reader's position is behind the block's pages now.
    Block(Block),
    /// The main stream's half of a barrier with the multifd channels (section 6.4).
    MultifdFlush,
    /// A part of the RAM section begins; pages follow.
    Part {
        /// The section's number.
        section: u32,
    },
    /// The last part of the RAM section begins; the guest has been stopped.
    End {
        /// The section's number.
        section: u32,
    },
    /// A page. A page may come again; the last one counts.
    Page(Page<'a>),
    /// What began with `RamStart`, `Part` or `End` is complete.
    EndOfBody,
    /// The mark behind each section.
    Footer {
        /// The number of the section that it closes.
        section: u32,
    },
    /// The state of a memory device that has to be there before the pages. [`Record::Raw`] pieces and a footer follow.
    Early(EarlySection),
    /// A piece of what the record before announced: as much of it as was there.
    Raw(&'a [u8]),
    /// The memory is complete. At the reader's position begins the [`Tail`](super::Tail). No byte belongs to this
    /// record, and the reader stays here.
    Tail,
}

/// What a virtio-mem device says before the pages (section 1.5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EarlySection {
    /// The section's number.
    pub section: u32,
    /// Its name: the device's, and `/virtio-mem-device-early`.
    pub name: Name,
    /// Which of several with this name.
    pub instance: u32,
    /// Version of the layout.
    pub version: u32,
    /// Where the device's memory is in the guest.
    pub address: u64,
    /// How much memory the device has at most, in bytes.
    pub region_bytes: u64,
    /// The size of what can be plugged, in bytes.
    pub block_bytes: u64,
    /// NUMA node.
    pub node: u32,
    /// How much is plugged, in bytes.
    pub plugged_bytes: u64,
    /// Length of the bitmap of plugged blocks, which follows.
    pub bitmap_bytes: u64,
}

/// What a reader did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<T> {
    /// It took the first `used` bytes.
    Done {
        /// What they are.
        record: T,
        /// How many.
        used: usize,
    },
    /// It took nothing, and will not before it is given so many bytes from the same place on.
    More {
        /// More than it was given, at most [`MAX_RECORD_BYTES`].
        at_least: usize,
    },
}

impl EarlySection {
    /// Reads what is behind the name, up to the bitmap.
    pub(super) fn read(reader: &mut Reader<'_>, section: u32, name: Name) -> Result<Self, Error> {
        let instance = reader.be32("section instance")?;
        let version = reader.be32("section version")?;
        let address = reader.be64("memory device address")?;
        let region_bytes = reader.be64("memory device size")?;
        if region_bytes == 0 || region_bytes >= MAX_REGION_BYTES {
            return Err(reader.named("memory device size", &name, region_bytes, "not between 1 and 2^56 bytes"));
        }
        let block_bytes = reader.be64("memory device block size")?;
        if !block_bytes.is_power_of_two() {
            return Err(reader.named("memory device block size", &name, block_bytes, "not a power of two"));
        }
        let node = reader.be32("memory device node")?;
        let plugged_bytes = reader.be64("memory device plugged size")?;
        let bitmap_bytes = (region_bytes / block_bytes).div_ceil(u64::BITS.into()) * 8;
        Ok(EarlySection {
            section,
            name,
            instance,
            version,
            address,
            region_bytes,
            block_bytes,
            node,
            plugged_bytes,
            bitmap_bytes,
        })
    }
}
