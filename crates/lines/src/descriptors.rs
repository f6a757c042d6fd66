//! Bytes of a unix socket, and the file descriptors that travel with them.
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    cmsg_space,
    io::{Errno, Result},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};

/// The most file descriptors that the kernel passes with one message.
pub const MAX_FDS: usize = 253;

const SPACE: usize = cmsg_space!(ScmRights(MAX_FDS));

/// What one call has received.
#[derive(Debug)]
pub struct Received {
    /// How many bytes; none: the other side has hung up.
    pub bytes: usize,
    /// In the order in which they were sent. They are closed when this process becomes another program.
    pub fds: Vec<OwnedFd>,
    /// Some are lost: there were too many, or this process may not open as many files.
    pub is_cut: bool,
}

/// Receives bytes and what travels with them. The kernel ends that with the message that carried descriptors.
///
/// # Errors
/// The system's own.
pub fn receive_with_fds(from: impl AsFd, bytes: &mut [u8], flags: RecvFlags) -> Result<Received> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = part {
            fds.extend(some);
        }
    }
    Ok(Received { bytes: message.bytes, fds, is_cut: message.flags.contains(ReturnFlags::CTRUNC) })
}

/// Sends bytes, with these descriptors, at most [`MAX_FDS`], on the first one. Returns how many bytes were sent. A peer
/// that has hung up is an error and no signal.
///
/// # Errors
/// The system's own, as for too many descriptors (`EMSGSIZE`).
pub fn send_with_fds(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // The space is rounded up: one more would fit.
    if fds.len() > MAX_FDS || (!fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds))) {
        return Err(Errno::MSGSIZE);
    }
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs::File, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn descriptors_come_with_the_first_byte_and_end_the_call() {
        let (one, other) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let none = SendFlags::empty();
        assert_eq!(send_with_fds(&one, b"ab", &[null.as_fd(), null.as_fd()], none).unwrap(), 2);
        assert_eq!(send_with_fds(&one, b"cd", &[], none).unwrap(), 2);
        let mut bytes = [0; 8];
        for (wanted, fds) in [(2, 2), (2, 0)] {
            let received = receive_with_fds(&other, &mut bytes, RecvFlags::empty()).unwrap();
            assert_eq!((received.bytes, received.fds.len(), received.is_cut), (wanted, fds, false));
        }
        drop(one);
        assert_eq!(receive_with_fds(&other, &mut bytes, RecvFlags::empty()).unwrap().bytes, 0);
    }

    #[test]
    fn more_than_the_kernel_passes_are_refused() {
        let (one, _other) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let refused = send_with_fds(&one, b"a", &[null.as_fd(); MAX_FDS + 1], SendFlags::empty());
        assert_eq!(refused, Err(Errno::MSGSIZE));
    }
}
