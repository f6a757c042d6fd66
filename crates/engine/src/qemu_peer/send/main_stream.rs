//! What goes over the main connection while a round is sent: zero pages where it has to tell them, and without channels
//! all others.
use std::cell::RefCell;

use transship_memory::{PageRange, PageSet, WindowBuffer, WindowPages};
use transship_wire::qemu::Name;

use super::{channels::Common, line::Line, plan::Zeros};
use crate::{
    Error, Rule,
    channels::{MainThread, RoundWork, Sent, Shared, Window, trim},
    free::FreePages,
    guest::RegionPages,
    scan::Pending,
};

/// The main thread in a round.
pub(crate) struct MainStream<'a> {
    /// Only it uses the line; it is borrowed for a call at a time.
    pub(crate) line: RefCell<&'a mut Line>,
    pub(crate) shared: &'a Shared,
    pub(crate) common: &'a Common,
    /// No round was sent yet.
    pub(crate) first: bool,
}

impl MainStream<'_> {
    /// Sends a round without channels.
    pub(crate) fn send(
        &self,
        work: &RoundWork<'_>,
        free: &mut FreePages,
        buffer: &mut WindowBuffer,
    ) -> Result<(Sent, Vec<RegionPages>), Error> {
        let (mut sent, mut new_holes) = (Sent::default(), Vec::new());
        for (region, pending) in work.pending.iter().enumerate() {
            self.tells_holes(region, pending)?;
            for windows in pending.batches() {
                for pages in trim(self.shared, work, region, windows, free, self, &mut new_holes)? {
                    let mut window = Window::new(work.round, region, pages);
                    let read = self.shared.read(&mut window, buffer)?;
                    self.tell_found(&window)?;
                    self.shared.settle(&window, &mut sent);
                    let present = read.present();
                    let mut line = self.line.borrow_mut();
                    for (page, bytes) in present.iter().zip(read.into_bytes().as_chunks().0) {
                        line.writer.page(&self.common.names[region], page.offset(), bytes);
                    }
                    line.flush_pieces()?;
                }
            }
        }
        Ok((sent, new_holes))
    }

    /// Tells the zero pages of a window that was looked at, if it is to be told here.
    fn tell_found(&self, window: &Window) -> Result<(), Error> {
        if self.common.zeros == Zeros::InPackets {
            return Ok(());
        }
        let found = window.zero.unwrap_or(0);
        let had = self.shared.content[window.region].window(window.first);
        self.tell_zeros(window.region, window.pages(if self.first { found } else { found & had }))
    }

    fn tell_zeros(&self, region: usize, zero: WindowPages) -> Result<(), Error> {
        zero.runs().try_for_each(|run| self.tell_range(region, run))
    }

    fn tell_range(&self, region: usize, range: PageRange) -> Result<(), Error> {
        let name: &Name = &self.common.names[region];
        let mut line = self.line.borrow_mut();
        for page in range.iter() {
            line.writer.zero_page(name, page.offset());
            line.flush_pieces()?;
        }
        Ok(())
    }
}

impl MainThread for MainStream<'_> {
    fn check(&self) -> Result<(), Error> {
        if self.shared.failure.is_over() {
            return Err(Error::breach(&self.shared.peer, Rule::Stays, "broke a channel"));
        }
        self.check_at_the_end()
    }

    fn check_at_the_end(&self) -> Result<(), Error> {
        if self.shared.progress.is_cancelled() {
            return Err(Error::CANCELLED);
        }
        self.line.borrow_mut().check_silence()
    }

    /// What a channel has to say is closer to the cause than that the whole has ended.
    fn reason(&self) -> Option<Error> {
        None
    }

    /// Where it does, it tells in the first round all that is a hole: whatever the destination's memory holds, it is
    /// zero there afterwards.
    fn tells_holes(&self, region: usize, pending: &Pending) -> Result<bool, Error> {
        if self.common.zeros == Zeros::InPackets {
            return Ok(false);
        }
        let mut zero = pending.gone.clone();
        if self.first {
            zero = PageSet::full(zero.pages());
            zero.subtract(&pending.send);
        }
        for range in zero.ranges() {
            self.shared.content[region].take(range).for_each(drop);
            self.tell_range(region, range)?;
        }
        Ok(true)
    }

    /// A channel gets what is not zero, so that each page is in one place only until the barrier.
    fn look(&self, window: &Window, buffer: &mut WindowBuffer) -> Result<Option<u128>, Error> {
        if self.common.zeros == Zeros::InPackets {
            return Ok(None);
        }
        let mut window = *window;
        self.shared.read(&mut window, buffer)?;
        self.tell_found(&window)?;
        Ok(window.zero)
    }

    fn left_out(&self, region: usize, pages: WindowPages) -> Result<(), Error> {
        // Later the destination has what it was sent before, or zeros.
        if self.common.zeros == Zeros::OnMain && self.first { self.tell_zeros(region, pages) } else { Ok(()) }
    }
}
