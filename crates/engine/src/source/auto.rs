//! Which encoding pays: found by trying, window by window.
//!
//! What limits a move may be the link, the encoders or the memory bus, and may change while it runs. So nothing is computed from a model: each
//! encoding is used for a stretch of pages, and the one that got most pages through per second is used until the next trial. How often another
//! one is tried depends on how much worse it was, so that all trials together cost about a hundredth each.
use std::time::{Duration, Instant};

use transship_codec::{Method, Setting};

/// Pages that a stretch is measured over: 12 MiB. More would be surer, and cost a small guest more.
const MEASURED_PAGES: u64 = 3072;
/// Pages before them that still are the earlier encoding's: what waits in rings and sockets.
const SETTLING_PAGES: u64 = 2048;
/// What the trials of one encoding may cost, as a share of all time.
const TRIAL_COST: f64 = 0.01;
/// Stretches between two trials of the same encoding: not fewer, even if it is nearly as good, and not more, even if it is hopeless.
const TRIAL_EVERY: (f64, f64) = (8.0, 400.0);
/// A trial that has taken so much longer than the best would have is cut short: it has been seen enough of.
const PATIENCE: f64 = 1.5;
/// A rate that falls or rises by so much means that the link or the load has changed: everything is tried again.
const CHANGED: (f64, f64) = (0.6, 1.15);
/// Weight of the newest measurement: one stretch may have been lucky, or half of it under other conditions.
const NEWEST: f64 = 0.25;

/// The encodings to choose from, in the order in which they are tried first: where it is best to leave pages as they are, there is least time
/// for trials.
pub(crate) fn candidates() -> Vec<Setting> {
    let fastest = |method| Setting::new(method, Some(1)).expect("every method but none has a level 1");
    vec![Setting::NONE, fastest(Method::Lz4), fastest(Method::Zstd)]
}

/// One encoding, and what is known of it.
#[derive(Debug, Clone, Copy, Default)]
struct Candidate {
    /// Pages a second; none: not tried yet.
    rate: Option<f64>,
    /// Stretches of others since it was tried.
    since: f64,
}

/// Chooses between encodings by what they achieve.
#[derive(Debug)]
pub(crate) struct Auto {
    candidates: Vec<Candidate>,
    current: usize,
    stretch: Option<Stretch>,
}

/// A stretch of pages under one encoding.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    begin: Instant,
    begin_pages: u64,
    settled: Option<(Instant, u64)>,
}

impl Auto {
    pub(crate) fn new(candidates: usize) -> Self {
        Self { candidates: vec![Candidate::default(); candidates], current: 0, stretch: None }
    }

    /// Between two rounds time passes in which nothing is sent.
    pub(crate) fn pause(&mut self) {
        self.stretch = None;
    }

    /// The encoding for the next window. `pages`: how many with content have been sent so far, by all channels.
    pub(crate) fn choose(&mut self, now: Instant, pages: u64) -> usize {
        if self.candidates.len() == 1 {
            return 0;
        }
        let stretch = *self.stretch.get_or_insert(Stretch { begin: now, begin_pages: pages, settled: None });
        match stretch.settled {
            None if pages - stretch.begin_pages >= SETTLING_PAGES || self.is_hopeless(now - stretch.begin) => {
                self.stretch = Some(Stretch { settled: Some((now, pages)), ..stretch });
            }
            Some((since, from)) => {
                let (sent, took) = (pages - from, now.saturating_duration_since(since));
                if sent >= MEASURED_PAGES || sent > 0 && self.is_hopeless(took) {
                    self.measured(sent as f64 / took.as_secs_f64().max(1e-9));
                    self.stretch = None;
                }
            }
            None => {}
        }
        self.current
    }

    /// The best would have been through long ago.
    fn is_hopeless(&self, took: Duration) -> bool {
        let best = self.candidates.iter().filter_map(|c| c.rate).fold(0.0, f64::max);
        let would_take = MEASURED_PAGES as f64 / best;
        best > 0.0 && took.as_secs_f64() > PATIENCE * would_take
    }

    fn measured(&mut self, rate: f64) {
        let before = self.candidates[self.current].rate;
        self.candidates[self.current].rate = Some(before.map_or(rate, |before| before + NEWEST * (rate - before)));
        self.candidates.iter_mut().for_each(|candidate| candidate.since += 1.0);
        self.candidates[self.current].since = 0.0;
        if before.is_some_and(|before| rate < CHANGED.0 * before || rate > CHANGED.1 * before) {
            // What was measured before was measured elsewhere, so to speak.
            let current = self.current;
            self.candidates[current].rate = Some(rate);
            self.candidates.iter_mut().enumerate().filter(|(i, _)| *i != current).for_each(|(_, c)| c.rate = None);
        }
        self.current = self.next();
    }

    /// One that was not tried yet, or whose trial is due, or else the best.
    fn next(&self) -> usize {
        let rate = |candidate: &Candidate| candidate.rate.unwrap_or(0.0);
        if let Some(untried) = self.candidates.iter().position(|candidate| candidate.rate.is_none()) {
            return untried;
        }
        let best = (0..self.candidates.len())
            .max_by(|a, b| rate(&self.candidates[*a]).total_cmp(&rate(&self.candidates[*b])))
            .expect("there are candidates");
        let due = |candidate: &Candidate| {
            let loss = (rate(&self.candidates[best]) / rate(candidate).max(1e-9) - 1.0).min(PATIENCE);
            candidate.since >= (loss / TRIAL_COST).clamp(TRIAL_EVERY.0, TRIAL_EVERY.1)
        };
        self.candidates.iter().enumerate().find(|(i, c)| *i != best && due(c)).map_or(best, |(i, _)| i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages a second that each encoding gets through, from a page on.
    type Rates = (u64, [f64; 3]);

    /// Sends `pages` in windows of 128 and returns the seconds; `rates` change as the pages go by.
    fn simulate(pages: u64, rates: &[Rates], mut choose: impl FnMut(Instant, u64) -> usize) -> f64 {
        let begin = Instant::now();
        let mut seconds = 0.0;
        for sent in (0..pages).step_by(128) {
            let now = rates.iter().rev().find(|(from, _)| *from <= sent).expect("the first is from 0").1;
            seconds += 128.0 / now[choose(begin + Duration::from_secs_f64(seconds), sent)];
        }
        seconds
    }

    fn best_fixed(pages: u64, rates: &[Rates]) -> f64 {
        (0..3).map(|fixed| simulate(pages, rates, |_, _| fixed)).fold(f64::INFINITY, f64::min)
    }

    fn auto(pages: u64, rates: &[Rates]) -> f64 {
        let mut auto = Auto::new(3);
        simulate(pages, rates, |now, sent| auto.choose(now, sent))
    }

    const GIB: u64 = 262_144;

    #[test]
    fn it_is_nearly_as_fast_as_the_best_whatever_that_is() {
        let links = [
            [190e3, 430e3, 140e3], // memory to memory: as it is
            [77e3, 30e3, 115e3],   // a gigabit: the ratio decides
            [7.7e3, 3e3, 11.5e3],  // a tenth of it
            [300e3, 290e3, 250e3], // lz4, by a little
            [100e3, 100e3, 100e3], // no difference
        ];
        for rates in links {
            let rates = [(0, rates)];
            let (ours, best) = (auto(4 * GIB, &rates), best_fixed(4 * GIB, &rates));
            assert!(ours < best * 1.05, "{rates:?}: {ours} s, the best takes {best} s");
        }
    }

    #[test]
    fn it_notices_that_the_link_has_become_slow_and_fast_again() {
        let (fast, slow) = ([190e3, 430e3, 140e3], [77e3, 30e3, 115e3]);
        let rates = [(0, fast), (2 * GIB, slow), (4 * GIB, fast)];
        let ideal: f64 = [(2.0, fast[1]), (2.0, slow[2]), (2.0, fast[1])].iter().map(|(g, r)| g * GIB as f64 / r).sum();
        let ours = auto(6 * GIB, &rates);
        assert!(ours < ideal * 1.15, "{ours} s, {ideal} s if it had known");
        assert!(ours < best_fixed(6 * GIB, &rates) * 0.95, "better than any that does not change its mind");
    }

    #[test]
    fn a_pause_is_not_taken_for_a_slow_link() {
        let mut auto = Auto::new(3);
        let begin = Instant::now();
        let mut sent = 0;
        let mut run = |auto: &mut Auto, from: Instant| {
            for window in 0..400 {
                auto.choose(from + Duration::from_micros(window * 300), sent);
                sent += 128;
            }
        };
        run(&mut auto, begin);
        let before = auto.candidates[0].rate;
        auto.pause();
        run(&mut auto, begin + Duration::from_secs(3600));
        assert!(auto.candidates.iter().filter_map(|c| c.rate).all(|rate| rate > 100_000.0), "{before:?} {auto:?}");
    }
}
