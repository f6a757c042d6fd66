//! The data of a file that can seek it (SEEK_DATA, SEEK_HOLE), found by all cores where there is much to look at.
use std::sync::{Mutex, PoisonError};

use rustix::{fs::SeekFrom, io::Errno};

use crate::{ByteRange, Error, PageCount, PageNumber, PageRange, PageSet, all_cores, shared::Shared};

/// What a thread takes at once: a millisecond's work.
const PIECE: PageCount = PageCount::new(16384);

impl Shared {
    /// The data within the ranges.
    pub(crate) fn seek_data(&self, ranges: impl IntoIterator<Item = PageRange>) -> Result<PageSet, Error> {
        // Where pages can't be counted, the end of data is only found by a look at all of it: once is enough.
        let countable = self.count_data(PageRange::all(PageCount::ONE)).is_some();
        let most = if countable { PIECE } else { self.pages() };
        let pieces: Vec<PageRange> = ranges.into_iter().flat_map(|range| range.parts(most)).collect();
        let data = Mutex::new(PageSet::empty(self.pages()));
        let found = |pages| data.lock().unwrap_or_else(PoisonError::into_inner).insert(pages);
        all_cores::work("seek", &pieces, || (), |(), piece| self.seek_within(*piece, found))?;
        Ok(data.into_inner().unwrap_or_else(PoisonError::into_inner))
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
            // Moves the file's position, which may be shared with the VMM; nobody reads or writes memory by position.
            let first = match rustix::fs::seek(self.file(), SeekFrom::Data(at)) {
                Ok(first) => first,
                Err(Errno::NXIO) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    found(within);
                    break;
                }
                Err(source) => return Err(self.failed("find the holes", source)),
            };
            if first >= end {
                break;
            }
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
