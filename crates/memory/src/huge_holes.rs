//! Which pages a hugetlbfs file has. Such a file does not know SEEK_HOLE, but the kernel can be asked another way:
//! `UFFDIO_CONTINUE` maps a page that is in the file and fails on a hole, without making a page there.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
};

use crate::{mapping::Mapping, uffd};

/// The stretches of `bytes` that are there, as offsets into it, ascending. One may begin where another ends. `bytes`
/// and the offset in the file are multiples of `page_bytes`.
///
/// # Errors
/// The kernel can't, or we may not (a file opened for reading only). Nothing is then known of the holes.
pub(crate) fn present(file: BorrowedFd<'_>, offset: u64, bytes: u64, page_bytes: u64) -> io::Result<Vec<Range<u64>>> {
    // A mapping of its own, which nobody accesses: a page that is not mapped in it yet would have to wait for us.
    let mapping = Mapping::new(file, offset, usize::try_from(bytes).expect("64-bit addresses"), false)?;
    let base = mapping.at(0, 0).expect("every mapping begins").addr() as u64;
    let uffd = uffd::create()?;
    uffd::negotiate(uffd.as_fd(), uffd::MINOR)?;
    uffd::register(uffd.as_fd(), uffd::MINOR, base, bytes)?;
    let mut present: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < bytes {
        match uffd::map_present(uffd.as_fd(), base + at, bytes - at)? {
            0 => at += page_bytes,
            mapped => {
                let end = (at + mapped).next_multiple_of(page_bytes).min(bytes);
                present.push(at..end);
                at = end;
            }
        }
    }
    Ok(present)
}
