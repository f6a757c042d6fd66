//! What touched pages hold at first, and how it is recognised after a move.
use std::{fs, io::Read, path::Path};

use serde::{Deserialize, Serialize};
use transship_memory::PAGE_BYTES;

use super::{
    Error,
    options::Content,
    pattern::{PAGE_WORDS, PageWords, fill_random, hash, mix},
};

/// Pages of a kind that lie together in mixed content.
const MIXED_RUN: u64 = 16;
/// More of a corpus than this is not read: the guest would need as much beside its memory.
const MAX_CORPUS_BYTES: u64 = 1 << 30;

/// Content that both sides of a move know: made anew from a number, or recognised by hashes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Initial {
    Zero,
    Random,
    Mixed,
    /// Hashes of the pages of the corpus; page n of the guest holds page n modulo their number.
    Corpus(Vec<u64>),
}

impl Initial {
    /// Whether page `number` holds its first content. `scratch` is overwritten.
    pub(super) fn matches(&self, seed: u64, number: u64, page: &PageWords, scratch: &mut PageWords) -> bool {
        match self {
            Self::Corpus(hashes) if hashes.is_empty() => is_zero(page),
            Self::Corpus(hashes) => hash(page) == hashes[(number % hashes.len() as u64) as usize],
            _ => {
                self.make(seed, number, scratch);
                page == scratch
            }
        }
    }

    /// What page `number` holds at first; zeros for a corpus, whose pages can't be made.
    fn make(&self, seed: u64, number: u64, page: &mut PageWords) {
        let kind = match self {
            Self::Zero | Self::Corpus(_) => Kind::Zero,
            Self::Random => Kind::Random,
            Self::Mixed => mixed_kind(seed, number),
        };
        match kind {
            Kind::Zero => *page = [0; PAGE_WORDS],
            Kind::Random => fill_random(seed ^ mix(number), page),
            Kind::Text => fill_text(seed ^ mix(number), page),
        }
    }
}

enum Kind {
    Zero,
    Random,
    Text,
}

fn mixed_kind(seed: u64, number: u64) -> Kind {
    match mix(seed ^ mix(number / MIXED_RUN)) % 4 {
        0 | 1 => Kind::Zero,
        2 => Kind::Random,
        _ => Kind::Text,
    }
}

/// Eight-byte words out of sixteen: shrinks to about a tenth.
fn fill_text(key: u64, page: &mut PageWords) {
    const WORDS: [&[u8; 8]; 16] = [
        b"the ship",
        b" carries",
        b" a cargo",
        b" of page",
        b"s and it",
        b" sails o",
        b"n while ",
        b"the crew",
        b" writes ",
        b"letters,",
        b" harbour",
        b" lights ",
        b"blinking",
        b" through",
        b" the fog",
        b". Again,",
    ];
    let mut state = mix(key);
    for word in page.iter_mut() {
        state = mix(state);
        *word = u64::from_le_bytes(*WORDS[(state % 16) as usize]);
    }
}

pub(super) fn is_zero(page: &PageWords) -> bool {
    *page == [0; PAGE_WORDS]
}

/// Makes the first content of a guest.
pub(super) struct Filler {
    initial: Initial,
    corpus: Vec<PageWords>,
}

impl Filler {
    pub(super) fn new(content: &Content) -> Result<Self, Error> {
        let mut corpus = Vec::new();
        let initial = match content {
            Content::Zero => Initial::Zero,
            Content::Random => Initial::Random,
            Content::Mixed => Initial::Mixed,
            Content::Corpus(folder) => {
                corpus = read_corpus(folder)?;
                Initial::Corpus(corpus.iter().map(hash).collect())
            }
        };
        Ok(Self { initial, corpus })
    }

    pub(super) fn initial(&self) -> &Initial {
        &self.initial
    }

    pub(super) fn fill(&self, seed: u64, number: u64, page: &mut PageWords) {
        match self.corpus.len() {
            0 => self.initial.make(seed, number, page),
            pages => *page = self.corpus[(number % pages as u64) as usize],
        }
    }
}

/// The files of a folder, by name, each padded with zeros to whole pages.
fn read_corpus(folder: &Path) -> Result<Vec<PageWords>, Error> {
    let system = |source| Error::System { what: format!("read corpus {}", folder.display()), source };
    let mut files: Vec<_> = fs::read_dir(folder).map_err(system)?.collect::<Result<_, _>>().map_err(system)?;
    files.sort_by_key(fs::DirEntry::file_name);
    let mut pages = Vec::new();
    for file in files {
        if file.path().is_file() {
            let left = MAX_CORPUS_BYTES - (pages.len() * PAGE_BYTES) as u64;
            let mut bytes = Vec::new();
            fs::File::open(file.path()).and_then(|f| f.take(left).read_to_end(&mut bytes)).map_err(system)?;
            pages.extend(bytes.chunks(PAGE_BYTES).map(page_of));
        }
    }
    if pages.is_empty() {
        return Err(Error::Options(format!("corpus {}: it has no file with content", folder.display())));
    }
    Ok(pages)
}

fn page_of(bytes: &[u8]) -> PageWords {
    let mut page = [0; PAGE_WORDS];
    for (word, bytes) in page.iter_mut().zip(bytes.chunks(8)) {
        let mut full = [0; 8];
        full[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(full);
    }
    page
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_content_is_recognised_and_a_flipped_bit_is_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), vec![1; 5000]).unwrap();
        fs::write(folder.path().join("b"), "short").unwrap();
        for content in [Content::Zero, Content::Random, Content::Mixed, Content::Corpus(folder.path().into())] {
            let filler = Filler::new(&content).unwrap();
            for number in 0..100 {
                let (mut page, mut scratch) = ([1; PAGE_WORDS], [2; PAGE_WORDS]);
                filler.fill(9, number, &mut page);
                assert!(filler.initial().matches(9, number, &page, &mut scratch), "{content:?} {number}");
                page[511] ^= 1 << 63;
                assert!(!filler.initial().matches(9, number, &page, &mut scratch), "{content:?} {number}");
            }
        }
    }

    #[test]
    fn a_corpus_repeats_its_files_page_by_page() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), vec![0x11; PAGE_BYTES + 1]).unwrap();
        fs::write(folder.path().join("b"), vec![0x22; 8]).unwrap();
        let filler = Filler::new(&Content::Corpus(folder.path().into())).unwrap();
        let first_word = |number| {
            let mut page = [0; PAGE_WORDS];
            filler.fill(0, number, &mut page);
            page[0]
        };
        let words: Vec<u64> = (0..6).map(first_word).collect();
        let (a, rest, b) = (0x1111_1111_1111_1111, 0x11, 0x2222_2222_2222_2222);
        assert_eq!(words, [a, rest, b, a, rest, b]);
    }

    #[test]
    fn mixed_content_has_all_kinds() {
        let mut counts = [0; 3];
        (0..64).for_each(|run| counts[mixed_kind(1, run * MIXED_RUN) as usize] += 1);
        assert!(counts.iter().all(|&n| n > 5), "{counts:?}");
    }
}
