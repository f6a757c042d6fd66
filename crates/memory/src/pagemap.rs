//! The kernel's interface to the pages of a process, written ones and those that are there: PAGEMAP_SCAN. Structures
//! and numbers are those of Linux 6.7 (`linux/fs.h`), which promises to keep them. Older kernels have an entry for each
//! page to be read (`entries`), which tells the same of pages that are not tracked anew by looking at them.
mod entries;

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
    sync::OnceLock,
};

use crate::{
    ByteRange,
    uffd::{done, read_write},
};

const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// A page of a file, or of memory that is shared.
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The one page of zeros that the kernel shows to those who have only read.
const PAGE_IS_PFNZERO: u64 = 1 << 5;
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

/// What is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// Pages that were written, which are tracked anew in the same step. Pages that are not in the process's page table
    /// count as written, until they are tracked anew.
    Written,
    /// As `Written`, but of pages that the process has, in memory or in swap. The kernel takes no note of others, and
    /// makes no page tables for them; once such a page is there it is reported.
    WrittenAndThere,
    /// Pages that are not protected from writes; nothing is protected.
    Unprotected,
    /// As `Unprotected`, but of pages that the process has, in memory or in swap.
    UnprotectedAndThere,
    /// Pages that the process has, in memory or in swap; nothing is tracked anew.
    There,
    /// All pages but those that are `There`.
    NotThere,
    /// As `There`, but without those that show a file: what the process has written to its own mapping of one.
    Own,
}

impl Look {
    /// The same pages, none of which is tracked anew.
    pub(crate) fn without_rearming(self) -> Self {
        match self {
            Self::Written => Self::Unprotected,
            Self::WrittenAndThere => Self::UnprotectedAndThere,
            other => other,
        }
    }

    /// What a page must not be.
    fn inverted(self) -> u64 {
        match self {
            Self::Own => PAGE_IS_FILE,
            Self::NotThere => PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            _ => 0,
        }
    }

    /// The flags, what a page must be, what of it is told.
    fn request(self) -> (u64, u64, u64, u64) {
        let there = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let rearm = SCAN_WP_MATCHING | SCAN_CHECK_WPASYNC;
        match self {
            Self::Written => (rearm, PAGE_IS_WRITTEN, 0, PAGE_IS_WRITTEN),
            Self::WrittenAndThere => (rearm, PAGE_IS_WRITTEN, there, PAGE_IS_WRITTEN),
            Self::Unprotected => (0, PAGE_IS_WRITTEN, 0, PAGE_IS_WRITTEN),
            Self::UnprotectedAndThere => (0, PAGE_IS_WRITTEN, there, PAGE_IS_WRITTEN),
            Self::There => (0, 0, there, PAGE_IS_PFNZERO),
            Self::NotThere => (0, there, 0, there),
            Self::Own => (0, PAGE_IS_FILE, there, PAGE_IS_PFNZERO),
        }
    }

    /// Whether the look changes something, which only PAGEMAP_SCAN does.
    fn rearms(self) -> bool {
        matches!(self, Self::Written | Self::WrittenAndThere)
    }
}

/// How the kernel is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// By PAGEMAP_SCAN, if it has that, else by entries.
    Scan,
    /// By the entries of all pages: slower, and changes nothing.
    Entries,
}

/// A stretch of memory that was found: addresses in the process.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Found {
    pub(crate) start: u64,
    pub(crate) end: u64,
    categories: u64,
}

impl Found {
    fn new(ByteRange { start, end }: ByteRange) -> Self {
        Self { start, end, categories: 0 }
    }

    pub(crate) fn addresses(&self) -> ByteRange {
        ByteRange { start: self.start, end: self.end }
    }

    /// It was only read, and reads as zero.
    pub(crate) fn is_zero_page(&self) -> bool {
        self.categories & PAGE_IS_PFNZERO != 0
    }
}

const _: () = {
    assert!(size_of::<Scan>() == 96);
    assert!(size_of::<Found>() == 24);
    assert!(PAGEMAP_SCAN as u32 == 0xc060_6610);
};

/// That of this process. It is opened once: whoever gives up the right to open files has asked for it before.
pub(crate) fn own() -> io::Result<BorrowedFd<'static>> {
    static OWN: OnceLock<File> = OnceLock::new();
    if let Some(own) = OWN.get() {
        return Ok(own.as_fd());
    }
    let opened = File::open("/proc/self/pagemap")?;
    Ok(OWN.get_or_init(|| opened).as_fd())
}

/// Whether the kernel has PAGEMAP_SCAN.
pub(crate) fn is_known(pagemap: BorrowedFd<'_>) -> bool {
    // Of no memory at all.
    let unknown = |error: io::Error| error.raw_os_error() == Some(libc::ENOTTY);
    !by_scan(pagemap, Look::There, ByteRange::sized(0, 0), &mut [Found::default()]).is_err_and(unknown)
}

/// Looks at these addresses: how many stretches there are in `found`, and the address to go on from.
pub(crate) fn scan(
    pagemap: BorrowedFd<'_>,
    look: Look,
    by: By,
    addresses: ByteRange,
    found: &mut [Found],
) -> io::Result<(usize, u64)> {
    if by == By::Entries && !look.rearms() {
        return entries::look(pagemap, look, addresses, found);
    }
    match by_scan(pagemap, look, addresses, found) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) && !look.rearms() => {
            entries::look(pagemap, look, addresses, found)
        }
        result => result,
    }
}

fn by_scan(
    pagemap: BorrowedFd<'_>,
    look: Look,
    ByteRange { start, end }: ByteRange,
    found: &mut [Found],
) -> io::Result<(usize, u64)> {
    let (flags, category_mask, category_anyof_mask, return_mask) = look.request();
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        flags,
        start,
        end,
        walk_end: start,
        vec: ptr::from_mut(found).cast::<Found>().addr() as u64,
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: look.inverted(),
        category_mask,
        category_anyof_mask,
        return_mask,
    };
    // The kernel gets the vector's address as a number.
    let _ = found.as_mut_ptr().expose_provenance();
    // SAFETY: PAGEMAP_SCAN reads and writes one Scan, whose size the number holds, and writes at most vec_len entries
    // of the vector, for whose length we hold it mutably; any bytes are valid integers.
    let count = done(unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) })?;
    Ok((usize::try_from(count).unwrap_or(0).min(found.len()), scan.walk_end))
}
