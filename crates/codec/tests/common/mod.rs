//! Pages to encode.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::cast_possible_truncation)]
use proptest::prelude::*;
use transship_codec::{Method, Setting};

pub const PAGE: usize = 4096;

/// A page by its kind: zero, noise, text, runs.
pub fn page(kind: u8, seed: u64) -> Vec<u8> {
    // SplitMix64: neighbouring seeds have nothing in common.
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) as usize >> 8
    };
    const WORDS: [&str; 8] = ["guest ", "memory ", "page ", "the ", "of ", "channel ", "\n", "transship "];
    match kind {
        0 => vec![0; PAGE],
        1 => (0..PAGE).map(|_| next() as u8).collect(),
        2 => {
            let mut text = Vec::new();
            while text.len() < PAGE {
                text.extend_from_slice(WORDS[next() % WORDS.len()].as_bytes());
            }
            text.truncate(PAGE);
            text
        }
        _ => (0..PAGE).map(|i| (i / 64) as u8 ^ seed as u8).collect(),
    }
}

/// 1 to `most` pages of mixed kinds, or of one.
pub fn pages(most: usize) -> impl Strategy<Value = Vec<u8>> {
    let mixed = proptest::collection::vec((0u8..4, any::<u64>()), 1..=most);
    let equal =
        (1..=most, 0u8..4, any::<u64>()).prop_map(|(n, kind, seed)| (0..n as u64).map(|i| (kind, seed ^ i)).collect());
    prop_oneof![mixed, equal]
        .prop_map(|kinds: Vec<(u8, u64)>| kinds.into_iter().flat_map(|(k, s)| page(k, s)).collect())
}

/// A packet with every kind of page.
pub fn mixed(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| page((i % 4) as u8, i as u64)).collect()
}

/// Every method at its levels that differ in kind; the slowest are left out.
pub fn settings() -> Vec<Setting> {
    [
        (Method::None, vec![None]),
        (Method::Zlib, (0..=6).map(Some).collect()),
        (Method::Zstd, [-7, -5, -1, 0, 1, 3, 6].map(Some).to_vec()),
        (Method::Qatzip, [1, 2, 3, 4, 6].map(Some).to_vec()),
        (Method::Lz4, [1, 2, 3, 9].map(Some).to_vec()),
    ]
    .into_iter()
    .flat_map(|(method, levels)| levels.into_iter().map(move |level| Setting::new(method, level).unwrap()))
    .collect()
}

pub fn encode(setting: Setting, pages: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let _ = setting.encoder().encode(pages, &mut out);
    out
}
