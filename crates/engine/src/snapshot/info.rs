//! What a file holds, for people and programs.
use std::num::NonZeroU64;

use rustix::fs::Advice;
use serde::Serialize;
use transship_memory::{PageBuffer, PageCount};
use transship_secure::Identities;
use transship_wire::qemu::{Block, Configuration, GlobalState, PageContent, Record, RunState};

use super::{
    DirectIo, FileUri, Format,
    file::origin::Origin,
    image::opened::Image,
    open::{LEFT_OUT, Opened, Snapshot, Stream, needs_source, open},
};
use crate::{
    Error, Progress,
    stream::{
        tail::check_tail,
        whence::{Whence, damaged},
    },
};

/// Bytes of pages that are read at once when everything is.
const READ_PAGES: PageCount = PageCount::new(256);
/// A snapshot file or a stream.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotInfo {
    /// As the user named it.
    pub file: String,
    /// `mapped-ram`, `stream` or `raw`.
    pub format: String,
    /// Where in the file it begins.
    pub offset: u64,
    /// Length of the file from there on; of a pipe what came through it.
    pub bytes: u64,
    /// Bytes that the file takes on the disk; none for a pipe.
    pub allocated: Option<u64>,
    /// The machine's type.
    pub machine: String,
    /// What the writer says of the form.
    pub capabilities: Vec<&'static str>,
    /// Of the guest, if the file has it.
    pub uuid: Option<String>,
    /// `running`, `paused`, …: what the guest was when it was saved; none if the file does not say.
    pub state: Option<String>,
    /// Why it can't be restored, if that is to be seen from it.
    pub refusal: Option<String>,
    /// Why clones can't run from an image, though it can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_for_clones: Option<String>,
    /// Of an image: files of the disks that its guest had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<DisksInfo>,
    /// What libvirt has put before it, if it is one of its save images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<LibvirtInfo>,
    /// Guest memory and that of devices.
    pub blocks: Vec<BlockInfo>,
    /// Devices, in the order of the file.
    pub sections: Vec<SectionInfo>,
    /// Bytes of all device sections and their description.
    pub device_bytes: u64,
    /// Whether the file describes its device sections. If not they are not listed.
    pub described: bool,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Whether everything was read.
    pub checked: bool,
}

/// A domain of libvirt, as a save image defines it.
#[derive(Debug, Clone, Serialize)]
pub struct LibvirtInfo {
    /// Its name.
    pub domain: String,
    /// What the stream is in: `raw`, `sparse`, or the program that has compressed it.
    pub encoding: &'static str,
    /// Its definition.
    pub xml: String,
}

/// The disks of the guest that an image was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DisksInfo {
    /// What it was made of did not say. A clone can't be kept from the disks of that guest by their names.
    NotKnown,
    /// These, and no clone may write to them.
    Files(Vec<String>),
}

/// A RAM block.
#[derive(Debug, Clone, Default, Serialize)]
pub struct BlockInfo {
    /// QEMU's name for it.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Pages of 4096 bytes that it has.
    pub pages: u64,
    /// Pages whose content is in the file; in a stream, how often one is.
    pub stored: u64,
    /// Pages that are zero without being in the file; in a stream, records that say so.
    pub zero: u64,
    /// Records of a stream in another form (xbzrle, compressed).
    pub other: u64,
    /// Its pages are not here but in the file that the memory was made of.
    pub left_out: bool,
    /// Where a mapped-ram file has its bitmap, and its first page.
    pub bitmap_offset: Option<u64>,
    /// See `bitmap_offset`.
    pub pages_offset: Option<u64>,
    /// The file of an image that it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// A device's state.
#[derive(Debug, Clone, Serialize)]
pub struct SectionInfo {
    /// QEMU's name for it.
    pub name: String,
    /// Which of several with this name.
    pub instance: u32,
    /// Version of its layout.
    pub version: u32,
    /// Where it begins.
    pub offset: u64,
    /// Length of its contents.
    pub bytes: u64,
}

/// Looks at a file, or at a stream to its end. With `check` the pages of a file are read too; their places and the
/// device sections are looked at in any case. `identities`: the keys of an encrypted one.
///
/// # Errors
/// What is wrong with it, by field and offset.
pub fn inspect(from: &FileUri, identities: Option<&Identities>, check: bool) -> Result<SnapshotInfo, Error> {
    match open(from, DirectIo::Off, identities)? {
        Opened::Mapped(snapshot) => mapped(&snapshot, check),
        Opened::Stream(stream) => sequential(*stream),
        Opened::Image(image) => of_image(&image, check),
    }
}

/// Its first file says all but which pages the others hold.
fn of_image(image: &Image, check: bool) -> Result<SnapshotInfo, Error> {
    if check {
        image.check_bytes(&Progress::new())?;
    }
    let mut info = mapped(&image.snapshot, check)?;
    (info.file, info.format) = (image.name.clone(), Format::Raw.to_string());
    info.refusal = image.snapshot.refusal.clone();
    info.disks = Some(match &image.manifest.disks {
        None => DisksInfo::NotKnown,
        Some(disks) => DisksInfo::Files(disks.iter().map(|disk| disk.name.clone()).collect()),
    });
    info.not_for_clones = image.check_pinned().err().map(|error| error.to_string());
    for (region, (block, origin)) in image.memory.iter().enumerate() {
        let known = &mut info.blocks[*block];
        known.left_out = false;
        known.stored = image.stored(region)?.count().get();
        known.zero = known.pages - known.stored;
        known.file = Some(origin.name.clone());
        info.bytes += origin.bytes.unwrap_or(0);
        info.allocated = info.allocated.map(|allocated| allocated + origin.allocated());
    }
    Ok(info)
}

fn mapped(snapshot: &Snapshot, check: bool) -> Result<SnapshotInfo, Error> {
    let mut info = begin(&snapshot.origin, Format::MappedRam, &snapshot.configuration);
    info.refusal = snapshot.refusal.clone();
    info.checked = check;
    if check {
        let rest = snapshot.origin.bytes.and_then(NonZeroU64::new);
        let _ = rustix::fs::fadvise(&snapshot.origin.file, 0, rest, Advice::Sequential);
    }
    if snapshot.left_out().is_some() {
        info.refusal.get_or_insert_with(|| LEFT_OUT.to_owned());
    }
    for block in &snapshot.blocks {
        info.blocks.push(mapped_block(snapshot, block, check)?);
    }
    tail(&mut info, &snapshot.origin, &snapshot.tail, snapshot.tail_offset)?;
    Ok(info)
}

fn mapped_block(snapshot: &Snapshot, block: &Block, check: bool) -> Result<BlockInfo, Error> {
    let mut info = of_block(block);
    let Some(geometry) = block.geometry() else { return Ok(BlockInfo { left_out: true, ..info }) };
    let mut buffer = PageBuffer::new(if check { READ_PAGES.index() } else { 0 });
    snapshot.each_stored(block, |run| {
        info.stored += run.count.get();
        for part in run.parts(READ_PAGES).filter(|_| check) {
            let at = geometry.pages_offset + part.first.offset();
            let what = format!("pages of {:?}", &*block.name);
            snapshot.read_exact(&what, &mut buffer.bytes_mut()[..part.bytes() as usize], at)?;
        }
        Ok(())
    })?;
    info.zero = info.pages - info.stored;
    Ok(info)
}

fn sequential(mut stream: Stream) -> Result<SnapshotInfo, Error> {
    let origin = stream.origin.clone();
    let mut info = begin(&stream.origin, Format::Stream, &stream.configuration);
    info.refusal = stream.refusal.or(stream.configuration.ignore_shared.then(|| LEFT_OUT.to_owned()));
    info.checked = true;
    info.encrypted = stream.records.is_encrypted();
    info.blocks = stream.blocks.iter().map(of_block).collect();
    loop {
        let blocks = &mut info.blocks;
        let refusal = &mut info.refusal;
        let ended = stream.records.step(|record, _| {
            match record {
                Record::Page(page) => match page.content {
                    PageContent::Fill(0) => blocks[page.block].zero += 1,
                    PageContent::Fill(_) | PageContent::Normal(_) => blocks[page.block].stored += 1,
                    PageContent::Xbzrle(_) | PageContent::Compressed(_) => blocks[page.block].other += 1,
                },
                Record::Block(block) => blocks.push(of_block(&block)),
                Record::Command(command) => *refusal = refusal.take().or(needs_source(&command)),
                Record::Tail => return Ok(true),
                _ => {}
            }
            Ok(false)
        })?;
        if ended {
            break;
        }
    }
    let base = stream.records.reader().position();
    let sections = stream.records.tail()?;
    for block in &mut info.blocks {
        // QEMU lists what it leaves out as if it were there.
        block.left_out = stream.configuration.ignore_shared && block.stored + block.zero + block.other == 0;
    }
    if origin.bytes.is_none() {
        info.bytes = base + sections.len() as u64;
    }
    tail(&mut info, &origin, &sections, base)?;
    Ok(info)
}

fn begin(origin: &Origin, format: Format, configuration: &Configuration) -> SnapshotInfo {
    let capabilities = [(configuration.ignore_shared, "x-ignore-shared"), (configuration.mapped_ram, "mapped-ram")];
    SnapshotInfo {
        file: origin.name.clone(),
        format: origin.format(format).to_string(),
        offset: origin.offset,
        bytes: origin.bytes.map_or(0, |bytes| bytes.saturating_sub(origin.offset)),
        allocated: origin.bytes.map(|_| origin.allocated()),
        machine: configuration.machine.to_string(),
        capabilities: capabilities.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect(),
        uuid: configuration.uuid.map(uuid_text),
        state: None,
        refusal: None,
        not_for_clones: None,
        disks: None,
        libvirt: origin.image.as_ref().map(|image| LibvirtInfo {
            domain: image.definition.name().to_owned(),
            encoding: image.header.encoding.name(),
            xml: image.definition.xml().to_owned(),
        }),
        blocks: Vec::new(),
        sections: Vec::new(),
        device_bytes: 0,
        described: false,
        encrypted: false,
        checked: false,
    }
}

fn of_block(block: &Block) -> BlockInfo {
    let geometry = block.geometry();
    BlockInfo {
        name: block.name.to_string(),
        bytes: block.used_bytes,
        pages: block.pages(),
        bitmap_offset: geometry.map(|geometry| geometry.bitmap_offset),
        pages_offset: geometry.map(|geometry| geometry.pages_offset),
        ..BlockInfo::default()
    }
}

/// What follows the memory. Nothing may follow that.
fn tail(info: &mut SnapshotInfo, origin: &Origin, bytes: &[u8], base: u64) -> Result<(), Error> {
    let name = &origin.name;
    let parsed = check_tail(&Whence::File(name.to_owned()), bytes, base)?;
    let state = GlobalState::find(bytes, base).map_err(|error| damaged(name, error))?;
    info.state = match origin.ran(false) {
        true => Some(RunState::Running.name().to_owned()),
        false => state.map(|state| state.state),
    };
    info.device_bytes = bytes.len() as u64;
    info.described = parsed.is_walked();
    info.sections = parsed
        .sections
        .iter()
        .map(|section| SectionInfo {
            name: section.name.to_string(),
            instance: section.instance,
            version: section.version,
            offset: section.offset,
            bytes: section.body.len() as u64,
        })
        .collect();
    Ok(())
}

/// As people write it.
fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if [4, 6, 8, 10].contains(&at) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
