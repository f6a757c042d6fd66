//! A region of the memory of one moment: which pages it had, and which of them nobody has saved yet.
use std::sync::OnceLock;

use transship_memory::{PageCount, PageNumber, PageRange, PageSet, Region, WindowPages};

use crate::{Error, page_map::PageMap};

/// Pages that a fault saves: the page itself and its neighbours, which are likely to be written next.
pub(super) const FAULT_PAGES: PageCount = PageCount::new(16);
/// The largest pages of which copies are made.
const UNIT_PAGES_MAX: PageCount = PageCount::within(2 << 20);
/// Holes of up to so many pages are protected along with what is around them: it saves calls of the kernel, while the
/// guest stands still.
const GAP_PAGES: PageCount = PageCount::new(32);

/// Counts in units: pages that are protected and let go of together, 1 or those of a huge page. Sets and ranges of
/// units are of the types of those of pages; [`Unsaved::pages_of`] makes pages of them.
pub(super) struct Unsaved {
    /// Pages of a unit.
    pub(super) unit: PageCount,
    units: PageCount,
    /// Units that a writer takes at once.
    chunk: u64,
    /// Pages that were no holes some time before the moment.
    before: PageSet,
    /// Units that were let go of between then and the moment.
    passed: PageMap,
    /// Pages that were no holes in the moment, once it is there.
    data: OnceLock<PageSet>,
    /// Units that nobody has claimed; empty until then.
    pub(super) left: PageMap,
}

impl Unsaved {
    /// Of a guest that still runs.
    ///
    /// # Errors
    /// The system's; huge pages that are too large to be copied.
    pub(super) fn of(memory: &Region, unit: PageCount) -> Result<Self, Error> {
        if unit > UNIT_PAGES_MAX {
            return Err(Error::unfit(format!(
                "guest memory {:?} is in huge pages of {} MiB, which are too large to be copied while a write waits; \
                 use --live or --paused",
                memory.name(),
                unit.bytes() >> 20
            )));
        }
        let units = PageCount::new(memory.pages().div_ceil(unit));
        let (passed, left) = (PageMap::new(units), PageMap::new(units));
        let (before, data) = (memory.data()?, OnceLock::new());
        Ok(Self { unit, units, chunk: (128 / unit.get()).max(1), before, passed, data, left })
    }

    /// What is to be protected while the guest still runs.
    pub(super) fn beforehand(&self) -> Vec<PageRange> {
        self.around_data(&self.before)
    }

    /// The units around this one are let go of before the moment, because somebody writes there; they are protected
    /// again later.
    pub(super) fn pass(&self, unit: u64) -> PageRange {
        let units = self.around(unit);
        self.passed.insert(units);
        let first = units.first + PageCount::new(units.mask.trailing_zeros().into());
        self.pages_of(first.run(units.count().min(PageRange::all(self.units).end() - first)))
    }

    /// The moment: the guest stands still. What is to be protected now, beside what is.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn stop(&self, memory: &Region) -> Result<Vec<PageRange>, Error> {
        let mut fresh = memory.new_data(&self.before)?;
        let mut data = self.before.clone();
        data.union_with(&fresh);
        for units in self.passed.to_set(self.units).ranges() {
            fresh.insert(self.pages_of(units));
        }
        for range in data.ranges() {
            self.left.insert_range(self.units_of_pages(range));
        }
        // It is set once: there is one moment.
        let _ = self.data.set(data);
        Ok(self.around_data(&fresh))
    }

    /// Pages that were no holes in the moment; none before it.
    pub(super) fn data(&self) -> Option<&PageSet> {
        self.data.get()
    }

    pub(super) fn has_data(&self, unit: u64) -> bool {
        let pages = self.pages_of(PageRange::new(unit, 1));
        self.data().is_some_and(|data| pages.iter().any(|page| data.contains(page)))
    }

    /// The number of the unit that a page is in.
    pub(super) fn unit_of(&self, page: PageNumber) -> u64 {
        page.get() / self.unit.get()
    }

    /// Whole units.
    pub(super) fn pages_of(&self, units: PageRange) -> PageRange {
        PageRange::new(units.first.get() * self.unit.get(), units.count.get() * self.unit.get())
    }

    fn units_of_pages(&self, pages: PageRange) -> PageRange {
        let (first, end) = (self.unit_of(pages.first), pages.end().get().div_ceil(self.unit.get()));
        PageRange::new(first, end - first)
    }

    /// Ranges of whole units that hold these pages, with small holes between them.
    fn around_data(&self, data: &PageSet) -> Vec<PageRange> {
        let mut around: Vec<PageRange> = Vec::new();
        for range in data.ranges() {
            let range = self.pages_of(self.units_of_pages(range));
            match around.last_mut() {
                Some(last) if range.first <= last.end() + (GAP_PAGES - GAP_PAGES % self.unit) => {
                    last.count = range.end().max(last.end()) - last.first;
                }
                _ => around.push(range),
            }
        }
        around
    }

    /// The units that a fault on this one is about.
    pub(super) fn around(&self, unit: u64) -> WindowPages {
        let group = (FAULT_PAGES.get() / self.unit.get()).max(1);
        let (window, first) = (unit / 128 * 128, unit / group * group);
        WindowPages::new(window, (u128::MAX >> (128 - group)) << (first - window))
    }

    pub(super) fn chunks(&self) -> u64 {
        self.units.get().div_ceil(self.chunk)
    }

    /// The units of a chunk.
    pub(super) fn chunk(&self, number: u64) -> WindowPages {
        let first = number * self.chunk;
        WindowPages::new(first / 128 * 128, (u128::MAX >> (128 - self.chunk)) << (first % 128))
    }
}
