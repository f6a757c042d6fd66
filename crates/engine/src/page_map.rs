//! A page set that threads share: which pages the destination holds content for.
use std::sync::atomic::{AtomicU64, Ordering};

use transship_memory::{GuestMemory, PageCount, PageNumber, PageRange, PageSet, WINDOW_PAGES, WindowPages};

/// Bits for the pages of one region. Within a round each page belongs to one thread, and rounds are separated by joins
/// or channels, which order them: so every access is relaxed.
#[derive(Debug)]
pub(crate) struct PageMap {
    words: Vec<AtomicU64>,
}

impl PageMap {
    pub(crate) fn new(pages: PageCount) -> Self {
        // Two words a window, so that `window` never looks past the end.
        let words = pages.div_ceil(WINDOW_PAGES) as usize * 2;
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// By region of a memory: none of its pages.
    pub(crate) fn empty(memory: &GuestMemory) -> Vec<Self> {
        memory.regions().iter().map(|region| Self::new(region.pages())).collect()
    }

    /// With the pages of a set.
    pub(crate) fn of(set: &PageSet) -> Self {
        let map = Self::new(set.pages());
        set.windows().for_each(|window| map.insert(window));
        map
    }

    /// The 128 pages from `first`, a multiple of 128 inside the region.
    pub(crate) fn window(&self, first: PageNumber) -> u128 {
        let at = first.get() as usize / 64;
        let [low, high] = [at, at + 1].map(|word| u128::from(self.words[word].load(Ordering::Relaxed)));
        low | high << 64
    }

    pub(crate) fn insert(&self, pages: WindowPages) {
        self.each_half(pages, |word, bits| word.fetch_or(bits, Ordering::Relaxed));
    }

    pub(crate) fn insert_range(&self, range: PageRange) {
        range.windows().for_each(|window| self.insert(window));
    }

    pub(crate) fn contains(&self, page: PageNumber) -> bool {
        let page = page.get();
        self.words[page as usize / 64].load(Ordering::Relaxed) >> (page % 64) & 1 == 1
    }

    pub(crate) fn remove(&self, pages: WindowPages) {
        self.each_half(pages, |word, bits| word.fetch_and(!bits, Ordering::Relaxed));
    }

    /// Removes pages, and says which of them were there: of several threads that want one, one gets it.
    pub(crate) fn claim(&self, pages: WindowPages) -> WindowPages {
        let at = pages.first.get() as usize / 64;
        let halves = [(at, pages.mask as u64), (at + 1, (pages.mask >> 64) as u64)];
        let [low, high] = halves.map(|(word, bits)| match bits {
            0 => 0,
            _ => self.words[word].fetch_and(!bits, Ordering::Relaxed) & bits,
        });
        pages.with(u128::from(low) | u128::from(high) << 64)
    }

    fn each_half(&self, pages: WindowPages, apply: impl Fn(&AtomicU64, u64) -> u64) {
        let at = pages.first.get() as usize / 64;
        for (word, bits) in [(at, pages.mask as u64), (at + 1, (pages.mask >> 64) as u64)] {
            if bits != 0 {
                apply(&self.words[word], bits);
            }
        }
    }

    /// A copy, as a set of the region's `pages` pages.
    pub(crate) fn to_set(&self, pages: PageCount) -> PageSet {
        let mut set = PageSet::empty(pages);
        for PageRange { first, .. } in PageRange::all(pages).parts(WINDOW_PAGES) {
            first.masked(self.window(first)).runs().for_each(|run| set.insert(run));
        }
        set
    }

    /// Bit i % 8 of byte i / 8 for page i of `pages`, in whole words of 8 bytes: the bitmap of a mapped-ram file.
    pub(crate) fn to_bitmap(&self, pages: PageCount) -> Vec<u8> {
        let words = &self.words[..pages.get().div_ceil(64) as usize];
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    /// Takes the set pages of the range out of the map and returns them window by window.
    pub(crate) fn take(&self, range: PageRange) -> impl Iterator<Item = WindowPages> + '_ {
        range.windows().filter_map(|window| {
            let taken = window.with(self.window(window.first) & window.mask);
            (!taken.is_empty()).then(|| {
                self.remove(taken);
                taken
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Something that is done to a map.
    #[derive(Debug, Clone)]
    enum Step {
        Insert(WindowPages),
        InsertRange(PageRange),
        Remove(WindowPages),
        Claim(WindowPages),
        Take(PageRange),
    }

    fn pages_of(WindowPages { first, mask }: WindowPages) -> Vec<u64> {
        (0..128).filter(|bit| mask >> bit & 1 == 1).map(|bit| first.get() + bit).collect()
    }

    fn steps() -> impl Strategy<Value = (u64, Vec<Step>)> {
        // A last window that is whole, and ones that are not.
        prop_oneof![Just(1_u64), Just(128), Just(256), Just(300)].prop_flat_map(|pages| {
            let bits =
                prop_oneof![any::<u128>(), Just(u128::MAX), Just(1), Just(1 << 63), Just(1 << 64), Just(1 << 127)];
            let window = (0..pages.div_ceil(128), bits).prop_map(move |(number, bits)| {
                let there = |bit: &u32| number * 128 + u64::from(*bit) < pages;
                WindowPages::new(number * 128, (0..128).filter(there).fold(0, |kept, bit| kept | bits & 1 << bit))
            });
            let range = (0..=pages).prop_flat_map(move |first| (Just(first), 0..=pages - first));
            let range = range.prop_map(|(first, count)| PageRange::new(first, count));
            let step = prop_oneof![
                3 => window.clone().prop_map(Step::Insert),
                2 => range.clone().prop_map(Step::InsertRange),
                1 => window.clone().prop_map(Step::Remove),
                1 => window.prop_map(Step::Claim),
                1 => range.prop_map(Step::Take),
            ];
            (Just(pages), proptest::collection::vec(step, 0..12))
        })
    }

    /// Does it to both, and compares what is said.
    fn apply(step: &Step, map: &PageMap, model: &mut BTreeSet<u64>) {
        match *step {
            Step::Insert(pages) => {
                map.insert(pages);
                model.extend(pages_of(pages));
            }
            Step::InsertRange(range) => {
                map.insert_range(range);
                model.extend(range.first.get()..range.end().get());
            }
            Step::Remove(pages) => {
                map.remove(pages);
                model.retain(|page| !pages_of(pages).contains(page));
            }
            Step::Claim(pages) => {
                let had: Vec<_> = pages_of(pages).into_iter().filter(|page| model.remove(page)).collect();
                assert_eq!(pages_of(map.claim(pages)), had);
            }
            Step::Take(range) => {
                let taken: Vec<_> = map.take(range).collect();
                assert!(taken.iter().all(|window| window.first == window.first.window() && !window.is_empty()));
                let had: Vec<_> = (range.first.get()..range.end().get()).filter(|page| model.remove(page)).collect();
                assert_eq!(taken.into_iter().flat_map(pages_of).collect::<Vec<_>>(), had);
            }
        }
    }

    proptest! {
        #[test]
        fn a_map_is_what_its_model_is((pages, steps) in steps()) {
            let (map, mut model) = (PageMap::new(PageCount::new(pages)), BTreeSet::new());
            steps.iter().for_each(|step| apply(step, &map, &mut model));
            let listed: Vec<u64> = model.iter().copied().collect();
            let all = PageRange::all(PageCount::new(pages));
            let there = all.iter().filter(|page| map.contains(*page)).map(PageNumber::get);
            prop_assert_eq!(there.collect::<Vec<_>>(), listed.clone());
            let windows = all.parts(PageCount::new(128)).flat_map(|part| pages_of(part.first.masked(map.window(part.first))));
            prop_assert_eq!(windows.collect::<Vec<_>>(), listed.clone());
            let set = map.to_set(PageCount::new(pages));
            let there = all.iter().filter(|page| set.contains(*page)).map(PageNumber::get);
            prop_assert_eq!(there.collect::<Vec<_>>(), listed.clone());
            let bitmap = map.to_bitmap(PageCount::new(pages));
            prop_assert_eq!(bitmap.len() as u64, pages.div_ceil(64) * 8);
            let bits = (0..pages).filter(|page| bitmap[*page as usize / 8] >> (page % 8) & 1 == 1);
            prop_assert_eq!(bits.collect::<Vec<_>>(), listed);
        }
    }

    #[test]
    fn a_bitmap_is_in_whole_words_with_the_lowest_bit_first() {
        let map = PageMap::new(PageCount::new(300));
        map.insert(WindowPages::new(0, 1 | 1 << 9 | 1 << 127));
        map.insert(WindowPages::new(256, 1 << 43));
        let mut expected = [0; 40];
        (expected[0], expected[1], expected[15], expected[37]) = (1, 2, 0x80, 8);
        assert_eq!(map.to_bitmap(PageCount::new(300)), expected);
        assert_eq!(map.to_bitmap(PageCount::new(64)).len(), 8);
    }

    #[test]
    fn a_page_is_claimed_by_one_of_many() {
        let map = PageMap::new(PageCount::new(300));
        (0..300).step_by(128).for_each(|first| map.insert(WindowPages::new(first, u128::MAX)));
        let claimed: Vec<WindowPages> = std::thread::scope(|scope| {
            let thread = |t: u32| {
                let map = &map;
                scope.spawn(move || {
                    (0..3).map(|w| map.claim(WindowPages::new(w * 128, u128::MAX << t))).collect::<Vec<_>>()
                })
            };
            let threads: Vec<_> = [0, 3, 64, 70].map(thread).into();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
        });
        assert_eq!(claimed.iter().map(|pages| pages.count().get()).sum::<u64>(), 3 * 128);
        assert!([0, 256].iter().all(|first| map.claim(WindowPages::new(*first, u128::MAX)).is_empty()));
    }

    /// Of a guest of more than 64 MiB.
    #[test]
    fn ranges_far_from_the_first_page_are_the_same() {
        let map = PageMap::new(PageCount::new(40_000));
        let range = PageRange::new(20_001, 500);
        map.insert_range(range);
        assert_eq!(map.to_set(PageCount::new(40_000)).ranges().collect::<Vec<_>>(), [range]);
        let taken: Vec<_> = map.take(range).flat_map(WindowPages::iter).collect();
        assert_eq!(taken, range.iter().collect::<Vec<_>>());
    }

    #[test]
    fn taking_a_range_leaves_the_rest() {
        let map = PageMap::new(PageCount::new(300));
        map.insert(WindowPages::new(0, 1 << 5 | 1 << 100));
        map.insert(WindowPages::new(128, 1 << 3));
        map.insert(WindowPages::new(256, 1 << 40));
        let taken: Vec<_> = map.take(PageRange::new(6, 290)).collect();
        assert_eq!(taken, [WindowPages::new(0, 1 << 100), WindowPages::new(128, 1 << 3)]);
        assert_eq!(map.window(PageNumber::FIRST), 1 << 5);
        assert_eq!(map.window(PageNumber::new(256)), 1 << 40);
        assert_eq!(map.take(PageRange::new(0, 300)).count(), 2);
        assert_eq!(map.window(PageNumber::FIRST) | map.window(PageNumber::new(256)), 0);
    }
}
