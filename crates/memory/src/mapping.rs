//! Ownership of a shared mapping of a file.

use std::{ffi::c_void, os::fd::BorrowedFd, ptr};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A shared mapping, unmapped on drop.
///
/// No reference into it may ever exist: the guest, the VMM, or another thread of ours may write any byte at any moment.
/// So it hands out raw pointers only, and only to whole stretches that it has:
/// - `base .. base + len` is mapped from `new` until `drop`, readable, and writable if it was made so; nobody else
///   unmaps it;
/// - the pointer of `at(offset, len)` is good for `len` bytes as long as the mapping lives;
/// - whoever uses it copies bytes with raw or volatile accesses and takes none of them for stable.
///
/// If the file is cut short meanwhile, an access is answered with SIGBUS. That is accepted: the VMM, which uses
/// the same file as the memory of a guest, would die of the same; it is no way for a peer to reach us.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: the address is as good in another thread, and unmapping is allowed from any.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only raw pointers are to be had. Their users make no references and take no byte
// for stable, so that threads of ours that meet at one page are to each other what the guest is to them all.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, both multiples of its page size. Takes no huge page from a pool, and
    /// has none set aside.
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, len: usize, writable: bool) -> rustix::io::Result<Self> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        Self::with(file, offset, len, prot, MapFlags::NORESERVE)
    }

    /// Has the pool of a hugetlbfs set aside pages for all holes there, for whoever touches them. They stay so when
    /// this is gone.
    pub(crate) fn reserve(file: BorrowedFd<'_>, offset: u64, len: usize) -> rustix::io::Result<()> {
        Self::with(file, offset, len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::empty()).map(drop)
    }

    fn with(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        prot: ProtFlags,
        more: MapFlags,
    ) -> rustix::io::Result<Self> {
        // SAFETY: the kernel picks an unused place, so no memory of anybody else is affected.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED | more, file, offset)? };
        let mapping = Self { base, len };
        // SAFETY: exactly what was mapped; it says only that a core dump leaves this out, because it is a guest's.
        unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontDump)? };
        Ok(mapping)
    }

    /// Pages that are looked at here don't count as used by that, for a kernel that looks for pages to swap out. It
    /// would note that page by page when this is unmapped. Not for a file on a disk, which would be read ahead.
    pub(crate) fn leave_no_mark(&self) -> rustix::io::Result<()> {
        // SAFETY: exactly what was mapped; the advice changes nothing in it.
        unsafe { rustix::mm::madvise(self.base, self.len, Advice::Sequential) }
    }

    /// Address of `len` bytes from `offset`; none if the mapping does not have them.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = len <= self.len && offset <= self.len - len;
        inside.then(|| self.base.cast::<u8>().wrapping_add(offset))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what new() mapped; pointers from at() are not used after the mapping's life.
        let unmapped = unsafe { rustix::mm::munmap(self.base, self.len) };
        debug_assert!(unmapped.is_ok(), "unmap memory");
    }
}

/// Addresses of ours where there is nothing, and where nobody maps anything.
pub(crate) struct Reserved {
    mapping: Mapping,
}

impl Reserved {
    pub(crate) fn new(len: usize) -> rustix::io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel picks an unused place, so no memory of anybody else is affected.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags)? };
        Ok(Self { mapping: Mapping { base, len } })
    }

    /// The first address, which can't be read.
    pub(crate) fn start(&self) -> *const u8 {
        self.mapping.base.cast()
    }
}
