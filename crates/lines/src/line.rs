//! Lines on a unix stream socket, with the file descriptors that travel with them.
use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Instant,
};

use rustix::{
    event::PollFlags,
    io::Errno,
    net::{RecvFlags, SendFlags},
};

use crate::{
    descriptors::{MAX_FDS, receive_with_fds, send_with_fds},
    wait::wait_for,
};

/// The longest line, its end included. A description of the most regions that a line can carry fits.
pub const MAX_LINE_BYTES: usize = 64 << 10;

const CHUNK_BYTES: usize = 4096;

/// Why no line came, or could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The other side has hung up; half a line counts as none.
    #[error("it closed the connection")]
    Closed,
    /// The deadline is over.
    #[error("it did not answer in time")]
    TimedOut,
    /// More than [`MAX_LINE_BYTES`].
    #[error("it sent a line of more than {MAX_LINE_BYTES} bytes")]
    TooLong,
    /// More than [`MAX_FDS`].
    #[error("it sent more than {MAX_FDS} file descriptors with one line")]
    TooManyFds,
    /// The system's own.
    #[error("the connection failed: {0}")]
    System(#[from] io::Error),
}

/// A line without its end, and what came with it.
#[derive(Debug)]
pub struct Line {
    /// Without the newline.
    pub text: Vec<u8>,
    /// In the order in which they were sent.
    pub fds: Vec<OwnedFd>,
}

/// One end of a connection. What it holds is bounded: less than a line and a chunk, and [`MAX_FDS`] descriptors a line.
#[derive(Debug)]
pub struct LineSocket {
    stream: UnixStream,
    bytes: Vec<u8>,
    /// Bytes that were searched for the end of a line already.
    searched: usize,
    /// Descriptors, each with the index in `bytes` of a byte of the line that it belongs to.
    fds: Vec<(usize, OwnedFd)>,
}

impl LineSocket {
    /// Speaks over `stream`, which may be blocking: nothing here waits but as it says.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, bytes: Vec::new(), searched: 0, fds: Vec::new() }
    }

    /// What it speaks over.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Waits for a line until `deadline`.
    ///
    /// # Errors
    /// See [`LineError`]; the same for the others.
    pub fn receive(&mut self, deadline: Instant) -> Result<Line, LineError> {
        loop {
            if let Some(line) = self.take_line()? {
                return Ok(line);
            }
            if !wait_for(self.stream.as_fd(), PollFlags::IN, deadline)? {
                return Err(LineError::TimedOut);
            }
            self.read_some()?;
        }
    }

    /// Takes in what has arrived, without waiting.
    pub fn read_some(&mut self) -> Result<(), LineError> {
        let mut chunk = [0; CHUNK_BYTES];
        let received = match receive_with_fds(&self.stream, &mut chunk, RecvFlags::DONTWAIT) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(Errno::CONNRESET) => return Err(LineError::Closed),
            Err(e) => return Err(LineError::System(e.into())),
        };
        if received.bytes == 0 {
            return Err(LineError::Closed);
        }
        self.bytes.extend_from_slice(&chunk[..received.bytes]);
        // The kernel ends a read with the message that carried descriptors: they belong to the line of the last byte.
        let position = self.bytes.len() - 1;
        self.fds.extend(received.fds.into_iter().map(|fd| (position, fd)));
        if received.is_cut || self.fds.len() > MAX_FDS {
            return Err(LineError::TooManyFds);
        }
        Ok(())
    }

    /// A line that is complete already.
    pub fn take_line(&mut self) -> Result<Option<Line>, LineError> {
        let end = self.bytes[self.searched..].iter().position(|&b| b == b'\n').map(|at| self.searched + at);
        self.searched = self.bytes.len();
        let Some(end) = end else {
            return if self.bytes.len() >= MAX_LINE_BYTES { Err(LineError::TooLong) } else { Ok(None) };
        };
        if end >= MAX_LINE_BYTES {
            return Err(LineError::TooLong);
        }
        let rest = self.bytes.split_off(end + 1);
        let mut text = std::mem::replace(&mut self.bytes, rest);
        text.pop();
        self.searched = 0;
        let (mine, later): (Vec<_>, Vec<_>) = self.fds.drain(..).partition(|(position, _)| *position <= end);
        self.fds = later.into_iter().map(|(position, fd)| (position - end - 1, fd)).collect();
        Ok(Some(Line { text, fds: mine.into_iter().map(|(_, fd)| fd).collect() }))
    }

    /// Sends a line, with `fds` on its first byte, until `deadline`.
    pub fn send(&self, text: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<(), LineError> {
        let mut line = text.to_vec();
        line.push(b'\n');
        if line.len() > MAX_LINE_BYTES || fds.len() > MAX_FDS {
            let what = format!("can't send a line of {} bytes with {} file descriptors", line.len(), fds.len());
            return Err(LineError::System(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        let mut sent = 0;
        while sent < line.len() {
            let with = if sent == 0 { fds } else { &[] };
            match send_with_fds(&self.stream, &line[sent..], with, SendFlags::DONTWAIT) {
                Ok(n) => sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !wait_for(self.stream.as_fd(), PollFlags::OUT, deadline)? {
                        return Err(LineError::TimedOut);
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(LineError::Closed),
                Err(e) => return Err(LineError::System(e.into())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{fs::File, io::Write, time::Duration};

    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn pair() -> (LineSocket, LineSocket) {
        let (a, b) = UnixStream::pair().unwrap();
        (LineSocket::new(a), LineSocket::new(b))
    }

    #[test]
    fn descriptors_stay_with_their_line() {
        let (a, mut b) = pair();
        let null = File::open("/dev/null").unwrap();
        a.send(b"first", &[], later()).unwrap();
        a.send(b"second", &[null.as_fd(), null.as_fd()], later()).unwrap();
        a.send(b"third", &[], later()).unwrap();
        a.send(b"fourth", &[null.as_fd()], later()).unwrap();
        for (text, fds) in [("first", 0), ("second", 2), ("third", 0), ("fourth", 1)] {
            let line = b.receive(later()).unwrap();
            assert_eq!((line.text.as_slice(), line.fds.len()), (text.as_bytes(), fds));
        }
    }

    #[test]
    fn a_long_line_with_descriptors_comes_whole() {
        let (a, mut b) = pair();
        let null = File::open("/dev/null").unwrap();
        let text = vec![b'x'; MAX_LINE_BYTES - 1];
        let fds = vec![null.as_fd(); MAX_FDS];
        std::thread::scope(|s| {
            s.spawn(|| a.send(&text, &fds, later()).unwrap());
            let line = b.receive(later()).unwrap();
            assert_eq!(line.text, text);
            assert_eq!(line.fds.len(), MAX_FDS);
        });
    }

    #[test]
    fn a_line_that_never_ends_is_refused() {
        let (a, mut b) = pair();
        std::thread::scope(|s| {
            // The other side may hang up before all of it is written.
            s.spawn(move || (&a.stream).write_all(&vec![b'x'; 2 * MAX_LINE_BYTES]));
            assert!(matches!(b.receive(later()), Err(LineError::TooLong)));
            assert!(b.bytes.len() <= MAX_LINE_BYTES + CHUNK_BYTES);
            drop(b);
        });
    }

    #[test]
    fn half_a_line_is_a_closed_connection() {
        let (a, mut b) = pair();
        (&a.stream).write_all(b"half").unwrap();
        drop(a);
        assert!(matches!(b.receive(later()), Err(LineError::Closed)));
    }

    #[test]
    fn nobody_waits_for_ever() {
        let (_a, mut b) = pair();
        assert!(matches!(b.receive(Instant::now()), Err(LineError::TimedOut)));
    }
}
