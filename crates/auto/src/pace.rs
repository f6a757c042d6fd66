//! How fast it goes: what is counted over a stretch, and what follows from it.
use std::time::Duration;

use transship_memory::PAGE_BYTES;

use super::Threads;

/// Weight of the newest stretch: one may have been lucky.
const NEWEST: f64 = 0.3;
/// Encoders that are busy for less than this share of the time wait for the link.
const SATURATED: f64 = 0.9;

/// What all threads together have done since the beginning.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Pages that were dealt with.
    pub all_pages: u64,
    /// Those of them with content, which were sent.
    pub pages: u64,
    /// Bytes that these were on the wire.
    pub wire: u64,
    /// Those of `pages` that the encoding in use was chosen for.
    pub own_pages: u64,
    /// Bytes that these were on the wire.
    pub own_wire: u64,
    /// Time in which an encoder had a window at hand; all threads together.
    pub encoding: Duration,
    /// Time in which encoders and channels looked for zero pages; all threads together.
    pub looking: Duration,
}

/// What was counted over a stretch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    seconds: f64,
    pages: f64,
    wire: f64,
    /// Bytes of a page that the encoding in use has left; others may still be on their way.
    left: f64,
    /// Share of the time for which the encoders were busy.
    busy: f64,
}

impl Counted {
    /// `on_their_way`: pages that channels may have had at hand; of a stretch that was cut, else none.
    pub(super) fn new(
        took: Duration,
        from: &Counts,
        to: &Counts,
        is_raw: bool,
        threads: Threads,
        on_their_way: Option<u64>,
    ) -> Self {
        let all = took.as_secs_f64();
        let lookers = if is_raw { threads.channels } else { threads.encoders };
        // Zero pages cost the same under all encodings, and elsewhere there may be more of them, or fewer.
        let looking = (to.looking - from.looking).as_secs_f64() / lookers as f64;
        // In favour of the encoding: as if all that is on its way had arrived.
        let more = on_their_way.unwrap_or(0);
        Self {
            seconds: (all - looking).max(all / 10.0),
            pages: (to.pages - from.pages + more) as f64,
            wire: (to.wire - from.wire + more * PAGE_BYTES as u64) as f64,
            left: (to.own_wire - from.own_wire) as f64 / (to.own_pages - from.own_pages).max(1) as f64,
            busy: (to.encoding - from.encoding).as_secs_f64() / threads.encoders as f64 / all,
        }
    }

    /// Of pages as they are.
    pub(super) fn raw(&self) -> EncodingPace {
        let seconds_a_byte = self.seconds / self.wire;
        let seconds_a_page = seconds_a_byte * PAGE_BYTES as f64;
        EncodingPace { seconds_a_page, seconds_a_byte, waits_for_link: true, harder: 1.0 }
    }

    /// Of encoded ones. `sampled`: bytes that samples have left of a page.
    pub(super) fn encoded(&self, sampled: f64) -> EncodingPace {
        let seconds_a_byte = self.seconds / self.wire;
        let waits_for_link = self.busy < SATURATED;
        let seconds_a_page = if waits_for_link { seconds_a_byte * self.left } else { self.seconds / self.pages };
        EncodingPace { seconds_a_page, seconds_a_byte, waits_for_link, harder: self.left / sampled }
    }
}

/// How an encoding does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct EncodingPace {
    pub(super) seconds_a_page: f64,
    pub(super) seconds_a_byte: f64,
    /// So the link, and what lies behind it, takes that time for a byte. Else it waits for the encoders.
    pub(super) waits_for_link: bool,
    /// How much of a page is left, by how much of one is left in the samples: these pages shrink less, or more.
    pub(super) harder: f64,
}

impl EncodingPace {
    /// Both, the newer one weighing `NEWEST`.
    pub(super) fn then(self, newest: Self) -> Self {
        Self {
            seconds_a_page: smooth(self.seconds_a_page, newest.seconds_a_page),
            seconds_a_byte: smooth(self.seconds_a_byte, newest.seconds_a_byte),
            waits_for_link: newest.waits_for_link,
            harder: smooth(self.harder, newest.harder),
        }
    }
}

fn smooth(before: f64, newest: f64) -> f64 {
    before + NEWEST * (newest - before)
}
