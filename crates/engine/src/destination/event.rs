//! What a session's threads tell its main thread.
use crate::Error;

/// Of a channel, or of a decoder that has its packets.
pub(super) enum ChannelEvent {
    RoundEnd { round: u32, pages: u64, zero: u64, bytes: u64, cpu_seconds: f64 },
    Failed(Error),
}
