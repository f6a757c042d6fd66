//! What two relays say to each other that stand between two QEMUs.
//!
//! The relay near the source opens all connections of the link: one for *control*, which carries [`Message`]s both
//! ways, and 1 to 255 for *data*, which carry [`Packet`]s both ways. Each begins with a [`Greeting`]. A packet has
//! bytes of one of QEMU's connections; bytes of one connection may travel on any data connection, and are put in order
//! by their sequence numbers. `docs/protocol.md` has the order of things.
mod message;
mod packet;

use crate::Error;
use crate::preamble::{PREAMBLE_BYTES, Preamble, Protocol};

pub use message::{MAX_CREDIT, MAX_FIRST_BYTES, MESSAGE_BYTES, Message, TheEnd};
pub use packet::{Content, MAX_BYTES, PACKET_BYTES, Packet};

/// The version of the link's protocol that this crate speaks.
pub const VERSION: u16 = 1;
/// The most connections of QEMU's that a link carries: the main one and all channels that multifd can have.
pub const MAX_CONNECTIONS: u16 = 256;

const LINK: Protocol =
    Protocol { magic: *b"TSRL", version: VERSION, other: "no relay begins a link like this", has_probes: false };

/// Sent once by the relay near the source on each connection of the link, before anything else: a [`Preamble`] with the
/// magic `TSRL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting(pub Preamble);

impl Greeting {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        self.0.encode_for(&LINK)
    }

    /// # Errors
    /// Wrong magic, version, role, channel, or reserved bytes that are not zero.
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES]) -> Result<Self, Error> {
        Preamble::decode_for(bytes, &LINK).map(Self)
    }
}
