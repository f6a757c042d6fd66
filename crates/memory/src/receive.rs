//! Pages from a socket or a file straight into guest memory, without a buffer between them.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use rustix::mm::Advice;

use crate::{
    PageCount, PageRange, Region,
    pages::WINDOW_PAGES,
    region::Held,
    shared::{FAULT_AROUND_BYTES, Shared},
    window::WindowPages,
};

/// Pages that one fault maps, as the kernel comes.
const AROUND: PageCount = PageCount::within(FAULT_AROUND_BYTES as u64);

/// Where pages come from.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// What is next in a socket or pipe.
    Next(BorrowedFd<'a>),
    /// A file whose byte of this number is the first of page 0.
    File(BorrowedFd<'a>, u64),
}

impl Region {
    /// Whether [`Region::receive_window`] is faster than [`Region::write_pages`] for pages that are there already, or
    /// not. Where they are not, the mapping would cost a fault for each; private memory has no mapping here.
    pub fn receives(&self, are_there: bool) -> bool {
        match &self.held {
            Held::Shared(shared) => shared.is_hugetlb() || are_there,
            Held::Private(_) => false,
        }
    }

    /// Reads the pages of a window (4096 bytes each, in their order) from a socket or pipe into place, through the
    /// mapping. Goes on after short reads and interruptions.
    ///
    /// # Errors
    /// InvalidInput for pages that the region does not have, for one that was mapped for reading, and for private
    /// memory; nothing was read then. UnexpectedEof; no memory left; the system's own, WouldBlock of a socket with a
    /// receive timeout included: what the pages hold is unknown then. Memory that can't be had is a [`crate::Error`]
    /// inside.
    pub fn receive_window(&self, from: BorrowedFd<'_>, present: WindowPages) -> io::Result<()> {
        self.receive_from(Origin::Next(from), present)
    }

    /// As [`Region::receive_window`].
    pub(crate) fn receive_from(&self, from: Origin<'_>, present: WindowPages) -> io::Result<()> {
        let refused = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        self.check_writable().map_err(refused)?;
        self.check_window(present).map_err(refused)?;
        let Held::Shared(shared) = &self.held else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "private memory has no mapping here"));
        };
        shared.prepare(present).map_err(io::Error::other)?;
        shared.map_those_that_are_there(present)?;
        shared.receive(from, present)
    }
}

/// What was checked: the window, and that the mapping is writable.
impl Shared {
    /// Maps pages, many with one fault: the kernel maps the pages around one that is read, and on a tmpfs for writing
    /// as well. A fault in the copy out of the socket would map its own page only. Asked of the kernel by a call, so
    /// that a page that can't be had is an error and no SIGBUS.
    fn map_those_that_are_there(&self, present: WindowPages) -> io::Result<()> {
        if self.is_hugetlb() {
            return Ok(());
        }
        for PageRange { first, .. } in present.first.run(WINDOW_PAGES).parts(AROUND) {
            let block = present.mask >> (first - present.first).get() & ((1 << AROUND.get()) - 1);
            if block == 0 {
                continue;
            }
            let page = (first + PageCount::new(block.trailing_zeros().into())).run(PageCount::ONE);
            self.populate(page, Advice::LinuxPopulateRead).or_else(|error| match error {
                // Before Linux 5.14: the copy faults, page by page.
                rustix::io::Errno::INVAL => Ok(()),
                error => Err(io::Error::other(self.failed("allocate pages", error))),
            })?;
        }
        Ok(())
    }

    fn receive(&self, from: Origin<'_>, present: WindowPages) -> io::Result<()> {
        for run in present.runs() {
            let (start, len) = self.raw(run);
            let mut done = 0;
            while done < len {
                // SAFETY: raw() gives len bytes of the mapping, which is writable, and done is less; the kernel writes
                // at most as many as there are behind it. No reference to guest memory is made.
                let read = unsafe {
                    let (into, room) = (start.add(done).cast(), len - done);
                    match from {
                        Origin::Next(from) => libc::read(from.as_raw_fd(), into, room),
                        Origin::File(file, offset) => {
                            let at = offset.saturating_add(run.first.offset() + done as u64);
                            libc::pread(file.as_raw_fd(), into, room, at.cast_signed())
                        }
                    }
                };
                match usize::try_from(read) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(read) => done += read,
                    Err(_) => match io::Error::last_os_error() {
                        error if error.kind() == io::ErrorKind::Interrupted => {}
                        error => return Err(error),
                    },
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{io::Write, os::fd::AsFd, os::unix::net::UnixStream, thread};

    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::PAGE_BYTES;
    use crate::{Access, ByteRange, Error};

    const PAGES: u64 = 300;

    fn region(pages: u64) -> Region {
        let file = memfd_create("receive", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, pages * PAGE_BYTES as u64).unwrap();
        Region::map("ram", file, ByteRange::sized(0, pages * PAGE_BYTES as u64), Access::ReadWrite).unwrap()
    }

    fn contents(region: &Region) -> Vec<u8> {
        let mut bytes = vec![0; region.bytes() as usize];
        region.copy_to(PageRange::all(region.pages()), &mut bytes).unwrap();
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_comes_is_where_write_pages_would_have_put_it(
            number in 0..3_u64, mask in any::<u128>(), there in any::<u128>(), cut in 1..5000_usize,
        ) {
            let has = u128::MAX >> (128 - (PAGES - number * 128).min(128));
            let pages = WindowPages::new(number * 128, mask & has);
            let bytes: Vec<u8> = (0..pages.count().buffer_bytes()).map(|at| (at / 1000) as u8 | 1).collect();
            let (received, written) = (region(PAGES), region(PAGES));
            for region in [&received, &written] {
                let before = pages.with(there & has);
                region.write_pages(before, &vec![9; before.count().buffer_bytes()]).unwrap();
            }
            written.write_pages(pages, &bytes).unwrap();
            let (mut near, far) = UnixStream::pair().unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    bytes.chunks(cut).for_each(|piece| near.write_all(piece).unwrap());
                    near.write_all(b"next").unwrap();
                });
                received.receive_window(far.as_fd(), pages).unwrap();
                let mut next = [0; 4];
                std::io::Read::read_exact(&mut &far, &mut next).unwrap();
                assert_eq!(&next, b"next", "not a byte too many");
            });
            prop_assert!(contents(&received) == contents(&written));
        }
    }

    #[test]
    fn an_end_in_the_middle_and_memory_that_can_not_be_had_are_errors() {
        let region = region(256);
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(&[1; 5000]).unwrap();
        drop(near);
        let error = region.receive_window(far.as_fd(), WindowPages::new(0, 0b11)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        // Behind the file's end there is no page, as where a file system is full.
        ftruncate(region.file().unwrap(), 128 * PAGE_BYTES as u64).unwrap();
        let full = region.receive_window(far.as_fd(), WindowPages::new(128, 1)).unwrap_err();
        assert!(full.downcast::<Error>().unwrap().to_string().contains("remount,size="), "and no SIGBUS");
        let out_of_range = region.receive_window(far.as_fd(), WindowPages::new(256, 1)).unwrap_err();
        assert_eq!(out_of_range.kind(), io::ErrorKind::InvalidInput);
    }
}
