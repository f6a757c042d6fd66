//! What guest memory is filled with for the codecs: files, or data made here that shrinks to about a third.
use std::{fs, io::Write, path::Path};

use transship_memory::PAGE_BYTES;

use crate::units;

/// What is made here: more than any cache holds, and than any codec looks back.
const MADE_BYTES: usize = 32 << 20;
/// Stretches of text and of records that follow each other.
const STRETCH_BYTES: usize = 64 << 10;
const VOCABULARY: u64 = 4096;

/// Pages to fill memory with, one after the other, again and again.
pub(crate) struct Corpus {
    bytes: Vec<u8>,
    title: String,
}

impl Corpus {
    /// That of this folder, or our own; at most `limit` bytes.
    pub(crate) fn new(folder: Option<&Path>, limit: u64) -> Result<Self, String> {
        folder.map_or_else(|| Ok(Self::made(limit)), |folder| Self::of_files(folder, limit))
    }

    /// All files of a folder, by name, each padded with zeros to whole pages. Folders in it and packed files stay as
    /// they are.
    fn of_files(folder: &Path, limit: u64) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("--corpus {}: {error}", folder.display());
        let entries = fs::read_dir(folder).map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let mut files: Vec<_> = entries.into_iter().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
        files.sort();
        let (mut bytes, mut all, mut count) = (Vec::new(), 0, 0);
        for file in files {
            let content = fs::read(&file).map_err(|error| format!("--corpus: {}: {error}", file.display()))?;
            count += usize::from(!content.is_empty());
            all += content.len().next_multiple_of(PAGE_BYTES) as u64;
            let left = limit as usize - bytes.len();
            bytes.extend_from_slice(&content[..content.len().min(left)]);
            bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
        }
        if bytes.is_empty() {
            return Err(format!("--corpus {}: it has no file with content", folder.display()));
        }
        let part = if all > limit { format!("the first {} of ", units::bytes(limit)) } else { String::new() };
        let plural = if count == 1 { "file" } else { "files" };
        Ok(Self { bytes, title: format!("{part}{count} {plural}, {}", units::bytes(all)) })
    }

    /// The same on every machine: half text, half records.
    fn made(limit: u64) -> Self {
        let mut bytes = Vec::with_capacity(MADE_BYTES);
        let mut random = Random(1);
        while bytes.len() < MADE_BYTES.min(limit as usize) {
            let end = bytes.len() + STRETCH_BYTES;
            if (bytes.len() / STRETCH_BYTES).is_multiple_of(2) {
                text(&mut random, &mut bytes, end)
            } else {
                records(&mut random, &mut bytes, end)
            }
            bytes.truncate(end);
        }
        Self { bytes, title: format!("data made here, {}", units::bytes(MADE_BYTES as u64)) }
    }

    /// What it is, for the head of a table.
    pub(crate) fn title(&self) -> &str {
        &self.title
    }

    /// Pieces of at most so many bytes, whole pages each.
    pub(crate) fn packets(&self, bytes: usize) -> impl Iterator<Item = &[u8]> + Clone {
        // What is left over at the end would be a short packet among equal ones.
        let whole = self.bytes.len() / bytes * bytes;
        let rest = if whole == 0 { self.bytes.as_slice() } else { &[] };
        self.bytes[..whole].chunks(bytes).chain((!rest.is_empty()).then_some(rest))
    }

    /// Writes it into a file, for a guest that reads its own corpus.
    pub(crate) fn write(&self, file: &Path) -> Result<(), String> {
        let write = || fs::File::create(file)?.write_all(&self.bytes);
        write().map_err(|error| format!("can't write {}: {error}", file.display()))
    }
}

/// Words out of a vocabulary in which the first are much more frequent than the last.
fn text(random: &mut Random, out: &mut Vec<u8>, end: usize) {
    while out.len() < end {
        let exponent = random.below(VOCABULARY.ilog2().into());
        let number = random.below(2 << exponent);
        let mut letters = Random(number + 1);
        let length = 2 + letters.below(8);
        out.extend((0..length).map(|_| b"etaoinshrdlucmfw"[letters.below(16) as usize]));
        out.push(if random.below(12) == 0 { b'\n' } else { b' ' });
    }
}

/// Records as a program may have in its heap: a pointer, a counter, small numbers, and a measurement.
fn records(random: &mut Random, out: &mut Vec<u8>, end: usize) {
    let mut number = random.below(1 << 20);
    while out.len() < end {
        number += 1 + random.below(4);
        out.extend((0x7f3a_5c00_0000 + (number << 6)).to_le_bytes());
        out.extend(number.to_le_bytes());
        out.extend([random.below(4) as u8, 0, 1, 0, 0, 0, 0, 0]);
        out.extend((f64::from(random.below(1 << 20) as u32) / 1024.0).to_le_bytes());
    }
}

/// The same in each run (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 32) % limit
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use transship_codec::{Method, Setting};

    const PACKET: usize = 512 << 10;

    fn ratio(method: Method) -> f64 {
        let corpus = Corpus::new(None, 8 << 20).unwrap();
        let mut encoder = Setting::new(method, None).unwrap().encoder();
        let mut encoded = Vec::new();
        let (mut before, mut after) = (0, 0);
        for packet in corpus.packets(PACKET) {
            let _ = encoder.encode(packet, &mut encoded);
            before += packet.len();
            after += encoded.len();
        }
        assert_eq!(before, 8 << 20);
        before as f64 / after as f64
    }

    #[test]
    fn what_is_made_here_shrinks_to_about_a_third() {
        for method in [Method::Zlib, Method::Zstd] {
            let ratio = ratio(method);
            assert!((2.4..3.8).contains(&ratio), "{method}: {ratio}");
        }
        assert!(Corpus::made(8 << 20).bytes == Corpus::made(8 << 20).bytes, "it is the same each time");
    }

    #[test]
    fn files_are_read_by_name_up_to_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let error = Corpus::new(Some(folder.path()), 1 << 20).err().unwrap();
        assert!(error.contains("no file with content"), "{error}");
        fs::write(folder.path().join("b"), vec![2; PAGE_BYTES + 1]).unwrap();
        fs::write(folder.path().join("a"), vec![1; 10]).unwrap();
        fs::create_dir(folder.path().join("c")).unwrap();
        let corpus = Corpus::new(Some(folder.path()), 1 << 20).unwrap();
        let firsts: Vec<_> = corpus.packets(PAGE_BYTES).map(|page| (page.len(), page[0], page[10])).collect();
        assert_eq!(firsts, [(PAGE_BYTES, 1, 0), (PAGE_BYTES, 2, 2), (PAGE_BYTES, 2, 0)]);
        assert!(corpus.title().starts_with("2 files"), "{}", corpus.title());
        let corpus = Corpus::new(Some(folder.path()), 2 * PAGE_BYTES as u64).unwrap();
        assert_eq!(corpus.bytes.len(), 2 * PAGE_BYTES);
        assert!(corpus.title().starts_with("the first 8 KiB"), "{}", corpus.title());
    }
}
