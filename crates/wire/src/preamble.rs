//! The first bytes of every connection: who speaks, in which version, for which session.
use crate::Error;

/// The protocol version that this crate speaks.
pub const VERSION: u16 = 1;
/// The most data channels that a session may have.
pub const MAX_CHANNELS: u16 = 255;
/// Size of an encoded [`Preamble`] in bytes.
pub const PREAMBLE_BYTES: usize = 32;

/// Chosen at random by the source; ties the data connections to their control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Session(pub [u8; 16]);

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Control,
    /// Channel number, from 0.
    Data(u8),
}

/// Sent once by the connecting side: magic `TSHP`, version, role, channel, session, 6 reserved zero bytes... 
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    pub session: Session,
    pub role: Role,
}

impl Preamble {
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        todo!()
    }
    /// # Errors
    /// Wrong magic, version, role, channel, or reserved bytes that are not zero.
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES]) -> Result<Self, Error> {
        todo!("{bytes:?}")
    }
}
