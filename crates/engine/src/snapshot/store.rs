//! Where the contents of a stream go, whoever brings them: a file of either layout, or a guest that waits.
use transship_memory::{PAGE_BYTES, PageRange};
use transship_wire::qemu::Block;

use crate::{Error, FileReport, Progress};

/// Takes what a stream holds. Blocks are known by their numbers: their places in the lists, from 0 on. Pages of different blocks or places may
/// come from several threads at once; everything else comes from the one that reads the main stream, between pages.
///
/// Callers have checked that a block has the pages that they bring.
pub(crate) trait Store: Send + Sync {
    /// The list of blocks goes on with these.
    ///
    /// # Errors
    /// It has no room for them.
    fn list(&self, blocks: &[Block]) -> Result<(), Error>;
    /// Whole pages that follow each other, the first of them at `offset` of the block.
    fn write(&self, block: usize, offset: u64, pages: &[u8]) -> Result<(), Error>;
    /// These pages read as zero from now on, whatever there was.
    fn clear(&self, block: usize, pages: PageRange) -> Result<(), Error>;
    /// What has changed in a page since it came last, as xbzrle writes it; it can be applied to any page.
    fn patch(&self, block: usize, offset: u64, delta: &[u8]) -> Result<(), Error>;
    /// A piece of a section that comes before the pages, as it is.
    fn early(&self, bytes: &[u8]) -> Result<(), Error>;
    /// The source says that its guest has been stopped.
    fn switchover(&self);
    /// What comes now are the last pages.
    fn last(&self);
}

/// A store that becomes a file.
pub(crate) trait FileStore: Store {
    /// All pages are there, and `tail` is what follows them: makes the file whole, durably and at its name.
    ///
    /// # Errors
    /// See [`Target::complete`](super::target::Target::complete).
    fn complete(&self, tail: &[u8], file: &mut FileReport, progress: &Progress) -> Result<(), Error>;
}

/// How many pages were what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) normal: u64,
    pub(crate) zero: u64,
}

/// Stores the pages at `offsets` of a block, whose content is in `bytes` in this order. What is zero is cleared instead.
pub(crate) fn write_pages(store: &dyn Store, block: usize, offsets: &[u64], bytes: &[u8]) -> Result<Counts, Error> {
    let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
    let mut counts = Counts::default();
    let mut at = 0;
    while let Some((&offset, page)) = offsets.get(at).zip(pages.get(at)) {
        let zero = is_zero(page);
        let same = |next: usize| {
            offsets.get(next).copied() == Some(offset + ((next - at) * PAGE_BYTES) as u64)
                && pages.get(next).is_some_and(|page| is_zero(page) == zero)
        };
        let end = (at + 1..).find(|&next| !same(next)).unwrap_or(at + 1);
        let count = (end - at) as u64;
        if zero {
            store.clear(block, PageRange::new(offset / PAGE_BYTES as u64, count))?;
            counts.zero += count;
        } else {
            store.write(block, offset, &bytes[at * PAGE_BYTES..end * PAGE_BYTES])?;
            counts.normal += count;
        }
        at = end;
    }
    Ok(counts)
}

fn is_zero(page: &[u8; PAGE_BYTES]) -> bool {
    *page == [0; PAGE_BYTES]
}
