//! What the source's memory holds, written into its file from outside, before a guest uses it.
use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use serde::Serialize;
use transship_memory::{Access, ByteRange, PAGE_BYTES, PageCount, PageRange, Region, WINDOW_PAGES};

use crate::corpus::Corpus;

/// Memory that is filled alike: at least a huge page, so that holes are holes there too.
const CHUNK_BYTES: u64 = 2 << 20;
const WINDOW_BYTES: usize = WINDOW_PAGES.buffer_bytes();
/// What is compared at once.
const PIECE_BYTES: usize = 1 << 20;

/// A kind of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// Holes: memory that the guest has never touched
    Untouched,
    /// Pages that were written, with zeros
    Zero,
    /// Pages of random bytes
    Random,
    /// A quarter never touched, a quarter zero, the rest random with each eighth page zero
    Mixed,
}

impl Content {
    /// As it is called in tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Content::Untouched => "never touched",
            Content::Zero => "touched zero",
            Content::Random => "random",
            Content::Mixed => "mixed",
        }
    }

    fn of_chunk(self, chunk: u64) -> Fill {
        match (self, chunk % 8) {
            (Content::Untouched, _) | (Content::Mixed, 0..2) => Fill::Hole,
            (Content::Zero, _) | (Content::Mixed, 2..4) => Fill::Zero,
            (Content::Random, _) => Fill::Random,
            (Content::Mixed, _) => Fill::RandomAndZero,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fill {
    Hole,
    Zero,
    Random,
    /// Each eighth page is zero.
    RandomAndZero,
}

/// The file that is the source's memory.
///
/// It is mapped only while it is written: transship refuses a guest whose memory another process has mapped to write,
/// since that process's writes would escape it.
pub(crate) struct SourceMemory {
    path: PathBuf,
    bytes: u64,
    /// None: data everywhere.
    content: Option<Content>,
}

impl SourceMemory {
    /// Makes the file and fills it.
    pub(crate) fn create(path: &Path, bytes: u64, content: Content) -> Result<Self, String> {
        let memory = Self::empty(path, bytes, Some(content))?;
        memory.fill(&memory.map()?)?;
        Ok(memory)
    }

    /// Makes the file and fills it with a corpus, again and again.
    pub(crate) fn of_corpus(path: &Path, bytes: u64, corpus: &Corpus) -> Result<Self, String> {
        let memory = Self::empty(path, bytes, None)?;
        let region = memory.map()?;
        let mut pages = corpus.packets(PAGE_BYTES).cycle();
        let mut window = vec![0; WINDOW_BYTES];
        for PageRange { first, .. } in PageRange::all(region.pages()).parts(WINDOW_PAGES) {
            window.chunks_exact_mut(PAGE_BYTES).zip(&mut pages).for_each(|(page, from)| page.copy_from_slice(from));
            region.write_pages(first.masked(u128::MAX), &window).map_err(|e| e.to_string())?;
        }
        Ok(memory)
    }

    fn empty(path: &Path, bytes: u64, content: Option<Content>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("can't make the guest's memory {}: {error}", path.display());
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).map_err(failed)?;
        file.set_len(bytes).map_err(failed)?;
        Ok(Self { path: path.to_owned(), bytes, content })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the holes that there are to be. Whoever reads a hole through a mapping, as QEMU's own migration does,
    /// fills it with a zero page: after that it's no longer memory that was never touched.
    pub(crate) fn restore_holes(&self) -> Result<(), String> {
        let region = self.map()?;
        let mut holes = self.chunks(&region).filter(|&(fill, _)| fill == Fill::Hole);
        holes.try_for_each(|(_, pages)| region.clear(pages)).map_err(|e| e.to_string())
    }

    /// The bytes that are not holes.
    pub(crate) fn touched(&self) -> Result<Vec<Range<u64>>, String> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (_, pages) in self.chunks(&self.map()?).filter(|&(fill, _)| fill != Fill::Hole) {
            let (start, end) = (pages.first.offset(), pages.end().offset());
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        Ok(ranges)
    }

    fn map(&self) -> Result<Region, String> {
        let file = OpenOptions::new().read(true).write(true).open(&self.path);
        let file = file.map_err(|error| format!("can't open {}: {error}", self.path.display()))?;
        Region::map("bench", file.into(), ByteRange::sized(0, self.bytes), Access::ReadWrite).map_err(|e| e.to_string())
    }

    fn fill(&self, region: &Region) -> Result<(), String> {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut window = vec![0; WINDOW_BYTES];
        for (fill, pages) in self.chunks(region).filter(|&(fill, _)| fill != Fill::Hole) {
            for PageRange { first, .. } in pages.parts(WINDOW_PAGES) {
                random.fill(fill, &mut window);
                region.write_pages(first.masked(u128::MAX), &window).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    fn chunks(&self, region: &Region) -> impl Iterator<Item = (Fill, PageRange)> {
        let pages = PageCount::within(CHUNK_BYTES.max(region.backing_page_bytes()));
        let content = self.content;
        let parts = (0..).zip(PageRange::all(region.pages()).parts(pages));
        parts.map(move |(chunk, part)| (content.map_or(Fill::Random, |content| content.of_chunk(chunk)), part))
    }
}

impl Drop for SourceMemory {
    fn drop(&mut self) {
        // Gigabytes of memory; if this fails, removing the folder comes next.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Bytes without a pattern; the same in each run.
struct Random(u64);

impl Random {
    fn fill(&mut self, fill: Fill, window: &mut [u8]) {
        window.fill(0);
        for (number, page) in window.chunks_exact_mut(PAGE_BYTES).enumerate() {
            if fill == Fill::Random || fill == Fill::RandomAndZero && number % 8 != 0 {
                page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&self.next().to_le_bytes()));
            }
        }
    }

    /// xorshift64*.
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// The offset of the first page from `from` on that differs in two memory files, if any does. Read, not mapped: that
/// leaves holes alone.
///
/// Both stand at the first byte of a memory of `bytes`.
pub(crate) fn first_difference(mut one: File, mut other: File, from: u64, bytes: u64) -> Result<Option<u64>, String> {
    let rest = |file: &mut File| {
        let at = i64::try_from(from).map_err(io::Error::other)?;
        file.seek(SeekFrom::Current(at)).map(|_| ())
    };
    rest(&mut one).and_then(|()| rest(&mut other)).map_err(|error| format!("can't read memory: {error}"))?;
    let (mut a, mut b) = (Vec::with_capacity(PIECE_BYTES), Vec::with_capacity(PIECE_BYTES));
    let mut offset = from;
    loop {
        // A process has more behind its guest's memory.
        let length = bytes.saturating_sub(offset).min(PIECE_BYTES as u64);
        read_piece(&mut one, &mut a, length)
            .and_then(|()| read_piece(&mut other, &mut b, length))
            .map_err(|e| format!("can't compare memory: {e}"))?;
        if a != b {
            let at = a.iter().zip(&b).position(|(x, y)| x != y).unwrap_or(a.len().min(b.len()));
            return Ok(Some(offset + (at / PAGE_BYTES * PAGE_BYTES) as u64));
        }
        if a.is_empty() {
            return Ok(None);
        }
        offset += a.len() as u64;
    }
}

fn read_piece(file: &mut File, piece: &mut Vec<u8>, length: u64) -> io::Result<()> {
    piece.clear();
    file.take(length).read_to_end(piece).map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    const BYTES: u64 = 8 * CHUNK_BYTES;

    fn made(content: Content) -> (tempfile::TempDir, SourceMemory) {
        // Holes are only sure to be seen on tmpfs.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = SourceMemory::create(&folder.path().join("mem0"), BYTES, content).unwrap();
        (folder, memory)
    }

    fn data_bytes(memory: &SourceMemory) -> u64 {
        memory.map().unwrap().data().unwrap().bytes()
    }

    fn zero_pages(memory: &SourceMemory) -> usize {
        let bytes = std::fs::read(memory.path()).unwrap();
        bytes.chunks(PAGE_BYTES).filter(|page| page.iter().all(|&byte| byte == 0)).count()
    }

    #[test]
    fn each_kind_holds_what_it_says() {
        let all = (BYTES / PAGE_BYTES as u64) as usize;
        for (content, data, zero) in [
            (Content::Untouched, 0, all),
            (Content::Zero, BYTES, all),
            (Content::Random, BYTES, 0),
            (Content::Mixed, BYTES / 4 * 3, all / 2 + all / 16),
        ] {
            let (_folder, memory) = made(content);
            assert_eq!(data_bytes(&memory), data, "{content:?}");
            assert_eq!(zero_pages(&memory), zero, "{content:?}");
            let touched: u64 = memory.touched().unwrap().iter().map(|range| range.end - range.start).sum();
            assert_eq!(touched, data, "{content:?}");
        }
    }

    #[test]
    fn a_corpus_fills_all_memory() {
        let (folder, files) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(files.path().join("a"), vec![1; 2 * PAGE_BYTES]).unwrap();
        std::fs::write(files.path().join("b"), vec![2; PAGE_BYTES]).unwrap();
        let corpus = Corpus::new(Some(files.path()), BYTES).unwrap();
        let memory = SourceMemory::of_corpus(&folder.path().join("mem0"), BYTES, &corpus).unwrap();
        let bytes = std::fs::read(memory.path()).unwrap();
        let right = |(number, page): (usize, &[u8])| page.iter().all(|&byte| byte == [1, 1, 2][number % 3]);
        assert!(bytes.chunks(PAGE_BYTES).enumerate().all(right));
        assert_eq!(memory.touched().unwrap(), vec![0..BYTES]);
        memory.restore_holes().unwrap();
        assert_eq!(data_bytes(&memory), BYTES);
    }

    #[test]
    fn holes_that_were_filled_are_holes_again() {
        let (_folder, memory) = made(Content::Mixed);
        let file = OpenOptions::new().write(true).open(memory.path()).unwrap();
        file.write_all_at(&[1; 100], 4096).unwrap();
        assert_eq!(data_bytes(&memory), BYTES / 4 * 3 + PAGE_BYTES as u64);
        memory.restore_holes().unwrap();
        assert_eq!(data_bytes(&memory), BYTES / 4 * 3);
    }

    #[test]
    fn the_first_difference_is_found() {
        let (folder, memory) = made(Content::Random);
        let copy = folder.path().join("copy");
        std::fs::copy(memory.path(), &copy).unwrap();
        let difference = |from| {
            let [one, other] = [memory.path(), &copy].map(|path| File::open(path).unwrap());
            first_difference(one, other, from, BYTES)
        };
        assert_eq!(difference(0), Ok(None));
        let file = OpenOptions::new().write(true).read(true).open(&copy).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, BYTES - 1).unwrap();
        file.write_all_at(&[!byte[0]], BYTES - 1).unwrap();
        assert_eq!(difference(0), Ok(Some(BYTES - PAGE_BYTES as u64)));
        let last = BYTES - PAGE_BYTES as u64;
        assert_eq!(difference(last), Ok(Some(last)));
        assert_eq!(difference(BYTES), Ok(None));
        file.set_len(4096).unwrap();
        assert_eq!(difference(0), Ok(Some(4096)));
    }

    #[test]
    fn a_file_goes_away_with_its_memory() {
        let (folder, memory) = made(Content::Untouched);
        drop(memory);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
