//! What can be wrong with bytes from a peer.

/// Bytes that are not what the protocol allows. Offsets count from the first byte of the preamble, the packet header or
/// the message (its frame header included); in [`crate::qemu`] they are places in the stream or file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes end before the field does.
    #[error("{field} at offset {offset}: {missing} more bytes are needed")]
    Truncated {
        /// The field that was being read.
        field: &'static str,
        /// Where it begins.
        offset: usize,
        /// How many bytes of it are not there.
        missing: usize,
    },
    /// Bytes are left over after the last field.
    #[error("{field}: {extra} bytes too many after offset {offset}")]
    Trailing {
        /// What was read.
        field: &'static str,
        /// Where it ends.
        offset: usize,
        /// How many bytes follow.
        extra: usize,
    },
    /// A field has a value that it can't have.
    #[error("{field} at offset {offset} is {value:#x}: {why}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// Where it begins, or where in it the bad byte is.
        offset: usize,
        /// Its value (of a mask the low half, of a text its length or the bad character).
        value: u64,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// A name or text is not UTF-8.
    #[error("{field} at offset {offset} is not UTF-8")]
    Text {
        /// The field.
        field: &'static str,
        /// Where the first bad byte is.
        offset: usize,
    },
    /// A number that belongs to something with a name (a block, a section) can't be.
    #[error("{field} of {name:?} at offset {offset} is {value:#x}: {why}")]
    Named {
        /// The field.
        field: &'static str,
        /// What it belongs to.
        name: String,
        /// Where it is.
        offset: usize,
        /// Its value.
        value: u64,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// Something has a name that can't be here.
    #[error("{field} {name:?} at offset {offset}: {why}")]
    Refused {
        /// What it is.
        field: &'static str,
        /// Its name.
        name: String,
        /// Where it begins.
        offset: usize,
        /// Why it can't.
        why: &'static str,
    },
}

impl Error {
    /// The field, and where it is: its first byte, the first bad one, or the one behind it if there are too many.
    pub fn place(&self) -> (&'static str, usize) {
        match *self {
            Self::Truncated { field, offset, .. }
            | Self::Trailing { field, offset, .. }
            | Self::Invalid { field, offset, .. }
            | Self::Text { field, offset }
            | Self::Named { field, offset, .. }
            | Self::Refused { field, offset, .. } => (field, offset),
        }
    }
}
