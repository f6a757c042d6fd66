//! The data of a file that can seek it (SEEK_DATA, SEEK_HOLE), found by all cores where there is much to look at.
use std::sync::{Mutex, PoisonError};

use rustix::{fs::SeekFrom, io::Errno};

use crate::{ByteRange, Error, PageCount, PageNumber, PageRange, PageSet, all_cores, shared::Shared};

/// The unit of `st_blocks`, in bytes: stat(2).
const STAT_BLOCK: u64 = 512;
/// What a thread takes at once: a millisecond's work.
const PIECE: PageCount = PageCount::new(16384);

impl Shared {
    /// The data within the ranges.
    pub(crate) fn seek_data(&self, ranges: impl IntoIterator<Item = PageRange>) -> Result<PageSet, Error> {
        if self.has_no_hole() {
            let mut data = PageSet::empty(self.pages());
            ranges.into_iter().for_each(|range| data.insert(range));
            return Ok(data);
        }
        // Where pages can't be counted, the end of data is only found by a look at all of it: once is enough.
        let countable = self.count_data(PageRange::all(PageCount::ONE)).is_some();
        let most = if countable { PIECE } else { self.pages() };
        let pieces: Vec<PageRange> = ranges.into_iter().flat_map(|range| range.parts(most)).collect();
        let data = Mutex::new(PageSet::empty(self.pages()));
        let found = |pages| data.lock().unwrap_or_else(PoisonError::into_inner).insert(pages);
        all_cores::work("seek", &pieces, || (), |(), piece| self.seek_within(*piece, found))?;
        Ok(data.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the file of a tmpfs takes up as much as it is long, as that of a guest does which has used all of it.
    /// This costs one call. To count the pages takes a tenth of the time that reading them does. Pages that were
    /// allocated and never written are taken for data here; a file on a disk may take up more than what it holds.
    pub(crate) fn has_no_hole(&self) -> bool {
        let end = self.part_of_file(PageRange::all(self.pages())).end;
        self.is_on_tmpfs()
            && rustix::fs::fstat(self.file())
                .is_ok_and(|stat| stat.st_blocks as u64 * STAT_BLOCK >= end.max(stat.st_size as u64))
    }

    /// The ranges between pages of `known`.
    pub(crate) fn between(&self, known: &PageSet) -> Vec<PageRange> {
        let mut at = PageNumber::FIRST;
        let mut between = Vec::new();
        for range in known.ranges().chain([PageRange::all(self.pages()).end().run(PageCount::ZERO)]) {
            between.push(at.to(range.first));
            at = range.end();
        }
        between
    }

    /// Calls `found` with the data within a range, in its order.
    fn seek_within(&self, within: PageRange, found: impl Fn(PageRange)) -> Result<(), Error> {
        let ByteRange { start, end } = self.part_of_file(within);
        let mut at = start;
        while at < end {
            let first = match self.next_data(at, end) {
                Ok(Some(first)) => first,
                Ok(None) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    found(within);
                    break;
                }
                Err(source) => return Err(self.failed("find the holes", source)),
            };
            let page = PageNumber::at(first - self.file_offset());
            let sure = self.data_from(page.to(within.end()));
            let from = self.offset_in_file(page + sure);
            let hole = match (from < end).then(|| rustix::fs::seek(self.file(), SeekFrom::Hole(from.max(first)))) {
                None => end,
                Some(Ok(hole)) if hole > first => hole.min(end),
                // It was a hole again by the time of the second question, or the file was cut short.
                Some(Ok(_) | Err(Errno::NXIO)) => from.max(first + 1),
                Some(Err(source)) => return Err(self.failed("find the holes", source)),
            };
            found(page.to(PageNumber::behind(hole - self.file_offset())));
            at = hole;
        }
        Ok(())
    }

    /// Where the next data of the file is, from `at` on and before `end`.
    pub(crate) fn next_data(&self, at: u64, end: u64) -> Result<Option<u64>, Errno> {
        // Moves the file's position, which may be shared with the VMM; nobody reads or writes memory by position.
        match rustix::fs::seek(self.file(), SeekFrom::Data(at)) {
            Ok(data) => Ok(Some(data).filter(|data| *data < end)),
            Err(Errno::NXIO) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// How many pages from the first one on are surely data, up to the end of the range. Seeking the hole behind them
    /// alone would look at all data up to the next hole, wherever that is.
    fn data_from(&self, range: PageRange) -> PageCount {
        const FIRST_LOOK: PageCount = PageCount::new(64);
        let (mut sure, mut look) = (PageCount::ZERO, FIRST_LOOK);
        while sure < range.count {
            let next = (range.first + sure).run(look.min(range.count - sure));
            if self.count_data(next) != Some(next.count) {
                break;
            }
            sure += next.count;
            look = look * 2;
        }
        sure
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

    use super::*;
    use crate::Access;

    const PAGES: u64 = 16;

    /// A part of a file of twice its size.
    fn half(first: u64) -> Shared {
        let file = memfd_create("half", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 2 * PAGES * 4096).unwrap();
        Shared::map("half", file, ByteRange::sized(first * 4096, PAGES * 4096), Access::ReadWrite).unwrap()
    }

    /// By page of the file.
    fn write(shared: &Shared, first: u64, pages: u64) {
        let bytes = vec![7; pages as usize * 4096];
        assert_eq!(rustix::io::pwrite(shared.file(), &bytes, first * 4096), Ok(bytes.len()));
    }

    #[test]
    fn what_is_full_is_all_data_until_a_page_is_given_back() {
        for first in [0, PAGES] {
            let shared = half(first);
            write(&shared, 0, 2 * PAGES - 1);
            assert!(!shared.has_no_hole(), "a page is missing");
            write(&shared, 2 * PAGES - 1, 1);
            assert!(shared.has_no_hole());
            let all = PageRange::all(PageCount::new(PAGES));
            assert_eq!(shared.data().unwrap(), PageSet::full(PageCount::new(PAGES)));
            let wanted = PageNumber::at(3 * 4096).run(PageCount::new(2));
            assert_eq!(shared.seek_data([wanted]).unwrap().ranges().collect::<Vec<_>>(), [wanted]);
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(shared.file(), punch, (first + 5) * 4096, 4096).unwrap();
            assert!(!shared.has_no_hole());
            let mut rest = PageSet::empty(all.count);
            rest.insert(PageNumber::FIRST.run(PageCount::new(5)));
            rest.insert(PageNumber::at(6 * 4096).to(all.end()));
            assert_eq!(shared.data().unwrap(), rest);
        }
    }

    #[test]
    fn pages_elsewhere_in_the_file_fill_no_hole() {
        let shared = half(0);
        write(&shared, PAGES, PAGES);
        assert!(!shared.has_no_hole());
        assert_eq!(shared.data().unwrap(), PageSet::empty(PageCount::new(PAGES)));
    }
}
