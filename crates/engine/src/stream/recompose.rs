//! The stream that a QEMU loads instead of the file: everything but the guest's memory, which is in its place already.
//! Or all of it, if it is to be a file itself.
//!
//! ```text
//!   header, configuration with x-ignore-shared
//!   START    only blocks that are not guest memory: ROMs, video memory (another one if the file's list goes on later)
//!   (early sections)
//!   PART     their pages, as they come
//!   (SWITCHOVER_START)
//!   END      or here
//!   tail     the device sections, with the run state changed to paused
//! ```
use transship_wire::{
    PAGE_BYTES,
    qemu::{Block, Command, Configuration, Name, StreamWriter},
};

/// The number of the RAM section: any is accepted.
const RAM_SECTION: u32 = 1;

/// Makes the stream, piece by piece.
pub(crate) struct Recomposer {
    writer: StreamWriter,
    stage: Stage,
    /// Guest memory is left out: entries of the list have an address.
    ignore_shared: bool,
}

/// What the writer is in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Between two sections.
    Between,
    /// In a list of blocks that came later.
    Start,
    Part,
    /// In the last part.
    Last,
}

impl Recomposer {
    /// Begins a stream of `blocks`, which are none of the guest's memory.
    pub(crate) fn new<'a>(of: &Configuration, blocks: impl Iterator<Item = &'a Block> + Clone) -> Self {
        let mut recomposer = Self::begin(StreamWriter::new(0, RAM_SECTION), of, true);
        let total = blocks.clone().map(|block| block.used_bytes).sum();
        recomposer.start_again(total);
        blocks.for_each(|block| recomposer.block(block));
        recomposer.close();
        recomposer
    }

    /// Begins a stream of everything, at `base` of a file. Blocks are to follow.
    pub(crate) fn of_all(base: u64, ram_section: u32, of: &Configuration) -> Self {
        Self::begin(StreamWriter::new(base, ram_section), of, false)
    }

    fn begin(mut writer: StreamWriter, of: &Configuration, ignore_shared: bool) -> Self {
        let configuration = Configuration { ignore_shared, mapped_ram: false, ..of.clone() };
        writer.header().configuration(&configuration);
        Self { writer, stage: Stage::Between, ignore_shared }
    }

    /// The list of blocks goes on, with `total` bytes more.
    pub(crate) fn start_again(&mut self, total: u64) {
        self.close();
        self.writer.ram_start(total);
        self.stage = Stage::Start;
    }

    /// A block of the list.
    pub(crate) fn block(&mut self, block: &Block) {
        // Only looked at for blocks that the destination leaves out itself, which these are not.
        let gpa = self.ignore_shared.then(|| block.gpa.unwrap_or(0));
        self.writer.block(&Block { gpa, mapped: None, ..block.clone() });
    }

    /// A piece of an early section, as it is; before the first page.
    pub(crate) fn early(&mut self, bytes: &[u8]) {
        self.close();
        self.writer.raw(bytes);
    }

    /// A page of a block.
    pub(crate) fn page(&mut self, block: &Name, offset: u64, bytes: &[u8; PAGE_BYTES]) {
        self.open();
        self.writer.page(block, offset, bytes);
    }

    /// A page of a block that is zero.
    pub(crate) fn zero_page(&mut self, block: &Name, offset: u64) {
        self.open();
        self.writer.zero_page(block, offset);
    }

    /// What has changed in a page since it was last among these records.
    pub(crate) fn xbzrle_page(&mut self, block: &Name, offset: u64, delta: &[u8]) {
        self.open();
        self.writer.xbzrle_page(block, offset, delta);
    }

    /// The guest had been stopped from here on.
    pub(crate) fn switchover(&mut self) {
        self.close();
        self.writer.command(&Command::SwitchoverStart);
    }

    /// What comes now are the last pages.
    pub(crate) fn last(&mut self) {
        self.close();
        self.writer.end();
        self.stage = Stage::Last;
    }

    /// All pages are there.
    pub(crate) fn finish(&mut self) {
        if self.stage != Stage::Last {
            self.last();
        }
        self.writer.end_of_section();
        self.stage = Stage::Between;
    }

    /// What has been made since the last call.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        self.writer.take_bytes()
    }

    /// How many bytes wait to be taken.
    pub(crate) fn buffered(&self) -> usize {
        self.writer.buffered()
    }

    fn open(&mut self) {
        if self.stage == Stage::Start {
            self.close();
        }
        if self.stage == Stage::Between {
            self.writer.part();
            self.stage = Stage::Part;
        }
    }

    fn close(&mut self) {
        if matches!(self.stage, Stage::Part | Stage::Start) {
            self.writer.end_of_section();
            self.stage = Stage::Between;
        }
    }
}
