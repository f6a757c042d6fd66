//! Which pages of a block a file holds content for. The block's length is the word of somebody else, so this takes
//! memory for what has come, not for what was announced.
use std::collections::BTreeMap;

use transship_memory::{PageCount, PageNumber, PageRange};

/// Words of a piece: 4096 pages, 16 MiB of a block, in 512 bytes.
const WORDS: usize = 64;
const PIECE_PAGES: u64 = WORDS as u64 * 64;

/// A set of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// By number, those that ever had a page: bit i % 64 of word i / 64.
    pieces: BTreeMap<u64, [u64; WORDS]>,
}

impl Content {
    pub(crate) fn insert(&mut self, pages: PageRange) {
        for (piece, word, bits) in parts(pages) {
            self.pieces.entry(piece).or_insert([0; WORDS])[word] |= bits;
        }
    }

    pub(crate) fn remove(&mut self, pages: PageRange) {
        // A range of zeros may be as long as a block: only what is there is looked at.
        let (first, end) = (pages.first.get() / PIECE_PAGES, pages.end().get().div_ceil(PIECE_PAGES));
        let touched: Vec<u64> = self.pieces.range(first..end).map(|(&piece, _)| piece).collect();
        for piece in touched {
            let piece_pages = PageRange::new(piece * PIECE_PAGES, PIECE_PAGES);
            let within = pages.first.max(piece_pages.first).to(pages.end().min(piece_pages.end()));
            for (_, word, bits) in parts(within) {
                if let Some(words) = self.pieces.get_mut(&piece) {
                    words[word] &= !bits;
                }
            }
        }
    }

    pub(crate) fn contains(&self, page: PageNumber) -> bool {
        let page = page.get();
        let word = self.pieces.get(&(page / PIECE_PAGES)).map(|words| words[(page % PIECE_PAGES / 64) as usize]);
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// Pages in the set.
    pub(crate) fn count(&self) -> PageCount {
        PageCount::new(self.pieces.values().flatten().map(|word| u64::from(word.count_ones())).sum())
    }

    /// Pieces of the bitmap of a mapped-ram file: where in it each belongs, and its bytes. All that is not among them
    /// is zero.
    pub(crate) fn bitmap(&self, bitmap_bytes: u64) -> impl Iterator<Item = (u64, Vec<u8>)> + '_ {
        self.pieces.iter().filter_map(move |(piece, words)| {
            let at = piece * PIECE_PAGES / 8;
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.truncate(bitmap_bytes.saturating_sub(at).min(bytes.len() as u64) as usize);
            (!bytes.is_empty()).then_some((at, bytes))
        })
    }

    /// The pages that are in this set and not in `other`, run by run within pieces.
    pub(crate) fn without(&self, other: &Self) -> Vec<PageRange> {
        let mut runs: Vec<PageRange> = Vec::new();
        for (piece, words) in &self.pieces {
            let others = other.pieces.get(piece).copied().unwrap_or([0; WORDS]);
            for (number, (word, other)) in words.iter().zip(others).enumerate() {
                let mut rest = word & !other;
                while rest != 0 {
                    let skip = rest.trailing_zeros();
                    let count = (rest >> skip).trailing_ones();
                    let pages = PageCount::new(count.into());
                    let first = PageNumber::new(piece * PIECE_PAGES + number as u64 * 64 + u64::from(skip));
                    match runs.last_mut() {
                        Some(last) if last.end() == first => last.count += pages,
                        _ => runs.push(first.run(pages)),
                    }
                    rest &= !((u64::MAX >> (64 - count)) << skip);
                }
            }
        }
        runs
    }
}

/// Piece, word and bits of all words that have pages of the range.
fn parts(pages: PageRange) -> impl Iterator<Item = (u64, usize, u64)> {
    let (mut at, end) = (pages.first.get(), pages.end().get());
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let next = (at / 64 + 1) * 64;
        let count = next.min(end) - at;
        let bits = (u64::MAX >> (64 - count)) << (at % 64);
        let part = (at / PIECE_PAGES, (at % PIECE_PAGES / 64) as usize, bits);
        at += count;
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const PAGES: u64 = 3 * PIECE_PAGES + 77;

    fn range() -> impl Strategy<Value = PageRange> {
        (0..PAGES, prop_oneof![3 => 1..70u64, 1 => 1..2 * PIECE_PAGES])
            .prop_map(|(first, count)| PageRange::new(first, count.min(PAGES - first)))
    }

    fn model_of(steps: &[(bool, PageRange)]) -> (Content, BTreeSet<u64>) {
        let (mut content, mut model) = (Content::default(), BTreeSet::new());
        for &(insert, range) in steps {
            if insert {
                content.insert(range);
                model.extend(range.first.get()..range.end().get());
            } else {
                content.remove(range);
                model.retain(|page| !(range.first.get()..range.end().get()).contains(page));
            }
        }
        (content, model)
    }

    proptest! {
        #[test]
        fn a_set_is_what_its_model_is(
            steps in vec((any::<bool>(), range()), 0..12),
            others in vec((any::<bool>(), range()), 0..6),
        ) {
            let (content, model) = model_of(&steps);
            let (other, theirs) = model_of(&others);
            prop_assert_eq!(content.count().get(), model.len() as u64);
            prop_assert!((0..PAGES).all(|page| content.contains(PageNumber::new(page)) == model.contains(&page)));

            let bytes = PAGES.div_ceil(64) * 8;
            let mut bitmap = vec![0; bytes as usize];
            for (at, piece) in content.bitmap(bytes) {
                bitmap[at as usize..at as usize + piece.len()].copy_from_slice(&piece);
            }
            let bit = |page: u64| bitmap[page as usize / 8] >> (page % 8) & 1 == 1;
            prop_assert!((0..PAGES).all(|page| bit(page) == model.contains(&page)));

            let rest: BTreeSet<u64> = model.difference(&theirs).copied().collect();
            let listed = content.without(&other).into_iter().flat_map(|run| run.iter()).map(PageNumber::get);
            let listed: Vec<u64> = listed.collect();
            prop_assert_eq!(listed, rest.into_iter().collect::<Vec<_>>());
        }
    }

    /// As long as a block can be.
    #[test]
    fn a_range_without_content_costs_nothing() {
        let mut content = Content::default();
        content.insert(PageRange::new(1 << 40, 3));
        content.remove(PageRange::new(0, 1 << 44));
        assert_eq!(content.count(), PageCount::ZERO);
    }
}
