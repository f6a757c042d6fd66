//! RAM blocks: how a stream announces them, and where a mapped-ram file keeps their pages (sections 2.1 and 4).
use std::ops::Range;

use super::fields::put_name;
use super::{Configuration, Name};
use crate::guest::{MAX_REGION_BYTES, MAX_REGIONS};
use crate::reader::Reader;
use crate::{Error, PAGE_BYTES};

/// The most blocks that a stream may list: every ROM and video memory is one, beside the guest's memory.
pub const MAX_BLOCKS: usize = MAX_REGIONS;
/// Pages of a block in a mapped-ram file begin at a multiple of this, so that direct I/O can reach them on any device
/// (section 4.2). A reader accepts any multiple of the page size.
pub const PAGES_ALIGNMENT: u64 = 1 << 20;

/// Length of [`Block`]'s header in a mapped-ram file (section 4.2).
const MAPPED_HEADER_BYTES: u64 = 4 + 8 + 8 + 8;
const MAPPED_VERSION: u32 = 1; // section 4.2
const PAGE: u64 = PAGE_BYTES as u64;
/// Bits of a bitmap are kept in words of this many bytes (section 4.3).
const BITMAP_WORD_BYTES: u64 = 8;
/// File positions stay below this, so that sums of a few of them fit.
const POSITIONS_END: u64 = 1 << 62;

/// Where a mapped-ram file keeps the pages of a block. Positions count from the beginning of the file, also when the
/// stream begins later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Where the bitmap is. Bit `i % 8` of its byte `i / 8` says whether page i is in the file; if not, the page is
    /// zero.
    pub bitmap_offset: u64,
    /// Where page 0 is; page i is `i * 4096` bytes later.
    pub pages_offset: u64,
}

/// What a mapped-ram file says of a block's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapped {
    /// They are there.
    At(Geometry),
    /// They are not in the file: they are in the shared file that the block is made of (section 3). QEMU 11.1 writes
    /// this.
    Ignored,
}

/// A RAM block as the stream announces it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// QEMU's name for it: `pc.ram`, or the id of a memory backend, or a device's.
    pub name: Name,
    /// Its length in bytes: a multiple of 4096, not 0, below 2^56.
    pub used_bytes: u64,
    /// Where it is in the memory region that contains it. There if and only if `x-ignore-shared` is on.
    pub gpa: Option<u64>,
    /// There if and only if `mapped-ram` is on.
    pub mapped: Option<Mapped>,
}

/// Length of the bitmap for a block of this many bytes.
pub fn bitmap_bytes(used_bytes: u64) -> u64 {
    used_bytes.div_ceil(PAGE).div_ceil(8 * BITMAP_WORD_BYTES) * BITMAP_WORD_BYTES
}

impl Geometry {
    /// Where stock QEMU places bitmap and pages of a block whose header ends at `header_end`: the bitmap at once, the
    /// pages at the next multiple of [`PAGES_ALIGNMENT`].
    pub fn stock(header_end: u64, used_bytes: u64) -> Self {
        let pages_offset = (header_end + bitmap_bytes(used_bytes)).next_multiple_of(PAGES_ALIGNMENT);
        Geometry { bitmap_offset: header_end, pages_offset }
    }

    /// The bytes of the file that hold the bitmap.
    pub fn bitmap(&self, used_bytes: u64) -> Range<u64> {
        self.bitmap_offset..self.bitmap_offset + bitmap_bytes(used_bytes)
    }

    /// The bytes of the file that hold the pages. Where they end the stream goes on.
    pub fn pages(&self, used_bytes: u64) -> Range<u64> {
        self.pages_offset..self.pages_offset + used_bytes
    }
}

impl Block {
    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.used_bytes / PAGE
    }

    /// Where a mapped-ram file has its pages.
    pub fn geometry(&self) -> Option<Geometry> {
        match self.mapped {
            Some(Mapped::At(geometry)) => Some(geometry),
            Some(Mapped::Ignored) | None => None,
        }
    }

    /// Length of its entry in the stream.
    pub fn entry_bytes(&self) -> u64 {
        let gpa = if self.gpa.is_some() { 8 } else { 0 };
        let mapped = if self.mapped.is_some() { MAPPED_HEADER_BYTES } else { 0 };
        1 + u64::from(self.name.len_byte()) + 8 + gpa + mapped
    }

    /// Reads an entry of a stream with this configuration.
    pub(super) fn read(reader: &mut Reader<'_>, configuration: &Configuration) -> Result<Self, Error> {
        let name = reader.name("block name")?;
        let used_bytes = reader.be64("block length")?;
        if used_bytes == 0 || !used_bytes.is_multiple_of(PAGE) || used_bytes >= MAX_REGION_BYTES {
            let why = "not a number of whole pages between 1 page and 2^56 bytes";
            return Err(reader.named("block length", &name, used_bytes, why));
        }
        let gpa = configuration.ignore_shared.then(|| reader.be64("block address")).transpose()?;
        let mapped = configuration
            .mapped_ram
            .then(|| read_mapped(reader, &name, used_bytes, configuration.ignore_shared))
            .transpose()?;
        Ok(Block { name, used_bytes, gpa, mapped })
    }

    /// Appends its entry.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        put_name(out, &self.name);
        out.extend(self.used_bytes.to_be_bytes());
        out.extend(self.gpa.into_iter().flat_map(u64::to_be_bytes));
        if let Some(mapped) = self.mapped {
            let (bitmap_offset, pages_offset) = match mapped {
                Mapped::At(geometry) => (geometry.bitmap_offset, geometry.pages_offset),
                Mapped::Ignored => (0, 0),
            };
            out.extend(MAPPED_VERSION.to_be_bytes());
            for number in [PAGE, bitmap_offset, pages_offset] {
                out.extend(number.to_be_bytes());
            }
        }
    }
}

fn read_mapped(reader: &mut Reader<'_>, name: &Name, used_bytes: u64, may_ignore: bool) -> Result<Mapped, Error> {
    reader.constant("mapped-ram version", MAPPED_VERSION, "only version 1 is known")?;
    let page_bytes = reader.be64("mapped-ram page size")?;
    if page_bytes != PAGE {
        return Err(reader.named("mapped-ram page size", name, page_bytes, "only pages of 4096 bytes are supported"));
    }
    let bitmap_offset = reader.be64("bitmap offset")?;
    if bitmap_offset > POSITIONS_END - bitmap_bytes(used_bytes) {
        return Err(reader.named("bitmap offset", name, bitmap_offset, "no file is that long"));
    }
    let pages_offset = reader.be64("pages offset")?;
    if (bitmap_offset, pages_offset) == (0, 0) && may_ignore {
        return Ok(Mapped::Ignored);
    }
    if !pages_offset.is_multiple_of(PAGE) {
        return Err(reader.named("pages offset", name, pages_offset, "not a multiple of 4096"));
    }
    if pages_offset > POSITIONS_END - used_bytes {
        return Err(reader.named("pages offset", name, pages_offset, "no file is that long"));
    }
    Ok(Mapped::At(Geometry { bitmap_offset, pages_offset }))
}
