//! What a written page holds: its own number and version, and a pattern that both determine. A page that is old, torn
//! or somewhere else is noticed.
use transship_memory::PAGE_BYTES;

/// 64-bit words of a page.
pub(super) const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// The content of a page.
pub(super) type PageWords = [u64; PAGE_WORDS];

/// Odd numbers without a visible pattern (fractions of the golden ratio and of the square root of 3).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD: u64 = 0xbb67_ae85_84ca_a73b;

/// Mixes a number so that neighbours have nothing in common.
pub(super) fn mix(number: u64) -> u64 {
    let a = (number ^ (number >> 32)).wrapping_mul(STEP);
    let b = (a ^ (a >> 29)).wrapping_mul(SPREAD);
    b ^ (b >> 32)
}

/// Fills a page with words that look random and depend on `key` alone.
pub(super) fn fill_random(key: u64, page: &mut PageWords) {
    let mut state = mix(key);
    for word in page.iter_mut() {
        state = state.wrapping_add(STEP);
        let x = (state ^ (state >> 29)).wrapping_mul(SPREAD);
        *word = x ^ (x >> 32);
    }
}

/// What page `number` of the guest holds after it was written for the `version`-th time (from 1).
pub(super) fn fill_written(seed: u64, number: u64, version: u32, page: &mut PageWords) {
    fill_random(mix(seed ^ mix(number)) ^ u64::from(version), page);
    page[0] = number;
    page[1] = u64::from(version);
}

/// A hash of a page, for content that can't be made anew.
pub(super) fn hash(page: &PageWords) -> u64 {
    page.iter().fold(STEP, |hash, &word| (hash ^ word).wrapping_mul(SPREAD).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(number: u64, version: u32) -> PageWords {
        let mut page = [0; PAGE_WORDS];
        fill_written(7, number, version, &mut page);
        page
    }

    #[test]
    fn no_word_survives_a_new_version() {
        // So that a page is torn wherever two versions meet, behind the two words that name it.
        let (old, new) = (written(3, 1), written(3, 2));
        assert!(old.iter().zip(&new).skip(1).all(|(a, b)| a != b));
        assert_eq!(new, written(3, 2));
        assert!(new.iter().zip(&written(4, 2)).filter(|(a, b)| a == b).count() <= 1);
    }

    #[test]
    fn the_hash_sees_every_bit() {
        let page = written(1, 1);
        for word in 0..PAGE_WORDS {
            let mut other = page;
            other[word] ^= 1 << (word % 64);
            assert_ne!(hash(&page), hash(&other));
        }
        let mut swapped = page;
        swapped.swap(10, 11);
        assert_ne!(hash(&page), hash(&swapped));
    }
}
