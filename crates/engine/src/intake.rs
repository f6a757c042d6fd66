//! What guest memory holds while pages come into it, from several threads at once.
use std::{io, os::fd::BorrowedFd};

use transship_memory::{GuestMemory, Lent, LentSlots, PageRange, PageSet, WindowBuffer, WindowPages};

use crate::{Error, page_map::PageMap};

/// Guest memory that is being filled.
pub(crate) struct Intake {
    memory: GuestMemory,
    /// By region: pages that were written. All that are in neither map read as zero.
    written: Vec<PageMap>,
    /// By region: pages that may hold something from before, and are neither written nor cleared yet.
    old: Vec<PageMap>,
}

impl Intake {
    /// Memory of which all pages read as zero.
    pub(crate) fn of_zeros(memory: GuestMemory) -> Self {
        let none: Vec<_> = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        Self::with_old(memory, &none)
    }

    /// Memory that may hold anything. Before it is used, [`Intake::clear_old`] must be called: memory that somebody
    /// has preallocated would be read and written twice if it were cleared first.
    ///
    /// # Errors
    /// Memory that is to be there can't be had.
    pub(crate) fn over_old(memory: GuestMemory) -> Result<Self, Error> {
        let old = memory.ready()?;
        Ok(Self::with_old(memory, &old))
    }

    fn with_old(memory: GuestMemory, old: &[PageSet]) -> Self {
        let written = PageMap::empty(&memory);
        Self { memory, written, old: old.iter().map(PageMap::of).collect() }
    }

    pub(crate) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// By region: the pages that were written.
    pub(crate) fn written(&self) -> &[PageMap] {
        &self.written
    }

    /// Writes pages of a window. The caller has checked that there is such a region.
    pub(crate) fn write(&self, region: usize, present: WindowPages, bytes: &[u8]) -> Result<(), Error> {
        self.memory.regions()[region].write_pages(present, bytes)?;
        self.note_written(region, present);
        Ok(())
    }

    /// Whether [`Intake::receive`] is faster than [`Intake::write`].
    pub(crate) fn receives(&self, region: usize, present: WindowPages) -> bool {
        self.memory.regions()[region].receives(self.lacks(region, present).is_empty())
    }

    /// As [`Intake::write`], with what comes next from a socket.
    ///
    /// # Errors
    /// [`Region::receive_window`].
    ///
    /// [`Region::receive_window`]: transship_memory::Region::receive_window
    pub(crate) fn receive(&self, region: usize, present: WindowPages, from: BorrowedFd<'_>) -> io::Result<()> {
        self.memory.regions()[region].receive_window(from, present)?;
        self.note_written(region, present);
        Ok(())
    }

    /// Copies pages of a window from lent memory, but for those that are zero if they are looked for: which these are.
    /// What those held here is the caller's to clear.
    ///
    /// # Errors
    /// [`Lent::read_window`]; memory that can't be had, as a [`transship_memory::Error`] inside.
    pub(crate) fn copy_lent(
        &self,
        (lent, region): (&Lent, usize),
        wanted: WindowPages,
        look: bool,
        buffer: &mut WindowBuffer,
    ) -> io::Result<u128> {
        let memory = &self.memory.regions()[region];
        if memory.is_private() || !self.lacks(region, wanted).is_empty() {
            let write = |pages, bytes: &[u8]| self.write(region, pages, bytes).map_err(io::Error::other);
            return lent.read_window(region, wanted, look, buffer, write);
        }
        lent.copy_window(region, wanted, memory)?;
        self.note_written(region, wanted);
        let zero = if look { memory.zero_mask(wanted).map_err(io::Error::other)? } else { 0 };
        if !memory.gives_back() {
            self.written[region].remove(wanted.with(zero)); // they read as zero now
        }
        Ok(zero)
    }

    /// As [`Intake::write`], of pages in a slot.
    ///
    /// # Errors
    /// [`LentSlots::write_window`].
    pub(crate) fn write_slot(
        &self,
        region: usize,
        present: WindowPages,
        (slots, slot): (&LentSlots, usize),
    ) -> io::Result<()> {
        slots.write_window(slot, present, &self.memory.regions()[region])?;
        self.note_written(region, present);
        Ok(())
    }

    /// Those of the pages that may be holes.
    fn lacks(&self, region: usize, pages: WindowPages) -> WindowPages {
        pages.without(self.written[region].window(pages.first) | self.old[region].window(pages.first))
    }

    fn note_written(&self, region: usize, pages: WindowPages) {
        self.old[region].claim(pages);
        self.written[region].insert(pages);
    }

    /// Makes pages of a window read as zero.
    pub(crate) fn clear_window(&self, region: usize, zero: WindowPages) -> Result<(), Error> {
        let memory = &self.memory.regions()[region];
        for run in self.written[region].claim(zero).runs() {
            memory.clear(run)?;
        }
        Ok(memory.clear_window(self.old[region].claim(zero))?)
    }

    /// Makes a range read as zero.
    pub(crate) fn clear_range(&self, region: usize, range: PageRange) -> Result<(), Error> {
        let memory = &self.memory.regions()[region];
        let mut written = self.written[region].take(range);
        if memory.gives_back() {
            let (written, old) = (written.count(), self.old[region].take(range).count());
            return if written + old > 0 { Ok(memory.clear(range)?) } else { Ok(()) };
        }
        // Zeros in holes would take memory.
        written.try_for_each(|window| window.runs().try_for_each(|run| memory.clear(run)))?;
        Ok(self.old[region].take(range).try_for_each(|window| memory.clear_window(window))?)
    }

    /// Makes these pages of a region read as zero, if they were written. Nobody may write pages meanwhile.
    pub(crate) fn clear_set(&self, region: usize, set: &PageSet) -> Result<(), Error> {
        let memory = &self.memory.regions()[region];
        let mut there = self.written[region].to_set(memory.pages());
        there.intersect_with(set);
        for range in there.ranges() {
            memory.clear(range)?;
            self.written[region].take(range).for_each(drop);
        }
        Ok(())
    }

    /// Makes all pages read as zero that hold something from before. Nobody may write or clear pages meanwhile.
    pub(crate) fn clear_old(&self) -> Result<(), Error> {
        for (region, old) in self.memory.regions().iter().zip(&self.old) {
            let mut set = PageSet::empty(region.pages());
            let all = PageRange::all(region.pages());
            old.take(all).for_each(|window| window.runs().for_each(|run| set.insert(run)));
            region.clear_set(&set)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use transship_memory::{Access, ByteRange, Keep, LentFile, PAGE_BYTES, PageCount, PageNumber, Region};

    use super::*;

    const PAGES: u64 = 300;
    const OLD: u8 = 0xee;

    /// Something that is done to pages of both regions.
    #[derive(Debug, Clone)]
    enum Step {
        Write(WindowPages, u8),
        /// Of lent memory that holds this byte, with a look for zeros or without.
        Copy(WindowPages, u8, bool),
        ClearWindow(WindowPages),
        ClearRange(PageRange),
    }

    /// Pages that a region has.
    fn window() -> impl Strategy<Value = WindowPages> {
        (0..PAGES.div_ceil(128), any::<u128>()).prop_map(|(number, mask)| {
            let has = (PAGES - number * 128).min(128);
            WindowPages::new(number * 128, mask & u128::MAX >> (128 - has))
        })
    }

    fn range() -> impl Strategy<Value = PageRange> {
        (0..PAGES).prop_flat_map(|first| (0..=PAGES - first).prop_map(move |count| PageRange::new(first, count)))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            2 => (window(), 1_u8..9).prop_map(|(pages, byte)| Step::Write(pages, byte)),
            2 => (window(), 0_u8..3, any::<bool>()).prop_map(|(pages, byte, look)| Step::Copy(pages, byte, look)),
            1 => window().prop_map(Step::ClearWindow),
            1 => range().prop_map(Step::ClearRange),
        ]
    }

    /// Zeros can be holes in the first region only.
    fn memory_with(old: &[PageRange]) -> GuestMemory {
        let region = |name| {
            let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, PAGES * PAGE_BYTES as u64).unwrap();
            Region::map(name, file, ByteRange::sized(0, PAGES * PAGE_BYTES as u64), Access::ReadWrite).unwrap()
        };
        let memory = GuestMemory::new(vec![region("a"), region("b").keeping(Keep::All)]);
        for region in memory.regions() {
            for pages in old.iter().flat_map(|range| range.windows()) {
                region.write_pages(pages, &vec![OLD; pages.count().buffer_bytes()]).unwrap();
            }
        }
        memory
    }

    /// Two regions of which these pages hold a byte.
    fn lent(pages: WindowPages, byte: u8) -> Lent {
        let file = |_| {
            let file = memfd_create("lent", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, PAGES * PAGE_BYTES as u64).unwrap();
            let write = |page: PageNumber| rustix::io::pwrite(&file, &[byte; PAGE_BYTES], page.offset()).unwrap();
            pages.iter().for_each(|page| assert_eq!(write(page), PAGE_BYTES));
            Some(LentFile { file, offset: 0 })
        };
        Lent::of([0, 1].map(file).into(), &memory_with(&[])).unwrap()
    }

    /// By page: the byte that all of it holds.
    fn holds(region: &Region) -> Vec<u8> {
        let mut bytes = vec![0; PAGES as usize * PAGE_BYTES];
        region.copy_to(PageRange::new(0, PAGES), &mut bytes).unwrap();
        let byte_of = |page: &[u8]| {
            assert!(page.iter().all(|byte| *byte == page[0]), "a page is torn");
            page[0]
        };
        bytes.chunks(PAGE_BYTES).map(byte_of).collect()
    }

    fn apply(step: &Step, intake: &Intake, region: usize, model: &mut [u8]) {
        let mut set = |pages: WindowPages, byte| pages.iter().for_each(|page| model[page.get() as usize] = byte);
        match *step {
            Step::Write(pages, byte) => {
                intake.write(region, pages, &vec![byte; pages.count().buffer_bytes()]).unwrap();
                set(pages, byte);
            }
            Step::Copy(pages, byte, look) => {
                let found = intake.copy_lent((&lent(pages, byte), region), pages, look, &mut WindowBuffer::default());
                let found = found.unwrap();
                assert_eq!(found, if look && byte == 0 { pages.mask } else { 0 });
                intake.clear_window(region, pages.with(found)).unwrap();
                set(pages, byte);
            }
            Step::ClearWindow(pages) => {
                intake.clear_window(region, pages).unwrap();
                set(pages, 0);
            }
            Step::ClearRange(range) => {
                intake.clear_range(region, range).unwrap();
                range.windows().for_each(|pages| set(pages, 0));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn of_what_was_there_before_nothing_is_left(
            old in proptest::collection::vec(range(), 0..4),
            steps in proptest::collection::vec(step(), 0..8),
            later in proptest::collection::vec(step(), 0..4),
        ) {
            let intake = Intake::over_old(memory_with(&old)).unwrap();
            for (number, region) in intake.memory().clone().regions().iter().enumerate() {
                let mut model = vec![0; PAGES as usize];
                steps.iter().for_each(|step| apply(step, &intake, number, &mut model));
                intake.clear_old().unwrap();
                prop_assert_eq!(&holds(region), &model);
                later.iter().for_each(|step| apply(step, &intake, number, &mut model));
                prop_assert_eq!(&holds(region), &model);
                for (page, byte) in model.iter().enumerate() {
                    prop_assert!(*byte == 0 || intake.written()[number].contains(PageNumber::new(page as u64)));
                }
            }
        }
    }

    /// Memory that is preallocated holds zeros as a rule: they are looked at, and nothing is written.
    #[test]
    fn what_is_overwritten_is_not_cleared_before() {
        let all = PageRange::new(0, PAGES);
        let intake = Intake::over_old(memory_with(&[all])).unwrap();
        assert!(intake.memory().regions().iter().all(|region| holds(region) == [OLD; PAGES as usize]));
        for region in 0..2 {
            all.windows().for_each(|pages| {
                intake.write(region, pages, &vec![1; pages.count().buffer_bytes()]).unwrap();
            });
        }
        assert!(intake.old.iter().all(|old| old.to_set(PageCount::new(PAGES)).is_empty()));
    }
}
