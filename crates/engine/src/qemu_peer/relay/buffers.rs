//! Buffers that are filled again and again: to allocate and clear one for each packet costs as much as to copy it.
use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex},
};

use transship_wire::relay::MAX_BYTES;

use super::fate::lock;

/// Whole buffers that are kept while nobody uses them.
const KEPT: usize = 32;
/// Fewer bytes get a buffer of their own size. Thousands of them may wait, and a whole one for each would take more
/// memory than a window allows.
const SMALL: usize = MAX_BYTES / 4;

/// The buffers of a session.
pub(super) struct Buffers {
    /// Whole ones, of `MAX_BYTES`. The one that was used last is next: it may still be in a processor's cache.
    unused: Mutex<Vec<Vec<u8>>>,
}

impl Buffers {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { unused: Mutex::new(Vec::with_capacity(KEPT)) })
    }

    /// `MAX_BYTES`, with any content.
    pub(super) fn whole(self: &Arc<Self>) -> Buffer {
        let room = lock(&self.unused).pop().unwrap_or_else(|| vec![0; MAX_BYTES]);
        Buffer { room, length: MAX_BYTES, home: Arc::clone(self) }
    }

    /// So many bytes, at most `MAX_BYTES`, with any content.
    pub(super) fn of(self: &Arc<Self>, length: usize) -> Buffer {
        if length < SMALL {
            return Buffer { room: vec![0; length], length, home: Arc::clone(self) };
        }
        let mut buffer = self.whole();
        buffer.length = length;
        buffer
    }

    /// A copy of so many bytes, at most `MAX_BYTES`.
    pub(super) fn copy(self: &Arc<Self>, bytes: &[u8]) -> Buffer {
        let mut copy = self.of(bytes.len());
        copy.copy_from_slice(bytes);
        copy
    }

    /// The first bytes of a whole buffer, in whose place there is another one then. Few are copied.
    pub(super) fn first(self: &Arc<Self>, room: &mut Buffer, length: usize) -> Buffer {
        if length < SMALL {
            return self.copy(&room[..length]);
        }
        let mut first = std::mem::replace(room, self.whole());
        first.length = length;
        first
    }
}

/// Bytes, whose room is used again.
pub(super) struct Buffer {
    room: Vec<u8>,
    length: usize,
    home: Arc<Buffers>,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.room[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.room[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.room.len() == MAX_BYTES {
            let mut unused = lock(&self.home.unused);
            if unused.len() < KEPT {
                unused.push(std::mem::take(&mut self.room));
            }
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_dropped_is_filled_again() {
        let buffers = Buffers::new();
        let mut room = buffers.whole();
        room.fill(7);
        let first = buffers.first(&mut room, SMALL);
        assert_eq!((first.len(), room.len()), (SMALL, MAX_BYTES));
        assert!(first.iter().all(|byte| *byte == 7) && room.iter().all(|byte| *byte == 0), "another one");
        drop(first);
        let again = buffers.of(SMALL + 1);
        assert_eq!((again.len(), again.last()), (SMALL + 1, Some(&7)), "of any content");
        assert_eq!(buffers.of(SMALL + 1).last(), Some(&0), "that one is in use");
        assert_eq!(*buffers.copy(&[1; MAX_BYTES]), [1; MAX_BYTES]);
    }

    #[test]
    fn few_bytes_take_no_whole_one() {
        let buffers = Buffers::new();
        let mut room = buffers.whole();
        room[..3].copy_from_slice(&[1, 2, 3]);
        let few = buffers.first(&mut room, 3);
        assert_eq!((&*few, few.room.len(), room[2]), (&[1, 2, 3][..], 3, 3), "it is still the same");
        drop(few);
        assert!(lock(&buffers.unused).is_empty());
        assert_eq!(buffers.of(SMALL - 1).room.len(), SMALL - 1);
    }

    #[test]
    fn the_one_that_was_used_last_is_next() {
        let buffers = Buffers::new();
        let rooms = [buffers.whole(), buffers.whole()];
        let last = rooms[1].room.as_ptr();
        drop(rooms);
        assert_eq!(buffers.whole().room.as_ptr(), last);
    }

    #[test]
    fn no_more_are_kept_than_a_few() {
        let buffers = Buffers::new();
        drop((0..2 * KEPT).map(|_| buffers.whole()).collect::<Vec<_>>());
        assert_eq!(lock(&buffers.unused).len(), KEPT);
    }
}
