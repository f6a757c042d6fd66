//! Pages of a window of a region on their way out: to a socket, a pipe or a file, without a copy of those that are left
//! in a mapping.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use crate::{PAGE_BYTES, PageCount, PageNumber, WindowRead, read::Parts, window::WindowPages};

impl WindowRead<'_> {
    /// Writes `head` and then some of the pages to a socket, pipe or file, straight from guest memory if they were left
    /// there. Goes on after short writes and interruptions.
    ///
    /// # Errors
    /// The system's own, WouldBlock of a socket with a send timeout included: an unknown part was written by then, so
    /// the stream is of no use any more.
    ///
    /// # Panics
    /// They are not all present.
    pub fn send(&self, to: BorrowedFd<'_>, head: &[u8], pages: WindowPages) -> io::Result<()> {
        self.send_as(Way::Sendmsg { flags: 0 }, to, head, pages)
    }

    /// As [`WindowRead::send`]. Over TCP, what is sent next goes apart from it: so the kernel puts no more into the
    /// link at once.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn send_apart(&self, to: BorrowedFd<'_>, head: &[u8], pages: WindowPages) -> io::Result<()> {
        self.send_as(Way::Sendmsg { flags: libc::MSG_EOR }, to, head, pages)
    }

    fn send_as(&self, way: Way, to: BorrowedFd<'_>, head: &[u8], pages: WindowPages) -> io::Result<()> {
        self.check(pages);
        let mut parts = vec![part(head.as_ptr(), head.len())];
        match self.parts() {
            Parts::Mapped(shared) => parts.extend(pages.runs().map(|run| {
                let (start, len) = shared.raw(run);
                part(start, len)
            })),
            Parts::Copied(bytes) => {
                parts.extend(self.places(pages).map(|place| part(bytes[place.clone()].as_ptr(), place.len())));
            }
        }
        // SAFETY: the parts are of slices and of a mapping, all of which live beyond this call.
        unsafe { write_all(way, to, &mut parts) }
    }

    /// Writes `bytes` to a file at `at`, and among them the pages that are present: one at each place in `bytes` that
    /// `cuts` names, in their order. So each page can have a head of its own, and need not be copied to stand behind
    /// it.
    ///
    /// # Errors
    /// The system's own.
    ///
    /// # Panics
    /// There are not as many cuts as pages, or they are not in ascending order within `bytes`.
    pub fn write_woven(&self, to: BorrowedFd<'_>, at: u64, bytes: &[u8], cuts: &[usize]) -> io::Result<()> {
        let present = self.present();
        assert_eq!(cuts.len() as u64, present.count().get(), "a cut for each page");
        let mut parts = match self.parts() {
            Parts::Mapped(shared) => {
                let page = |page: PageNumber| shared.raw(page.run(PageCount::ONE)).0.cast_const();
                woven(bytes, cuts, present.iter().map(page))
            }
            Parts::Copied(pages) => {
                woven(bytes, cuts, pages.as_chunks::<PAGE_BYTES>().0.iter().map(|page| page.as_ptr()))
            }
        };
        // SAFETY: the parts are of slices and of a mapping, all of which live beyond this call.
        unsafe { write_all(Way::Pwritev { at }, to, &mut parts) }
    }
}

/// Writes `len` bytes to a file at `at`.
///
/// # Safety
/// They are readable during the call. They may be written meanwhile.
pub(crate) unsafe fn write_at(to: BorrowedFd<'_>, at: u64, from: *const u8, len: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { write_all(Way::Pwritev { at }, to, &mut [part(from, len)]) }
}

/// What is to be written: of `bytes` up to the first cut, the first page, and so on.
fn woven(bytes: &[u8], cuts: &[usize], pages: impl Iterator<Item = *const u8>) -> Vec<libc::iovec> {
    let mut parts = Vec::with_capacity(2 * cuts.len() + 1);
    let mut begin = 0;
    for (&cut, page) in cuts.iter().zip(pages) {
        let head = &bytes[begin..cut];
        parts.extend([part(head.as_ptr(), head.len()), part(page, PAGE_BYTES)]);
        begin = cut;
    }
    let rest = &bytes[begin..];
    parts.push(part(rest.as_ptr(), rest.len()));
    parts
}

fn part(start: *const u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len }
}

/// How a file descriptor is written to.
#[derive(Clone, Copy)]
enum Way {
    /// A peer that is gone is an error, and no SIGPIPE, whatever the program does about that signal.
    Sendmsg {
        /// More than that.
        flags: libc::c_int,
    },
    Writev,
    /// At a place of a file.
    Pwritev {
        /// Where the next byte goes.
        at: u64,
    },
}

/// Writes all parts, in order. At most 257 come here (the pages of a window, each with a head, and what follows them),
/// below the 1024 of IOV_MAX.
///
/// # Safety
/// Each part is readable during the call. It may be written meanwhile.
unsafe fn write_all(mut way: Way, to: BorrowedFd<'_>, parts: &mut [libc::iovec]) -> io::Result<()> {
    let mut rest = skip(parts, 0);
    while !rest.is_empty() {
        // SAFETY: the caller's promise; skip() only shortens parts.
        match unsafe { write_some(way, to, rest) } {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                rest = skip(rest, written);
                if let Way::Pwritev { at } = &mut way {
                    *at += written as u64;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOTSOCK) => way = Way::Writev,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// # Safety
/// As [`write_all`].
unsafe fn write_some(way: Way, to: BorrowedFd<'_>, parts: &mut [libc::iovec]) -> io::Result<usize> {
    let written = match way {
        Way::Sendmsg { flags } => {
            // SAFETY: a msghdr is plain integers and pointers, for which zero means none.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = parts.as_mut_ptr();
            message.msg_iovlen = parts.len();
            // SAFETY: the message points to as many parts as it says; they are readable by the caller's promise.
            unsafe { libc::sendmsg(to.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | flags) }
        }
        // SAFETY: as many parts as said, readable by the caller's promise.
        Way::Writev => unsafe { libc::writev(to.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) },
        Way::Pwritev { at } => {
            let at = at.try_into().map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
            // SAFETY: as above.
            unsafe { libc::pwritev(to.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int, at) }
        }
    };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// The parts without their first `bytes`, and without empty ones before the first that is not.
fn skip(mut parts: &mut [libc::iovec], mut bytes: usize) -> &mut [libc::iovec] {
    while let Some(part) = parts.first_mut() {
        if bytes < part.iov_len {
            part.iov_base = part.iov_base.cast::<u8>().wrapping_add(bytes).cast();
            part.iov_len -= bytes;
            break;
        }
        bytes -= part.iov_len;
        parts = &mut parts[1..];
    }
    parts
}
