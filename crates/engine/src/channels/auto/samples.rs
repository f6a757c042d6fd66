//! What encodings cost and leave, from windows that were encoded in all ways.
use std::time::Duration;

use transship_memory::PAGE_BYTES;

/// Share of the encoders' time that samples may take; the first few are free.
const SHARE: f64 = 0.005;
const FREE: u32 = 2;
/// What a sample still weighs after each further one.
const DECAY: f64 = 0.7;

/// A window that was encoded in all ways.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) pages: u64,
    /// By encoding: bytes that are left, and the time that an encoder needs.
    pub(crate) outcomes: Vec<(u64, Duration)>,
}

/// All samples, the newer ones weighing more.
#[derive(Debug)]
pub(super) struct Samples {
    pages: f64,
    /// By encoding: bytes left, and seconds of one encoder.
    sums: Vec<(f64, f64)>,
    asked: u32,
    came: u32,
    /// Of encoders, for all of them.
    seconds: f64,
}

impl Samples {
    pub(super) fn new(encodings: usize) -> Self {
        Self { pages: 0.0, sums: vec![(0.0, 0.0); encodings], asked: 0, came: 0, seconds: 0.0 }
    }

    pub(super) fn add(&mut self, sample: &Sample) {
        if sample.pages == 0 {
            self.asked -= 1; // there was nothing to learn from
            return;
        }
        self.came += 1;
        self.pages = self.pages * DECAY + sample.pages as f64;
        for (sum, &(left, needs)) in self.sums.iter_mut().zip(&sample.outcomes) {
            self.seconds += needs.as_secs_f64();
            *sum = (sum.0 * DECAY + left as f64, sum.1 * DECAY + needs.as_secs_f64());
        }
    }

    /// Whether to ask for one, `seconds` of all encoders having passed. It counts as asked for then.
    pub(super) fn ask(&mut self, seconds: f64) -> bool {
        let affordable = self.seconds * f64::from(self.asked + 1) < SHARE * seconds * f64::from(self.asked);
        let due = self.asked < FREE || self.came == self.asked && affordable;
        self.asked += u32::from(due);
        due
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
        samples.ask(0.0);
        samples.add(&sample(100, 100 * 4000));
        assert_eq!(samples.of(0), Some((4000.0, 0.001)));
        (0..50).for_each(|_| samples.add(&sample(100, 100 * 1000)));
        let left = samples.of(0).map(|of| of.0);
        assert!(left.is_some_and(|left| (1000.0..1020.0).contains(&left)), "{left:?}");
    }

    #[test]
    fn they_take_a_small_share_of_the_time_and_come_one_by_one() {
        let mut samples = Samples::new(1);
        assert_eq!([0, 1, 2].map(|_| samples.ask(0.0)), [true, true, false], "two are free");
        samples.add(&sample(2, 0));
        samples.add(&sample(2, 0));
        assert!(!samples.ask(1.0), "4 ms for two: a third is too much for 5 ms");
        assert!(samples.ask(1.5) && !samples.ask(100.0), "the next one only when this one has come");
    }

    #[test]
    fn windows_without_content_are_asked_for_anew() {
        let mut samples = Samples::new(1);
        assert!(samples.ask(0.0) && samples.ask(0.0) && !samples.ask(0.0));
        samples.add(&sample(0, 0));
        assert!(samples.ask(0.0) && samples.of(0).is_none());
    }
}
