//! Pages of one moment on their way into a stream, in any order: each thread puts its records behind all others.
use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use transship_memory::{ByteRange, Error as MemoryError, PageBuffer, PageCount, PageNumber, Writeback};
use transship_wire::qemu::{Name, StreamWriter};

use super::stream::{PIECE, RAM_SECTION};
use crate::snapshot::file::sealed::Sealed;

/// Where the next records go.
pub(crate) struct Appended {
    /// Of the regions.
    names: Vec<Name>,
    /// Relaxed: a thread needs nothing but a place of its own, and where they end is asked when they have ended.
    at: AtomicU64,
    /// Where they go if they are encrypted: one behind the other.
    sealed: Option<Arc<Sealed>>,
}

impl Appended {
    /// Behind what is written already.
    pub(crate) fn new(names: Vec<Name>, at: u64, sealed: Option<Arc<Sealed>>) -> Self {
        Self { names, at: AtomicU64::new(at), sealed }
    }

    /// Where all of them end.
    pub(crate) fn end(&self) -> u64 {
        self.at.load(Relaxed)
    }
}

/// The records of one thread.
pub(crate) struct Appender {
    to: Arc<Appended>,
    file: File,
    writer: StreamWriter,
    writeback: Writeback,
}

impl Appender {
    /// Writes to a file through the page cache.
    pub(crate) fn new(to: Arc<Appended>, file: File) -> Self {
        Self { to, file, writer: StreamWriter::new(0, RAM_SECTION), writeback: Writeback::default() }
    }

    /// Pages of a region from `first` on.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn append(&mut self, region: usize, first: PageNumber, buffer: PageBuffer) -> Result<(), MemoryError> {
        let to = Arc::clone(&self.to);
        for (page, bytes) in first.run(PageCount::new(buffer.pages() as u64)).iter().zip(buffer.bytes().as_chunks().0) {
            self.writer.page(&to.names[region], page.offset(), bytes);
        }
        if self.writer.buffered() < PIECE { Ok(()) } else { self.finish() }
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn finish(&mut self) -> Result<(), MemoryError> {
        // Its first record names its block, whatever another thread puts before it.
        let bytes = std::mem::replace(&mut self.writer, StreamWriter::new(0, RAM_SECTION)).take_bytes();
        let length = bytes.len() as u64;
        let at = self.to.at.fetch_add(length, Relaxed);
        let failed = |source| MemoryError::System { what: "write".into(), source };
        if let Some(sealed) = &self.to.sealed {
            return sealed.append(&bytes).map_err(failed);
        }
        self.file.write_all_at(&bytes, at).map_err(failed)?;
        self.writeback.wrote(self.file.as_fd(), ByteRange::sized(at, length));
        Ok(())
    }
}
