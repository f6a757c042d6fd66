//! Descriptors of open files, which go over a unix socket of this host with a byte, and who is at its other end.
use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    time::Duration,
};

use rustix::{
    io::retry_on_intr,
    net::{RecvFlags, SendFlags},
};
use transship_lines::{receive_with_fds, send_with_fds};

use super::{Connection, users::user_of};

impl Connection {
    /// The user at the other end; none: it may be on another host, or what is said is encrypted.
    pub(crate) fn user(&self) -> Option<u32> {
        match self {
            Self::Unix(socket) => user_of(socket).ok(),
            _ => None,
        }
    }

    /// Sends these, at most [`MAX_FDS`](transship_lines::MAX_FDS) and perhaps none, with a byte.
    pub(crate) fn send_files(&self, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        retry_on_intr(|| send_with_fds(self, &[0], files, SendFlags::empty()))?;
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
        let received = retry_on_intr(|| receive_with_fds(self, &mut [0], RecvFlags::empty()))?;
        match received.bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ if received.is_cut => Err(io::Error::other(
                "not all descriptors could be had: there are too many, or this process may not open as many files",
            )),
            _ => Ok(received.fds),
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
