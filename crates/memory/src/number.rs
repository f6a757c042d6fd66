//! Which page of a region: a number that is no count, and no place in bytes.
use std::{
    fmt,
    ops::{Add, AddAssign, Sub},
};

use crate::{PAGE, PageCount, PageRange, WINDOW_PAGES, WindowPages};

/// The number of a page in its region, from 0 on. It becomes a place in bytes by [`PageNumber::offset`] only, and a
/// bare number by [`PageNumber::get`]: for bytes on a wire, for files, for indices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct PageNumber(u64);

impl PageNumber {
    /// The first page of every region.
    pub const FIRST: Self = Self(0);

    /// The page of this number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The page that the byte at `offset` of the region is in.
    pub const fn at(offset: u64) -> Self {
        Self(offset / PAGE)
    }

    /// One past the last page that has a part in the first `bytes` bytes of the region.
    pub const fn behind(bytes: u64) -> Self {
        Self(bytes.div_ceil(PAGE))
    }

    /// The number itself.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Where the page begins, in bytes from the region's beginning.
    pub const fn offset(self) -> u64 {
        self.0 * PAGE
    }

    /// The first page of the window of 128 that it is in.
    pub const fn window(self) -> Self {
        self.unit(WINDOW_PAGES)
    }

    /// The first page of the `pages` aligned ones that it is among: of a huge page, say.
    pub const fn unit(self, pages: PageCount) -> Self {
        Self(self.0 / pages.get() * pages.get())
    }

    /// The first page from this one on that begins `pages` aligned ones.
    pub const fn next_unit(self, pages: PageCount) -> Self {
        Self(self.0.next_multiple_of(pages.get()))
    }

    /// `count` pages from this one on.
    pub const fn run(self, count: PageCount) -> PageRange {
        PageRange { first: self, count }
    }

    /// The pages from this one on that are below `end`; none if that is not behind it.
    pub const fn to(self, end: Self) -> PageRange {
        self.run(end.since(self))
    }

    /// The pages of `mask`, whose lowest bit is this page.
    pub const fn masked(self, mask: u128) -> WindowPages {
        WindowPages { first: self, mask }
    }

    /// How many pages it is behind `earlier`; 0 if it is not.
    pub const fn since(self, earlier: Self) -> PageCount {
        PageCount::new(self.0.saturating_sub(earlier.0))
    }
}

/// The page that is so many pages further.
impl Add<PageCount> for PageNumber {
    type Output = Self;

    fn add(self, count: PageCount) -> Self {
        Self(self.0 + count.get())
    }
}

impl AddAssign<PageCount> for PageNumber {
    fn add_assign(&mut self, count: PageCount) {
        *self = *self + count;
    }
}

/// How many pages lie between, of which the earlier one is the first.
impl Sub for PageNumber {
    type Output = PageCount;

    fn sub(self, earlier: Self) -> PageCount {
        PageCount::new(self.0 - earlier.0)
    }
}

impl fmt::Display for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// As the number that it is, so that ranges of pages read as such.
impl fmt::Debug for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: PageNumber = PageNumber::new(10);

    #[test]
    fn a_place_in_bytes_is_in_the_page_that_begins_there_or_before() {
        assert_eq!((PageNumber::at(0), PageNumber::at(40_959)), (PageNumber::FIRST, PageNumber::new(9)));
        assert_eq!((PageNumber::at(40_960), TEN.offset()), (TEN, 40_960));
        assert_eq!((PageNumber::behind(0), PageNumber::behind(1)), (PageNumber::FIRST, PageNumber::new(1)));
        assert_eq!((PageNumber::behind(40_960), PageNumber::behind(40_961)), (TEN, PageNumber::new(11)));
    }

    #[test]
    fn pages_are_counted_from_the_earlier_one() {
        assert_eq!(
            (TEN - PageNumber::new(3), TEN.since(PageNumber::new(3)), TEN.since(PageNumber::new(11))),
            [7, 7, 0].map(PageCount::new).into()
        );
        assert_eq!(
            (TEN.to(PageNumber::new(12)), TEN.to(PageNumber::new(9))),
            (PageRange::new(10, 2), TEN.run(PageCount::ZERO))
        );
        assert_eq!(TEN + PageCount::new(5), PageNumber::new(15));
    }

    #[test]
    fn aligned_pages_begin_where_they_did() {
        let unit = |number| {
            (
                PageNumber::new(number).unit(PageCount::new(8)).get(),
                PageNumber::new(number).next_unit(PageCount::new(8)).get(),
            )
        };
        assert_eq!([unit(0), unit(7), unit(8), unit(9)], [(0, 0), (0, 8), (8, 8), (8, 16)]);
        assert_eq!((PageNumber::new(300).window().get(), PageNumber::new(127).window().get()), (256, 0));
    }

    #[test]
    fn the_parts_of_a_range_are_all_of_it() {
        let parts = |first, count, most| PageRange::new(first, count).parts(most).collect::<Vec<_>>();
        assert_eq!(parts(5, 9, PageCount::new(4)), [PageRange::new(5, 4), PageRange::new(9, 4), PageRange::new(13, 1)]);
        assert_eq!(
            (parts(5, 4, PageCount::new(4)), parts(5, 0, PageCount::new(4))),
            (vec![PageRange::new(5, 4)], vec![])
        );
    }

    #[test]
    fn a_number_reads_as_such() {
        assert_eq!(format!("page {TEN:>4} of {:?}", TEN..PageNumber::new(12)), "page   10 of 10..12");
    }
}
