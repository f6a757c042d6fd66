//! How many pages of a file are in memory. Those of a tmpfs that hold something are there, or in swap.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{ByteRange, PageCount};

/// cachestat(2), since Linux 6.5. The number is that of all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct Range {
    offset: u64,
    /// 0: to the end of the file.
    bytes: u64,
}

/// In pages.
#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// How many pages of the range of a tmpfs's file are in memory or were swapped out: bytes of the file, both ends
/// multiples of the page size. It costs a look at these pages alone, where SEEK_HOLE looks at all pages up to the next
/// hole, wherever that is. None: the kernel does not say.
pub(crate) fn pages(file: BorrowedFd<'_>, range: ByteRange) -> Option<PageCount> {
    counts(file, range).map(|counts| PageCount::new(counts.cached + counts.evicted))
}

/// How many pages of the range of any file are in the page cache: bytes of the file, both ends multiples of the page
/// size. Reads nothing. None: the kernel does not say, as before Linux 6.5.
pub fn cached_pages(file: BorrowedFd<'_>, range: ByteRange) -> Option<PageCount> {
    counts(file, range).map(|counts| PageCount::new(counts.cached))
}

fn counts(file: BorrowedFd<'_>, range: ByteRange) -> Option<Counts> {
    let mut counts = Counts::default();
    if range.is_empty() {
        return Some(counts);
    }
    let range = Range { offset: range.start, bytes: range.len() };
    // SAFETY: both are of the kernel's layout and live until the call returns; it reads the first and writes the
    // second. The descriptor is borrowed.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut counts, 0_u32) };
    (result == 0).then_some(counts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{fs::File, os::fd::AsFd, os::unix::fs::FileExt};

    use super::*;

    #[test]
    fn only_pages_of_the_range_are_counted() {
        let file = File::from(rustix::fs::memfd_create("cached", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(64 * 4096).unwrap();
        let Some(none) = pages(file.as_fd(), ByteRange::sized(0, 64 * 4096)) else {
            transship_lab::lacks("a kernel that has cachestat");
            return;
        };
        assert_eq!(none, PageCount::ZERO);
        for page in [3, 4, 63] {
            file.write_all_at(&[1; 4096], page * 4096).unwrap();
        }
        for (first, end, wanted) in [(0, 64, 3), (3, 5, 2), (4, 5, 1), (5, 63, 0), (63, 64, 1), (7, 7, 0)] {
            let range = ByteRange { start: first * 4096, end: end * 4096 };
            assert_eq!(pages(file.as_fd(), range), Some(PageCount::new(wanted)), "{first} to {end}");
        }
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            3 * 4096,
            4096,
        )
        .unwrap();
        for count in [pages, cached_pages] {
            assert_eq!(count(file.as_fd(), ByteRange::sized(3 * 4096, 2 * 4096)), Some(PageCount::ONE));
        }
    }
}
