//! The guest's own memory: a shared file and the mapping through which the guest lives in it.
//!
//! Other processes read and write the same pages at any time, so no reference to them exists: pages are written and
//! read through volatile accesses, into and out of memory of our own.
use std::{
    ffi::c_void,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fstatfs, ftruncate, memfd_create, open, unlink},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use transship_memory::PageCount;

use super::{Error, pattern::PageWords};

/// One region.
#[derive(Debug)]
pub(super) struct Ram {
    name: String,
    file: OwnedFd,
    /// Invariant: `pages` pages from here are mapped, readable, writable and shared, until this is dropped. The file is
    /// as long, and nobody makes it shorter.
    base: NonNull<PageWords>,
    pages: PageCount,
}

// SAFETY: the mapping belongs to the process, not to a thread; all accesses are volatile and go through `&self`. Two
// accesses to one page at once may mix their words, which is no worse than what other processes do to this memory; the
// callers order them where the content matters.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    /// Makes a region of zeros, all of it a hole, in a memfd or in a file without a name in `directory`.
    pub(super) fn new(name: String, pages: PageCount, directory: Option<&Path>) -> Result<Self, Error> {
        let bytes = pages.bytes();
        let place = directory.map_or("a memfd".into(), |d| d.display().to_string());
        let system = |source: io::Error| Error::System {
            what: format!("make region {name} of {bytes} bytes in {place}"),
            source,
        };
        let file = match directory {
            None => memfd(&name, bytes),
            Some(directory) => unnamed_file(directory, bytes),
        };
        let file = file.map_err(system)?;
        let length = usize::try_from(bytes).map_err(|e| system(io::Error::other(e)))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses touches no memory that is in use.
        let base = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, &file, 0) };
        let base = base.map_err(|e| system(e.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| system(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { name, file, base, pages })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn pages(&self) -> PageCount {
        self.pages
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pages.bytes()
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    pub(super) fn write_page(&self, page: u64, from: &PageWords) {
        // SAFETY: `page` checked that it is mapped, and aligned: pages are.
        unsafe { self.page(page).write_volatile(*from) };
    }

    pub(super) fn read_page(&self, page: u64, into: &mut PageWords) {
        // SAFETY: as in write_page; any bits are words.
        *into = unsafe { self.page(page).read_volatile() };
    }

    /// A page of this region.
    fn page(&self, page: u64) -> *mut PageWords {
        assert!(page < self.pages.get(), "page {page} of {} in region {}", self.pages, self.name);
        // SAFETY: the page lies in the mapping, whose size fits usize since it was mapped.
        unsafe { self.base.as_ptr().add(page as usize) }
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, with its length; no pointer into it leaves this type, and no
        // method runs any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.bytes() as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Sealed, so that whoever gets it may rely on its size.
fn memfd(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// A file that nobody else finds. Made with a name first: not every file system of huge pages makes one without.
fn unnamed_file(directory: &Path, bytes: u64) -> io::Result<OwnedFd> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = directory.join(format!("transship-guest-{}-{number}", std::process::id()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
    unlink(&path)?;
    let block = fstatfs(&file)?.f_bsize as u64;
    if block == 0 || !bytes.is_multiple_of(block) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("not a multiple of its pages of {block} bytes"),
        ));
    }
    ftruncate(&file, bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::synthetic::pattern::PAGE_WORDS;
    use transship_memory::PAGE_BYTES;

    #[test]
    fn what_is_written_is_in_the_file() {
        for directory in [None, Some(Path::new("/dev/shm"))] {
            let ram = Ram::new("ram".into(), PageCount::new(4), directory).unwrap();
            let page = std::array::from_fn(|i| i as u64);
            ram.write_page(2, &page);
            let mut bytes = [0; PAGE_BYTES];
            rustix::io::pread(ram.file(), &mut bytes, 2 * PAGE_BYTES as u64).unwrap();
            assert!(bytes.chunks(8).zip(page).all(|(a, b)| a == b.to_ne_bytes()));
            let mut back = [1; PAGE_WORDS];
            ram.read_page(2, &mut back);
            assert_eq!(back, page);
            ram.read_page(3, &mut back);
            assert_eq!(back, [0; PAGE_WORDS]);
        }
    }

    #[test]
    #[should_panic(expected = "page 4 of 4")]
    fn there_is_no_page_behind_the_end() {
        Ram::new("ram".into(), PageCount::new(4), None).unwrap().write_page(4, &[0; PAGE_WORDS]);
    }
}
