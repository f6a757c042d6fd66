//! A snapshot, read and checked up to where the device sections begin: what it holds, and where.
use std::sync::Arc;

use transship_memory::{PageCount, PageRange, PageSet, WindowPages};
use transship_secure::Identities;
use transship_wire::qemu::{Block, Command, Configuration, Geometry, GlobalState, Mapped, Record, bitmap_bytes};

use super::{
    DirectIo, FilePlace, FileUri,
    file::origin::Origin,
    image::opened::Image,
    save_image::{self, Begun},
};
use crate::{
    Error, Misfit,
    opened::all_is_open,
    stream::{
        feed::MAX_EARLY_BYTES,
        records::Records,
        tail::check_tail,
        whence::{Whence, damaged, misfit, wrong},
    },
};

/// Bytes of a bitmap that are looked at at once: 2 GiB of guest memory.
const BITMAP_CHUNK: u64 = 64 << 10;
/// Why a file without guest memory can't be restored.
pub(crate) const LEFT_OUT: &str =
    "it was saved with x-ignore-shared, which leaves guest memory in its own files; save with that capability off";

/// What a file turned out to be.
pub(crate) enum Opened {
    /// Every page has its place.
    Mapped(Box<Snapshot>),
    /// One record after the other; read up to the end of the list of blocks.
    Stream(Box<Stream>),
    /// A folder with guest memory in files of its own.
    Image(Box<Image>),
}

/// A plain stream whose pages come next.
pub(crate) struct Stream {
    pub(crate) origin: Origin,
    pub(crate) configuration: Configuration,
    /// The number of the RAM section.
    pub(crate) ram_section: u32,
    pub(crate) blocks: Vec<Block>,
    /// Why nobody can load it without its source, as far as it was read.
    pub(crate) refusal: Option<String>,
    pub(crate) records: Records,
}

/// A mapped-ram file whose structure has been checked; pages and bitmaps have not been looked at.
pub(crate) struct Snapshot {
    pub(crate) origin: Origin,
    pub(crate) configuration: Configuration,
    /// The number of the RAM section.
    pub(crate) ram_section: u32,
    pub(crate) blocks: Vec<Block>,
    /// Sections that are to come before the pages, verbatim.
    pub(crate) early: Vec<u8>,
    /// Whether the stream says that the guest had been stopped, which machines since 10.0 do.
    pub(crate) switchover: bool,
    /// Why nobody can load it without its source.
    pub(crate) refusal: Option<String>,
    /// Where the device sections begin.
    pub(crate) tail_offset: u64,
    /// From there to the end.
    pub(crate) tail: Vec<u8>,
}

/// Opens a file and reads as much of it as fits the memory of this process whatever it says: no page, no bitmap.
///
/// # Errors
/// It is none, or none that we can read; the text names the field and its offset.
pub(crate) fn open(from: &FileUri, direct_io: DirectIo, identities: Option<&Identities>) -> Result<Opened, Error> {
    if let FilePlace::Path(path) = &from.place
        && path.is_dir()
    {
        if identities.is_some() {
            return Err(wrong(
                &path.display().to_string(),
                "it is an image, which is never encrypted; leave out --identity",
            ));
        }
        let image = Image::open(&path.display().to_string(), path)?;
        all_is_open()?;
        return Ok(Opened::Image(Box::new(image)));
    }
    let origin = Origin::open(from, direct_io)?;
    all_is_open()?;
    read(origin, identities)
}

/// The same with a file that is open. `identities`: the keys of an encrypted one.
pub(crate) fn read(origin: Origin, identities: Option<&Identities>) -> Result<Opened, Error> {
    let Begun { image, input, reader } = save_image::begin(&origin, identities)?;
    let origin = Origin { image: image.map(Arc::new), ..origin };
    let mut records = Records::new(Whence::File(origin.name.clone()), input, reader);
    let mut head = Head::default();
    let configuration = loop {
        if let Some(configuration) = records.step(|record, _| head.take_first(&origin.name, record))? {
            break configuration;
        }
    };
    if !configuration.mapped_ram {
        records.expect_pages();
    }
    // The list of blocks, and what belongs to it.
    while !head.listed {
        records.step(|record, bytes| head.take_listed(&origin.name, record, bytes))?;
    }
    if !configuration.mapped_ram {
        let blocks = records.reader().blocks().to_vec();
        let Head { refusal, ram_section, .. } = head;
        let direct = origin.direct.filter(|_| records.are_of_a_file());
        let origin = Origin { direct, ..origin };
        let stream = Stream { origin, configuration, ram_section, blocks, refusal, records };
        return Ok(Opened::Stream(Box::new(stream)));
    }
    while !head.ended {
        records.step(|record, bytes| head.take_rest(&origin.name, record, bytes))?;
    }
    let (blocks, tail_offset) = (records.reader().blocks().to_vec(), records.reader().position());
    let tail = records.tail()?;
    let Head { early, switchover, refusal, ram_section, .. } = head;
    let snapshot =
        Snapshot { origin, configuration, ram_section, blocks, early, switchover, refusal, tail_offset, tail };
    Ok(Opened::Mapped(Box::new(snapshot)))
}

/// What has been read of the head of a stream.
#[derive(Default)]
struct Head {
    listed: bool,
    ended: bool,
    switchover: bool,
    /// An early section goes on.
    in_early: bool,
    ram_section: u32,
    early: Vec<u8>,
    refusal: Option<String>,
}

impl Head {
    /// Up to the configuration.
    fn take_first(&mut self, file: &str, record: Record<'_>) -> Result<Option<Configuration>, Error> {
        match record {
            Record::Header => Ok(None),
            Record::Configuration(configuration) => Ok(Some(configuration)),
            _ => unfit(
                file,
                "it has no configuration record, like the streams of machine types before 2.4; so its machine is \
                 unknown",
            ),
        }
    }

    /// Up to the end of the section that lists the blocks.
    fn take_listed(&mut self, file: &str, record: Record<'_>, bytes: &[u8]) -> Result<(), Error> {
        match record {
            Record::Footer { .. } if !self.in_early => self.listed = true,
            Record::Tail => return unfit(file, "it lists no memory"),
            record => self.take_rest(file, record, bytes)?,
        }
        Ok(())
    }

    /// What a mapped-ram file has beside.
    fn take_rest(&mut self, file: &str, record: Record<'_>, bytes: &[u8]) -> Result<(), Error> {
        let was_early = std::mem::take(&mut self.in_early);
        match record {
            Record::Tail => self.ended = true,
            Record::RamStart { section, .. } => self.ram_section = section,
            Record::Command(Command::SwitchoverStart) => self.switchover = true,
            Record::Command(command) => self.refusal = self.refusal.take().or(needs_source(&command)),
            Record::Early(_) => self.keep_early(file, bytes)?,
            Record::Raw(_) if was_early => self.keep_early(file, bytes)?,
            Record::Footer { .. } if was_early => {
                self.early.extend_from_slice(bytes);
            }
            Record::Page(page) => {
                let what =
                    format!("a page record for offset {:#x} in a mapped-ram file, where none can be", page.offset);
                return Err(wrong(file, what));
            }
            _ => {}
        }
        Ok(())
    }

    fn keep_early(&mut self, file: &str, bytes: &[u8]) -> Result<(), Error> {
        self.in_early = true;
        if self.early.len() + bytes.len() > MAX_EARLY_BYTES {
            return unfit(file, "its early device sections are larger than any machine's");
        }
        self.early.extend_from_slice(bytes);
        Ok(())
    }
}

/// Commands that mean nothing once the stream lies in a file are passed over; why others can't be.
pub(crate) fn needs_source(command: &Command) -> Option<String> {
    match command {
        Command::OpenReturnPath | Command::Ping(_) | Command::SwitchoverStart => None,
        Command::PostcopyAdvise(_) => Some("it was made for postcopy; save one without that capability".into()),
        other => Some(format!("it has the command {}, which needs a source that answers", other.name())),
    }
}

/// That all of the guest is in the file, in a form that is known.
///
/// # Errors
/// What is not.
pub(crate) fn check_complete(snapshot: &Snapshot) -> Result<(), Error> {
    let name = &snapshot.origin.name;
    if let Some(why) = &snapshot.refusal {
        return Err(misfit(Misfit::NeedsAnswers, name, why));
    }
    if let Some(block) = snapshot.left_out() {
        let what = format_args!("it has no pages of {:?}: {LEFT_OUT}", &*block.name);
        return Err(misfit(Misfit::LeftOut, name, what));
    }
    check_tail(&Whence::File(name.to_owned()), &snapshot.tail, snapshot.tail_offset).map(drop)
}

fn unfit<T>(file: &str, what: &str) -> Result<T, Error> {
    Err(wrong(file, what))
}

impl Snapshot {
    /// The pages of a block that are in the file. `block` is small enough to be somebody's memory: the set takes a bit
    /// a page.
    ///
    /// # Errors
    /// A bit for a page that the block does not have; the system's own.
    pub(crate) fn stored(&self, block: &Block) -> Result<PageSet, Error> {
        let mut set = PageSet::empty(PageCount::new(block.pages()));
        self.each_stored(block, |range| {
            set.insert(range);
            Ok(())
        })?;
        Ok(set)
    }

    /// Hands the pages of a block that are in the file to `take`, ascending, without keeping them.
    ///
    /// # Errors
    /// As [`Snapshot::stored`], and those of `take`.
    pub(crate) fn each_stored(
        &self,
        block: &Block,
        mut take: impl FnMut(PageRange) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Some(Geometry { bitmap_offset, .. }) = block.geometry() else { return Ok(()) };
        let total = bitmap_bytes(block.used_bytes);
        let mut chunk = Vec::new();
        for at in (0..total).step_by(BITMAP_CHUNK as usize) {
            let length = BITMAP_CHUNK.min(total - at);
            chunk.resize(length as usize, 0);
            self.read_exact(&format!("the bitmap of {:?}", &*block.name), &mut chunk, bitmap_offset + at)?;
            // A bitmap has whole words of 64 bits, a window is two of them: the last one may be half.
            for (window, bytes) in chunk.chunks(16).enumerate() {
                let mut word = [0; 16];
                word[..bytes.len()].copy_from_slice(bytes);
                let pages = u128::from_le_bytes(word);
                if pages == 0 {
                    continue;
                }
                let first = at * 8 + window as u64 * 128;
                let last = first + u64::from(127 - pages.leading_zeros());
                if last >= block.pages() {
                    let offset = bitmap_offset + at + window as u64 * 16;
                    let (name, has) = (&*block.name, block.pages());
                    let what = format!(
                        "bitmap of {name:?} at offset {offset:#x}: it has page {last}, but the block has {has} pages"
                    );
                    return unfit(&self.origin.name, &what);
                }
                WindowPages::new(first, pages).runs().try_for_each(&mut take)?;
            }
        }
        Ok(())
    }

    /// Reads bytes that must be there.
    pub(crate) fn read_exact(&self, what: &str, into: &mut [u8], at: u64) -> Result<(), Error> {
        self.origin.read_exact(what, into, at)
    }

    /// The block whose pages are not in the file, if there is one.
    pub(crate) fn left_out(&self) -> Option<&Block> {
        self.blocks.iter().find(|block| block.mapped == Some(Mapped::Ignored))
    }

    /// What the device sections say of the guest's running; none: they don't say.
    ///
    /// # Errors
    /// They say it in a way that can't be.
    pub(crate) fn global_state(&self) -> Result<Option<GlobalState>, Error> {
        GlobalState::find(&self.tail, self.tail_offset).map_err(|error| damaged(&self.origin.name, error))
    }
}
