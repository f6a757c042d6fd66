//! How many pages: a number that is no page, and no number of bytes.
use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign, Div, Mul, Rem, Sub, SubAssign},
};

use crate::{PAGE, PAGE_BYTES, PageSet};

/// A number of pages. It becomes a size by [`PageCount::bytes`] only, and a bare number by [`PageCount::get`]: for
/// reports, for bytes on a wire, for files, for indices. A bare number of something in memory is one of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct PageCount(u64);

impl PageCount {
    /// No page.
    pub const ZERO: Self = Self(0);
    /// A single page.
    pub const ONE: Self = Self(1);
    /// More than any memory has.
    pub const MAX: Self = Self(u64::MAX);

    /// So many pages.
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// The whole pages that so many bytes have.
    pub const fn within(bytes: u64) -> Self {
        Self(bytes / PAGE)
    }

    /// The pages that it takes to hold so many bytes.
    pub const fn holding(bytes: u64) -> Self {
        Self(bytes.div_ceil(PAGE))
    }

    /// The pages of sets, one of each region, together.
    pub fn of(sets: &[PageSet]) -> Self {
        sets.iter().map(PageSet::count).sum()
    }

    /// The number itself.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Their size in bytes; the largest number if it is not countable.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(PAGE)
    }

    /// Their size as that of a buffer, in bytes.
    pub const fn buffer_bytes(self) -> usize {
        self.index() * PAGE_BYTES
    }

    /// The number as an index, or as a number of things in memory.
    pub const fn index(self) -> usize {
        const { assert!(usize::BITS == u64::BITS, "64-bit addresses") };
        self.0 as usize
    }

    /// Whether there is no page.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// How many parts of `pages` pages it takes to have them all.
    pub const fn div_ceil(self, pages: Self) -> u64 {
        self.0.div_ceil(pages.0)
    }

    /// As many pages as whole parts of `pages` pages have, of which the last may have more than there are.
    pub const fn next_multiple_of(self, pages: Self) -> Self {
        Self(self.0.next_multiple_of(pages.0))
    }

    /// Without `other`; none if these are more.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Both together; the largest number if it is not countable.
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Add for PageCount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for PageCount {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for PageCount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl SubAssign for PageCount {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

/// So many times as many.
impl Mul<u64> for PageCount {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self(self.0 * times)
    }
}

/// The pages of each of so many equal parts; what is left over is in none.
impl Div<u64> for PageCount {
    type Output = Self;

    fn div(self, parts: u64) -> Self {
        Self(self.0 / parts)
    }
}

/// The pages that are left over when parts of so many are taken.
impl Rem for PageCount {
    type Output = Self;

    fn rem(self, other: Self) -> Self {
        Self(self.0 % other.0)
    }
}

impl Sum for PageCount {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// As the number that it is.
impl fmt::Debug for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_pages_and_pages_have_bytes() {
        let of = |bytes| (PageCount::within(bytes).get(), PageCount::holding(bytes).get());
        assert_eq!([of(0), of(1), of(4096), of(40_959), of(40_961)], [(0, 0), (0, 1), (1, 1), (9, 10), (10, 11)]);
        assert_eq!((PageCount::new(10).bytes(), PageCount::new(10).buffer_bytes()), (40_960, 40_960));
        assert_eq!(PageCount::MAX.bytes(), u64::MAX, "no number from outside overflows");
    }

    #[test]
    fn counts_are_added_and_parted() {
        let ten = PageCount::new(10);
        assert_eq!((ten + PageCount::ONE, ten - PageCount::ONE, ten * 3), (count(11), count(9), count(30)));
        assert_eq!((ten / 4, ten % count(4), ten.div_ceil(count(4))), (count(2), count(2), 3));
        assert_eq!((ten.next_multiple_of(count(8)), ten.saturating_sub(count(11))), (count(16), PageCount::ZERO));
        assert_eq!([ten, count(5)].into_iter().sum::<PageCount>(), count(15));
    }

    fn count(pages: u64) -> PageCount {
        PageCount::new(pages)
    }
}
