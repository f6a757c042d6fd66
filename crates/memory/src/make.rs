//! Making pages before they are used. Whoever writes to a page through a mapping and there is no memory for it, dies of
//! SIGBUS.

use rustix::{fs::FallocateFlags, io::Errno, mm::Advice};

use crate::{Error, PageCount, PageRange, mapping::Mapping, shared::Shared};

impl Shared {
    /// Makes the pages that are not there, as writing to them through the mapping would; what they hold stays. The
    /// range was checked.
    ///
    /// # Errors
    /// There is no memory for them; the system's own.
    pub(crate) fn make(&self, range: PageRange) -> Result<(), Error> {
        match self.populate(range, Advice::LinuxPopulateWrite) {
            // Before Linux 5.14.
            Err(Errno::INVAL) => self.allocate(range),
            made => made.map_err(|source| self.failed("allocate pages", source)),
        }
    }

    /// As [`Shared::make`], for pages that are read only.
    pub(crate) fn make_to_read(&self, range: PageRange) -> Result<(), Error> {
        match self.populate(range, Advice::LinuxPopulateRead) {
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(source) => Err(self.failed("allocate pages", source)),
        }
    }

    /// Makes sure that writing to these pages through the mapping makes none. False: it can't be had, or there are so
    /// few that it is not worth it.
    pub(crate) fn is_made(&self, range: PageRange) -> bool {
        const FEW: PageCount = PageCount::new(8);
        range.count >= FEW && self.populate(range, Advice::LinuxPopulateWrite).is_ok()
    }

    pub(crate) fn populate(&self, range: PageRange, how: Advice) -> Result<(), Errno> {
        let (start, len) = self.raw(range);
        loop {
            // SAFETY: raw() gives len bytes of the mapping; pages are made as an access would make them, and what they
            // hold stays.
            match unsafe { rustix::mm::madvise(start.cast(), len, how) } {
                Err(Errno::INTR | Errno::AGAIN) => {}
                // An access would be a SIGBUS.
                Err(Errno::FAULT) => return Err(Errno::NOSPC),
                result => return result,
            }
        }
    }

    /// Has the file allocate these pages, all of its own that have a part in them. The range was checked.
    ///
    /// # Errors
    /// As [`Shared::make`].
    pub(crate) fn allocate(&self, range: PageRange) -> Result<(), Error> {
        let (offset, bytes) = self.whole(range);
        loop {
            match rustix::fs::fallocate(self.file(), FallocateFlags::KEEP_SIZE, offset, bytes) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(source) => return Err(self.failed("allocate memory", source)),
            }
        }
    }

    /// Has the pool set aside pages for the holes of the range. The region is one of huge pages, and the range was
    /// checked.
    ///
    /// # Errors
    /// As [`Shared::make`].
    pub(crate) fn reserve(&self, range: PageRange) -> Result<(), Error> {
        let (offset, bytes) = self.whole(range);
        let len = usize::try_from(bytes).expect("64-bit addresses");
        Mapping::reserve(self.file(), offset, len).map_err(|source| self.failed("reserve huge pages", source))
    }

    /// Where the pages are in the file, rounded to its own pages: the last of a region's may be there in part only, and
    /// is nobody else's.
    pub(crate) fn whole(&self, range: PageRange) -> (u64, u64) {
        let unit = self.unit_pages();
        let (first, end) = (range.first.unit(unit), range.end().next_unit(unit));
        (self.offset_in_file(first), (end - first).bytes())
    }
}
