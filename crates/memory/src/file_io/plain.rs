//! One request after the other, by pwrite and pread.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::{
    Turns,
    request::{Direction, Next, Request, RequestFailure},
};
use crate::GuestMemory;

/// Does what is left of the request, in its turn if there are any.
pub(super) fn transfer(
    memory: &GuestMemory,
    file: BorrowedFd<'_>,
    request: &mut Request,
    turns: Option<&Turns>,
) -> Result<(), RequestFailure> {
    loop {
        let turn = turns.map(Turns::wait);
        let answer = once(memory, file, request);
        drop(turn);
        match request.answered(answer, memory, file) {
            Next::Done => return Ok(()),
            Next::Again => {}
            Next::Failed(failure) => return Err(failure),
        }
    }
}

/// As much as the kernel does in one call.
fn once(memory: &GuestMemory, file: BorrowedFd<'_>, request: &mut Request) -> Result<usize, Errno> {
    let direction = request.direction();
    let offset = request.offset() as libc::off_t;
    let (start, len) = request.rest(memory);
    let moved = match direction {
        // SAFETY: rest() gives len bytes of a mapping, which `memory` keeps, or of a buffer that the request has or
        // holds; all outlive the call. The kernel copies from there; if the guest writes meanwhile, any mix of bytes is
        // good.
        Direction::Write => unsafe { libc::pwrite(file.as_raw_fd(), start.cast(), len, offset) },
        // SAFETY: as above; the bytes may be written: read() saw that the region is mapped for writing, and of a
        // mapping there are only raw pointers, so nobody takes its bytes for stable.
        Direction::Read => unsafe { libc::pread(file.as_raw_fd(), start.cast(), len, offset) },
    };
    usize::try_from(moved).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
