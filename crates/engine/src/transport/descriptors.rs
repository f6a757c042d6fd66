//! Descriptors of open files, which go over a unix socket of this host with a byte, and who is at its other end.
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    cmsg_space,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg, sockopt::socket_peercred,
    },
};
use transship_lines::MAX_FDS;

use super::Connection;

const SPACE: usize = cmsg_space!(ScmRights(MAX_FDS));

impl Connection {
    /// The user at the other end; none: it may be on another host, or what is said is encrypted.
    pub(crate) fn user(&self) -> Option<u32> {
        match self {
            Self::Unix(socket) => socket_peercred(socket).ok().map(|peer| peer.uid.as_raw()),
            _ => None,
        }
    }

    /// Sends these, at most [`MAX_FDS`] and perhaps none, with a byte.
    pub(crate) fn send_files(&self, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
        }
        rustix::io::retry_on_intr(|| sendmsg(self, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits until `timeout` for the next byte, and takes what comes with it. What follows it is left where it is.
    pub(crate) fn receive_files(&self, timeout: Duration) -> io::Result<Vec<OwnedFd>> {
        self.set_read_timeout(Some(timeout))?;
        let received = self.receive_now();
        self.set_read_timeout(None)?;
        received
    }

    fn receive_now(&self) -> io::Result<Vec<OwnedFd>> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let message = rustix::io::retry_on_intr(|| {
            recvmsg(self, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut files = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = part {
                files.extend(some);
            }
        }
        match message {
            _ if message.bytes == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ if message.flags.contains(ReturnFlags::CTRUNC) => Err(io::Error::other(
                "not all descriptors could be had: there are too many, or this process may not open as many files",
            )),
            _ => Ok(files),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        fs::File,
        io::{Read, Write},
        os::{fd::AsFd, unix::net::UnixStream},
    };

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn pair() -> (Connection, Connection) {
        let (one, other) = UnixStream::pair().unwrap();
        (Connection::Unix(one), Connection::Unix(other))
    }

    #[test]
    fn descriptors_come_in_their_order_and_what_follows_stays() {
        let (mut one, mut other) = pair();
        let files = [1, 2].map(|byte| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&[byte]).unwrap();
            file
        });
        one.send_files(&files.each_ref().map(AsFd::as_fd)).unwrap();
        one.write_all(b"next").unwrap();
        let came = other.receive_files(PATIENCE).unwrap();
        let bytes = came.into_iter().map(|file| {
            let mut byte = [0];
            rustix::io::pread(File::from(file), &mut byte, 0).unwrap();
            byte[0]
        });
        assert_eq!(bytes.collect::<Vec<_>>(), [1, 2]);
        let mut next = [0; 4];
        other.read_exact(&mut next).unwrap();
        assert_eq!(&next, b"next");
    }

    #[test]
    fn a_byte_alone_brings_nothing_and_an_end_is_an_error() {
        let (mut one, other) = pair();
        one.write_all(&[0]).unwrap();
        assert!(other.receive_files(PATIENCE).unwrap().is_empty());
        let late = other.receive_files(Duration::from_millis(1)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::WouldBlock);
        drop(one);
        assert_eq!(other.receive_files(PATIENCE).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn who_is_at_the_other_end_of_a_unix_socket_is_known() {
        assert_eq!(pair().0.user(), Some(rustix::process::geteuid().as_raw()));
    }
}
