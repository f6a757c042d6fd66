//! The stream that a QEMU loads instead of the file: everything but the guest's memory, which is in its place already.
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
pub(super) struct Recomposer {
    writer: StreamWriter,
    stage: Stage,
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
    pub(super) fn new<'a>(of: &Configuration, blocks: impl Iterator<Item = &'a Block> + Clone) -> Self {
        let mut writer = StreamWriter::new(0, RAM_SECTION);
        let configuration = Configuration { ignore_shared: true, mapped_ram: false, ..of.clone() };
        let total = blocks.clone().map(|block| block.used_bytes).sum();
        writer.header().configuration(&configuration).ram_start(total);
        let mut recomposer = Self { writer, stage: Stage::Start };
        blocks.for_each(|block| recomposer.block(block));
        recomposer.close();
        recomposer
    }

    /// The list of blocks goes on, with `total` bytes more.
    pub(super) fn start_again(&mut self, total: u64) {
        self.close();
        self.writer.ram_start(total);
        self.stage = Stage::Start;
    }

    /// A block of the list.
    pub(super) fn block(&mut self, block: &Block) {
        // Only looked at for blocks that the destination leaves out itself, which these are not.
        let gpa = Some(block.gpa.unwrap_or(0));
        self.writer.block(&Block { gpa, mapped: None, ..block.clone() });
    }

    /// A piece of an early section, as it is; before the first page.
    pub(super) fn early(&mut self, bytes: &[u8]) {
        self.close();
        self.writer.raw(bytes);
    }

    /// A page of a block.
    pub(super) fn page(&mut self, block: &Name, offset: u64, bytes: &[u8; PAGE_BYTES]) {
        self.open();
        self.writer.page(block, offset, bytes);
    }

    /// A page of a block that is zero.
    pub(super) fn zero_page(&mut self, block: &Name, offset: u64) {
        self.open();
        self.writer.zero_page(block, offset);
    }

    /// The guest had been stopped from here on.
    pub(super) fn switchover(&mut self) {
        self.close();
        self.writer.command(&Command::SwitchoverStart);
    }

    /// What comes now are the last pages.
    pub(super) fn last(&mut self) {
        self.close();
        self.writer.end();
        self.stage = Stage::Last;
    }

    /// All pages are there.
    pub(super) fn finish(&mut self) {
        if self.stage != Stage::Last {
            self.last();
        }
        self.writer.end_of_section();
        self.stage = Stage::Between;
    }

    /// What has been made since the last call.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.writer.take_bytes()
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
