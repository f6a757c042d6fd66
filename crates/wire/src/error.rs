//! What can be wrong with bytes from a peer.

/// Bytes that are not what the protocol allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes end before the field does.
    #[error("{field} at offset {offset}: {missing} more bytes needed")]
    Truncated { field: &'static str, offset: usize, missing: usize },
    /// Bytes are left over after the last field.
    #[error("{field}: {extra} bytes too many after offset {offset}")]
    Trailing { field: &'static str, offset: usize, extra: usize },
    /// A field has a value that it can't have.
    #[error("{field} at offset {offset} is {value:#x}: {why}")]
    Invalid { field: &'static str, offset: usize, value: u64, why: &'static str },
    /// A name or text is not UTF-8.
    #[error("{field} at offset {offset} is not UTF-8")]
    Text { field: &'static str, offset: usize },
}
