//! One region of guest memory (QEMU: a RAM block), mapped into this process from its backing file.
use std::{io, os::fd::{BorrowedFd, OwnedFd}, sync::Arc};
use crate::{Error, PageRange, PageSet};

/// Pages that one call of the window functions can speak of, and the alignment of their first page.
pub const WINDOW_PAGES: u64 = 128;

/// How a region is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The source: we never write.
    Read,
    /// The destination.
    ReadWrite,
}

/// See the crate's documentation for why nothing here returns a slice. Send and Sync: all threads may use it at once.
pub struct Region {
    name: String,
}

#[allow(unused_variables)]
impl Region {
    /// Maps `bytes` of `file` from `file_offset`.
    /// # Errors
    /// Not a multiple of the page size, file too short, a file that can't be mapped shared, the system's own.
    pub fn map(name: &str, file: OwnedFd, file_offset: u64, bytes: u64, access: Access) -> Result<Self, Error> { todo!() }
    pub fn name(&self) -> &str { &self.name }
    pub fn bytes(&self) -> u64 { todo!() }
    pub fn pages(&self) -> u64 { todo!() }
    /// Size of the pages that back it, from the file system (4096, or the page size of a hugetlbfs).
    pub fn backing_page_bytes(&self) -> u64 { todo!() }
    pub fn file(&self) -> BorrowedFd<'_> { todo!() }

    /// The pages that are not holes in the backing file (SEEK_DATA, SEEK_HOLE). Everything else reads as zero.
    pub fn data(&self) -> Result<PageSet, Error> { todo!() }
    /// Makes the pages read as zero: holes where whole backing pages are covered, zeros written elsewhere.
    pub fn clear(&self, range: PageRange) -> Result<(), Error> { todo!() }

    /// Maps the present pages of the range in bulk before they are read (MADV_POPULATE_READ); never creates pages in holes
    /// unless the kernel has to. Failing is harmless and ignored.
    pub fn populate_read(&self, range: PageRange) { todo!() }
    /// Of the pages of a window that `wanted` names: the ones that are all zero. SIMD at the machine's width.
    /// # Errors: OutOfRange
    pub fn zero_mask(&self, first: u64, wanted: u128) -> Result<u128, Error> { todo!() }
    /// Appends the pages that `present` names to `out`, which are copied once.
    pub fn copy_out(&self, first: u64, present: u128, out: &mut Vec<u8>) -> Result<(), Error> { todo!() }
    /// Writes `head` and then the present pages of the window to a socket or file, straight from guest memory (writev; goes on
    /// after short writes and EINTR; Interrupted/WouldBlock errors of a socket with a send timeout are returned).
    pub fn send_window(&self, to: BorrowedFd<'_>, head: &[u8], first: u64, present: u128) -> io::Result<()> { todo!() }
    /// Writes the pages (a multiple of 4096 bytes, in the order of `present`'s bits) into place. Zero-copy is not needed: measured
    /// best is pwrite to the backing file in runs, or a copy into the mapping where the file is hugetlbfs.
    pub fn write_pages(&self, first: u64, present: u128, bytes: &[u8]) -> Result<(), Error> { todo!() }
    /// Asks for transparent huge pages where the file system can (MADV_HUGEPAGE); harmless elsewhere.
    pub fn advise_huge(&self) { todo!() }
}

/// All regions of a guest, in the adapter's order; the index is the region's number on the wire.
#[derive(Clone)]
pub struct GuestMemory {
    regions: Arc<[Region]>,
}

impl GuestMemory {
    pub fn new(regions: Vec<Region>) -> Self {
        Self { regions: regions.into() }
    }
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
    pub fn get(&self, region: usize) -> Option<&Region> {
        self.regions.get(region)
    }
    /// Size of all regions in bytes.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(Region::bytes).sum()
    }
}
