//! A mapped-ram file whose pages come from a stream: each goes to its place, in any order and as often as it likes.
use std::sync::{Mutex, MutexGuard, RwLock};

use transship_memory::{PAGE_BYTES, PageRange, Writeback};
use transship_wire::qemu::{Block, Configuration, bitmap_bytes, xbzrle};

use super::{
    content::Content,
    layout::{Around, Layout},
    state::DeviceState,
    store::{FileStore, Store},
    target::Target,
};
use crate::{Error, FileReport, Progress};

const PAGE: u64 = PAGE_BYTES as u64;
/// All blocks together; no file is longer.
const MAX_BYTES: u64 = 1 << 60;

/// The file and what it holds.
pub(crate) struct MappedStore {
    target: Target,
    configuration: Configuration,
    ram_section: u32,
    /// By block. Only the main stream's reader writes, when it comes to a list.
    blocks: RwLock<Blocks>,
    around: Mutex<Beside>,
    /// Held while pages are written: of several threads that write to a file the kernel lets one go on and has the others spin.
    writeback: Mutex<Writeback>,
}

struct Blocks {
    layout: Layout,
    list: Vec<Place>,
}

/// Where a block's pages are, and which.
struct Place {
    pages_offset: u64,
    bytes: u64,
    pages: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    /// The file's bitmap.
    content: Content,
    /// All that were ever written.
    written: Content,
}

/// What is no page.
#[derive(Default)]
struct Beside {
    early: Vec<u8>,
    switchover: bool,
}

impl MappedStore {
    /// A file of a machine as `configuration` describes it. `ram_section`: the number that no section behind the memory has.
    pub(crate) fn begin(target: Target, configuration: &Configuration, ram_section: u32) -> Self {
        let layout = Layout::new(target.offset(), &[]);
        let blocks = RwLock::new(Blocks { layout, list: Vec::new() });
        Self {
            target,
            configuration: configuration.clone(),
            ram_section,
            blocks,
            around: Mutex::default(),
            writeback: Mutex::default(),
        }
    }

    fn with<T>(&self, block: usize, act: impl FnOnce(&Place) -> T) -> T {
        let blocks = self.blocks.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        act(&blocks.list[block])
    }
}

impl Place {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Store for MappedStore {
    fn list(&self, blocks: &[Block]) -> Result<(), Error> {
        let mut known = self.blocks.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        for block in blocks {
            if known.layout.end().saturating_add(block.used_bytes) > MAX_BYTES {
                return Err(Error::File(format!("blocks up to {:?} are longer than any file", &*block.name)));
            }
            let pages_offset = known.layout.push(&block.name, block.used_bytes);
            known.list.push(Place { pages_offset, bytes: block.used_bytes, pages: Mutex::default() });
        }
        let end = known.layout.end();
        self.target.expect(end - self.target.offset());
        self.target.set_length(end)
    }

    fn write(&self, block: usize, offset: u64, pages: &[u8]) -> Result<(), Error> {
        self.with(block, |place| {
            let at = place.pages_offset + offset;
            {
                let mut writeback = self.writeback.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                self.target.write_at(pages, at)?;
                self.target.begin_writeback(&mut writeback, at, pages.len() as u64);
            }
            let range = PageRange::new(offset / PAGE, pages.len() as u64 / PAGE);
            let mut known = place.pages();
            known.content.insert(range);
            known.written.insert(range);
            Ok(())
        })
    }

    fn clear(&self, block: usize, pages: PageRange) -> Result<(), Error> {
        self.with(block, |place| place.pages().content.remove(pages));
        Ok(())
    }

    fn patch(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error> {
        let mut page = [0; PAGE_BYTES];
        self.with(block, |place| {
            if place.pages().content.contains(offset / PAGE) {
                self.target.read_at(&mut page, place.pages_offset + offset)?;
            }
            Ok::<_, Error>(())
        })?;
        xbzrle::decode(delta, 0, &mut page).map_err(|error| Error::File(error.to_string()))?;
        self.write(block, offset, &page)
    }

    fn early(&self, bytes: &[u8]) -> Result<(), Error> {
        self.beside().early.extend_from_slice(bytes);
        Ok(())
    }

    fn switchover(&self) {
        self.beside().switchover = true;
    }

    fn last(&self) {}
}

impl MappedStore {
    fn beside(&self) -> MutexGuard<'_, Beside> {
        self.around.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl FileStore for MappedStore {
    fn complete(&self, tail: &[u8], file: &mut FileReport, progress: &Progress) -> Result<(), Error> {
        let Beside { early, switchover } = std::mem::take(&mut *self.beside());
        let state = DeviceState {
            configuration: self.configuration.clone(),
            ram_section: self.ram_section,
            blocks: Vec::new(),
            early,
            switchover_start: switchover,
            tail: tail.to_vec(),
        };
        let blocks = self.blocks.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Around { pieces, .. } = blocks.layout.around(&state)?;
        for (place, at) in blocks.list.iter().zip(blocks.layout.bitmaps()) {
            let known = place.pages();
            file.pages_stored += known.content.count();
            for (offset, bytes) in known.content.bitmap(bitmap_bytes(place.bytes)) {
                self.target.write_at(&bytes, at + offset)?;
            }
            for range in known.written.without(&known.content) {
                if progress.is_cancelled() {
                    return Err(Error::Cancelled);
                }
                self.target.punch(place.pages_offset + range.first * PAGE, range.bytes())?;
                file.pages_freed += range.count;
            }
        }
        let (head, rest) = pieces.split_first().ok_or_else(|| Error::File("an empty snapshot".into()))?;
        rest.iter().try_for_each(|piece| self.target.write_at(&piece.bytes, piece.position))?;
        self.target.complete(&head.bytes, progress)?;
        (file.bytes, file.allocated) = self.target.size()?;
        Ok(())
    }
}
