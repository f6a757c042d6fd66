//! The kernel's interface to written pages: PAGEMAP_SCAN. Structures and numbers are those of Linux 6.7 (`linux/fs.h`),
//! which promises to keep them.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

use crate::uffd::{done, read_write};

const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// Protect what is reported, in the same step.
const SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fail on memory that is not tracked.
const SCAN_CHECK_WPASYNC: u64 = 1 << 1;

const PAGEMAP_SCAN: libc::Ioctl = read_write(b'f', 16, size_of::<Scan>());

#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// A stretch of written memory: addresses in the tracked process.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Written {
    pub(crate) start: u64,
    pub(crate) end: u64,
    categories: u64,
}

const _: () = {
    assert!(size_of::<Scan>() == 96);
    assert!(size_of::<Written>() == 24);
    assert!(PAGEMAP_SCAN as u32 == 0xc060_6610);
};

/// Stretches written between `start` and `end`, which are tracked anew in the same step; how many there are in `found`,
/// and the address to go on from.
pub(crate) fn scan(pagemap: BorrowedFd<'_>, start: u64, end: u64, found: &mut [Written]) -> io::Result<(usize, u64)> {
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        flags: SCAN_WP_MATCHING | SCAN_CHECK_WPASYNC,
        start,
        end,
        walk_end: start,
        vec: ptr::from_mut(found).cast::<Written>().addr() as u64,
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_WRITTEN,
    };
    // The kernel gets the vector's address as a number.
    let _ = found.as_mut_ptr().expose_provenance();
    // SAFETY: PAGEMAP_SCAN reads and writes one Scan, whose size the number holds, and writes at most vec_len entries
    // of the vector, for whose length we hold it mutably; any bytes are valid integers.
    let count = done(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) })?;
    Ok((usize::try_from(count).unwrap_or(0).min(found.len()), scan.walk_end))
}
