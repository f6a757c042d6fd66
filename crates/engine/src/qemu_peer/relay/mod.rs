//! Two relays between two stock QEMUs, with a link of our own between them.
//!
//! ```text
//!   QEMU ══► stream 0 … ─┐                                                                      ┌─ stream 0 … ══► QEMU
//!            (reads)     ├─► encoders ─► one ring ─► N link connections ═══► decode ─► in order ┤  (writes)
//!                        ┘   and back, as it is: answers                                        └
//! ```
//!
//! A relay carries the bytes of each of QEMU's connections, both ways, and changes none. A *stream* is one such
//! connection at one relay: a thread reads from it and one writes to it. What is read is cut into packets, which may
//! overtake each other on the link; the other relay puts them in order. Each stream has a window: so much may be on its
//! way, and the other relay allows more when its QEMU has taken it. So a connection that is not read on the other side
//! blocks no other.
//!
//! - `near`: the life of the relay near the source; `far`: of the one near the destination
//! - `many`: any number of them, as a service
//! - `link`: the connections between the two, and `control_line` one of them; `inlet`: packets come in; `outlet`:
//!   packets go out, by way of the encoders
//! - `stream`: one of QEMU's connections; `carry`: the threads that read from it and write to it
//! - `session`: what all threads share; `fate`: whether it goes on; `buffers`: what all bytes lie in
//! - `follow`: what the relay near the source has to know of the main stream: whether there is a way back, and where
//!   the end is
mod buffers;
mod carry;
mod control_line;
mod far;
mod fate;
mod follow;
mod inlet;
mod link;
mod many;
mod near;
mod outlet;
mod session;
mod stream;

use transship_secure::Caller;

use crate::Compress;

pub use far::relay_to_qemu;
pub use many::{Relayed, relay_many};
pub use near::relay_from_qemu;

/// Options of the relay near the source.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// 1 to 255 data connections of the link.
    pub channels: u8,
    /// How packets are encoded.
    pub compress: Compress,
    /// Threads that encode; at least 1.
    pub encoders: u8,
    /// Also relay for a source that does not wait for word from the destination.
    pub without_return_path: bool,
    /// By whom the link is encrypted; none: by nobody.
    pub caller: Option<Caller>,
}
