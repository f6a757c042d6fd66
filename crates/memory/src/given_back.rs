//! Notices pages of a file that were given back, also if they are there again.
//!
//! Punching a hole is not a write. And if the guest reads the page before anybody looks for holes, it is memory again,
//! of zeros, that no tracker reports: the kernel keeps a page's protection over the hole. But whoever punches takes the
//! page out of all mappings of the file, and whoever reads it gets it back into his own alone. So a mapping that nobody
//! reads or writes keeps note:
//!
//! ```text
//!   note   the pages that are to be read next are mapped here
//!   look   pages that were noted and are not mapped here any more were given back since, or swapped out
//! ```
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use crate::{
    Area, ByteRange, Error, PageCount, PageNumber, PageRange, PageSet, WindowPages,
    mapping::Mapping,
    pagemap::{self, By, Look},
    shared::Shared,
    sweep::sweep,
    uffd::{self, MINOR, MINOR_SHMEM},
};

/// A mapping of a region's file, with the pages in it that were noted and have been there ever since.
pub(crate) struct Noted {
    /// Gone before the mapping is: what is registered needs it.
    uffd: OwnedFd,
    mapping: Mapping,
    pagemap: BorrowedFd<'static>,
    pages: PageCount,
    unit_pages: PageCount,
}

impl Noted {
    /// Nothing is noted yet.
    ///
    /// # Errors
    /// The kernel can't (a file on a disk, or Linux before 5.14), or this process may not.
    pub(crate) fn of(shared: &Shared) -> Result<Self, Error> {
        let failed = |source| Error::system(format!("keep note of the pages of region {:?}", shared.name()), source);
        let (pages, unit_pages) = (shared.pages(), shared.unit_pages());
        let wanted = if shared.is_hugetlb() { MINOR } else { MINOR_SHMEM };
        let bytes = pages.next_multiple_of(unit_pages).bytes();
        let len = usize::try_from(bytes).expect("64-bit addresses");
        let mapping = Mapping::new(shared.file(), shared.file_offset(), len, false).map_err(|e| failed(e.into()))?;
        let _ = mapping.leave_no_mark(); // as fast as it was, if the kernel does not know that
        let uffd = uffd::create().map_err(failed)?;
        uffd::negotiate(uffd.as_fd(), wanted).map_err(failed)?;
        // Registered memory is mapped page by page, and never around a page.
        uffd::register(uffd.as_fd(), wanted, ByteRange::sized(address(&mapping), bytes)).map_err(failed)?;
        let pagemap = pagemap::own().map_err(failed)?;
        Ok(Self { uffd, mapping, pagemap, pages, unit_pages })
    }

    /// The pages that were noted and have been there since.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn look(&self) -> Result<PageSet, Error> {
        let area = Area {
            region: 0,
            first_page: PageNumber::FIRST,
            address: address(&self.mapping),
            bytes: self.pages.bytes(),
        };
        // Mostly these are few, and what the kernel has to tell takes it longer than the look.
        let mut gone = PageSet::empty(self.pages);
        sweep(self.pagemap, (Look::NotThere, By::Scan), &[area], &mut gone)?;
        let mut there = PageSet::full(self.pages);
        there.subtract(&gone);
        Ok(there)
    }

    /// Maps the pages of a range, in whole pages of the file. Those that are holes by now stay holes.
    fn map(&self, range: PageRange) -> Result<(), Error> {
        let (base, unit) = (address(&self.mapping), self.unit_pages.bytes());
        let (mut at, end) = (range.first.offset() / unit * unit, range.end().offset().next_multiple_of(unit));
        while at < end {
            let mapped = match uffd::map_present(self.uffd.as_fd(), ByteRange { start: base + at, end: base + end }) {
                // A neighbour that was noted.
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => 0,
                mapped => mapped.map_err(|source| Error::system("keep note of pages of guest memory", source))?,
            };
            // It stops at a hole, or at what is there.
            at += mapped.next_multiple_of(unit).max(unit);
        }
        Ok(())
    }
}

/// Keeps note of pages before they are read.
#[derive(Clone, Default)]
pub struct Note {
    noted: Option<Arc<Noted>>,
    there: Option<PageSet>,
}

impl Note {
    /// `there`: what need not be noted once more.
    pub(crate) fn new(noted: Arc<Noted>, there: Option<PageSet>) -> Self {
        Self { noted: Some(noted), there }
    }

    /// Takes note of pages that are to be read next. Those that are holes are not noted.
    ///
    /// # Errors
    /// The system's own. What was not noted is taken for given back the next time.
    pub fn keep(&self, windows: &[WindowPages]) -> Result<(), Error> {
        let Some(noted) = &self.noted else { return Ok(()) };
        let mut together: Option<PageRange> = None;
        for window in windows {
            let there = self.there.as_ref().map_or(0, |there| there.window(window.first));
            for run in window.without(there).runs() {
                match &mut together {
                    Some(before) if before.end() == run.first => before.count += run.count,
                    before => before.replace(run).map_or(Ok(()), |done| noted.map(done))?,
                }
            }
        }
        together.map_or(Ok(()), |last| noted.map(last))
    }
}

fn address(mapping: &Mapping) -> u64 {
    mapping.at(0, 0).expect("every mapping begins").addr() as u64
}
