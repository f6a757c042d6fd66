//! How many windows that are to go as they are go to the channels at a time, and how many may be on their way.
//!
//! Each that is handed over alone wakes a thread, which is dear beside a fast link, and channels that find nothing
//! ready lose time. But what a channel has taken can't be encoded any more when the choice changes, and a slow link
//! carries few windows in the time that a look at it takes.
use std::time::{Duration, Instant};

use transship_memory::PAGE_BYTES;
use transship_wire::PAGES_PER_PACKET;

use super::{Counts, Threads};

/// Windows that are on their way at first while pages are sent as they are only to see how fast the link is: it should
/// cost a slow link little. To a fast one so few would make it look slow, so as many as it takes in this time are on
/// their way as soon as that is seen,
const PROBING_WINDOWS: u64 = 2;
const PROBING: Duration = Duration::from_millis(8);
/// step by step, since sockets may hold more than is thought. What is seen with fewer of them is void if there can be
/// so many more.
const PROBING_STEP: f64 = 1.5;
const PROBING_STEP_MOST: u64 = 2;
/// Otherwise a batch is what the link takes in this time, up to so many windows, and in the hands of all channels
/// together up to so many.
const BATCH: Duration = Duration::from_millis(2);
const BATCH_WINDOWS: u64 = 8;
const WINDOWS_IN_HANDS: u64 = 32;
/// Beside a batch in its hands, so many wait for each channel; of single windows so many for all.
const BATCHES_WAITING: u64 = 2;
const WAITING: u64 = 2;
const WINDOW_BYTES: u64 = PAGES_PER_PACKET * PAGE_BYTES as u64;

/// For pages that are to go as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawFlow {
    /// Windows at a time.
    pub batch: usize,
    /// Windows that may be on their way.
    pub most: u64,
    /// As `most`, where each is handed over alone.
    pub most_alone: u64,
}

impl RawFlow {
    /// At the start of a measurement of the link.
    const PROBING: Self = Self { batch: 1, most: PROBING_WINDOWS, most_alone: PROBING_WINDOWS };

    /// Over a link that is known.
    pub(super) fn over(seconds_a_byte: f64, threads: Threads) -> Self {
        let seconds_a_window = seconds_a_byte * WINDOW_BYTES as f64;
        let channels = threads.channels as u64;
        let batch_most = (WINDOWS_IN_HANDS / channels).clamp(1, BATCH_WINDOWS);
        let batch = ((BATCH.as_secs_f64() / seconds_a_window) as u64).clamp(1, batch_most);
        let most_alone = WAITING + channels;
        let most = if batch == 1 { most_alone } else { (1 + BATCHES_WAITING) * batch * channels };
        Self { batch: batch as usize, most, most_alone }
    }

    /// Whether another one may go when so many are on their way, of which so many wait for their batch to be full. A
    /// batch is begun only if all of it may go: else the first small one would have all others be small.
    pub fn lets(self, on_their_way: u64, batch: usize) -> bool {
        let others = if batch == 0 { self.batch as u64 - 1 } else { 0 };
        on_their_way + others < self.most
    }

    /// Whoever hands them over, and may not, should sleep until no more are on their way. With batches these are half
    /// of what may be, and he wakes seldom: each time he takes a core from a channel, which costs more than it seems to
    /// where there are few.
    pub fn sleep_until(self) -> u64 {
        if self.batch == 1 { self.most - 1 } else { (self.most / 2).min(self.most - self.batch as u64) }
    }
}

/// How many are on their way while the link is only looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probe {
    pub(super) flow: RawFlow,
    /// When as many as may be on their way had last gone, and what had been counted then.
    since: Option<(Instant, Counts)>,
}

impl Probe {
    pub(super) const BEGIN: Self = Self { flow: RawFlow::PROBING, since: None };

    /// Returns whether so many more may be on their way now that what was seen before is void. `are_full`: the sockets,
    /// which else take a few windows at once.
    pub(super) fn pass(&mut self, now: Instant, counts: &Counts, are_full: bool, threads: Threads) -> bool {
        let (since, before) = *self.since.get_or_insert((now, *counts));
        let RawFlow { most, .. } = self.flow;
        let (all, content) = (counts.all_pages - before.all_pages, counts.pages - before.pages);
        if all < most * PAGES_PER_PACKET {
            return false;
        }
        self.since = Some((now, *counts));
        // Zero pages are next to nothing for sockets and link: as if they were a fast link.
        if !are_full && content * 2 > all {
            return false;
        }
        let seconds_a_byte = (now - since).as_secs_f64() / (all * PAGE_BYTES as u64) as f64;
        let over = RawFlow::over(seconds_a_byte, threads);
        let bearable = (PROBING.as_secs_f64() / (seconds_a_byte * WINDOW_BYTES as f64)) as u64;
        let more = bearable.min(over.most).min(most * PROBING_STEP_MOST);
        if (more as f64) < most as f64 * PROBING_STEP {
            return false;
        }
        let batch = over.batch.min((more / PROBING_WINDOWS) as usize);
        self.flow = RawFlow { batch, most: more, most_alone: more.min(over.most_alone) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Auto, *};

    fn over(bytes_a_second: f64) -> RawFlow {
        let threads = Threads { encoders: 2, channels: 4, cores: 2 };
        Auto::new(3, 0, threads).over_link(1.0 / bytes_a_second).raw_flow()
    }

    #[test]
    fn only_a_fast_link_gets_batches() {
        assert_eq!(over(125e6), RawFlow { batch: 1, most: 6, most_alone: 6 }, "a window takes 4 ms");
        assert_eq!(over(1.25e9), RawFlow { batch: 4, most: 48, most_alone: 6 }, "0.42 ms");
        assert_eq!(over(50e9), RawFlow { batch: 8, most: 96, most_alone: 6 });
        assert_eq!(over(f64::INFINITY), RawFlow { batch: 8, most: 96, most_alone: 6 }, "faster than was thought");
    }

    #[test]
    fn a_batch_is_begun_only_if_all_of_it_may_go() {
        let flow = RawFlow { batch: 8, most: 32, most_alone: 6 };
        assert!(flow.lets(24, 0) && !flow.lets(25, 0));
        assert!(flow.lets(31, 7) && !flow.lets(32, 7));
        for flow in [flow, over(125e6), Probe::BEGIN.flow, RawFlow { batch: 8, most: 8, most_alone: 6 }] {
            assert!(flow.lets(flow.sleep_until(), 0), "{flow:?}: who was woken can go on");
        }
    }

    /// What a look lets be on its way, window by window, over a link that takes so many bytes a second.
    fn look(bytes_a_second: f64, content: bool, are_full: bool) -> Vec<u64> {
        let (mut probe, begin) = (Probe::BEGIN, Instant::now());
        let threads = Threads { encoders: 2, channels: 4, cores: 2 };
        let mut pass = |window: u64| {
            let all_pages = window * PAGES_PER_PACKET;
            let counts = Counts { all_pages, pages: if content { all_pages } else { 0 }, ..Counts::default() };
            let seconds = (window * WINDOW_BYTES) as f64 / bytes_a_second;
            probe.pass(begin + Duration::from_secs_f64(seconds), &counts, are_full, threads);
            probe.flow.most
        };
        (0..=200).map(&mut pass).collect()
    }

    #[test]
    fn a_look_at_a_fast_link_soon_has_more_on_the_way() {
        let most = look(4e9, true, true);
        assert_eq!((most[1], most[2], most[6], most[14], most[30]), (2, 4, 8, 16, 32));
        assert_eq!(most[200], 61, "8 ms");
        assert_eq!(look(4e9, false, false), most, "zero pages");
        for (speed, are_full) in [(125e6, true), (4e9, false)] {
            assert!(look(speed, true, are_full).iter().all(|most| *most == PROBING_WINDOWS), "a gigabit, and sockets");
        }
    }
}
