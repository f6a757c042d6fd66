//! Which part of a region is tracked: the part of which its file has had something.
//!
//! To track a page costs an entry in a page table of the process, also where nothing ever was. So memory of which the
//! file has nothing is not tracked at all. Whoever writes there makes a page in the file, which stays until it is given
//! back. A look at the file finds it at the next scan, and from then on that part is tracked.
//!
//! ```text
//!   scan:  which blocks have something now? ──► these are tracked ──► which of their pages have something?
//!                                                                      all of them may have been written
//! ```
//!
//! What is written after the first question is found by the second one or by the next scan. What is written after the
//! second question is found by the tracker.
use crate::{ByteRange, Error, GuestMemory, PageNumber, PageRange, PageSet, Region, region::Held, shared::Shared};

/// What is tracked as a whole. A multiple of a huge page, in the file as in memory that has huge pages of it: the
/// kernel protects no part of one.
const BLOCK_BYTES: u64 = 2 << 20;

/// The pages of a region that are tracked.
pub(crate) struct Reach {
    memory: GuestMemory,
    region: usize,
    pages: PageSet,
}

impl Reach {
    /// Nothing yet. None: all of the region is to be tracked, as no file says where it has something.
    pub(crate) fn of(memory: &GuestMemory, region: usize) -> Option<Self> {
        let shared = shared(memory.regions().get(region)?)?;
        let pages = PageSet::empty(shared.pages());
        Some(Self { memory: memory.clone(), region, pages })
    }

    /// What is tracked.
    pub(crate) fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// Adds what is to be tracked from now on, whole blocks, and returns that.
    ///
    /// # Errors
    /// The system's own; the same for the others.
    pub(crate) fn grow(&mut self) -> Result<PageSet, Error> {
        let mut grown = PageSet::empty(self.pages.pages());
        if let Some(shared) = self.shared_beyond() {
            if shared.has_no_hole() {
                grown = PageSet::full(shared.pages());
                grown.subtract(&self.pages);
            } else {
                let beyond = shared.between(&self.pages);
                beyond.into_iter().try_for_each(|range| add_blocks(shared, range, &mut grown))?;
            }
        }
        self.pages.union_with(&grown);
        Ok(grown)
    }

    /// Which of these pages the file has.
    pub(crate) fn data_among(&self, pages: &PageSet) -> Result<PageSet, Error> {
        if pages.is_empty() { Ok(pages.clone()) } else { self.region().data_among(pages) }
    }

    /// The pages that the file has and that are not tracked.
    pub(crate) fn data_beyond(&self) -> Result<PageSet, Error> {
        self.shared_beyond()
            .map_or_else(|| Ok(PageSet::empty(self.pages.pages())), |shared| shared.new_data(&self.pages))
    }

    /// None: all is tracked.
    fn shared_beyond(&self) -> Option<&Shared> {
        shared(self.region()).filter(|shared| self.pages.count() < shared.pages())
    }

    fn region(&self) -> &Region {
        &self.memory.regions()[self.region]
    }
}

/// Of a region whose file says where it has something.
fn shared(region: &Region) -> Option<&Shared> {
    match &region.held {
        Held::Shared(shared) => Some(shared).filter(|shared| shared.is_on_tmpfs()),
        Held::Private(_) => None,
    }
}

/// Adds the blocks of the range, which ends where blocks do, of which the file has something.
fn add_blocks(shared: &Shared, range: PageRange, blocks: &mut PageSet) -> Result<(), Error> {
    let ByteRange { start, end } = shared.part_of_file(range);
    let mut at = start;
    let next = |at| shared.next_data(at, end).map_err(|source| shared.failed("find what its file has", source));
    while let Some(data) = next(at)? {
        let block = data / BLOCK_BYTES * BLOCK_BYTES;
        let (first, behind) = (block.max(start), (block + BLOCK_BYTES).min(end));
        let page = |byte: u64| PageNumber::at(byte - shared.file_offset());
        blocks.insert(page(first).to(page(behind)));
        at = behind;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::{Access, PageCount};

    const BLOCK: u64 = BLOCK_BYTES / 4096;

    /// A part of a file that begins in the middle of a block and ends in one.
    fn part() -> GuestMemory {
        let file = memfd_create("part", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8 * BLOCK_BYTES).unwrap();
        let part = ByteRange { start: BLOCK_BYTES / 2, end: 6 * BLOCK_BYTES + BLOCK_BYTES / 4 };
        GuestMemory::new(vec![Region::map("part", file, part, Access::ReadWrite).unwrap()])
    }

    /// By page of the part.
    fn write(shared: &Shared, page: u64) {
        let at = shared.offset_in_file(PageNumber::new(page));
        assert_eq!(rustix::io::pwrite(shared.file(), &[7], at), Ok(1));
    }

    fn ranges(set: &PageSet) -> Vec<(u64, u64)> {
        set.ranges().map(|range| (range.first.get(), range.end().get())).collect()
    }

    #[test]
    fn blocks_are_those_of_the_file_and_each_is_reached_once() {
        let memory = part();
        let shared = shared(&memory.regions()[0]).unwrap();
        let (begin, all) = (BLOCK / 2, 23 * BLOCK / 4);
        assert_eq!(shared.pages(), PageCount::new(all));
        let mut reach = Reach::of(&memory, 0).unwrap();
        assert!(reach.grow().unwrap().is_empty(), "there is nothing");
        // In front of the part, and behind it.
        rustix::io::pwrite(shared.file(), &[7], 0).unwrap();
        rustix::io::pwrite(shared.file(), &[7], 7 * BLOCK_BYTES).unwrap();
        assert!(reach.grow().unwrap().is_empty(), "nothing of it is the part's");

        write(shared, 0);
        write(shared, begin);
        write(shared, begin + BLOCK - 1);
        write(shared, begin + 3 * BLOCK);
        let grown = reach.grow().unwrap();
        let expected = [(0, begin + BLOCK), (begin + 3 * BLOCK, begin + 4 * BLOCK)];
        assert_eq!(ranges(&grown), expected);
        assert_eq!(ranges(reach.pages()), expected);

        assert!(reach.grow().unwrap().is_empty(), "nothing has come");
        write(shared, 1);
        write(shared, all - 1);
        let last = begin + 5 * BLOCK;
        assert_eq!(ranges(&reach.grow().unwrap()), [(last, all)]);
        (0..all).for_each(|page| write(shared, page));
        assert_eq!(ranges(&reach.grow().unwrap()), [(begin + BLOCK, begin + 3 * BLOCK), (begin + 4 * BLOCK, last)]);
        assert_eq!(*reach.pages(), PageSet::full(shared.pages()));
        assert!(reach.grow().unwrap().is_empty());
    }

    #[test]
    fn what_takes_up_all_its_file_is_reached_at_once() {
        let file = memfd_create("full", MemfdFlags::CLOEXEC).unwrap();
        let bytes = vec![7; 3 * BLOCK_BYTES as usize];
        assert_eq!(rustix::io::pwrite(&file, &bytes, 0), Ok(bytes.len()));
        let region = Region::map("full", file, ByteRange::sized(0, 3 * BLOCK_BYTES), Access::Read).unwrap();
        let all = PageSet::full(region.pages());
        let mut reach = Reach::of(&GuestMemory::new(vec![region]), 0).unwrap();
        assert_eq!(reach.grow().unwrap(), all);
        assert!(reach.data_beyond().unwrap().is_empty());
    }
}
