//! A device state stream as the guest process sees it: an end of a pipe or socket that the client passed, with time
//! limits.
use std::{
    io::{self, Read, Write},
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use rustix::{
    event::PollFlags,
    fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat},
    io::Errno,
    net::SendFlags,
};

use transship_lines::wait_for;

use super::client::LONG;

/// Counts what goes through. A client that does not read or write for [`LONG`] ends it.
pub(super) struct StateStream {
    fd: OwnedFd,
    socket: bool,
    bytes: u64,
}

impl StateStream {
    pub(super) fn new(fd: OwnedFd) -> Result<Self, String> {
        let kind = fstat(&fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let socket = match kind {
            Ok(FileType::Socket) => true,
            Ok(FileType::Fifo) => false,
            _ => return Err("the file descriptor for the device state is neither a pipe nor a socket".into()),
        };
        fcntl_getfl(&fd)
            .and_then(|flags| fcntl_setfl(&fd, flags | OFlags::NONBLOCK))
            .map_err(|e| format!("can't use the device state stream: {e}"))?;
        Ok(Self { fd, socket, bytes: 0 })
    }

    pub(super) fn passed(&self) -> u64 {
        self.bytes
    }

    /// Repeats `act` until it does not say that it would block.
    fn retry(
        &mut self,
        events: PollFlags,
        mut act: impl FnMut(&Self) -> rustix::io::Result<usize>,
    ) -> io::Result<usize> {
        let deadline = Instant::now() + LONG;
        loop {
            match act(self) {
                Ok(n) => {
                    self.bytes += n as u64;
                    return Ok(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !wait_for(self.fd.as_fd(), events, deadline)? {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "the device state stream stands still"));
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Read for StateStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.retry(PollFlags::IN, |s| rustix::io::read(&s.fd, &mut *into))
    }
}

impl Write for StateStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry(PollFlags::OUT, |s| match s.socket {
            true => rustix::net::send(&s.fd, bytes, SendFlags::NOSIGNAL),
            false => rustix::io::write(&s.fd, bytes),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
