//! Some pages of one window of 128: how sets of pages travel between threads, and what a packet carries.
use crate::{PageCount, PageNumber, PageRange, WINDOW_PAGES};

/// Some of the 128 pages from `first` on, as a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WindowPages {
    /// The first page of the window, which need not be among them.
    pub first: PageNumber,
    /// Bit `i` is page `first + i`.
    pub mask: u128,
}

impl WindowPages {
    /// The pages of `mask` in the window from page number `first` on: for literals, and for numbers from outside. A
    /// page that is known has [`PageNumber::masked`].
    pub const fn new(first: u64, mask: u128) -> Self {
        PageNumber::new(first).masked(mask)
    }

    /// Those pages of `range` that are in the window from page `first` on.
    pub fn within(range: PageRange, first: PageNumber) -> Self {
        let below = |page: PageNumber| low_bits(page.since(first).min(WINDOW_PAGES).get());
        Self { first, mask: below(range.end()) & !below(range.first) }
    }

    /// Others of the same window.
    pub fn with(self, mask: u128) -> Self {
        Self { mask, ..self }
    }

    /// Without those that `mask` names.
    pub fn without(self, mask: u128) -> Self {
        self.with(self.mask & !mask)
    }

    /// The lowest of them, `count` at most.
    pub fn lowest(self, count: PageCount) -> Self {
        if count >= self.count() {
            return self;
        }
        let rest = (0..count.get()).fold(self.mask, |rest, _| rest & (rest - 1));
        self.without(rest)
    }

    /// All of them, ascending, `most` at a time, but for the last part, which has what remains.
    ///
    /// # Panics
    /// `most` is 0.
    pub fn parts(self, most: PageCount) -> impl Iterator<Item = Self> {
        assert!(!most.is_zero(), "parts without a page never end");
        let mut rest = self;
        std::iter::from_fn(move || {
            let part = rest.lowest(most);
            rest = rest.without(part.mask);
            (!part.is_empty()).then_some(part)
        })
    }

    /// How many they are.
    pub fn count(self) -> PageCount {
        PageCount::new(self.mask.count_ones().into())
    }

    /// Their size in bytes.
    pub fn bytes(self) -> u64 {
        self.count().bytes()
    }

    /// The pages from the window's first one up to the last of them: what a region must have to have them all.
    pub fn reach(self) -> PageRange {
        self.first.run(PageCount::new((u128::BITS - self.mask.leading_zeros()).into()))
    }

    /// None at all.
    pub fn is_empty(self) -> bool {
        self.mask == 0
    }

    /// Their maximal runs, ascending.
    pub fn runs(self) -> impl Iterator<Item = PageRange> {
        let mut rest = self.mask;
        std::iter::from_fn(move || {
            if rest == 0 {
                return None;
            }
            let skipped = rest.trailing_zeros();
            let count = (rest >> skipped).trailing_ones();
            rest &= !low_bits(u64::from(skipped + count));
            Some((self.first + PageCount::new(skipped.into())).run(PageCount::new(count.into())))
        })
    }

    /// Their numbers, ascending.
    pub fn iter(self) -> impl Iterator<Item = PageNumber> {
        self.runs().flat_map(|run| run.iter())
    }
}

impl PageRange {
    /// The windows that the range has pages of, which begin at multiples of 128, and these pages.
    pub fn windows(self) -> impl Iterator<Item = WindowPages> {
        let windows = self.first.window().to(self.end()).parts(WINDOW_PAGES);
        // A range of no pages may begin in the middle of one.
        windows.map(move |window| WindowPages::within(self, window.first)).filter(|window| !window.is_empty())
    }
}

/// The lowest `count` bits, `count` up to 128.
pub(crate) fn low_bits(count: u64) -> u128 {
    if count == 0 { 0 } else { u128::MAX >> (WINDOW_PAGES.get() - count) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_maximal_and_are_the_pages_of_the_mask(first in 0..1u64 << 40, mask: u128, other: u128) {
            // Long runs as well as short ones.
            for mask in [mask, mask & other, mask | other, 0, u128::MAX, 1, 1 << 127] {
                let window = WindowPages::new(first, mask);
                let pages: Vec<u64> = (0..128).filter(|bit| mask >> bit & 1 == 1).map(|bit| first + bit).collect();
                let runs: Vec<_> = window.runs().collect();
                prop_assert!(runs.windows(2).all(|two| two[0].end() < two[1].first));
                prop_assert_eq!(window.count().get(), pages.len() as u64);
                prop_assert_eq!(window.bytes(), pages.len() as u64 * 4096);
                prop_assert_eq!(window.reach(), PageRange::new(first, pages.last().map_or(0, |last| last + 1 - first)));
                prop_assert_eq!(window.is_empty(), pages.is_empty());
                prop_assert_eq!(window.iter().map(PageNumber::get).collect::<Vec<_>>(), pages);
            }
        }

        #[test]
        fn parts_are_full_but_for_the_last_and_are_all_pages(first in 0..1u64 << 40, mask: u128, most in 1..200u64) {
            for mask in [mask, 0, u128::MAX, 1, 1 << 127] {
                let window = WindowPages::new(first, mask);
                let parts: Vec<_> = window.parts(PageCount::new(most)).collect();
                let full = parts.len().saturating_sub(1);
                prop_assert!(parts[..full].iter().all(|part| part.count().get() == most));
                prop_assert!(parts.iter().all(|part| !part.is_empty() && part.count().get() <= most));
                prop_assert!(parts.into_iter().flat_map(WindowPages::iter).eq(window.iter()));
            }
        }

        #[test]
        fn the_windows_of_a_range_hold_its_pages_and_no_other(first in 0..500u64, count in 0..500u64) {
            let windows: Vec<_> = PageRange::new(first, count).windows().collect();
            prop_assert!(windows.iter().all(|window| window.first == window.first.window() && !window.is_empty()));
            let pages: Vec<u64> = windows.into_iter().flat_map(WindowPages::iter).map(PageNumber::get).collect();
            prop_assert_eq!(pages, (first..first + count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_lowest_are_taken_first_and_the_rest_is_left() {
        let lowest = |mask, count| WindowPages::new(256, mask).lowest(count);
        assert_eq!(lowest(u128::MAX, PageCount::new(64)), WindowPages::new(256, u64::MAX.into()));
        assert_eq!(
            (lowest(u128::MAX, PageCount::new(4)).mask, lowest(1 << 127, PageCount::new(4)).mask),
            (0xf, 1 << 127)
        );
        assert_eq!(lowest(0b1010_1000, PageCount::new(2)).mask, 0b0010_1000);
        assert_eq!(
            (
                lowest(1 << 127, PageCount::new(64)).mask,
                lowest(0, PageCount::new(64)).mask,
                lowest(1, PageCount::ZERO).mask
            ),
            (1 << 127, 0, 0)
        );
        let window = WindowPages::new(256, 0b1100);
        assert_eq!((window.with(0b11), window.without(0b110)), (WindowPages::new(256, 0b11), window.with(0b1000)));
    }

    #[test]
    fn a_range_may_lie_about_before_and_behind_a_window() {
        let within =
            |first, count, window| WindowPages::within(PageRange::new(first, count), PageNumber::new(window)).mask;
        assert_eq!(within(0, 1000, 128), u128::MAX);
        assert_eq!((within(0, 128, 128), within(256, 1, 128), within(200, 0, 128)), (0, 0, 0));
        assert_eq!((within(0, 129, 128), within(255, 9, 128)), (1, 1 << 127));
        assert_eq!(within(u64::MAX - 1, u64::MAX, 128), 0);
    }
}
