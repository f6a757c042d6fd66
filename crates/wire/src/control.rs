//! What the two sides say to each other on the control connection.
use crate::Error;

/// Size of a frame header: kind u16, reserved u16, payload length u32, id u64.
pub const FRAME_BYTES: usize = 16;
/// The longest payload of a message. A piece of device state is the largest that we send (256 KiB); the bound leaves room.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// The most regions that a guest may have (8 NUMA nodes are common, hot-plugged memory adds some).
pub const MAX_REGIONS: usize = 1024;

/// The header of a message: its kind, its length, and an id that counts up by one on each side from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    pub kind: u16,
    pub payload: u32,
    pub id: u64,
}

/// One memory region of a guest. Names and sizes must be equal on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionDescription {
    /// At most 255 bytes.
    pub name: String,
    /// In bytes, a multiple of 4096, not 0.
    pub bytes: u64,
}

/// What must be equal on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestDescription {
    /// Which adapter made it, and what machine it is: `qemu pc-q35-10.0`, `synthetic`. At most 255 bytes.
    pub machine: String,
    pub regions: Vec<RegionDescription>,
}

/// Why a side ends the session. The text is shown to the user as the other side's words; at most 4096 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: String,
}

/// A message. The number of each kind is its tag on the wire. `S` is the source, `D` the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// 1, S to D, first: what is to come. `channels` data connections follow.
    Hello { channels: u8, verify: bool, guest: GuestDescription },
    /// 2, D to S: the guest fits and the memory reads as zero everywhere.
    Welcome,
    /// 3, D to S: every channel has brought its `RoundEnd` and all of it is in place.
    RoundDone { round: u32, pages: u64, zero: u64 },
    /// 4, S to D: digest of all guest memory, taken while the guest stands still.
    Digest { digest: [u8; 32] },
    /// 5, D to S: the same over there. Equal or the session ends.
    DigestIs { digest: [u8; 32] },
    /// 6, S to D: a piece of the device state, in order.
    State { bytes: Vec<u8> },
    /// 7, S to D: the device state is complete: its length and its blake3 hash.
    StateEnd { bytes: u64, digest: [u8; 32] },
    /// 8, D to S: memory and device state are loaded; the guest could run. It does not run before `Go`.
    Loaded,
    /// 9, S to D: the source has given the guest up for good; it's the destination's. `run`: it was running, so start it.
    Go { run: bool },
    /// 10, D to S: the guest runs here (or stands here, if it stood).
    Running,
    /// 11, both: I end the session, because. Valid at any time before `Go`, and after it from D only (it could not start the guest).
    Abort(Refusal),
}

impl Frame {
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        todo!()
    }
    /// # Errors
    /// Reserved bits, a payload longer than [`MAX_MESSAGE_BYTES`], an unknown kind.
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, Error> {
        todo!("{bytes:?}")
    }
}

impl Message {
    /// The name of the message, for errors: "Hello", "RoundDone", ….
    pub fn name(&self) -> &'static str {
        todo!()
    }
    /// Frame and payload, ready to be written.
    pub fn encode(&self, id: u64) -> Vec<u8> {
        todo!("{id}")
    }
    /// # Errors
    /// Any field that breaks a rule above; bytes left over.
    pub fn decode(frame: &Frame, payload: &[u8]) -> Result<Self, Error> {
        todo!("{frame:?}{payload:?}")
    }
}
