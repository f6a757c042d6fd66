//! The options that a user can choose.
use std::{str::FromStr, time::Duration};

pub use transship_codec::Setting;
use transship_codec::SettingError;
use transship_secure::Caller;

use crate::{AtStopCommand, HoldOptions};

/// Where zero pages are detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroPages {
    /// Each channel thread, right before it sends.
    #[default]
    Channels,
    /// The main thread, before it hands pages to the channels; for comparison.
    Main,
    /// Nowhere: zero pages travel as data. Holes are still skipped.
    Off,
}

/// How pages are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compress {
    /// All in the same way, except those that don't shrink.
    Fixed(Setting),
    /// In the way that turns out to be fastest, as long as it is.
    Auto,
}

impl Default for Compress {
    fn default() -> Self {
        Self::Fixed(Setting::NONE)
    }
}

impl FromStr for Compress {
    type Err = SettingError;

    /// `auto`, or `METHOD[:LEVEL]`.
    fn from_str(text: &str) -> Result<Self, SettingError> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Fixed) }
    }
}

/// What to do with pages when all encoders are busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenBusy {
    /// Wait for one: fewer bytes.
    #[default]
    Wait,
    /// Send them as they are: less waiting, for links that are nearly as fast as the encoders.
    Raw,
}

/// What is done about a guest that writes faster than its pages can be carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Converge {
    /// Nothing: it gets a verdict with the numbers, and runs on where it is.
    #[default]
    Never,
    /// Its writers are held, for a few milliseconds at a time, so that each round is smaller than the one before. Its
    /// writes must be tracked in the way that lets them wait.
    Pace,
}

/// What is asked of a move, whoever receives the guest.
#[derive(Debug, Clone)]
pub struct MoveTerms {
    /// Threads that encode, beside the channels; at least 1.
    pub encoders: u8,
    /// What to do when all of them are busy.
    pub when_busy: WhenBusy,
    /// Where zero pages are detected.
    pub zero_pages: ZeroPages,
    /// Most bytes a second on all connections together; none: as fast as it goes.
    pub bandwidth: Option<u64>,
    /// How long the guest may stand still, 0 < t <= 60 s.
    pub downtime: Duration,
    /// The same, rather than that the move is given up.
    pub max_downtime: Duration,
    /// Rounds after which a guest that does not converge gets its verdict.
    pub max_rounds: u32,
    /// What is done so that it converges.
    pub converge: Converge,
    /// Runs while the guest stands still, before it is given up; a failure takes it back.
    pub at_stop: Option<AtStopCommand>,
    /// Kept ready, when it has converged, until it is told to go on; none: it goes on by itself.
    pub hold: Option<HoldOptions>,
    /// As whom the destination is called, which must be who it has to be; none: in clear, whoever it is.
    pub caller: Option<Caller>,
}

impl Default for MoveTerms {
    fn default() -> Self {
        Self {
            encoders: std::thread::available_parallelism().map_or(2, |n| n.get().min(255) as u8),
            when_busy: WhenBusy::default(),
            zero_pages: ZeroPages::default(),
            bandwidth: None,
            downtime: Duration::from_millis(300),
            max_downtime: Duration::ZERO,
            max_rounds: 30,
            converge: Converge::default(),
            at_stop: None,
            hold: None,
            caller: None,
        }
    }
}

/// When a guest is handed over before its pages, unless its rest fits the downtime earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostCopyAfter {
    /// After so many rounds; 0: before any page is sent.
    Rounds(u32),
    /// After the first round, if a second would hardly leave less; after the second in any case.
    NoGain,
}

impl PostCopyAfter {
    /// Rounds after which another is of no use in any case: one with all pages, and one with what was written
    /// meanwhile.
    pub(crate) const NO_GAIN_MOST: usize = 2;
}

/// Options of a move to a transship.
#[derive(Debug, Clone)]
pub struct MoveOptions {
    /// 1 to 255 data channels.
    pub channels: u8,
    /// How pages are encoded.
    pub compress: Compress,
    /// Compare a digest of all memory on both sides.
    pub verify: bool,
    /// When the guest runs at the destination, and the rest of its pages follow; none: never.
    pub post_copy: Option<PostCopyAfter>,
    /// A destination on this host may read the memory itself if it is root's or this user's; none: nobody's may.
    pub lend_to: Option<u32>,
    /// What a stock QEMU could be asked as well.
    pub terms: MoveTerms,
}

impl Default for MoveOptions {
    fn default() -> Self {
        Self {
            channels: std::thread::available_parallelism().map_or(2, |n| n.get().min(16) as u8),
            compress: Compress::default(),
            verify: false,
            post_copy: None,
            lend_to: None,
            terms: MoveTerms::default(),
        }
    }
}
