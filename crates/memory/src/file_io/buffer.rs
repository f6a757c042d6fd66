//! Memory of our own that a disk can read and write.

use super::REQUEST_PAGES;
use crate::PAGE_BYTES;

/// Whole pages of our own, aligned for direct I/O.
pub struct PageBuffer {
    /// The pages, and room to align them in.
    room: Vec<u8>,
    /// Where they begin.
    start: usize,
    len: usize,
}

impl PageBuffer {
    /// Room for `pages` pages, all zero.
    pub fn new(pages: usize) -> Self {
        let len = pages * PAGE_BYTES;
        let room = vec![0; len + PAGE_BYTES - 1];
        // The vector is never grown, so its bytes stay where they are.
        let start = room.as_ptr().addr().wrapping_neg() % PAGE_BYTES;
        Self { room, start, len }
    }

    /// How many pages.
    pub fn pages(&self) -> usize {
        self.len / PAGE_BYTES
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.room[self.start..][..self.len]
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..][..self.len]
    }
}

/// Buffers for requests of any size that were used, and can be again. What is in them is of no use.
#[derive(Default)]
pub(super) struct Spare {
    buffers: Vec<PageBuffer>,
}

impl Spare {
    pub(super) fn take(&mut self) -> PageBuffer {
        self.buffers.pop().unwrap_or_else(|| PageBuffer::new(REQUEST_PAGES.index()))
    }

    pub(super) fn give(&mut self, buffer: Option<PageBuffer>) {
        self.buffers.extend(buffer);
    }
}
