//! Which pages a hugetlbfs file has. Such a file does not know SEEK_HOLE, but the kernel can be asked another way:
//! `UFFDIO_CONTINUE` maps a page that is in the file and fails on a hole, without making a page there.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use crate::{ByteRange, mapping::Mapping, uffd};

/// The stretches of a part of the file that are there, as offsets into the part, ascending. One may begin where another
/// ends. The part consists of whole pages of `page_bytes`.
///
/// # Errors
/// The kernel can't, or we may not (a file opened for reading only). Nothing is then known of the holes.
pub(crate) fn present(file: BorrowedFd<'_>, part: ByteRange, page_bytes: u64) -> io::Result<Vec<ByteRange>> {
    let bytes = part.len();
    // A mapping of its own, which nobody accesses: a page that is not mapped in it yet would have to wait for us.
    let mapping = Mapping::new(file, part.start, usize::try_from(bytes).expect("64-bit addresses"), false)?;
    let base = mapping.at(0, 0).expect("every mapping begins").addr() as u64;
    let uffd = uffd::create()?;
    uffd::negotiate(uffd.as_fd(), uffd::MINOR)?;
    let mapped = ByteRange::sized(base, bytes);
    uffd::register(uffd.as_fd(), uffd::MINOR, mapped)?;
    let mut present: Vec<ByteRange> = Vec::new();
    let mut at = 0;
    while at < bytes {
        match uffd::map_present(uffd.as_fd(), mapped.skip(at))? {
            0 => at += page_bytes,
            mapped => {
                let end = (at + mapped).next_multiple_of(page_bytes).min(bytes);
                present.push(ByteRange { start: at, end });
                at = end;
            }
        }
    }
    Ok(present)
}
