//! A file from a place on, read past the page cache by a thread of its own before somebody asks for it.
//!
//! ```text
//!   the file ── 2 MiB at a time ──► a thread ── pieces ──► whoever reads
//!                                       ▲───── buffers ────────┘
//! ```
use std::{
    fs::File,
    io::{self, Read},
    mem,
    ops::Range,
    os::unix::fs::FileExt,
    sync::Arc,
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::{PAGE_BYTES, PageBuffer};

/// Read at once: a huge page.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces that there are, read or being read.
const PIECES: usize = 4;

/// What was read, and where it is in the buffer.
struct Piece {
    buffer: PageBuffer,
    bytes: Range<usize>,
}

/// The bytes, in their order.
pub(crate) struct Ahead {
    /// Until the end of the file has come, or this is dropped: the thread ends when they are gone.
    channels: Option<Channels>,
    current: Piece,
    thread: Option<JoinHandle<()>>,
}

struct Channels {
    full: Receiver<io::Result<Piece>>,
    free: Sender<PageBuffer>,
}

impl Ahead {
    /// Of a file that is open for direct I/O.
    ///
    /// # Errors
    /// There can be no thread.
    pub(crate) fn start(file: Arc<File>, at: u64) -> io::Result<Self> {
        let (tell, full) = bounded(PIECES);
        let (free, buffers) = bounded(PIECES);
        let work = move || read_all(&file, at, &buffers, &tell);
        let thread = thread::Builder::new().name("read ahead".to_owned()).spawn(work)?;
        let buffer = || PageBuffer::new(PIECE_BYTES / PAGE_BYTES);
        for _ in 1..PIECES {
            // There is room for all of them. The thread may have ended: nobody has read what it says.
            let _ = free.send(buffer());
        }
        let current = Piece { buffer: buffer(), bytes: 0..0 };
        Ok(Self { channels: Some(Channels { full, free }), current, thread: Some(thread) })
    }

    /// Gives the piece back that was taken, and waits for the next one. At the end of the file it is empty.
    fn next(&mut self) -> io::Result<()> {
        let Some(Channels { full, free }) = &self.channels else { return Ok(()) };
        let ended = || io::Error::other("the thread that reads ahead has ended");
        let next = full.recv().map_err(|_| ended())??;
        let taken = mem::replace(&mut self.current, next);
        // The thread has ended if it needs no more.
        let _ = free.send(taken.buffer);
        if self.current.bytes.is_empty() {
            self.channels = None;
        }
        Ok(())
    }
}

impl Read for Ahead {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.current.bytes.is_empty() {
            self.next()?;
        }
        let Piece { buffer, bytes } = &mut self.current;
        let count = bytes.len().min(into.len());
        into[..count].copy_from_slice(&buffer.bytes()[bytes.start..][..count]);
        bytes.start += count;
        Ok(count)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.channels = None;
        if let Some(thread) = self.thread.take() {
            // A panic in there has been printed.
            let _ = thread.join();
        }
    }
}

/// The thread's life: up to the end of the file, which is an empty piece, or to the first error.
fn read_all(file: &File, mut at: u64, buffers: &Receiver<PageBuffer>, tell: &Sender<io::Result<Piece>>) {
    for mut buffer in buffers {
        // Past the page cache only whole blocks can be read.
        let skip = at % PAGE_BYTES as u64;
        let read = loop {
            match file.read_at(buffer.bytes_mut(), at - skip) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        let piece = read.map(|count| Piece { buffer, bytes: (skip as usize).min(count)..count });
        let count = piece.as_ref().map_or(0, |piece| piece.bytes.len());
        at += count as u64;
        if tell.send(piece).is_err() || count == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use super::*;

    /// Bytes that differ, in a file.
    fn file(bytes: usize) -> (Vec<u8>, Arc<File>) {
        let all: Vec<u8> = (0..bytes as u32).flat_map(|number| number.to_le_bytes()).take(bytes).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&all).unwrap();
        (all, Arc::new(file))
    }

    #[test]
    fn every_byte_comes_once_wherever_it_begins_and_ends() {
        for bytes in [0, 1, PAGE_BYTES, PIECE_BYTES - 1, PIECE_BYTES, 6 * PIECE_BYTES + 4097] {
            let (all, file) = file(bytes);
            for at in [0, 1, PAGE_BYTES, PIECE_BYTES + 5, bytes, bytes + 1] {
                let mut read = Vec::new();
                let mut ahead = Ahead::start(Arc::clone(&file), at as u64).unwrap();
                ahead.read_to_end(&mut read).unwrap();
                assert!(read == all[at.min(bytes)..], "{} of {bytes} bytes from {at} on", read.len());
                assert_eq!(ahead.read(&mut [0]).unwrap(), 0, "it stays the end");
            }
        }
    }

    #[test]
    fn who_does_not_read_it_to_its_end_is_not_waited_for() {
        let (all, file) = file(20 * PIECE_BYTES);
        let mut ahead = Ahead::start(file, 3).unwrap();
        let mut some = [0; 5];
        ahead.read_exact(&mut some).unwrap();
        assert_eq!(some, all[3..8]);
        drop(ahead);
        drop(Ahead::start(Arc::new(tempfile::tempfile().unwrap()), 0).unwrap());
    }

    #[test]
    fn an_error_is_told_and_is_the_end() {
        let file = File::open("/").unwrap();
        let mut ahead = Ahead::start(Arc::new(file), 0).unwrap();
        let errors = [0; 2].map(|_| ahead.read(&mut [0]).unwrap_err());
        assert_eq!(errors[0].raw_os_error(), Some(rustix::io::Errno::ISDIR.raw_os_error()));
    }
}
