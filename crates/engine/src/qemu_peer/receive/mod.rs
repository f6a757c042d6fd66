//! A stock QEMU migrates to us: into a waiting QEMU, or straight into a file.
//!
//! - `lobby`: who connects
//! - `main_line`: the main connection, and what is answered on it
//! - `end`: where its stream ends
//! - `channel`: the multifd channels; `barrier`: what keeps them and the main stream in order
//! - `guest_store`: a guest that waits; files are the stores of [`crate::snapshot`]
//! - `life`: from the first connection to the source's being told, made of these
mod barrier;
mod channel;
pub(super) mod end;
mod guest_store;
mod life;
pub(super) mod lobby;
mod main_line;

use transship_memory::GuestMemory;

use crate::{
    Error, FileUri, Format,
    guest::DestinationGuest,
    snapshot::{DirectIo, target::Target},
};

pub use life::receive_from_qemu;

/// Where a guest goes.
pub enum Sink<'a> {
    /// Into a QEMU that waits.
    Guest(&'a mut dyn DestinationGuest),
    /// Into a file.
    File(FileSink),
}

/// A file that is to be made. Dropped before it is complete it leaves things as they were.
pub struct FileSink {
    target: Target,
    format: Format,
}

impl FileSink {
    /// Begins a file in this layout: what keeps it from being made is told before anybody connects.
    ///
    /// # Errors
    /// Another save makes this file now; it can't be written or replaced.
    pub fn create(to: &FileUri, format: Format) -> Result<Self, Error> {
        // There is no guest here whose memory the file could be.
        let target = Target::create(to, DirectIo::Off, &GuestMemory::new(Vec::new()))?;
        Ok(Self { target, format })
    }
}
