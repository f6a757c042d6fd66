//! A stretch of bytes.

use std::fmt;

/// Bytes `start .. end` of a file, of a process's addresses, or of anything else that is counted in bytes from 0.
///
/// Whoever takes one can't be given an end for a size, or a size for an offset.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The first byte.
    pub start: u64,
    /// The byte behind the last.
    pub end: u64,
}

impl ByteRange {
    /// So many bytes from `start` on; as many of them as there can be numbers for.
    pub const fn sized(start: u64, bytes: u64) -> Self {
        Self { start, end: start.saturating_add(bytes) }
    }

    /// How many bytes there are.
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// It has no byte.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Whether the byte is one of them.
    pub const fn contains(self, byte: u64) -> bool {
        self.start <= byte && byte < self.end
    }

    /// What is left of it behind its first `bytes`.
    #[must_use]
    pub const fn skip(self, bytes: u64) -> Self {
        Self { start: self.start.saturating_add(bytes), end: self.end }
    }

    /// Its first `bytes`, or all of it.
    #[must_use]
    pub fn take(self, bytes: u64) -> Self {
        Self { start: self.start, end: self.end.min(self.start.saturating_add(bytes)) }
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_range_lie_in_it() {
        let range = ByteRange::sized(100, 50);
        assert_eq!((range, range.len()), (ByteRange { start: 100, end: 150 }, 50));
        assert!(range.contains(100) && range.contains(149) && !range.contains(150) && !range.contains(99));
        assert_eq!(range.take(20), ByteRange { start: 100, end: 120 });
        assert_eq!(range.skip(20), ByteRange { start: 120, end: 150 });
        assert_eq!(range.take(60), range);
        let behind = range.skip(60);
        assert!(behind.is_empty() && !behind.contains(155));
        assert_eq!(ByteRange { start: 7, end: 3 }.len(), 0);
        assert_eq!(ByteRange::sized(u64::MAX - 1, 5).len(), 1, "there are no more");
        assert_eq!(format!("{range:?}"), "0x64..0x96");
    }
}
