//! What must be equal on both sides: the machine and its memory.
use std::collections::HashSet;
use std::ops::RangeInclusive;

use crate::Error;
use crate::reader::{Reader, Writer};

/// Bytes of a page on the wire, whatever the host's page size.
pub const PAGE_BYTES: usize = 4096;
/// The most regions that a guest may have (8 NUMA nodes are common, hot-plugged memory adds some).
pub const MAX_REGIONS: usize = 1024;
/// A region is smaller than this: what 5-level page tables map to user space.
pub const MAX_REGION_BYTES: u64 = 1 << 56;
/// All memory of a guest has at most so many bytes (256 TiB): more than any machine has.
pub(crate) const MAX_GUEST_BYTES: u64 = 1 << 48;
/// The longest name of a machine or region, as QEMU bounds its own.
pub const MAX_NAME_BYTES: usize = 255;

/// One memory region of a guest. Names and sizes must be equal on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionDescription {
    /// 1 to 255 bytes, no control characters. Unique in its guest.
    pub name: String,
    /// In bytes, a multiple of 4096, not 0, below 2^56.
    pub bytes: u64,
}

/// What must be equal on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestDescription {
    /// Which adapter made it, and what machine it is: `qemu pc-q35-10.0`, `synthetic`. 1 to 255 bytes, no control
    /// characters.
    pub machine: String,
    /// 1 to [`MAX_REGIONS`]. A packet names a region by its index here.
    pub regions: Vec<RegionDescription>,
}

const NAME_SIZES: RangeInclusive<usize> = 1..=MAX_NAME_BYTES;

impl GuestDescription {
    /// The fewest bytes of an encoded description: one region, names of one byte.
    pub(crate) const BYTES_MIN: usize = 2 + (2 + 1) + (8 + 2 + 1);
    /// The most: all regions, all names as long as can be.
    pub(crate) const BYTES_MAX: usize = 2 + (2 + MAX_NAME_BYTES) + MAX_REGIONS * (8 + 2 + MAX_NAME_BYTES);

    /// Whether a peer would accept the description. A side checks its own guest with this before it says Hello, so that
    /// the user hears of a region that can't be moved from the side that has it.
    ///
    /// # Errors
    /// The first rule above that it breaks.
    pub fn check(&self) -> Result<(), Error> {
        let mut writer = Writer::default();
        self.write(&mut writer);
        let mut reader = Reader::new(&writer.0, 0);
        Self::read(&mut reader)?;
        reader.end("guest description")
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        // A count that does not fit becomes the largest, which the other side refuses and does not misread.
        writer.put(u16::try_from(self.regions.len()).unwrap_or(u16::MAX).to_le_bytes());
        writer.text(&self.machine);
        for region in &self.regions {
            writer.put(region.bytes.to_le_bytes()).text(&region.name);
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let count = reader.u16("region count")?;
        if !(1..=MAX_REGIONS).contains(&usize::from(count)) {
            return Err(reader.invalid("region count", count.into(), "a guest has 1 to 1024 regions"));
        }
        let machine = reader.text("machine", NAME_SIZES)?.to_owned();
        let mut names = HashSet::with_capacity(count.into());
        let mut regions = Vec::with_capacity(count.into());
        for _ in 0..count {
            let bytes = read_region_bytes(reader)?;
            let name = reader.text("region name", NAME_SIZES)?;
            if !names.insert(name) {
                return Err(reader.invalid("region name", name.len() as u64, "two regions have this name"));
            }
            regions.push(RegionDescription { name: name.to_owned(), bytes });
        }
        Ok(GuestDescription { machine, regions })
    }
}

fn read_region_bytes(reader: &mut Reader<'_>) -> Result<u64, Error> {
    let bytes = reader.u64("region bytes")?;
    if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES as u64) {
        return Err(reader.invalid("region bytes", bytes, "not a nonzero multiple of 4096"));
    }
    if bytes >= MAX_REGION_BYTES {
        return Err(reader.invalid("region bytes", bytes, "2^56 bytes or more"));
    }
    Ok(bytes)
}
