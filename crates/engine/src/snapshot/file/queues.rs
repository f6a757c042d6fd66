//! The requests of one thread on all files of a target.
use std::{io, os::fd::OwnedFd};

use transship_memory::{Error as MemoryError, FileIo, FileQueue, GuestMemory, Turns};

use super::target::Target;
use crate::Error;

/// A queue for each file, by its number.
pub(crate) struct Queues(Vec<FileQueue>);

impl Queues {
    /// Queues of `depth` requests on these descriptors, whose files others write as well; they have the same `turns`.
    ///
    /// # Errors
    /// See [`FileQueue::new`].
    pub(crate) fn new(
        memory: &GuestMemory,
        files: Vec<OwnedFd>,
        (how, depth): (FileIo, u16),
        turns: &Turns,
    ) -> io::Result<Self> {
        let queue = |file| Ok(FileQueue::new(memory.clone(), file, depth, how)?.taking(turns));
        files.into_iter().map(queue).collect::<io::Result<_>>().map(Self)
    }

    /// That of a file.
    pub(crate) fn of(&mut self, file: usize) -> &mut FileQueue {
        &mut self.0[file]
    }

    /// Whether they are io_uring.
    pub(crate) fn is_uring(&self) -> bool {
        self.0.iter().any(FileQueue::is_uring)
    }

    /// Waits until all that was asked for is done.
    ///
    /// # Errors
    /// The first of any of them.
    pub(crate) fn finish(&mut self) -> Result<(), MemoryError> {
        self.0.iter_mut().map(FileQueue::finish).fold(Ok(()), Result::and)
    }
}

impl Target {
    /// Descriptors for [`Queues`].
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn page_descriptors(&self) -> Result<Vec<OwnedFd>, Error> {
        (0..self.files()).map(|file| self.page_descriptor(file)).collect()
    }
}
