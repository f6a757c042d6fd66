//! Where guest memory lies in its files, as QEMU has told us.
use std::{fs::File, io, os::unix::fs::MetadataExt, sync::Arc};

use rustix::fs::{FallocateFlags, fallocate};
use transship_memory::PAGE_BYTES;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::message::FileRange;

/// A part of guest memory that is one range of one file.
#[derive(Debug, Clone)]
struct Entry {
    range: FileRange,
    /// What the file system gives back at once: the size of a huge page on a hugetlbfs.
    block_bytes: u64,
    file: Arc<File>,
}

/// A range of bytes in one entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Number of the entry.
    pub(crate) entry: usize,
    /// From the beginning of the entry.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// All of guest memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table(Vec<Entry>);

impl Table {
    /// What QEMU has given us; what is not in a file is left out.
    pub(crate) fn of(memory: &GuestMemoryMmap) -> io::Result<Self> {
        let mut entries = Vec::new();
        for region in memory.iter() {
            let Some(place) = region.file_offset() else { continue };
            let about = place.file().metadata()?;
            let range = FileRange {
                device: about.dev(),
                inode: about.ino(),
                file_offset: place.start(),
                bytes: region.len(),
                address: region.start_addr().0,
            };
            entries.push(Entry {
                range,
                block_bytes: about.blksize().max(PAGE_BYTES as u64),
                file: Arc::clone(place.arc()),
            });
        }
        Ok(Self(entries))
    }

    /// The ranges, in the order of their numbers.
    pub(crate) fn ranges(&self) -> Vec<FileRange> {
        self.0.iter().map(|entry| entry.range).collect()
    }

    /// The whole pages of `bytes` from the guest's address `from`. What the guest does not have is left out.
    pub(crate) fn pages(&self, from: u64, bytes: u64) -> impl Iterator<Item = Piece> + '_ {
        let page = PAGE_BYTES as u64;
        let end = from.saturating_add(bytes) / page * page;
        let from = from.checked_next_multiple_of(page).unwrap_or(u64::MAX);
        self.0.iter().enumerate().filter_map(move |(number, entry)| {
            let FileRange { address, bytes, .. } = entry.range;
            let first = from.max(address);
            let last = end.min(address.saturating_add(bytes));
            (first < last).then(|| Piece { entry: number, offset: first - address, bytes: last - first })
        })
    }

    /// Gives the memory of a piece back to the host: it reads as zero until it is written again. On huge pages only
    /// whole ones are. Returns the bytes.
    pub(crate) fn discard(&self, piece: Piece) -> io::Result<u64> {
        let Some(entry) = self.0.get(piece.entry) else { return Ok(0) };
        let from = entry.range.file_offset + piece.offset;
        let end = (from + piece.bytes) / entry.block_bytes * entry.block_bytes;
        let from = from.next_multiple_of(entry.block_bytes);
        if from >= end {
            return Ok(0);
        }
        fallocate(&*entry.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, from, end - from)?;
        Ok(end - from)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::FileExt;

    use vm_memory::{FileOffset, GuestAddress};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// 1 MiB at 0 and 1 MiB at 4 MiB, at these offsets of one file.
    fn table(offsets: [u64; 2]) -> (Table, File) {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(8 * MIB).unwrap();
        let at = |offset| Some(FileOffset::new(file.try_clone().unwrap(), offset));
        let ranges =
            [(GuestAddress(0), MIB as usize, at(offsets[0])), (GuestAddress(4 * MIB), MIB as usize, at(offsets[1]))];
        (Table::of(&GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()).unwrap(), file)
    }

    fn pages(table: &Table, from: u64, bytes: u64) -> Vec<(usize, u64, u64)> {
        table.pages(from, bytes).map(|piece| (piece.entry, piece.offset, piece.bytes)).collect()
    }

    #[test]
    fn only_whole_pages_that_the_guest_has_are_named() {
        let (table, _) = table([0, MIB]);
        assert_eq!(pages(&table, 0, MIB), [(0, 0, MIB)]);
        assert_eq!(pages(&table, 1, 3 * 4096), [(0, 4096, 2 * 4096)]);
        assert_eq!(pages(&table, 4096, 4095), []);
        assert_eq!(pages(&table, MIB - 4096, 4 * MIB), [(0, MIB - 4096, 4096), (1, 0, MIB - 4096)]);
        assert_eq!(pages(&table, MIB, 3 * MIB), []);
        assert_eq!(pages(&table, 0, u64::MAX), [(0, 0, MIB), (1, 0, MIB)]);
        assert_eq!(pages(&table, u64::MAX, u64::MAX), []);
        assert_eq!(pages(&table, u64::MAX - 4095, 4096), []);
        assert_eq!(pages(&table, 4096, 0), []);
    }

    #[test]
    fn what_is_given_back_is_that_part_of_the_file() {
        let (table, file) = table([2 * MIB, 5 * MIB]);
        file.write_all_at(&vec![1; 8 << 20], 0).unwrap();
        let before = file.metadata().unwrap().blocks();
        for piece in table.pages(4 * MIB + 4096, 8192) {
            assert_eq!(table.discard(piece).unwrap(), 8192);
        }
        assert_eq!(before - file.metadata().unwrap().blocks(), 16);
        let mut all = vec![0; 8 << 20];
        file.read_exact_at(&mut all, 0).unwrap();
        let zeros = all.iter().enumerate().filter(|(_, byte)| **byte == 0).map(|(at, _)| at as u64);
        assert_eq!(zeros.collect::<Vec<_>>(), (5 * MIB + 4096..5 * MIB + 4096 + 8192).collect::<Vec<_>>());
    }
}
