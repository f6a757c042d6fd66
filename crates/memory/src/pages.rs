//! Sets of pages of one region.

/// Bytes of a page. Everything counts pages of this size, also in memory that is backed by huge pages.
pub const PAGE_BYTES: usize = 4096;

/// Pages `first .. first + count` of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRange {
    pub first: u64,
    pub count: u64,
}

impl PageRange {
    pub fn new(first: u64, count: u64) -> Self {
        Self { first, count }
    }
    /// One past the last page.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
    pub fn bytes(&self) -> u64 {
        self.count * PAGE_BYTES as u64
    }
}

/// A set of pages of a region of `pages` pages: a bitmap. Operations on two sets need equal sizes and panic otherwise.
#[derive(Clone, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
}

#[allow(unused_variables)]
impl PageSet {
    pub fn empty(pages: u64) -> Self { todo!() }
    pub fn full(pages: u64) -> Self { todo!() }
    /// Number of pages that the region has.
    pub fn pages(&self) -> u64 { self.pages }
    /// Number of pages in the set.
    pub fn count(&self) -> u64 { todo!() }
    pub fn is_empty(&self) -> bool { todo!() }
    pub fn contains(&self, page: u64) -> bool { todo!() }
    pub fn insert(&mut self, range: PageRange) { todo!() }
    pub fn remove(&mut self, range: PageRange) { todo!() }
    pub fn union_with(&mut self, other: &Self) { todo!() }
    pub fn subtract(&mut self, other: &Self) { todo!() }
    pub fn intersect_with(&mut self, other: &Self) { todo!() }
    /// Maximal runs in ascending order.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + '_ { std::iter::empty() }
    /// The 128 pages from `first` (a multiple of 128) as bits; pages past the end are 0.
    pub fn window(&self, first: u64) -> u128 { todo!() }
    /// The windows that are not empty, ascending: first page (a multiple of 128) and bits. Skips empty words fast.
    pub fn windows(&self) -> impl Iterator<Item = (u64, u128)> + '_ { std::iter::empty() }
}
