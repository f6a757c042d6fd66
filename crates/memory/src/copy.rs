//! Pages of a window of a region, looked at, copied and written.
//!
//! Here any page may be the first of a window.

use std::{
    cell::RefCell,
    io, ptr,
    sync::{MutexGuard, PoisonError, TryLockError},
};

use rustix::io::Errno;

use crate::{
    Error, PAGE_BYTES, PageCount, PageRange, Region, WindowBuffer, region::Held, shared::Shared, window::WindowPages,
    zero,
};

thread_local! {
    /// Private pages that are only looked at, for a moment.
    static LOOKED_AT: RefCell<WindowBuffer> = RefCell::new(WindowBuffer::default());
}

impl Region {
    /// Of the wanted pages: the mask of those that are all zero. SIMD at the machine's width. A page that is written
    /// meanwhile may be called either way; the tracker reports it.
    ///
    /// # Errors
    /// OutOfRange; of private memory the system's own.
    pub fn zero_mask(&self, wanted: WindowPages) -> Result<u128, Error> {
        self.check_window(wanted)?;
        match &self.held {
            Held::Shared(shared) => Ok(shared.zero_mask(wanted)),
            Held::Private(_) => LOOKED_AT
                .with_borrow_mut(|window| self.read_into(wanted, true, &mut window.room()[..wanted.bytes() as usize])),
        }
    }

    /// Appends the present pages to `out`, which are copied once. What comes out may mix bytes from before and after a
    /// write of the guest, but does not change any more.
    ///
    /// # Errors
    /// OutOfRange; of private memory the system's own. `out` is then as it was.
    pub fn copy_out(&self, present: WindowPages, out: &mut Vec<u8>) -> Result<(), Error> {
        self.check_window(present)?;
        match &self.held {
            Held::Shared(shared) => shared.copy_out(present, out),
            Held::Private(private) => return private.append(present, out).map_err(|e| self.unread(e)),
        }
        Ok(())
    }

    /// Copies the pages into memory of our own, once, as [`Region::copy_out`] does.
    ///
    /// # Errors
    /// OutOfRange; of private memory the system's own.
    ///
    /// # Panics
    /// `into` is not as long as the pages.
    pub fn copy_to(&self, pages: PageRange, into: &mut [u8]) -> Result<(), Error> {
        self.check(pages)?;
        assert_eq!(into.len() as u64, pages.bytes(), "room for the pages, no more and no less");
        match &self.held {
            Held::Shared(shared) => shared.copy_to(pages, into),
            Held::Private(private) => return private.read(pages, into).map_err(|e| self.unread(e)),
        }
        Ok(())
    }

    /// Writes the present pages (4096 bytes each, in their order) into place. They go through the
    /// backing file where that can be written, which is faster than faulting in a page at a time; a hugetlbfs can't.
    ///
    /// # Errors
    /// OutOfRange, WrongLength, a region mapped for reading, no memory left for them, the system's own.
    pub fn write_pages(&self, present: WindowPages, bytes: &[u8]) -> Result<(), Error> {
        self.check_writable()?;
        self.check_window(present)?;
        let pages = present.mask.count_ones();
        let expected = pages as usize * PAGE_BYTES;
        if bytes.len() != expected {
            let region = self.name().to_owned();
            return Err(Error::WrongLength { region, pages, expected, given: bytes.len() });
        }
        if let Held::Shared(shared) = &self.held {
            shared.prepare(present)?;
        }
        let mut rest = bytes;
        for pages in present.runs() {
            let (run, after) = rest.split_at(pages.bytes() as usize);
            match &self.held {
                Held::Shared(shared) => shared.write(pages, run)?,
                Held::Private(private) => {
                    private.write(pages, run).map_err(|source| self.failed("write pages", source))?;
                }
            }
            rest = after;
        }
        Ok(())
    }

    /// As [`Region::write_pages`], of pages that were checked: for those who have time, as they wait for a disk. Not on
    /// a hugetlbfs.
    pub(crate) fn write_in_turn(&self, pages: PageRange, bytes: &[u8]) -> Result<(), Errno> {
        match &self.held {
            Held::Shared(shared) => shared.write_file_in_turn(pages, bytes),
            Held::Private(private) => {
                private.write(pages, bytes).map_err(|source| Errno::from_io_error(&source).unwrap_or(Errno::IO))
            }
        }
    }

    pub(crate) fn unread(&self, source: io::Error) -> Error {
        self.failed("read pages", source)
    }

    /// # Errors
    /// The region does not have all of the pages.
    pub(crate) fn check_window(&self, pages: WindowPages) -> Result<(), Error> {
        self.check(pages.reach())
    }
}

/// What was checked: the ranges, and that the mapping is writable where it is written to.
impl Shared {
    pub(crate) fn zero_mask(&self, wanted: WindowPages) -> u128 {
        let mut zero = 0;
        for run in wanted.runs() {
            let (start, _) = self.raw(run);
            for page in 0..run.count.get() {
                // SAFETY: raw() gives the run's pages of the mapping, page is below their count, and a mapping is
                // always readable.
                let is_zero = unsafe { zero::is_zero(start.add(page as usize * PAGE_BYTES), PAGE_BYTES) };
                zero |= u128::from(is_zero) << ((run.first - wanted.first).get() + page);
            }
        }
        zero
    }

    pub(crate) fn copy_out(&self, present: WindowPages, out: &mut Vec<u8>) {
        out.reserve(present.bytes() as usize);
        for run in present.runs() {
            let (start, len) = self.raw(run);
            // SAFETY: raw() gives len readable bytes of the mapping, reserve() made room for as many, and nobody else
            // knows that room. The guest may write the source meanwhile: it is read by one raw copy into memory of our
            // own, no reference or value is made of it before, and any mix of bytes is a valid u8 array.
            unsafe {
                ptr::copy_nonoverlapping(start, out.as_mut_ptr().add(out.len()), len);
                out.set_len(out.len() + len);
            }
        }
    }

    /// Copies pages to `into`, which is as long, one behind the other.
    pub(crate) fn copy_runs(&self, pages: WindowPages, mut into: &mut [u8]) {
        for run in pages.runs() {
            let (now, later) = into.split_at_mut(run.bytes() as usize);
            self.copy_to(run, now);
            into = later;
        }
    }

    fn copy_to(&self, pages: PageRange, into: &mut [u8]) {
        let (start, len) = self.raw(pages);
        assert_eq!(into.len(), len, "room for the pages, no more and no less");
        // SAFETY: raw() gives len readable bytes of the mapping, and `into` is as long and our own. As in `copy_out`
        // the guest may write meanwhile, and no reference to its memory is made.
        unsafe { ptr::copy_nonoverlapping(start, into.as_mut_ptr(), len) };
    }

    /// Makes the pages of a window that have to be there before they are written.
    pub(crate) fn prepare(&self, present: WindowPages) -> Result<(), Error> {
        if !self.is_hugetlb() || present.is_empty() {
            return Ok(());
        }
        // At once for all: what lies between them is in the same huge pages.
        let before = PageCount::new(present.mask.trailing_zeros().into());
        self.make((present.first + before).to(present.reach().end()))
    }

    fn write(&self, pages: PageRange, bytes: &[u8]) -> Result<(), Error> {
        if self.is_hugetlb() {
            self.copy_in(pages, bytes);
            return Ok(());
        }
        self.write_file(pages, bytes)
    }

    /// Copies into the mapping. The range and that the mapping is writable were checked, and the pages are there.
    fn copy_in(&self, pages: PageRange, bytes: &[u8]) {
        let (start, len) = self.raw(pages);
        assert_eq!(bytes.len(), len, "bytes for the pages, no more and no less");
        // SAFETY: raw() gives len bytes of the mapping, which check_writable() let pass; bytes has as many. Nothing of
        // the mapping is lent as a reference, so bytes is not in it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), start, len) }
    }

    /// Whoever finds the file taken goes through the mapping: that takes more CPU time, but nobody else's.
    fn write_file(&self, pages: PageRange, bytes: &[u8]) -> Result<(), Error> {
        let written = match self.writing.try_lock() {
            Err(TryLockError::WouldBlock) if self.is_made(pages) => {
                self.copy_in(pages, bytes);
                return Ok(());
            }
            Err(TryLockError::WouldBlock) => self.write_file_in_turn(pages, bytes),
            Err(TryLockError::Poisoned(poisoned)) => self.pwrite(pages, bytes, &poisoned.into_inner()),
            Ok(turn) => self.pwrite(pages, bytes, &turn),
        };
        written.map_err(|source| self.failed("write pages", source))
    }

    /// Writes pages that were checked by way of the file, when nobody else does: for those who have time, as they wait
    /// for a disk. Not on a hugetlbfs.
    pub(crate) fn write_file_in_turn(&self, pages: PageRange, bytes: &[u8]) -> Result<(), Errno> {
        self.pwrite(pages, bytes, &self.writing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writers of one file wait for each other in the kernel, and spin there. Waiting for a turn of ours instead gives
    /// the same bytes a second for half the CPU time (0.38 s a GiB, not 0.8). The lock guards no data: a panic with it
    /// held breaks nothing.
    fn pwrite(&self, pages: PageRange, bytes: &[u8], _turn: &MutexGuard<'_, ()>) -> Result<(), Errno> {
        assert_eq!(bytes.len() as u64, pages.bytes(), "bytes for the pages, no more and no less");
        let mut offset = self.offset_in_file(pages.first);
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::io::pwrite(self.file(), rest, offset) {
                Ok(0) => return Err(Errno::NOSPC),
                Ok(written) => {
                    offset += written as u64;
                    rest = &rest[written..];
                }
                Err(Errno::INTR) => {}
                Err(source) => return Err(source),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{os::fd::AsFd, thread, time::Duration};

    use rustix::fs::MemfdFlags;

    use super::*;
    use crate::WINDOW_PAGES;
    use crate::{Access, ByteRange};

    const WINDOW_BYTES: u64 = WINDOW_PAGES.bytes();

    #[test]
    fn who_finds_the_file_taken_goes_through_the_mapping_where_there_is_room() {
        let file = rustix::fs::memfd_create("copy", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 2 * WINDOW_BYTES).unwrap();
        let region = Region::map(
            "ram",
            rustix::io::dup(&file).unwrap(),
            ByteRange::sized(0, 2 * WINDOW_BYTES),
            Access::ReadWrite,
        )
        .unwrap();
        // Behind its end no page can be made through the mapping: it would be a SIGBUS, as where a file system is full.
        rustix::fs::ftruncate(&file, WINDOW_BYTES).unwrap();
        let bytes = vec![7; WINDOW_BYTES as usize];
        thread::scope(|scope| {
            let Held::Shared(shared) = &region.held else { panic!("it was mapped") };
            let turn = shared.writing.lock().unwrap();
            let within = scope.spawn(|| region.write_pages(WindowPages::new(0, u128::MAX), &bytes));
            let behind = scope.spawn(|| region.write_pages(WindowPages::new(WINDOW_PAGES.get(), u128::MAX), &bytes));
            within.join().unwrap().unwrap();
            thread::sleep(Duration::from_millis(100)); // for a SIGBUS to come
            assert!(!behind.is_finished(), "it waits for the file");
            drop(turn);
            behind.join().unwrap().unwrap();
        });
        let mut found = vec![0; 2 * bytes.len()];
        assert_eq!(rustix::io::pread(file.as_fd(), &mut found, 0).unwrap(), found.len());
        assert!(found.iter().all(|byte| *byte == 7));
    }
}
