//! The pages of a window that are not zero, into a file.
//!
//! ```text
//!   mapped ─► looked at in the mapping ─────────────────────────────────► written from there
//!   copied ─► behind the last request's pages, and looked at there ─────► written from there
//!                                      └─ what comes after a zero page ─► moved to a request of its own
//! ```
use std::mem;

use super::{
    FileQueue, REQUEST_PAGES,
    request::{Direction, Request},
};
use crate::{Error, PageCount, PageNumber, PageRange, read, window::WindowPages};

impl FileQueue {
    /// As [`FileQueue::write`], of those pages of a window that are not all zero, each where it belongs if the region's
    /// page 0 is at byte `offset` of the file: the mask of those that are. `copied`: no page is mapped, and what is
    /// written later than this call is not in the file; private memory is always copied.
    ///
    /// # Errors
    /// As there; of private memory the system's own.
    pub fn write_window(
        &mut self,
        region: usize,
        wanted: WindowPages,
        offset: u64,
        copied: bool,
    ) -> Result<u128, Error> {
        let of = self.region(region)?;
        of.check_window(wanted)?;
        let at = |page: PageNumber| offset.saturating_add(page.offset());
        let mut zero = 0;
        if copied || of.is_private() {
            for run in wanted.runs() {
                let mut rest = run;
                while !rest.count.is_zero() {
                    let (some, found) = self.copy_some(region, rest, wanted.first, at)?;
                    zero |= found;
                    rest = some.end().to(rest.end());
                }
            }
        } else {
            wanted.runs().for_each(|run| of.populate_read(run));
            zero = of.zero_mask(wanted)?;
            for run in wanted.without(zero).runs() {
                self.ask(Direction::Write, region, run, at(run.first), None)?;
            }
        }
        Ok(zero)
    }

    /// Copies the first of these pages, as many as one request takes. Which they are, and the mask of the zero pages
    /// among them in the window from page `first` on.
    fn copy_some(
        &mut self,
        region: usize,
        pages: PageRange,
        first: PageNumber,
        at: impl Fn(PageNumber) -> u64,
    ) -> Result<(PageRange, u128), Error> {
        self.check_failed()?;
        let next = Request::of_pages(Direction::Write, region, pages.first.run(PageCount::ZERO), at(pages.first));
        let continued = self.pending.take_if(|pending| pending.is_continued_by(&next, true));
        let continues = continued.is_some();
        let mut request = match continued {
            Some(request) => request,
            None => next.through(self.spare().take()),
        };
        let some = pages.first.run(pages.count.min(REQUEST_PAGES.saturating_sub(request.pages())));
        let read = WindowPages::within(some, first);
        let room = request.room_behind(some.count).expect("a full request is not kept");
        let found = self.region(region).and_then(|of| of.read_into(read, true, room));
        // What could not be read is not written, and what was asked for before still is.
        let data = read.without(*found.as_ref().unwrap_or(&u128::MAX));
        let head = data.runs().next().filter(|run| run.first == some.first).map_or(PageCount::ZERO, |run| run.count);
        let behind = data.without(WindowPages::within(some.first.run(head), first).mask);
        let mut moved = mem::take(&mut self.moved);
        if !behind.is_empty() {
            moved.room()[..room.len()].copy_from_slice(room);
        }
        request.extend(head);
        if request.pages().is_zero() {
            let room = request.into_spare();
            self.spare().give(room);
        } else {
            if !continues {
                self.flush()?;
            }
            self.pending = Some(request);
        }
        for (run, place) in behind.runs().zip(read::places(read, behind)) {
            self.ask(Direction::Write, region, run, at(run.first), Some(&moved.room()[place]))?;
        }
        self.moved = moved;
        if self.pending.as_ref().is_some_and(|pending| pending.pages() == REQUEST_PAGES) {
            self.flush()?;
        }
        Ok((some, found?))
    }
}
