//! Pages of a window that are read once: whoever looks at them, encodes them and sends them has the same bytes.
//!
//! ```text
//!   private memory ─► copied, zeros left out ────────► encoded, or sent
//!   shared files ───► left in the mapping, looked at ─► copied and encoded, or sent
//! ```
//!
//! A page of a file can be copied as well (pread), and is then not mapped. Timed in moves of 512 MiB, that takes as
//! much CPU time: the page is copied twice on its way to the socket, and that costs what the mapping does. Where it is
//! copied anyway, it takes less ([`FileQueue::write_window`](crate::FileQueue::write_window)).
use std::{io, mem, ops::Range, os::fd::BorrowedFd};

use rustix::io::Errno;

use crate::{
    Error, PAGE_BYTES, PageBuffer, PageCount, Region, WINDOW_PAGES,
    region::Held,
    shared::Shared,
    slots::Slot,
    window::{WindowPages, low_bits},
    zero,
};

/// Pages that are copied and looked at before the next are, 128 KiB: the copy is still in the core's cache then.
pub(crate) const AT_ONCE: PageCount = PageCount::new(32);

/// Room for the pages of a window. One thread uses it again and again, so that it stays in its core's cache.
#[derive(Default)]
pub struct WindowBuffer {
    room: Room,
    /// How much of it was read last.
    filled: usize,
}

enum Room {
    /// As long as a window, once something was read.
    Own(Option<PageBuffer>),
    /// Of another process, too.
    Slot(Slot),
}

impl Default for Room {
    fn default() -> Self {
        Self::Own(None)
    }
}

impl WindowBuffer {
    pub(crate) fn in_slot(slot: Slot) -> Self {
        Self { room: Room::Slot(slot), filled: 0 }
    }

    /// What [`WindowRead::into_bytes`] returned last; nothing if a window was read since.
    pub fn bytes(&self) -> &[u8] {
        self.first(self.filled)
    }

    fn first(&self, bytes: usize) -> &[u8] {
        match &self.room {
            Room::Own(room) => room.as_ref().map_or(&[], |room| &room.bytes()[..bytes]),
            Room::Slot(slot) => slot.filled(bytes),
        }
    }

    pub(crate) fn room(&mut self) -> &mut [u8] {
        match &mut self.room {
            Room::Own(room) => room.get_or_insert_with(|| PageBuffer::new(WINDOW_PAGES.index())).bytes_mut(),
            Room::Slot(slot) => slot.room(),
        }
    }
}

/// Pages of a window that were read, but for those that were found to be zero.
pub struct WindowRead<'a> {
    /// The others.
    present: WindowPages,
    zero: u128,
    buffer: &'a mut WindowBuffer,
    /// Where they are: none, in the buffer, one behind the other.
    mapped: Option<&'a Shared>,
}

/// Where the pages of a [`WindowRead`] are, to be sent.
pub(crate) enum Parts<'a> {
    /// In a mapping.
    Mapped(&'a Shared),
    /// Copied, one behind the other.
    Copied(&'a [u8]),
}

impl Region {
    /// Reads the wanted pages. If told so it looks for those that are all zero, which are then left out. A page that is
    /// written meanwhile may be called either way; the tracker reports it.
    ///
    /// # Errors
    /// OutOfRange; of private memory the system's own.
    pub fn read_window<'a>(
        &'a self,
        wanted: WindowPages,
        look_for_zeros: bool,
        buffer: &'a mut WindowBuffer,
    ) -> Result<WindowRead<'a>, Error> {
        self.check_window(wanted)?;
        buffer.filled = 0;
        let (zero, mapped) = match &self.held {
            Held::Shared(shared) => {
                // Run by run: reading between them might make pages in holes.
                wanted.runs().for_each(|run| shared.populate_read(run));
                (if look_for_zeros { shared.zero_mask(wanted) } else { 0 }, Some(shared))
            }
            Held::Private(_) => {
                let copied = &mut buffer.room()[..wanted.bytes() as usize];
                let zero = self.read_into(wanted, look_for_zeros, copied)?;
                close_up(wanted, zero, copied);
                (zero, None)
            }
        };
        Ok(WindowRead { present: wanted.without(zero), zero, buffer, mapped })
    }

    /// Copies pages that the region has to `into`, which is as long, and looks for those that are all zero if told so:
    /// the mask of these. None is mapped.
    pub(crate) fn read_into(&self, wanted: WindowPages, look: bool, mut into: &mut [u8]) -> Result<u128, Error> {
        let mut zero = 0;
        for part in wanted.parts(if look { AT_ONCE } else { WINDOW_PAGES }) {
            let (now, later) = into.split_at_mut(part.bytes() as usize);
            let read = match &self.held {
                Held::Shared(shared) => read_file(shared.file(), shared.file_offset(), part, now),
                Held::Private(private) => private.read_into(part, now),
            };
            read.map_err(|source| self.unread(source))?;
            zero |= if look { zero::mask(part, now) } else { 0 };
            into = later;
        }
        Ok(zero)
    }
}

impl<'a> WindowRead<'a> {
    /// Those that were found to be zero.
    pub fn zero_mask(&self) -> u128 {
        self.zero
    }

    /// All others.
    pub fn present(&self) -> WindowPages {
        self.present
    }

    /// Their bytes, in their order, which change no more. Of a mapping they are copied now.
    pub fn into_bytes(self) -> &'a [u8] {
        let Self { present, buffer, mapped, .. } = self;
        let filled = present.bytes() as usize;
        if let Some(shared) = mapped {
            shared.copy_runs(present, &mut buffer.room()[..filled]);
        }
        buffer.filled = filled;
        buffer.bytes()
    }

    /// Appends some of them to `out`, which are copied once more.
    ///
    /// # Panics
    /// They are not all present.
    pub fn copy_out(&self, pages: WindowPages, out: &mut Vec<u8>) {
        self.check(pages);
        match self.parts() {
            Parts::Mapped(shared) => shared.copy_out(pages, out),
            Parts::Copied(bytes) => {
                self.places(pages).for_each(|place| out.extend_from_slice(&bytes[place]));
            }
        }
    }

    /// Copies some of them once more, one behind the other.
    ///
    /// # Panics
    /// They are not all present, or `into` is not as long as they are.
    pub fn copy_to(&self, pages: WindowPages, into: &mut [u8]) {
        self.check(pages);
        assert_eq!(into.len() as u64, pages.bytes(), "room for the pages, no more and no less");
        match self.parts() {
            Parts::Mapped(shared) => shared.copy_runs(pages, into),
            Parts::Copied(bytes) => {
                let mut rest = into;
                for place in self.places(pages) {
                    let (now, later) = mem::take(&mut rest).split_at_mut(place.len());
                    now.copy_from_slice(&bytes[place]);
                    rest = later;
                }
            }
        }
    }

    pub(crate) fn parts(&self) -> Parts<'_> {
        self.mapped.map_or_else(|| Parts::Copied(self.buffer.first(self.present.bytes() as usize)), Parts::Mapped)
    }

    /// Where the bytes of some of them are in the copy, run by run.
    pub(crate) fn places(&self, pages: WindowPages) -> impl Iterator<Item = Range<usize>> + use<> {
        places(self.present, pages)
    }

    pub(crate) fn check(&self, pages: WindowPages) {
        let known = pages.first == self.present.first && pages.mask & !self.present.mask == 0;
        assert!(known, "{pages:?} were read, and are not zero");
    }
}

/// Closes up the pages, without those that are zero.
fn close_up(wanted: WindowPages, zero: u128, copied: &mut [u8]) {
    let mut end = 0;
    for place in places(wanted, wanted.without(zero)) {
        let len = place.len();
        if place.start > end {
            copied.copy_within(place, end);
        }
        end += len;
    }
}

/// Reads pages of a region from a file in which it begins at byte `begin`, one behind the other.
pub(crate) fn read_file(file: BorrowedFd<'_>, begin: u64, wanted: WindowPages, mut into: &mut [u8]) -> io::Result<()> {
    for run in wanted.runs() {
        let (mut now, later) = into.split_at_mut(run.bytes() as usize);
        let mut at = begin.saturating_add(run.first.offset());
        while !now.is_empty() {
            match rustix::io::pread(file, &mut *now, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => (now, at) = (&mut now[read..], at + read as u64),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        into = later;
    }
    Ok(())
}

/// Where some of the pages are among the bytes of all, run by run.
pub(crate) fn places(all: WindowPages, some: WindowPages) -> impl Iterator<Item = Range<usize>> {
    some.runs().map(move |run| {
        let before = all.mask & low_bits(run.first.since(all.first).get());
        let start = before.count_ones() as usize * PAGE_BYTES;
        start..start + run.bytes() as usize
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels copy pages to it at full speed then: see [`PageBuffer`].
    #[test]
    fn a_window_is_copied_to_the_start_of_a_page() {
        let mut buffer = WindowBuffer::default();
        assert!(buffer.room().as_ptr().addr().is_multiple_of(PAGE_BYTES));
        assert_eq!(buffer.room().len(), WINDOW_PAGES.buffer_bytes());
    }
}
