//! What travels on a data channel: a fixed header, then the pages that it announces.
use crate::Error;

/// Bytes of a page on the wire, whatever the host's page size.
pub const PAGE_BYTES: usize = 4096;
/// Pages that one packet can speak of: a window of this many, aligned to as many.
pub const PAGES_PER_PACKET: u64 = 128;
/// Size of an encoded packet header in bytes.
pub const PACKET_BYTES: usize = 64;

/// One header of a data channel.
///
/// Layout, little-endian: magic u32, kind u8, encoding u8, region u16, round u32, payload u32 (bytes that follow),
/// first u64 (page), then 16 bytes + 16 bytes of body by kind, 8 reserved bytes that are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packet {
    /// Pages of the window that begins at page `first` (a multiple of [`PAGES_PER_PACKET`]): bit i of `present` says that
    /// the page `first + i` travels in the payload, bit i of `zero` that it reads as zero. The masks are disjoint and not
    /// both empty. The payload holds the present pages in ascending order.
    Pages { round: u32, region: u16, first: u64, present: u128, zero: u128 },
    /// `count` pages from `first` on (any alignment) read as zero.
    Hole { round: u32, region: u16, first: u64, count: u64 },
    /// The last packet of a round on this channel; `packets` were sent before it in this round on this channel.
    RoundEnd { round: u32, packets: u64 },
}

impl Packet {
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        todo!()
    }
    /// # Errors
    /// Any field that breaks a rule of the layout. Whether the region and the pages exist is the engine's to check.
    pub fn decode(bytes: &[u8; PACKET_BYTES]) -> Result<Self, Error> {
        todo!("{bytes:?}")
    }
    /// Bytes of payload that follow this header: at most `PAGES_PER_PACKET * PAGE_BYTES`.
    pub fn payload_bytes(&self) -> usize {
        todo!()
    }
}
