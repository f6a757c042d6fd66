//! Where the contents of a stream go, whoever brings them: a file of either layout, or a guest that waits.
use std::sync::Arc;

use transship_memory::{PAGE_BYTES, PageCount, PageNumber, PageRange};
use transship_wire::qemu::Block;

use crate::{Error, FileReport, Progress, guest::DiskFile};

/// Takes what a stream holds. Blocks are known by their numbers: their places in the lists, from 0 on. Everything but
/// pages comes from the one that reads the main stream, between pages.
pub(crate) trait Store: Send + Sync {
    /// The list of blocks goes on with these.
    ///
    /// # Errors
    /// It has no room for them.
    fn list(&self, blocks: &[Block]) -> Result<(), Error>;
    /// A way in for pages. Each thread that brings some has its own.
    ///
    /// # Errors
    /// The system does not let us have what it takes.
    fn writer(self: Arc<Self>) -> Result<Box<dyn PageWriter>, Error>;
    /// A piece of a section that comes before the pages, as it is.
    fn early(&self, bytes: &[u8]) -> Result<(), Error>;
    /// The source says that its guest has been stopped.
    fn switchover(&self);
    /// What comes now are the last pages.
    fn last(&self) {}
}

/// A thread's way into a store. What it brings for a page is kept in order; what several bring for the same page is so
/// if one of them has finished before the other begins.
///
/// Callers have checked that a block has the pages that they bring.
pub(crate) trait PageWriter: Send {
    /// Room for so many pages. As long as nothing was stored from it, it keeps what it is filled with.
    ///
    /// # Errors
    /// Of what was stored before.
    fn room(&mut self, pages: usize) -> Result<&mut [u8], Error>;
    /// The room as it was filled.
    fn filled(&self) -> &[u8];
    /// Stores pages of a block that follow each other, which are in the room from page `at` of it on.
    fn store(&mut self, at: usize, block: usize, pages: PageRange) -> Result<(), Error>;
    /// These pages read as zero from now on, whatever there was.
    fn clear(&mut self, block: usize, pages: PageRange) -> Result<(), Error>;
    /// What has changed in a page since it came last, as xbzrle writes it; it can be applied to any page. The room is
    /// lost.
    fn patch(&mut self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error>;
    /// Returns when all of it is in place.
    ///
    /// # Errors
    /// The first one of anything that was stored.
    fn finish(&mut self) -> Result<(), Error>;
}

/// A store that has pages in place as soon as it was given them. Those of different blocks or places may come from
/// several threads at once.
pub(crate) trait PromptStore: Send + Sync {
    /// Whole pages that follow each other, the first of them at `offset` of the block.
    fn write(&self, block: usize, offset: u64, pages: &[u8]) -> Result<(), Error>;
    /// See [`PageWriter::clear`].
    fn clear(&self, block: usize, pages: PageRange) -> Result<(), Error>;
    /// See [`PageWriter::patch`].
    fn patch(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error>;
}

/// The way into such a store.
pub(crate) struct PromptWriter<S> {
    store: Arc<S>,
    room: Vec<u8>,
}

impl<S> PromptWriter<S> {
    pub(crate) fn new(store: Arc<S>) -> Self {
        Self { store, room: Vec::new() }
    }
}

impl<S: PromptStore> PageWriter for PromptWriter<S> {
    fn room(&mut self, pages: usize) -> Result<&mut [u8], Error> {
        let bytes = pages * PAGE_BYTES;
        let filled = self.room.len();
        super::make_room(&mut self.room, filled, bytes);
        Ok(&mut self.room[..bytes])
    }

    fn filled(&self) -> &[u8] {
        &self.room
    }

    fn store(&mut self, at: usize, block: usize, pages: PageRange) -> Result<(), Error> {
        let bytes = &self.room[at * PAGE_BYTES..][..pages.bytes() as usize];
        self.store.write(block, pages.first.offset(), bytes)
    }

    fn clear(&mut self, block: usize, pages: PageRange) -> Result<(), Error> {
        self.store.clear(block, pages)
    }

    fn patch(&mut self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error> {
        self.store.patch(block, offset, delta)
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// A store that becomes a file.
pub(crate) trait FileStore: Store {
    /// The disks that the guest had, which an image remembers. Unless this is called, nothing is known of them.
    fn disks(&self, _disks: Vec<DiskFile>) {}
    /// All pages are there, and `tail` is what follows them: makes the file whole, durably and at its name.
    ///
    /// # Errors
    /// The system does not take it; what was at the name before is there as it was.
    fn complete(&self, tail: &[u8], file: &mut FileReport, progress: &Progress) -> Result<(), Error>;
}

/// How many pages were what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) normal: PageCount,
    pub(crate) zero: PageCount,
}

/// Stores the pages at `offsets` of a block, which the room holds in this order. What is zero is cleared instead.
pub(crate) fn write_pages(writer: &mut dyn PageWriter, block: usize, offsets: &[u64]) -> Result<Counts, Error> {
    let mut counts = Counts::default();
    let mut at = 0;
    while let Some(&offset) = offsets.get(at) {
        let (pages, _) = writer.filled().as_chunks::<PAGE_BYTES>();
        let zero = is_zero(&pages[at]);
        let same = |next: usize| {
            offsets.get(next).copied() == Some(offset + ((next - at) * PAGE_BYTES) as u64)
                && is_zero(&pages[next]) == zero
        };
        let end = (at + 1..).find(|&next| !same(next)).unwrap_or(at + 1);
        let run = PageNumber::at(offset).run(PageCount::new((end - at) as u64));
        if zero {
            writer.clear(block, run)?;
            counts.zero += run.count;
        } else {
            writer.store(at, block, run)?;
            counts.normal += run.count;
        }
        at = end;
    }
    Ok(counts)
}

fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    *page == [0; PAGE_BYTES]
}
