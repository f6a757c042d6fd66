//! The reader of the main stream, up to where the guest's memory is complete (sections 1 and 2).
use super::layout::Layout;
use super::page::{Blocks, BodyRecord, FLAGS, MEM_SIZE};
use super::record::{END, EOF, EarlySection, FOOTER, FULL, PART, Record, START, Step};
use super::{Block, Command, Configuration, MAX_BLOCKS, command, configuration};
use crate::Error;
use crate::guest::MAX_GUEST_BYTES;
use crate::reader::Reader;

// Section 1.1.
pub(super) const MAGIC: [u8; 4] = *b"QEVM";
pub(super) const VERSION: u32 = 3;
// Section 2.
pub(super) const RAM: &str = "ram";
pub(super) const RAM_VERSION: u32 = 4;
/// The only device whose state comes before the memory (section 1.5).
const EARLY: &str = "/virtio-mem-device-early";

/// Reads the main stream record by record. It keeps the list of blocks and nothing else of it.
///
/// ```text
/// Header Configuration Command*
/// RamStart Block* MultifdFlush* EndOfBody Footer  (Early Raw* Footer)*
/// (Part (Page | MultifdFlush)* EndOfBody Footer | Command Raw*)*
/// End (Page | MultifdFlush)* EndOfBody Footer  Tail
/// ```
///
/// The list of blocks may go on in another `RamStart` behind parts, as in the streams that transship writes. A
/// mapped-ram file has one, no pages between these, and may go without `Part` and `End`.
///
/// A stream in which other sections than `ram` come in parts (VFIO devices, dirty bitmaps) is refused: the end of such
/// a part can't be found without knowing the device. So is postcopy with memory in huge pages, where the list of blocks
/// can't be told apart without knowing them, and a stream of a machine type older than 2.4, which has neither
/// configuration nor footers.
///
/// What has been read is consistent in itself: names are unique, lengths add up, pages are within their blocks, and in
/// a mapped-ram file no two parts overlap. Which blocks the guest at hand has is not this crate's business.
#[derive(Debug, Clone)]
pub struct StreamReader {
    position: u64,
    state: State,
    configuration: Option<Configuration>,
    ram: Option<u32>,
    blocks: Blocks,
    total: u64,
    listed: u64,
    layout: Layout,
    huge_pages: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    Configuration,
    /// Between sections.
    Sections,
    /// In START, in the list of blocks.
    Blocks,
    /// Behind the list of blocks, or in the body of a part.
    Body(Kind),
    Footer(u32, Kind),
    Raw {
        left: u64,
        /// The early section that these bytes belong to.
        early: Option<u32>,
    },
    Tail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Start,
    Part,
    End,
    Early,
}

impl Default for StreamReader {
    fn default() -> Self {
        Self::new()
    }
}

impl StreamReader {
    /// A reader at the beginning of a stream.
    pub fn new() -> Self {
        Self::at(0)
    }

    /// A reader of a stream that begins at `base` of its file.
    pub fn at(base: u64) -> Self {
        StreamReader {
            position: base,
            state: State::Header,
            configuration: None,
            ram: None,
            blocks: Blocks::default(),
            total: 0,
            listed: 0,
            layout: Layout::new(base),
            huge_pages: false,
        }
    }

    /// The same for a file of this length: pages that would be beyond its end are refused with the block that announces
    /// them.
    #[must_use]
    pub fn within(mut self, file_bytes: u64) -> Self {
        self.layout.file_bytes = Some(file_bytes);
        self
    }

    /// Where the next byte to read is: counted from the beginning of the file, or for a stream from its first byte.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// What the stream has said of itself.
    pub fn configuration(&self) -> Option<&Configuration> {
        self.configuration.as_ref()
    }

    /// The blocks that have been listed so far.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks.list
    }

    /// Reads the next record from `bytes`, which begin at [`StreamReader::position`].
    ///
    /// # Errors
    /// The first byte that breaks a rule. The reader stays where it is, and would say the same again.
    pub fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<Record<'a>>, Error> {
        let mut reader = Reader::at(bytes, self.position);
        let (record, state) = match self.read(&mut reader) {
            Ok(read) => read,
            Err(Error::Truncated { missing, .. }) => return Ok(Step::More { at_least: bytes.len() + missing }),
            Err(error) => return Err(error),
        };
        // The configuration needs a look at the byte behind it, and nothing else looks ahead: what was read was used.
        let used = bytes.len() - reader.rest().len();
        self.take(&record, used as u64)?;
        self.state = state;
        Ok(Step::Done { record, used })
    }

    /// The error to report when the input ends behind `bytes`, and [`StreamReader::next`] asks for more.
    pub fn cut_short(&self, bytes: &[u8]) -> Error {
        let mut reader = Reader::at(bytes, self.position);
        match self.read(&mut reader) {
            Err(error) => error,
            Ok(_) => Error::Truncated { field: "stream", offset: reader.offset(), missing: 1 },
        }
    }

    fn read<'a>(&self, reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
        match self.state {
            State::Header => read_header(reader),
            State::Configuration => read_configuration(reader),
            State::Sections => self.read_section(reader),
            State::Blocks => self.read_block(reader),
            State::Body(kind) => self.read_body(reader, kind),
            State::Footer(section, kind) => read_footer(reader, section, kind),
            State::Raw { left, early } => read_raw(reader, left, early),
            State::Tail => Ok((Record::Tail, State::Tail)),
        }
    }

    fn read_section<'a>(&self, reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
        let before = reader.rest();
        let kind = reader.u8("record type")?;
        let may_end = self.ram.is_some() && self.configuration.as_ref().is_some_and(|c| c.mapped_ram);
        match kind {
            command::TYPE => read_command(reader),
            START => self.read_start(reader),
            PART => Ok((Record::Part { section: self.read_ram_id(reader)? }, State::Body(Kind::Part))),
            END => Ok((Record::End { section: self.read_ram_id(reader)? }, State::Body(Kind::End))),
            FULL => match self.read_full(reader, may_end)? {
                Some(early) => Ok(early),
                None => {
                    *reader = Reader::at(before, self.position);
                    Ok((Record::Tail, State::Tail))
                }
            },
            EOF if may_end => {
                *reader = Reader::at(before, self.position);
                Ok((Record::Tail, State::Tail))
            }
            EOF => Err(reader.invalid("record type", kind.into(), "the stream ends before the memory is complete")),
            _ => Err(reader.invalid("record type", kind.into(), "no record begins with this byte here")),
        }
    }

    fn read_start<'a>(&self, reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
        let section = reader.be32("section number")?;
        let name = reader.name("section name")?;
        if &*name != RAM {
            let why = "a section that comes in parts and is not RAM: its end can't be found";
            return Err(reader.refused("section", &name, why));
        }
        let mapped = self.configuration.as_ref().is_some_and(|c| c.mapped_ram);
        if self.ram.is_some_and(|begun| mapped || begun != section) {
            return Err(reader.refused("section", &name, "it has begun before"));
        }
        reader.constant("section instance", 0, "there is one RAM section")?;
        reader.constant("section version", RAM_VERSION, "only version 4 of the RAM section is known")?;
        let word = reader.be64("RAM total")?;
        if word & FLAGS != MEM_SIZE {
            return Err(reader.invalid("RAM total", word, "not a number of pages with the flag 4"));
        }
        let total = word & !FLAGS;
        if self.total.saturating_add(total) > MAX_GUEST_BYTES {
            return Err(reader.invalid(
                "RAM total",
                word,
                "with the blocks before it more than 256 TiB, which no guest has",
            ));
        }
        let state = if total == 0 { State::Body(Kind::Start) } else { State::Blocks };
        Ok((Record::RamStart { section, total }, state))
    }

    fn read_block<'a>(&self, reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
        if self.huge_pages {
            let why = "blocks of huge pages: with postcopy the list of blocks does not say which these are";
            return Err(Error::Refused { field: "section", name: RAM.into(), offset: reader.offset(), why });
        }
        let configuration = self.configuration.as_ref().expect("the configuration comes before any section");
        let start = reader.offset();
        let block = Block::read(reader, configuration)?;
        let wrong = |field, value, why| Error::Named { field, name: block.name.to_string(), offset: start, value, why };
        if self.blocks.contains(&block.name) {
            return Err(wrong("block name", block.name.len() as u64, "it is listed twice"));
        }
        if self.blocks.list.len() >= MAX_BLOCKS {
            return Err(wrong("block number", MAX_BLOCKS as u64, "no guest has that many blocks"));
        }
        let left = self.total - self.listed;
        if block.used_bytes > left {
            return Err(wrong("block length", block.used_bytes, "the blocks are longer than their total"));
        }
        let state = if block.used_bytes == left { State::Body(Kind::Start) } else { State::Blocks };
        Ok((Record::Block(block), state))
    }

    fn read_body<'a>(&self, reader: &mut Reader<'a>, kind: Kind) -> Result<(Record<'a>, State), Error> {
        let mapped = self.configuration.as_ref().is_some_and(|c| c.mapped_ram);
        let section = self.ram.expect("a body is only read behind START");
        Ok(match self.blocks.read_record(reader, kind != Kind::Start && !mapped)? {
            BodyRecord::Page(page) => (Record::Page(page), self.state),
            BodyRecord::MultifdFlush if mapped => {
                let why = "a mapped-ram file has no multifd barriers";
                return Err(reader.invalid("RAM record", super::page::MULTIFD_FLUSH, why));
            }
            BodyRecord::MultifdFlush => (Record::MultifdFlush, self.state),
            BodyRecord::EndOfBody => (Record::EndOfBody, State::Footer(section, kind)),
        })
    }

    fn read_ram_id(&self, reader: &mut Reader<'_>) -> Result<u32, Error> {
        let section = reader.be32("section number")?;
        if self.ram == Some(section) {
            Ok(section)
        } else {
            Err(reader.invalid("section number", section.into(), "it has not begun"))
        }
    }

    /// A whole section: an early one, or else the first of the tail.
    fn read_full<'a>(&self, reader: &mut Reader<'a>, may_end: bool) -> Result<Option<(Record<'a>, State)>, Error> {
        let section = reader.be32("section number")?;
        let name = reader.name("section name")?;
        if !name.ends_with(EARLY) {
            let why = "a device's state comes before the memory is complete";
            return if may_end { Ok(None) } else { Err(reader.refused("section", &name, why)) };
        }
        let early = EarlySection::read(reader, section, name)?;
        let state = State::Raw { left: early.bitmap_bytes, early: Some(section) };
        Ok(Some((Record::Early(early), state)))
    }

    /// Notes what the record says, when all of it has been read.
    fn take(&mut self, record: &Record<'_>, used: u64) -> Result<(), Error> {
        let end = self.position.saturating_add(used);
        let mut next = end;
        match record {
            Record::Configuration(configuration) => self.configuration = Some(configuration.clone()),
            Record::Command(Command::PostcopyAdvise(Some(sizes))) => self.huge_pages = sizes.blocks != sizes.guest,
            Record::RamStart { section, total } => {
                self.ram = Some(*section);
                self.total += total;
            }
            Record::Block(block) => {
                let last = self.listed + block.used_bytes == self.total;
                next = self.layout.add(block, self.position..end, last)?;
                self.listed += block.used_bytes;
                self.blocks.add(block.clone());
            }
            Record::Page(page) => self.blocks.named = Some(page.block),
            _ => {}
        }
        self.position = next;
        Ok(())
    }
}

fn read_header<'a>(reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
    let magic = reader.be32("stream magic")?;
    if magic != u32::from_be_bytes(MAGIC) {
        return Err(reader.invalid("stream magic", magic.into(), "no QEMU migration stream begins here"));
    }
    reader.constant("stream version", VERSION, "only version 3 is known")?;
    Ok((Record::Header, State::Configuration))
}

fn read_configuration<'a>(reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
    let kind = reader.u8("record type")?;
    if kind != configuration::TYPE {
        let why = "no configuration: the machine type is older than 2.4, or this is no migration stream";
        return Err(reader.invalid("record type", kind.into(), why));
    }
    Ok((Record::Configuration(Configuration::read(reader)?), State::Sections))
}

fn read_command<'a>(reader: &mut Reader<'a>) -> Result<(Record<'a>, State), Error> {
    let command = Command::read(reader)?;
    let state = match command {
        Command::Packaged { bytes } if bytes > 0 => State::Raw { left: bytes.into(), early: None },
        _ => State::Sections,
    };
    Ok((Record::Command(command), state))
}

fn read_footer<'a>(reader: &mut Reader<'a>, section: u32, kind: Kind) -> Result<(Record<'a>, State), Error> {
    let byte = reader.u8("footer")?;
    if byte != FOOTER {
        return Err(reader.invalid("footer", byte.into(), "a section ends here, and its footer begins with 0x7e"));
    }
    reader.constant("footer", section, "not the number of the section that ends here")?;
    let state = if kind == Kind::End { State::Tail } else { State::Sections };
    Ok((Record::Footer { section }, state))
}

fn read_raw<'a>(reader: &mut Reader<'a>, left: u64, early: Option<u32>) -> Result<(Record<'a>, State), Error> {
    let field = if early.is_some() { "memory device bitmap" } else { "package" };
    let there = reader.rest().len().max(1);
    let count = usize::try_from(left).map_or(there, |left| left.min(there));
    let piece = reader.bytes(field, count)?;
    let state = match (left - count as u64, early) {
        (0, Some(section)) => State::Footer(section, Kind::Early),
        (0, None) => State::Sections,
        (left, early) => State::Raw { left, early },
    };
    Ok((Record::Raw(piece), state))
}
