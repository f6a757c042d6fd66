//! Page records: what the bodies of the RAM section are made of (section 2.2).
use std::collections::HashMap;

use super::fields::put_name;
use super::{Block, Name};
use crate::reader::Reader;
use crate::{Error, PAGE_BYTES};

// Each record begins with 64 bits: flags in the low 12, the place in the block above them (sections 2.1, 2.2).
pub(super) const ZERO: u64 = 0x002;
pub(super) const MEM_SIZE: u64 = 0x004;
pub(super) const PAGE: u64 = 0x008;
pub(super) const EOS: u64 = 0x010;
pub(super) const CONTINUE: u64 = 0x020;
pub(super) const XBZRLE: u64 = 0x040;
const COMPRESSED: u64 = 0x100;
pub(super) const MULTIFD_FLUSH: u64 = 0x200;
pub(super) const FLAGS: u64 = PAGE_BYTES as u64 - 1;

pub(super) const XBZRLE_ENCODING: u8 = 1; // section 2.2
/// QEMU sends the page itself when the difference would not be shorter.
const MAX_XBZRLE_BYTES: usize = PAGE_BYTES;
/// More than zlib ever makes of a page: what doesn't shrink grows by a few bytes.
pub const MAX_COMPRESSED_BYTES: usize = 2 * PAGE_BYTES;

/// A page of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page<'a> {
    /// Index of the block in [`StreamReader::blocks`](super::StreamReader::blocks).
    pub block: usize,
    /// Where the page is in the block, in bytes: a multiple of 4096 within the block's length.
    pub offset: u64,
    /// What it holds.
    pub content: PageContent<'a>,
}

/// The content of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageContent<'a> {
    /// Each byte has this value. QEMU sends 0; versions before 10 would take another value too.
    Fill(u8),
    /// These bytes.
    Normal(&'a [u8; PAGE_BYTES]),
    /// What has changed since the page was sent last: [`xbzrle::decode`](super::xbzrle::decode).
    Xbzrle(&'a [u8]),
    /// A zlib stream of the page, of at most [`MAX_COMPRESSED_BYTES`] (the capability `compress` of versions before
    /// 9.1).
    Compressed(&'a [u8]),
}

/// What a body can hold.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BodyRecord<'a> {
    Page(Page<'a>),
    MultifdFlush,
    EndOfBody,
}

/// The blocks that the stream has listed.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    pub(super) list: Vec<Block>,
    by_name: HashMap<Name, usize>,
    /// The block that a page record named last. It holds across bodies.
    pub(super) named: Option<usize>,
}

impl Blocks {
    pub(super) fn contains(&self, name: &Name) -> bool {
        self.by_name.contains_key(name)
    }

    pub(super) fn add(&mut self, block: Block) {
        self.by_name.insert(block.name.clone(), self.list.len());
        self.list.push(block);
    }

    /// Reads one record of a body. Where pages can't be (in START, and in mapped-ram files) they are refused.
    pub(super) fn read_record<'a>(&self, reader: &mut Reader<'a>, with_pages: bool) -> Result<BodyRecord<'a>, Error> {
        let word = reader.be64("RAM record")?;
        match (word, word & FLAGS & !CONTINUE) {
            (EOS, _) => Ok(BodyRecord::EndOfBody),
            (MULTIFD_FLUSH, _) => Ok(BodyRecord::MultifdFlush),
            (_, ZERO | PAGE | XBZRLE | COMPRESSED) if with_pages => self.read_page(reader, word).map(BodyRecord::Page),
            (_, ZERO | PAGE | XBZRLE | COMPRESSED) => {
                Err(reader.invalid("RAM record", word, "a page can't be sent here"))
            }
            _ => Err(reader.invalid("RAM record", word, "no record has these flags")),
        }
    }

    fn read_page<'a>(&self, reader: &mut Reader<'a>, word: u64) -> Result<Page<'a>, Error> {
        let start = reader.field_start();
        let block = if word & CONTINUE == 0 {
            self.read_name(reader)?
        } else {
            let why = "it continues in the block that was named before, but none was";
            self.named.ok_or_else(|| reader.invalid("RAM record", word, why))?
        };
        let offset = word & !FLAGS;
        let Block { name, used_bytes, .. } = &self.list[block];
        if offset >= *used_bytes {
            let (name, why) = (name.to_string(), "beyond the end of the block");
            return Err(Error::Named { field: "page offset", name, offset: start, value: offset, why });
        }
        let content = read_content(reader, word & FLAGS & !CONTINUE)?;
        Ok(Page { block, offset, content })
    }

    fn read_name(&self, reader: &mut Reader<'_>) -> Result<usize, Error> {
        let (offset, name) = reader.name_bytes("block name")?;
        let known = std::str::from_utf8(name).ok().and_then(|name| self.by_name.get(name));
        known.copied().ok_or_else(|| Error::Refused {
            field: "block name",
            name: String::from_utf8_lossy(name).into(),
            offset,
            why: "the stream has not listed such a block",
        })
    }
}

fn read_content<'a>(reader: &mut Reader<'a>, kind: u64) -> Result<PageContent<'a>, Error> {
    match kind {
        ZERO => reader.u8("fill byte").map(PageContent::Fill),
        PAGE => reader.page("page").map(PageContent::Normal),
        XBZRLE => {
            let encoding = reader.u8("xbzrle encoding")?;
            if encoding != XBZRLE_ENCODING {
                return Err(reader.invalid("xbzrle encoding", encoding.into(), "it is 1 in all versions"));
            }
            let count = reader.be16("xbzrle length")?.into();
            read_encoded(reader, "xbzrle length", count, MAX_XBZRLE_BYTES).map(PageContent::Xbzrle)
        }
        _ => {
            let count = reader.be32("compressed length")? as usize;
            read_encoded(reader, "compressed length", count, MAX_COMPRESSED_BYTES).map(PageContent::Compressed)
        }
    }
}

fn read_encoded<'a>(
    reader: &mut Reader<'a>,
    field: &'static str,
    count: usize,
    most: usize,
) -> Result<&'a [u8], Error> {
    if !(1..=most).contains(&count) {
        return Err(reader.invalid(field, count as u64, "not the length of an encoded page"));
    }
    reader.bytes("encoded page", count)
}

/// Appends the beginning of a record with these flags. The block is named unless it is the one of the record before.
pub(super) fn put_page_header(out: &mut Vec<u8>, flags: u64, offset: u64, name: Option<&Name>) {
    out.extend((offset | flags).to_be_bytes());
    if let Some(name) = name {
        put_name(out, name);
    }
}
