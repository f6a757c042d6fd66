//! What a user can choose.
use std::time::Duration;

/// Who looks for zero pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroPages {
    /// Each channel thread, right before it sends.
    #[default]
    Channels,
    /// The main thread, before it hands pages to the channels; for comparison.
    Main,
    /// Nobody: zero pages travel as data. Holes are still skipped.
    Off,
}

/// Options of the source.
#[derive(Debug, Clone)]
pub struct MoveOptions {
    /// 1 to 255 data channels.
    pub channels: u8,
    /// Who looks for zero pages.
    pub zero_pages: ZeroPages,
    /// Most bytes a second on all channels together; none: as fast as it goes.
    pub bandwidth: Option<u64>,
    /// How long the guest may stand still, 0 < t <= 60 s.
    pub downtime: Duration,
    /// Compare a digest of all memory on both sides.
    pub verify: bool,
    /// Rounds after which a guest that does not converge gets its verdict.
    pub max_rounds: u32,
}

impl Default for MoveOptions {
    fn default() -> Self {
        Self {
            channels: std::thread::available_parallelism().map_or(2, |n| n.get().min(16) as u8),
            zero_pages: ZeroPages::default(),
            bandwidth: None,
            downtime: Duration::from_millis(300),
            verify: false,
            max_rounds: 30,
        }
    }
}
