//! What encodings cost and leave, from windows that were encoded in all ways.
use std::time::Duration;

use transship_memory::PAGE_BYTES;

/// Share of the encoders' time that samples may take; the first few are free.
const SHARE: f64 = 0.005;
const FREE: u32 = 2;
/// While encoders wait for the link, and so few have come that a single one that was held up would mislead.
const SHARE_FEW: f64 = 0.05;
const FEW: u32 = 8;
/// And with more of them. Such encoders keep nobody from anything but a guest, or a peer on the same host.
const SHARE_WAITING: f64 = 0.01;
/// What a sample still weighs after each further one.
const DECAY: f64 = 0.7;

/// A window that was encoded in all ways.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Pages that it has.
    pub pages: u64,
    /// By encoding: bytes that are left, and the time that an encoder needs.
    pub outcomes: Vec<(u64, Duration)>,
}

/// All samples, the newer ones weighing more.
#[derive(Debug)]
pub(super) struct Samples {
    pages: f64,
    /// By encoding: bytes left, and seconds of one encoder.
    sums: Vec<(f64, f64)>,
    asked: u32,
    came: u32,
    /// Of encoders: what all of them took, and what they may take.
    seconds: f64,
    allowed: f64,
    /// The last one had nothing to learn from; and pages with content that had been sent when that was heard of.
    was_empty: bool,
    pages_seen: Option<u64>,
}

/// What samples may cost now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoders {
    /// They, or the cores, have other things to do.
    Needed,
    /// They wait for the link.
    Waiting,
}

impl Samples {
    pub(super) fn new(encodings: usize) -> Self {
        Self {
            pages: 0.0,
            sums: vec![(0.0, 0.0); encodings],
            asked: 0,
            came: 0,
            seconds: 0.0,
            allowed: 0.0,
            was_empty: false,
            pages_seen: None,
        }
    }

    pub(super) fn add(&mut self, sample: &Sample) {
        if sample.pages == 0 {
            self.asked -= 1;
            self.was_empty = true;
            return;
        }
        self.came += 1;
        self.pages = self.pages * DECAY + sample.pages as f64;
        for (sum, &(left, needs)) in self.sums.iter_mut().zip(&sample.outcomes) {
            self.seconds += needs.as_secs_f64();
            *sum = (sum.0 * DECAY + left as f64, sum.1 * DECAY + needs.as_secs_f64());
        }
    }

    /// So many more seconds of all encoders have passed.
    pub(super) fn pass(&mut self, seconds: f64, encoders: Encoders) {
        let share = match encoders {
            Encoders::Needed => SHARE,
            Encoders::Waiting if self.came < FEW => SHARE_FEW,
            Encoders::Waiting => SHARE_WAITING,
        };
        self.allowed += seconds * share;
    }

    /// Whether to ask for one, `pages` with content having been sent so far. It counts as asked for then.
    ///
    /// Zero pages teach nothing, and where there is one there are many: after a window of them none is asked for until
    /// others were met.
    pub(super) fn ask(&mut self, pages: u64) -> bool {
        if std::mem::take(&mut self.was_empty) {
            self.pages_seen = Some(pages);
        }
        if self.pages_seen.is_some_and(|seen| pages <= seen) {
            return false;
        }
        let affordable = self.seconds * f64::from(self.asked + 1) < self.allowed * f64::from(self.asked);
        let due = self.asked < FREE || self.came == self.asked && affordable;
        self.asked += u32::from(due);
        due
    }

    /// By encoding, as `of`.
    pub(super) fn all(&self) -> Vec<Option<(f64, f64)>> {
        (0..self.sums.len()).map(|encoding| self.of(encoding)).collect()
    }

    /// Bytes left of a page, and seconds of an encoder for one. None before the first sample.
    pub(super) fn of(&self, encoding: usize) -> Option<(f64, f64)> {
        let (left, seconds) = self.sums[encoding];
        (self.came > 0).then(|| ((left / self.pages).min(PAGE_BYTES as f64), seconds / self.pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(pages: u64, left: u64) -> Sample {
        Sample { pages, outcomes: vec![(left, Duration::from_millis(pages))] }
    }

    #[test]
    fn newer_ones_weigh_more() {
        let mut samples = Samples::new(1);
        assert_eq!(samples.of(0), None);
        samples.ask(0);
        samples.add(&sample(100, 100 * 4000));
        assert_eq!(samples.of(0), Some((4000.0, 0.001)));
        (0..50).for_each(|_| samples.add(&sample(100, 100 * 1000)));
        let left = samples.of(0).map(|of| of.0);
        assert!(left.is_some_and(|left| (1000.0..1020.0).contains(&left)), "{left:?}");
    }

    #[test]
    fn they_take_a_small_share_of_the_time_and_come_one_by_one() {
        let mut samples = Samples::new(1);
        assert_eq!([0, 1, 2].map(|_| samples.ask(0)), [true, true, false], "two are free");
        samples.add(&sample(2, 0));
        samples.add(&sample(2, 0));
        samples.pass(1.0, Encoders::Needed);
        assert!(!samples.ask(1), "4 ms for two: a third is too much for 5 ms");
        samples.pass(0.5, Encoders::Needed);
        assert!(samples.ask(1));
        samples.pass(100.0, Encoders::Needed);
        assert!(!samples.ask(1), "the next one only when this one has come");
    }

    #[test]
    fn idle_encoders_are_asked_sooner_but_not_for_ever() {
        let mut samples = Samples::new(1);
        (0..2).for_each(|_| assert!(samples.ask(0)));
        (0..2).for_each(|_| samples.add(&sample(2, 0)));
        samples.pass(0.09, Encoders::Waiting);
        for _ in 2..FEW {
            samples.pass(0.04, Encoders::Waiting);
            assert!(samples.ask(1), "2 ms of 2 ms, and half a millisecond is left over");
            samples.add(&sample(2, 0));
        }
        samples.pass(0.1, Encoders::Waiting);
        assert!(!samples.ask(1), "2 ms are too much for 1.5");
        samples.pass(0.1, Encoders::Waiting);
        assert!(samples.ask(1));
    }

    #[test]
    fn memory_without_content_is_not_asked_for_on_and_on() {
        let mut samples = Samples::new(1);
        assert!(samples.ask(0) && samples.ask(0) && !samples.ask(0));
        samples.add(&sample(0, 0));
        assert!(!samples.ask(0) && samples.of(0).is_none(), "nothing but zero pages was met");
        assert!(samples.ask(1), "it still wants two");
        samples.add(&sample(0, 0));
        assert!(!samples.ask(1));
        samples.add(&sample(3, 0));
        assert!(samples.ask(4) && samples.of(0).is_some());
    }
}
