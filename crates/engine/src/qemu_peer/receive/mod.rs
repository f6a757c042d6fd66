//! A stock QEMU migrates to us: into a waiting QEMU, or straight into a file.
//!
//! - `main_line`: the main connection, and what is answered on it
//! - `channel`: the multifd channels; `barrier`: what keeps them and the main stream in order
//! - `life`: from the first connection to the source's being told, made of these; what comes goes into a store of
//!   [`crate::stream`], which is a guest that waits, or of [`crate::snapshot`], which is a file
mod barrier;
mod channel;
mod life;
mod main_line;

use transship_memory::{FileIo, GuestMemory};

use crate::{
    Error, FileUri, Format,
    guest::DestinationGuest,
    snapshot::{DirectIo, file::target::Target},
};

pub use life::receive_from_qemu;

/// Where a guest goes.
pub enum Sink<'a> {
    /// Into a QEMU that waits.
    Guest(&'a mut dyn DestinationGuest),
    /// Into a file.
    File(FileSink),
}

/// How a file is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FileSinkOptions {
    /// The layout of the file.
    pub format: Format,
    /// Whether pages go past the page cache. A stream goes through it.
    pub direct_io: DirectIo,
    /// How the kernel is asked to write pages. Those of a stream are appended, one after the other.
    pub io: FileIo,
}

/// A file that is to be made. Dropped before it is complete it leaves things as they were.
pub struct FileSink {
    target: Box<Target>,
    options: FileSinkOptions,
}

impl FileSink {
    /// Begins a file: what keeps it from being made is told before anybody connects.
    ///
    /// # Errors
    /// Another save makes this file now; it can't be written or replaced, or not in the way asked for.
    pub fn create(to: &FileUri, options: FileSinkOptions) -> Result<Self, Error> {
        // A stream's pages have no places that a disk could take.
        let direct_io = if options.format.is_sequential() { DirectIo::Off } else { options.direct_io };
        // There is no guest here whose memory the file could be.
        let target = Target::create(to, direct_io, &GuestMemory::new(Vec::new()))?;
        Ok(Self { target: Box::new(target), options })
    }
}
