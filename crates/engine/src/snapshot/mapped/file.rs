//! A mapped-ram file while pages come to it: where each has its place, and which are there.
use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
};

use transship_memory::{FileIo, PAGE_BYTES, PageNumber, PageRange, Turns};
use transship_wire::qemu::Block;

use super::{
    content::Content,
    layout::{Layout, Spot},
};
use crate::{
    Error,
    snapshot::{
        file::target::Target,
        image::{add_memory_file, is_guest_memory},
    },
};

/// All blocks together; no file is longer.
const MAX_BYTES: u64 = 1 << 60;

/// What all writers of a file share.
pub(super) struct MappedFile {
    pub(super) target: Target,
    /// By block. Only the main stream's reader writes, when it comes to a list.
    blocks: RwLock<Blocks>,
    /// How the kernel is asked, and whether that is io_uring.
    pub(super) io: FileIo,
    is_uring: AtomicBool,
    /// Of the writers through the page cache.
    pub(super) turns: Turns,
    /// Writers with something that is not known to be in the file. One that is given up leaves it counted: what it had
    /// may be missing. Its last change by a writer goes before the look at it in `is_finished`.
    unfinished: AtomicUsize,
}

pub(super) struct Blocks {
    pub(super) layout: Layout,
    pub(super) list: Vec<BlockInFile>,
}

/// Where a block's pages are, and which.
pub(super) struct BlockInFile {
    pub(super) at: Spot,
    pub(super) bytes: u64,
    pages: Mutex<Pages>,
}

#[derive(Default)]
pub(super) struct Pages {
    /// The file's bitmap.
    pub(super) content: Content,
    /// All that were ever written.
    pub(super) written: Content,
}

impl MappedFile {
    pub(super) fn new(target: Target, layout: Layout, io: FileIo) -> Self {
        Self {
            target,
            blocks: RwLock::new(Blocks { layout, list: Vec::new() }),
            io,
            is_uring: AtomicBool::new(false),
            turns: Turns::default(),
            unfinished: AtomicUsize::new(0),
        }
    }

    pub(super) fn blocks(&self) -> RwLockReadGuard<'_, Blocks> {
        self.blocks.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn with<T>(&self, block: usize, act: impl FnOnce(&BlockInFile) -> T) -> T {
        act(&self.blocks().list[block])
    }

    /// Gives more blocks their places.
    pub(super) fn add(&self, blocks: &[Block]) -> Result<(), Error> {
        let mut known = self.blocks.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        for block in blocks {
            if known.layout.end().saturating_add(block.used_bytes) > MAX_BYTES {
                return Err(Error::file(format!("blocks up to {:?} are longer than any file", &*block.name)));
            }
            let bytes = block.used_bytes;
            let at = if known.layout.is_image() && is_guest_memory(&block.name) {
                let file = add_memory_file(&self.target, bytes)?;
                known.layout.push_left_out(&block.name, bytes, file);
                Spot { file, offset: 0 }
            } else {
                Spot { file: 0, offset: known.layout.push(&block.name, bytes) }
            };
            known.list.push(BlockInFile { at, bytes, pages: Mutex::default() });
        }
        let end = known.layout.end();
        self.target.expect(end - self.target.offset());
        self.target.set_length(end)
    }

    /// A writer asks the kernel by io_uring, or not.
    pub(super) fn note_io(&self, is_uring: bool) {
        self.is_uring.store(is_uring, Relaxed);
    }

    pub(super) fn is_uring(&self) -> bool {
        self.is_uring.load(Relaxed)
    }

    pub(super) fn begin_unfinished(&self) {
        self.unfinished.fetch_add(1, AcqRel);
    }

    pub(super) fn end_unfinished(&self) {
        self.unfinished.fetch_sub(1, AcqRel);
    }

    /// Whether all that writers brought is in the file.
    pub(super) fn is_finished(&self) -> bool {
        self.unfinished.load(Acquire) == 0
    }

    /// What a page is; everything that was stored of it is in the file, through the page cache or past it.
    pub(super) fn read_page(&self, block: usize, page: PageNumber, into: &mut [u8; PAGE_BYTES]) -> Result<(), Error> {
        self.with(block, |place| {
            if place.pages().content.contains(page) {
                return self.target.read_at(place.at.file, into, place.byte_of(page));
            }
            into.fill(0);
            Ok(())
        })
    }
}

impl BlockInFile {
    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Where in its file a page is.
    pub(super) fn byte_of(&self, page: PageNumber) -> u64 {
        self.at.offset + page.offset()
    }

    pub(super) fn note_content(&self, range: PageRange) {
        let mut known = self.pages();
        known.content.insert(range);
        known.written.insert(range);
    }

    pub(super) fn note_zero(&self, range: PageRange) {
        self.pages().content.remove(range);
    }
}
