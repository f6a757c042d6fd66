//! The device state of a guest that stands still, taken apart: blocks of memory that are the devices' own, and the
//! rest, which nobody but the VMM understands.
use std::{collections::BTreeMap, io::Read};

use transship_memory::{PAGE_BYTES, PageNumber};
use transship_wire::qemu::{
    Block, Command, Configuration, Described, GlobalState, Name, Page, PageContent, Record, RunState, Step,
    StreamReader, StreamWriter, describe,
};

use super::regions::RegionBlock;
use crate::{
    Error,
    guest::{Found, GuestError, SourceGuest, StateFormat},
};

/// Bytes that are read at once.
const PIECE: usize = 256 * 1024;
/// The most that is taken for device state beside the devices' memory. Graphics cards with resources of the guest's
/// come to hundreds of MB.
const TAIL_MAX: usize = 2 << 30;

/// The section that holds the state of a guest that is no QEMU: its length in 8 bytes, big-endian, and what its VMM has
/// said.
pub(crate) const OPAQUE_SECTION: &str = "transship/device-state";
const OPAQUE_VERSION: u32 = 1;
/// The number of the RAM section in a file that has it.
const OPAQUE_RAM_SECTION: u32 = 1;
/// Length of the section `globalstate`.
const GLOBAL_STATE_BYTES: u64 = 104;

/// What a snapshot holds beside the guest's own memory.
pub(crate) struct DeviceState {
    /// Of the VMM's stream; of a snapshot, once its capabilities are set.
    pub(crate) configuration: Configuration,
    /// The number of the RAM section.
    pub(crate) ram_section: u32,
    pub(crate) blocks: Vec<DeviceBlock>,
    /// Sections that stand before the pages, as they are.
    pub(crate) early: Vec<u8>,
    /// Whether the stream marks the moment in which the guest stood still.
    pub(crate) switchover_start: bool,
    /// Device sections, the end, and their description.
    pub(crate) tail: Vec<u8>,
}

/// Pages that are not zero, by their numbers.
type Pages = BTreeMap<PageNumber, Box<[u8; PAGE_BYTES]>>;

/// Memory of a device, such as a video memory or a ROM.
pub(crate) struct DeviceBlock {
    pub(crate) name: Name,
    pub(crate) bytes: u64,
    pub(crate) pages: Pages,
}

impl DeviceState {
    /// Has the guest, which stands still, say its state, and reads it to the end. `found`: what it is to say of it.
    ///
    /// # Errors
    /// The adapter's; a stream that has something else in it than expected.
    pub(crate) fn take(guest: &mut dyn SourceGuest, regions: &[RegionBlock], found: Found) -> Result<Self, Error> {
        let ran = found.ran();
        let format = guest.state_format();
        let mut stream = guest.save_state()?;
        let mut state = match format {
            StateFormat::Qemu { .. } => Taking::new(stream.as_mut()).all(regions)?,
            StateFormat::Opaque => Self::opaque(machine_name(guest)?, &read_all(stream.as_mut(), Vec::new())?, ran)?,
        };
        drop(stream);
        guest.state_saved()?;
        state.say_that_it_ran(ran)?;
        Ok(state)
    }

    /// Sections around what nobody but the VMM understands, so that the file can be walked like any other.
    fn opaque(machine: Name, bytes: &[u8], ran: bool) -> Result<Self, Error> {
        let length = bytes.len() as u64;
        let state = Section {
            name: Name::new(OPAQUE_SECTION).map_err(strange)?,
            version: OPAQUE_VERSION,
            fields: vec![("length", "uint64", 8), ("state", "buffer", length)],
            body: [&length.to_be_bytes()[..], bytes].concat(),
        };
        let sections = if ran { vec![state] } else { vec![state, stood_still()?] };
        Ok(Self {
            configuration: Configuration::new(machine),
            ram_section: OPAQUE_RAM_SECTION,
            blocks: Vec::new(),
            early: Vec::new(),
            switchover_start: false,
            tail: tail(&sections),
        })
    }

    /// The VMM stood still when it was asked, so its state says that the guest does.
    fn say_that_it_ran(&mut self, ran: bool) -> Result<(), Error> {
        if !ran {
            return Ok(());
        }
        if let Some(mut global) = GlobalState::find(&self.tail, 0).map_err(strange)? {
            global.patch(&mut self.tail, RunState::Running);
        }
        Ok(())
    }

    /// Bytes that it has.
    pub(crate) fn bytes(&self) -> u64 {
        let pages: usize = self.blocks.iter().map(|block| block.pages.len()).sum();
        (self.tail.len() + self.early.len() + pages * PAGE_BYTES) as u64
    }
}

/// The machine as a stream names it.
///
/// # Errors
/// A name that no stream can hold.
pub(crate) fn machine_name(guest: &dyn SourceGuest) -> Result<Name, Error> {
    let machine = guest.description().machine;
    let name = match guest.state_format() {
        StateFormat::Qemu { .. } => machine.strip_prefix("qemu ").unwrap_or(&machine),
        StateFormat::Opaque => &machine,
    };
    Name::new(name).map_err(|error| Error::unfit(format!("can't name the machine {machine:?} in a snapshot: {error}")))
}

/// A device section that we make.
struct Section {
    name: Name,
    version: u32,
    /// Name, type, size.
    fields: Vec<(&'static str, &'static str, u64)>,
    body: Vec<u8>,
}

/// The section of QEMU's that says whether the guest ran, of one that did not.
fn stood_still() -> Result<Section, Error> {
    let state = RunState::Paused.name();
    let mut body = (state.len() as u32 + 1).to_be_bytes().to_vec();
    body.extend(state.as_bytes());
    body.resize(GLOBAL_STATE_BYTES as usize, 0);
    let name = Name::new("globalstate").map_err(strange)?;
    Ok(Section { name, version: 1, fields: vec![("state", "buffer", GLOBAL_STATE_BYTES)], body })
}

fn tail(sections: &[Section]) -> Vec<u8> {
    let mut writer = StreamWriter::new(0, OPAQUE_RAM_SECTION);
    for (Section { name, version, body, .. }, number) in sections.iter().zip(OPAQUE_RAM_SECTION + 1..) {
        writer.full(number, name, 0, *version, body);
    }
    let described = sections.iter().map(|Section { name, version, fields, .. }| Described {
        name,
        instance: 0,
        version: *version,
        fields,
    });
    let described: Vec<_> = described.collect();
    writer.eof().vmdesc(&describe(&described));
    writer.take_bytes()
}

fn strange(error: impl std::fmt::Display) -> Error {
    Error::Guest(GuestError::vmm(format!("can't read the device state that the VMM has written: {error}")))
}

/// Reads on to the end.
fn read_all(stream: &mut (dyn Read + Send), mut bytes: Vec<u8>) -> Result<Vec<u8>, Error> {
    let most = TAIL_MAX as u64;
    stream
        .take(most + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::Io { what: "read the device state".into(), source })?;
    if bytes.len() as u64 > most {
        return Err(strange(format!("it has more than {most} bytes in addition to memory")));
    }
    Ok(bytes)
}

/// QEMU's stream while it is read.
struct Taking<'a> {
    stream: &'a mut (dyn Read + Send),
    reader: StreamReader,
    /// What was read and not yet used begins at `at`.
    bytes: Vec<u8>,
    at: usize,
    /// By block of the stream: the pages that came; none for a region of the guest.
    pages: Vec<Option<Pages>>,
    ram_section: u32,
    early: Vec<u8>,
    switchover_start: bool,
}

impl<'a> Taking<'a> {
    fn new(stream: &'a mut (dyn Read + Send)) -> Self {
        Self {
            stream,
            reader: StreamReader::new(),
            bytes: Vec::new(),
            at: 0,
            pages: Vec::new(),
            ram_section: 0,
            early: Vec::new(),
            switchover_start: false,
        }
    }

    fn all(mut self, regions: &[RegionBlock]) -> Result<DeviceState, Error> {
        loop {
            let step = self.reader.next(&self.bytes[self.at..]).map_err(strange)?;
            match step {
                Step::More { .. } => self.read_more()?,
                Step::Done { record: Record::Tail, .. } => break,
                Step::Done { record, used } => {
                    let record_bytes = self.at..self.at + used;
                    match record {
                        Record::RamStart { section, .. } => self.ram_section = section,
                        Record::Block(block) => {
                            let is_region = regions.iter().any(|region| region.name == block.name);
                            self.pages.push((!is_region).then(Pages::new));
                        }
                        Record::Page(page) => put(&mut self.pages, self.reader.blocks(), &page)?,
                        Record::Command(Command::SwitchoverStart) => self.switchover_start = true,
                        Record::Command(other) => return Err(strange(format!("it has a command {other:?}"))),
                        Record::Early(_) => self.early.extend(&self.bytes[record_bytes]),
                        Record::Raw(piece) => self.early.extend(piece),
                        Record::Footer { section } if section != self.ram_section => {
                            self.early.extend(&self.bytes[record_bytes]);
                        }
                        _ => {}
                    }
                    self.at += used;
                }
            }
        }
        let tail = read_all(self.stream, self.bytes.split_off(self.at))?;
        let configuration = self.reader.configuration().cloned().ok_or_else(|| strange("it has no configuration"))?;
        check_regions(self.reader.blocks(), regions)?;
        let blocks = self.reader.blocks().iter().zip(self.pages).filter_map(|(block, pages)| {
            Some(DeviceBlock { name: block.name.clone(), bytes: block.used_bytes, pages: pages? })
        });
        Ok(DeviceState {
            configuration,
            ram_section: self.ram_section,
            blocks: blocks.collect(),
            early: self.early,
            switchover_start: self.switchover_start,
            tail,
        })
    }

    fn read_more(&mut self) -> Result<(), Error> {
        self.bytes.drain(..self.at);
        self.at = 0;
        let have = self.bytes.len();
        self.bytes.resize(have + PIECE, 0);
        let read = loop {
            match self.stream.read(&mut self.bytes[have..]) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => break read.map_err(|source| Error::Io { what: "read the device state".into(), source })?,
            }
        };
        self.bytes.truncate(have + read);
        if read == 0 { Err(strange(self.reader.cut_short(&self.bytes))) } else { Ok(()) }
    }
}

fn put(pages: &mut [Option<Pages>], blocks: &[Block], page: &Page<'_>) -> Result<(), Error> {
    let Some(pages) = pages.get_mut(page.block).and_then(Option::as_mut) else {
        let name = blocks.get(page.block).map_or("?", |block| &block.name);
        return Err(strange(format!(
            "it has pages of {name}, which is the guest's own memory and should have been left out"
        )));
    };
    let number = PageNumber::at(page.offset);
    match page.content {
        PageContent::Fill(0) => drop(pages.remove(&number)),
        PageContent::Fill(byte) => drop(pages.insert(number, Box::new([byte; PAGE_BYTES]))),
        PageContent::Normal(bytes) => drop(pages.insert(number, Box::new(*bytes))),
        PageContent::Xbzrle(_) | PageContent::Compressed(_) => {
            return Err(strange("it has compressed pages, which were not requested"));
        }
    }
    Ok(())
}

/// The blocks that were left out are what we have mapped.
fn check_regions(blocks: &[Block], regions: &[RegionBlock]) -> Result<(), Error> {
    for region in regions {
        match blocks.iter().find(|block| block.name == region.name) {
            Some(block) if block.used_bytes == region.bytes => {}
            Some(block) => {
                let (name, theirs, ours) = (&region.name, block.used_bytes, region.bytes);
                return Err(strange(format!(
                    "its RAM block {name} has {theirs} bytes, but the shared memory has {ours}"
                )));
            }
            None => return Err(strange(format!("it has no RAM block {}", region.name))),
        }
    }
    Ok(())
}
