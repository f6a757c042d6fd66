//! What a session's threads tell its main thread.
use crate::Error;

/// Of a channel, or of a decoder that has its packets.
pub(super) enum ChannelEvent {
    RoundEnd { round: u32, arrived: Arrived, cpu_seconds: f64 },
    Failed(Error),
}

/// What a round has brought.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arrived {
    /// With content, however they came.
    pub(super) pages: u64,
    pub(super) zero: u64,
    /// Over connections.
    pub(super) bytes: u64,
    /// Of pages that were read here.
    pub(super) lent: u64,
}

impl Arrived {
    pub(super) fn add(&mut self, other: &Self) {
        self.pages += other.pages;
        self.zero += other.zero;
        self.bytes += other.bytes;
        self.lent += other.lent;
    }
}
