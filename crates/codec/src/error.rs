//! What can be wrong with a setting or with encoded bytes.
use crate::Method;

/// A `METHOD[:LEVEL]` that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// No such method.
    #[error("unknown method {given:?}; use one of none, zlib, zstd, qatzip, lz4")]
    Method {
        /// What was written.
        given: String,
    },
    /// A method without levels got one.
    #[error("method {method} has no level, but {given:?} was given")]
    NoLevels {
        /// The method.
        method: Method,
        /// What was written.
        given: String,
    },
    /// A level that is no number or out of bounds.
    #[error("{method} level {given:?} is not a number from {min} to {max}")]
    Level {
        /// The method.
        method: Method,
        /// What was written.
        given: String,
        /// The lowest level.
        min: i32,
        /// The highest level.
        max: i32,
    },
}

/// An encoded packet that could not be decoded. Which channel and packet it was, the caller knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{method} packet of {encoded} bytes for {expected} bytes of pages: {fault}")]
pub struct DecodeError {
    /// The method it should have.
    pub method: Method,
    /// Bytes that came.
    pub encoded: usize,
    /// Bytes that they should make.
    pub expected: usize,
    /// What is wrong.
    pub fault: Fault,
}

impl DecodeError {
    pub(crate) fn new(method: Method, encoded: &[u8], pages: &[u8], fault: Fault) -> Self {
        Self { method, encoded: encoded.len(), expected: pages.len(), fault }
    }
}

/// What is wrong with an encoded packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The bytes end too early.
    #[error("it ends early, after {made} bytes of pages")]
    Truncated {
        /// Bytes that it made.
        made: usize,
    },
    /// The bytes make more than was announced.
    #[error("it decodes to more bytes than that")]
    TooLong,
    /// Bytes are left over.
    #[error("{extra} bytes are left over after the pages")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// The bytes are not of this method.
    #[error("it is corrupt or of another method ({what})")]
    Corrupt {
        /// What was looked for.
        what: &'static str,
    },
    /// A header field has a value that it can't have.
    #[error("{field} is {value}: {why}")]
    Field {
        /// Its name.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        why: &'static str,
    },
    /// The pages do not have the checksum that came with them.
    #[error("checksum {found:#010x}, but the packet states {expected:#010x}")]
    Checksum {
        /// Of the pages.
        found: u32,
        /// That came.
        expected: u32,
    },
    /// The channel's stream ended, which it must not before the channel does.
    #[error("the channel's stream ends in it")]
    StreamEnd,
    /// An earlier packet of this channel was bad.
    #[error("an earlier packet of this channel was bad, so its stream can't go on")]
    Broken,
}
