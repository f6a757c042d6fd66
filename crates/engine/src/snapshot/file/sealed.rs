//! A file that is encrypted while it is written: what is appended goes out in pieces, each sealed with its number.
//!
//! Its head says what it is. The first bytes of that are kept until the rest is on the disk, as a snapshot's own are
//! in a file in clear. What the kernel gets is encrypted, so no file ever holds guest memory in clear, under any name.
use std::{
    fs::File,
    io::{self, BufWriter, Write},
    mem,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{Arc, Mutex, PoisonError},
};

use transship_memory::{ByteRange, Writeback};
use transship_secure::{ENCRYPTED_MAGIC, FileSealer, Recipients};

use super::target::Target;
use crate::Error;

/// Written at once.
const CHUNK: usize = 1 << 20;

/// The file, to which several threads append.
pub(crate) struct Sealed {
    /// None: it was finished.
    sealer: Mutex<Option<FileSealer<BufWriter<Placed>>>>,
}

impl Sealed {
    /// Begins at `at`.
    ///
    /// # Errors
    /// The system's own.
    pub(super) fn begin(file: File, at: u64, recipients: &Recipients) -> io::Result<Self> {
        let placed = Placed { file, at, head: Vec::new(), writeback: Writeback::default() };
        let sealer = recipients.seal(BufWriter::with_capacity(CHUNK, placed))?;
        Ok(Self { sealer: Mutex::new(Some(sealer)) })
    }

    /// Puts bytes behind all others.
    ///
    /// # Errors
    /// The system's own. The file can't be completed after one.
    pub(crate) fn append(&self, bytes: &[u8]) -> io::Result<()> {
        let mut sealer = self.sealer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of_all = sealer.take().ok_or_else(ended)?;
        of_all.write_all(bytes)?;
        *sealer = Some(of_all);
        Ok(())
    }

    /// Writes what is left, and returns what belongs at the beginning.
    ///
    /// # Errors
    /// As [`Sealed::append`].
    pub(super) fn finish(&self) -> io::Result<Vec<u8>> {
        let sealer = self.sealer.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(ended)?;
        let mut placed = sealer.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(mem::take(&mut placed.head))
    }
}

/// A write has failed before, and the error was told.
fn ended() -> io::Error {
    io::Error::other("a part of it could not be written")
}

/// Bytes on their way into the file, all but the first.
struct Placed {
    file: File,
    /// Where the next ones go.
    at: u64,
    head: Vec<u8>,
    writeback: Writeback,
}

impl Write for Placed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let missing = ENCRYPTED_MAGIC.len() - self.head.len();
        if missing > 0 {
            let kept = missing.min(bytes.len());
            self.head.extend_from_slice(&bytes[..kept]);
            self.at += kept as u64;
            return Ok(kept);
        }
        self.file.write_all_at(bytes, self.at)?;
        self.writeback.wrote(self.file.as_fd(), ByteRange::sized(self.at, bytes.len() as u64));
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How a stream begins and ends, whether it is encrypted or not.
impl Target {
    /// From now on what is appended is encrypted. Nothing of the snapshot may have been written yet.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn seal(&mut self, recipients: &Recipients) -> Result<(), Error> {
        let file = File::from(self.cached_descriptor(0)?);
        let sealed = Sealed::begin(file, self.offset(), recipients).map_err(|source| self.failed("write", source))?;
        self.sealed = Some(Arc::new(sealed));
        Ok(())
    }

    /// Whether what is appended is encrypted.
    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    /// For several threads that append; none: it is in clear, and they write at places.
    pub(crate) fn sealed(&self) -> Option<Arc<Sealed>> {
        self.sealed.clone()
    }

    /// The first bytes, without which it is no snapshot. Returns those that are to be kept until the end.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn append_head(&self, head: Vec<u8>) -> Result<Vec<u8>, Error> {
        match &self.sealed {
            Some(sealed) => {
                sealed.append(&head).map_err(|source| self.failed("write", source))?;
                Ok(Vec::new())
            }
            None => Ok(head),
        }
    }

    /// Nothing more is appended. `head`: what was kept. Returns what is to be written at the beginning.
    pub(super) fn end_appended(&self, head: &[u8]) -> Result<Vec<u8>, Error> {
        match &self.sealed {
            Some(sealed) => sealed.finish().map_err(|source| self.failed("write", source)),
            None => Ok(head.to_vec()),
        }
    }
}
