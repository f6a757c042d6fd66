//! Guest memory that its process shares with nobody, and that can't be mapped here: every byte is copied by the kernel.

use std::{io, os::fd::BorrowedFd, sync::Arc};

use crate::{
    ByteRange, Keep, PAGE_BYTES, PageCount, PageNumber, PageRange, PageSet, Process, process::Span, shared::Shared,
    window::WindowPages,
};

/// Pages that cost as much to look at as to ask about what is behind them alone.
const SMALL_GAP: PageCount = PageCount::new(512);

/// Where a region is in its process.
pub(crate) struct Private {
    pub(crate) process: Arc<Process>,
    /// Of its first page.
    pub(crate) address: u64,
    pub(crate) page_bytes: u64,
    /// The file whose content shows where the process has not written.
    pub(crate) below: Option<Shared>,
    pub(crate) keep: Keep,
}

impl Private {
    fn span(&self, pages: PageRange) -> Span {
        Span { address: self.address_of(pages.first), len: pages.bytes() as usize }
    }

    pub(crate) fn address_of(&self, page: PageNumber) -> u64 {
        self.address + page.offset()
    }

    fn addresses_of(&self, pages: PageRange) -> ByteRange {
        ByteRange { start: self.address_of(pages.first), end: self.address_of(pages.end()) }
    }

    /// The pages that lie at what was found, of those that were looked for.
    fn pages_at(&self, found: ByteRange, looked_for: ByteRange) -> PageRange {
        let end = found.end.min(looked_for.end);
        PageNumber::at(found.start - self.address).to(PageNumber::at(end - self.address))
    }

    fn spans(&self, pages: WindowPages) -> Vec<Span> {
        pages.runs().map(|run| self.span(run)).collect()
    }

    /// Calls `found` with the pages of the range that the process has, in their order.
    pub(crate) fn each_there(&self, range: PageRange, mut found: impl FnMut(PageRange)) -> io::Result<()> {
        let addresses = self.addresses_of(range);
        self.process.pages_there(addresses, |there| found(self.pages_at(there, addresses)))
    }

    /// Adds the pages that the process has mapped, be it only to read zeros.
    pub(crate) fn add_mapped(&self, into: &mut PageSet) -> io::Result<()> {
        let addresses = self.addresses_of(PageRange::all(into.pages()));
        self.process.pages_mapped(addresses, |mapped| into.insert(self.pages_at(mapped, addresses)))
    }

    /// The pages that the process has written, where everything else shows a file.
    pub(crate) fn own(&self, pages: PageCount) -> io::Result<PageSet> {
        let mut own = PageSet::empty(pages);
        let addresses = self.addresses_of(PageRange::all(pages));
        self.process.own_pages(addresses, |its_own| own.insert(self.pages_at(its_own, addresses)))?;
        Ok(own)
    }

    /// Adds the pages of the range that are not known to read as zero.
    pub(crate) fn add_data(&self, range: PageRange, data: &mut PageSet) -> io::Result<()> {
        self.each_there(range, |there| data.insert(there))
    }

    /// Whether all pages of the range are there.
    pub(crate) fn are_there(&self, range: PageRange) -> io::Result<bool> {
        let mut count = PageCount::ZERO;
        self.each_there(range, |there| count += there.count)?;
        Ok(count == range.count)
    }

    /// As [`Private::add_data`], in the wanted pages and between those that are near each other.
    pub(crate) fn add_data_near(&self, wanted: &PageSet, data: &mut PageSet) -> io::Result<()> {
        wanted.ranges_near(SMALL_GAP).try_for_each(|range| self.add_data(range, data))
    }

    /// Reads the pages to the end of `out`.
    pub(crate) fn append(&self, pages: WindowPages, out: &mut Vec<u8>) -> io::Result<()> {
        let before = out.len();
        out.resize(before + pages.bytes() as usize, 0);
        let read = self.read_into(pages, &mut out[before..]);
        if read.is_err() {
            out.truncate(before);
        }
        read
    }

    /// Copies the pages to `into`, which is as long.
    pub(crate) fn read_into(&self, pages: WindowPages, into: &mut [u8]) -> io::Result<()> {
        self.process.read(&self.spans(pages), into)
    }

    pub(crate) fn read(&self, pages: PageRange, into: &mut [u8]) -> io::Result<()> {
        self.process.read(&[self.span(pages)], into)
    }

    pub(crate) fn write(&self, pages: PageRange, bytes: &[u8]) -> io::Result<()> {
        self.process.write(self.address_of(pages.first), bytes)
    }

    /// Writes zeros to pages, also where there are none.
    pub(crate) fn write_zeros(&self, pages: PageRange) -> io::Result<()> {
        const ZEROS: &[u8] = &[0; 64 * PAGE_BYTES];
        let most = PageCount::within(ZEROS.len() as u64);
        for part in pages.parts(most) {
            self.write(part, &ZEROS[..part.bytes() as usize])?;
        }
        Ok(())
    }

    /// That file, and where in it the memory begins.
    pub(crate) fn file_below(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.below.as_ref().map(|below| (below.file(), below.file_offset()))
    }

    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.below.as_ref().map(Shared::file)
    }
}
