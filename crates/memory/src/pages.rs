//! Sets of pages of one region.

use std::fmt;

use crate::{
    PageCount, PageNumber,
    window::{WindowPages, low_bits},
};

/// Bytes of a page. Everything counts pages of this size, also in memory that is backed by huge pages.
pub const PAGE_BYTES: usize = 4096;

/// The same as a number of bytes in files and streams.
pub const PAGE: u64 = PAGE_BYTES as u64;

/// Pages that one window speaks of: the bits of a `u128`. The windows of a [`PageSet`] begin at multiples of it.
pub const WINDOW_PAGES: PageCount = PageCount::new(WINDOW_BITS);

const WINDOW_BITS: u64 = u128::BITS as u64;

/// Pages `first .. first + count` of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRange {
    /// First page.
    pub first: PageNumber,
    /// Number of pages.
    pub count: PageCount,
}

impl PageRange {
    /// `count` pages from number `first` on: for literals, and for numbers from outside. A page that is known has
    /// [`PageNumber::run`] and [`PageNumber::to`].
    pub const fn new(first: u64, count: u64) -> Self {
        PageNumber::new(first).run(PageCount::new(count))
    }

    /// The first `count` pages of a region: all that one of so many pages has.
    pub const fn all(count: PageCount) -> Self {
        PageNumber::FIRST.run(count)
    }

    /// One past the last page; the largest number if there is no such page number.
    pub fn end(&self) -> PageNumber {
        PageNumber::new(self.first.get().saturating_add(self.count.get()))
    }

    /// Whether `page` is one of them.
    pub fn contains(&self, page: PageNumber) -> bool {
        (self.first..self.end()).contains(&page)
    }

    /// Their numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = PageNumber> + use<> {
        (self.first.get()..self.end().get()).map(PageNumber::new)
    }

    /// The range in parts of `most` pages each, but for the last, which has what remains.
    ///
    /// # Panics
    /// `most` is 0.
    pub fn parts(self, most: PageCount) -> impl Iterator<Item = Self> {
        let end = self.end();
        let firsts = (self.first.get()..end.get()).step_by(most.index());
        firsts.map(PageNumber::new).map(move |first| first.run(most.min(end - first)))
    }

    /// Size in bytes; the largest number if it is not countable.
    pub fn bytes(&self) -> u64 {
        self.count.bytes()
    }

    /// Whether all its pages are among the first `pages`.
    pub(crate) fn fits(&self, pages: PageCount) -> bool {
        self.count <= pages && self.first.get() <= (pages - self.count).get()
    }
}

/// A set of pages of a region of `pages` pages: a bitmap. Operations on two sets need equal sizes and panic otherwise,
/// and so do pages that the region does not have: numbers from outside are to be checked before they come here.
#[derive(Clone, PartialEq, Eq)]
pub struct PageSet {
    /// Page `p` is bit `p % 128` of word `p / 128`. Bits past the last page are always 0.
    words: Vec<u128>,
    pages: PageCount,
}

impl PageSet {
    /// No page of a region of `pages` pages.
    pub fn empty(pages: PageCount) -> Self {
        Self::filled(pages, 0)
    }

    /// All pages of a region of `pages` pages.
    pub fn full(pages: PageCount) -> Self {
        let mut set = Self::filled(pages, u128::MAX);
        if let (Some(last), over @ 1..) = (set.words.last_mut(), (pages % WINDOW_PAGES).get()) {
            *last = low_bits(over);
        }
        set
    }

    fn filled(pages: PageCount, word: u128) -> Self {
        let words = usize::try_from(pages.div_ceil(WINDOW_PAGES)).expect("a bitmap that fits into the address space");
        Self { words: vec![word; words], pages }
    }

    /// Number of pages that the region has.
    pub fn pages(&self) -> PageCount {
        self.pages
    }

    /// Number of pages in the set.
    pub fn count(&self) -> PageCount {
        PageCount::new(self.words.iter().map(|word| u64::from(word.count_ones())).sum())
    }

    /// Size of the pages in the set in bytes.
    pub fn bytes(&self) -> u64 {
        self.count().bytes()
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Whether `page` is in the set; a page that the region does not have is not.
    pub fn contains(&self, page: PageNumber) -> bool {
        let page = page.get();
        page < self.pages.get() && self.words[(page / WINDOW_BITS) as usize] >> (page % WINDOW_BITS) & 1 == 1
    }

    /// Adds the pages of `range`.
    ///
    /// # Panics
    /// The region does not have them all.
    pub fn insert(&mut self, range: PageRange) {
        self.each_word_of(range, |word, mask| *word |= mask);
    }

    /// Takes the pages of `range` out.
    ///
    /// # Panics
    /// The region does not have them all.
    pub fn remove(&mut self, range: PageRange) {
        self.each_word_of(range, |word, mask| *word &= !mask);
    }

    /// Adds the pages of `other`.
    ///
    /// # Panics
    /// The sets are not of the same size; so do the next two.
    pub fn union_with(&mut self, other: &Self) {
        self.each_word_with(other, |word, other| *word |= other);
    }

    /// Takes the pages of `other` out.
    pub fn subtract(&mut self, other: &Self) {
        self.each_word_with(other, |word, other| *word &= !other);
    }

    /// Keeps only the pages that are also in `other`.
    pub fn intersect_with(&mut self, other: &Self) {
        self.each_word_with(other, |word, other| *word &= other);
    }

    /// Maximal runs in ascending order.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + '_ {
        let (mut from, end) = (PageNumber::FIRST, PageRange::all(self.pages).end());
        std::iter::from_fn(move || {
            let first = self.next(from, 0)?;
            from = self.next(first, u128::MAX).unwrap_or(end).min(end);
            Some(first.to(from))
        })
    }

    /// As [`PageSet::ranges`], with those as one that have at most `gap` other pages between them.
    pub(crate) fn ranges_near(&self, gap: PageCount) -> impl Iterator<Item = PageRange> + '_ {
        let mut ranges = self.ranges().peekable();
        std::iter::from_fn(move || {
            let mut range = ranges.next()?;
            while let Some(next) = ranges.next_if(|next| next.first - range.end() <= gap) {
                range.count = next.end() - range.first;
            }
            Some(range)
        })
    }

    /// The 128 pages from `first` as bits; pages past the end are 0.
    ///
    /// # Panics
    /// `first` is no multiple of 128.
    pub fn window(&self, first: PageNumber) -> u128 {
        let first = first.get();
        assert!(first.is_multiple_of(WINDOW_BITS), "page {first} does not begin a window of {WINDOW_PAGES}");
        usize::try_from(first / WINDOW_BITS).ok().and_then(|word| self.words.get(word)).copied().unwrap_or(0)
    }

    /// The windows that are not empty, ascending or from the end; they begin at multiples of 128. Skips empty words
    /// fast.
    pub fn windows(&self) -> impl DoubleEndedIterator<Item = WindowPages> + '_ {
        let words = self.words.iter().enumerate().filter(|&(_, &word)| word != 0);
        words.map(|(at, &word)| WindowPages::new(at as u64 * WINDOW_BITS, word))
    }

    /// First page from `from` on whose bit differs from those of `flip`, which is all zeros or all ones. With ones, it
    /// may be past the last page.
    fn next(&self, from: PageNumber, flip: u128) -> Option<PageNumber> {
        let from = from.get();
        let mut at = (from / WINDOW_BITS) as usize;
        let mut word = (self.words.get(at)? ^ flip) & !low_bits(from % WINDOW_BITS);
        while word == 0 {
            at += 1;
            word = self.words.get(at)? ^ flip;
        }
        Some(PageNumber::new(at as u64 * WINDOW_BITS + u64::from(word.trailing_zeros())))
    }

    /// Hands each word that has pages of `range` to `change`, with the bits of these pages.
    fn each_word_of(&mut self, range: PageRange, change: impl Fn(&mut u128, u128)) {
        assert!(range.fits(self.pages), "pages {}..{} of a set of {}", range.first, range.end(), self.pages);
        if range.count.is_zero() {
            return;
        }
        let (first, last) = (range.first.get(), range.end().get() - 1);
        let (from, to) = ((first / WINDOW_BITS) as usize, (last / WINDOW_BITS) as usize);
        let head = !low_bits(first % WINDOW_BITS);
        let tail = u128::MAX >> (WINDOW_BITS - 1 - last % WINDOW_BITS);
        if from == to {
            return change(&mut self.words[from], head & tail);
        }
        change(&mut self.words[from], head);
        self.words[from + 1..to].iter_mut().for_each(|word| change(word, u128::MAX));
        change(&mut self.words[to], tail);
    }

    fn each_word_with(&mut self, other: &Self, change: impl Fn(&mut u128, u128)) {
        assert_eq!(self.pages, other.pages, "two page sets of different regions");
        self.words.iter_mut().zip(&other.words).for_each(|(word, &other)| change(word, other));
    }
}

impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} pages ", self.count(), self.pages)?;
        f.debug_list().entries(self.ranges().map(|range| range.first..range.end())).finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Something that is done to a set.
    #[derive(Debug, Clone)]
    enum Step {
        Insert(PageRange),
        Remove(PageRange),
        Union(Vec<u64>),
        Subtract(Vec<u64>),
        Intersect(Vec<u64>),
    }

    fn range(pages: u64) -> impl Strategy<Value = PageRange> {
        (0..=pages).prop_flat_map(move |first| (Just(first), 0..=pages - first)).prop_map(|(f, c)| PageRange::new(f, c))
    }

    fn some(pages: u64) -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(0..pages.max(1), if pages == 0 { 0..1 } else { 0..200 })
            .prop_map(move |list| if pages == 0 { Vec::new() } else { list })
    }

    fn steps() -> impl Strategy<Value = (u64, Vec<Step>)> {
        // Sizes about the borders of words, and any others.
        let sizes = prop_oneof![Just(0), Just(1), Just(127), Just(128), Just(129), Just(256), 2_u64..1000];
        sizes.prop_flat_map(|pages| {
            let step = prop_oneof![
                4 => range(pages).prop_map(Step::Insert),
                3 => range(pages).prop_map(Step::Remove),
                1 => some(pages).prop_map(Step::Union),
                1 => some(pages).prop_map(Step::Subtract),
                1 => some(pages).prop_map(Step::Intersect),
            ];
            (Just(pages), prop::collection::vec(step, 0..12))
        })
    }

    fn set_of(pages: u64, list: &[u64]) -> PageSet {
        let mut set = PageSet::empty(PageCount::new(pages));
        list.iter().for_each(|&page| set.insert(PageRange::new(page, 1)));
        set
    }

    fn apply(step: &Step, set: &mut PageSet, model: &mut BTreeSet<u64>) {
        let pages = set.pages();
        match step {
            Step::Insert(range) => {
                set.insert(*range);
                model.extend(range.iter().map(PageNumber::get));
            }
            Step::Remove(range) => {
                set.remove(*range);
                model.retain(|page| !range.contains(PageNumber::new(*page)));
            }
            Step::Union(list) => {
                set.union_with(&set_of(pages.get(), list));
                model.extend(list);
            }
            Step::Subtract(list) => {
                set.subtract(&set_of(pages.get(), list));
                model.retain(|page| !list.contains(page));
            }
            Step::Intersect(list) => {
                set.intersect_with(&set_of(pages.get(), list));
                model.retain(|page| list.contains(page));
            }
        }
    }

    proptest! {
        #[test]
        fn a_set_is_what_its_model_is((pages, steps) in steps(), full: bool) {
            let mut set = if full { PageSet::full(PageCount::new(pages)) } else { PageSet::empty(PageCount::new(pages)) };
            let mut model: BTreeSet<u64> = if full { (0..pages).collect() } else { BTreeSet::new() };
            for step in &steps {
                apply(step, &mut set, &mut model);
            }
            prop_assert_eq!(set.pages().get(), pages);
            prop_assert_eq!(set.count().get(), model.len() as u64);
            prop_assert_eq!(set.is_empty(), model.is_empty());
            prop_assert!((0..pages + 300).all(|page| set.contains(PageNumber::new(page)) == model.contains(&page)));

            let ranges: Vec<_> = set.ranges().collect();
            let listed: Vec<u64> = ranges.iter().flat_map(PageRange::iter).map(PageNumber::get).collect();
            prop_assert_eq!(&listed, &model.iter().copied().collect::<Vec<_>>());
            prop_assert!(ranges.windows(2).all(|two| two[0].end() < two[1].first), "runs are maximal");

            let windows: Vec<_> = set.windows().collect();
            prop_assert!(windows.iter().all(|window| window.first == window.first.window() && !window.is_empty()));
            let bits = |first: u64, bits: u128| (0..128).filter(move |b| bits >> b & 1 == 1).map(move |b| first + b);
            let there = windows.into_iter().flat_map(WindowPages::iter).map(PageNumber::get);
            prop_assert_eq!(there.collect::<Vec<_>>(), listed.clone());
            let all = (0..pages + 256).step_by(128).flat_map(|first| bits(first, set.window(PageNumber::new(first))));
            prop_assert_eq!(all.collect::<Vec<_>>(), listed);
            let from_the_end: Vec<_> = set.windows().rev().collect();
            prop_assert!(set.windows().eq(from_the_end.into_iter().rev()));

            // Equality is that of the pages, whatever way led there.
            prop_assert_eq!(set, set_of(pages, &model.into_iter().collect::<Vec<_>>()));
        }
    }

    proptest! {
        #[test]
        fn runs_with_few_pages_between_them_are_told_as_one(pages in some(1000), gap in 0..40_u64) {
            let mut expected: Vec<(u64, u64)> = Vec::new();
            for page in pages.iter().copied().collect::<BTreeSet<_>>() {
                match expected.last_mut() {
                    Some((_, end)) if (*end..page).count() as u64 <= gap => *end = page + 1,
                    _ => expected.push((page, page + 1)),
                }
            }
            let set = set_of(1000, &pages);
            let near: Vec<_> = set.ranges_near(PageCount::new(gap)).map(|range| (range.first.get(), range.end().get())).collect();
            prop_assert_eq!(near, expected);
        }
    }

    #[test]
    fn a_set_prints_its_runs() {
        assert_eq!(format!("{:?}", set_of(300, &[3, 4, 299])), "3 of 300 pages [3..5, 299..300]");
    }

    #[test]
    #[should_panic(expected = "pages 10..21 of a set of 20")]
    fn a_page_past_the_end_is_refused() {
        PageSet::empty(PageCount::new(20)).insert(PageRange::new(10, 11));
    }

    #[test]
    #[should_panic(expected = "of a set of 20")]
    fn a_range_whose_end_overflows_is_refused() {
        PageSet::empty(PageCount::new(20)).remove(PageRange::new(u64::MAX, 2));
    }

    #[test]
    #[should_panic(expected = "different regions")]
    fn sets_of_different_sizes_do_not_mix() {
        PageSet::empty(PageCount::new(20)).union_with(&PageSet::empty(PageCount::new(21)));
    }
}
