//! The rounds of a move that has not begun: each takes as long as its pages need on the way, and what is written in
//! that time is the next one. [`Forecast`], which judges real rounds, judges these.
use std::time::Duration;

use serde::Serialize;
use transship_memory::PAGE;

use super::sample::{GuestSample, Written};
use crate::{
    Converge, PostCopyAfter, Report, RoundReport,
    forecast::{Aim, Forecast, Verdict},
    pacing,
    shortfall::Medium,
};

/// What a round takes beside its pages: scans, threads, an answer.
const ROUND: Duration = Duration::from_millis(5);
/// Of the rest of the first round, what a second one may leave if the guest could as well go before its pages. The
/// round delays the end by what it leaves, which is sent twice then. It is worth that if far fewer pages are waited
/// for.
const WORTH_A_ROUND: f64 = 0.25;

/// How pages are carried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Carrier {
    /// Bytes a second on the wire.
    pub bytes_per_s: f64,
    /// There and back.
    pub round_trip: Duration,
    /// Bytes of pages by bytes on the wire.
    pub ratio: f64,
    /// Bytes of pages that all encoders together make smaller in a second; none: pages are sent as they are.
    pub encode_bytes_per_s: Option<f64>,
}

impl Carrier {
    /// Bytes of pages a second.
    pub(super) fn pages_per_s(&self) -> f64 {
        let by_link = self.bytes_per_s * self.ratio;
        self.encode_bytes_per_s.map_or(by_link, |encode| by_link.min(encode)).max(1.0)
    }

    /// How many seconds a round of so many bytes takes.
    fn round_seconds(&self, bytes: f64) -> f64 {
        bytes / self.pages_per_s() + (ROUND + self.round_trip).as_secs_f64()
    }
}

/// What the move is allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// How long the guest may stand still.
    pub downtime: Duration,
    /// Rounds after which it is given up.
    pub max_rounds: u32,
    /// What is done so that it converges.
    pub converge: Converge,
}

/// What a move would be like.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Outlook {
    /// It ends with the guest at the destination; otherwise with a verdict, and the other numbers are those until then.
    pub converges: bool,
    /// All of it, in milliseconds.
    pub total_ms: f64,
    /// The last one, in which the guest stands still, included.
    pub rounds: u32,
    /// On the wire.
    pub bytes: u64,
    /// For how long the guest stands still; if it does not converge, for how long it would have to.
    pub downtime_ms: f64,
    /// How much of its writing the guest does during the move: 1, or less if it is paced. None: that depends on the
    /// pages that it waits for.
    pub work_share: Option<f64>,
    /// Of the pages, bytes of those that follow the guest.
    pub follows_bytes: u64,
}

/// Where the rounds begin.
#[derive(Debug, Clone, Default)]
pub(super) struct Start {
    /// What the next round has to send.
    pub(super) rest: f64,
    /// Rounds so far.
    pub(super) rounds: Vec<RoundReport>,
}

/// What a move of this guest would be like.
pub fn predict(sample: &GuestSample, carrier: &Carrier, work: &Work) -> Outlook {
    let (curve, rest) = Curve::of(sample);
    let state = Duration::from_secs_f64(sample.state_ms / 1e3);
    run_on(Start { rest, rounds: Vec::new() }, &curve, carrier, work, state)
}

/// What a move of this guest would be like whose pages may follow it, after one or two rounds.
pub fn predict_post_copy(sample: &GuestSample, carrier: &Carrier, work: &Work) -> Outlook {
    let (curve, mut rest) = Curve::of(sample);
    let state = sample.state_ms / 1e3;
    let time = |bytes: f64| carrier.round_seconds(bytes);
    let fits = |rest: f64| state + time(rest) <= work.downtime.as_secs_f64();
    let mut outlook = Outlook { converges: true, ..Outlook::default() };
    let (mut seconds, mut bytes) = (0.0, rest);
    loop {
        seconds += time(rest);
        outlook.rounds += 1;
        rest = curve.bytes(time(rest));
        bytes += rest;
        let is_last = outlook.rounds as usize == PostCopyAfter::NO_GAIN_MOST;
        if fits(rest) || is_last || !curve.another_gains(rest, time(rest), fits) {
            break;
        }
    }
    if fits(rest) {
        outlook.rounds += 1;
        outlook.work_share = Some(1.0);
        outlook.downtime_ms = (state + time(rest)) * 1e3;
    } else {
        outlook.follows_bytes = rest as u64;
        outlook.downtime_ms = (state + time(0.0)) * 1e3;
        seconds += time(rest);
    }
    outlook.bytes = (bytes / carrier.ratio) as u64;
    outlook.total_ms = seconds * 1e3 + outlook.downtime_ms;
    outlook
}

/// What is left of a move from here on.
pub(super) fn run_on(start: Start, curve: &Curve<'_>, carrier: &Carrier, work: &Work, state: Duration) -> Outlook {
    let Work { downtime, max_rounds, converge } = *work;
    let (medium, max_downtime) = (Medium::Link, downtime);
    let aim = Aim { medium, downtime, max_downtime, bandwidth: None, max_rounds, converge };
    let mut forecast = Forecast::new(aim, state);
    let (mut report, mut rest) = (Report { rounds: start.rounds, ..Report::default() }, start.rest);
    if !report.rounds.is_empty() {
        // What these have left is among the rests that a smaller one is compared with.
        forecast.judge(&report, rest as u64, None);
    }
    let (mut outlook, mut paced) = (Outlook::default(), Paced::default());
    let time = |bytes: f64| carrier.round_seconds(bytes);
    loop {
        let seconds = time(rest);
        outlook.total_ms += seconds * 1e3;
        outlook.rounds += 1;
        outlook.bytes += (rest / carrier.ratio) as u64;
        let free = curve.bytes(seconds);
        // The first round is never paced.
        let holds = converge == Converge::Pace && !report.rounds.is_empty();
        let most = if holds { pacing::most(rest, &forecast.room(&report, None)) } else { f64::MAX };
        let written = free.min(most);
        paced.note(seconds, free, written);
        let (bytes, ms) = ((rest / carrier.ratio) as u64, seconds * 1e3);
        let dirty_pages_per_s = written / PAGE as f64 / seconds;
        report.rounds.push(RoundReport { bytes, ms, dirty_pages_per_s, ..RoundReport::default() });
        rest = written;
        let verdict = forecast.judge(&report, rest as u64, None);
        if verdict == Verdict::AnotherRound {
            continue;
        }
        outlook.downtime_ms = (state.as_secs_f64() + time(rest)) * 1e3;
        outlook.work_share = Some(paced.share());
        if verdict == Verdict::Fits {
            outlook.converges = true;
            outlook.total_ms += outlook.downtime_ms;
            outlook.rounds += 1;
            outlook.bytes += (rest / carrier.ratio) as u64;
        }
        return outlook;
    }
}

/// How much is written in which time.
pub(super) struct Curve<'a> {
    pub(super) points: &'a [Written],
    /// All memory that there is.
    pub(super) most: f64,
}

impl<'a> Curve<'a> {
    /// Of a sample, and the bytes of its first round.
    fn of(sample: &'a GuestSample) -> (Self, f64) {
        let most = sample.data_bytes as f64;
        (Self { points: &sample.written, most }, most * (1.0 - sample.zero_share))
    }

    /// Whether a round that sends this rest in so many seconds leaves far less, or so little that the guest may be
    /// stopped for it.
    pub(super) fn another_gains(&self, rest: f64, seconds: f64, fits: impl Fn(f64) -> bool) -> bool {
        let left = self.bytes(seconds);
        left < WORTH_A_ROUND * rest || fits(left)
    }

    /// Between two points, and before the first, it is a line; behind the last it goes on as before it.
    fn bytes(&self, seconds: f64) -> f64 {
        let (ms, origin) = (seconds * 1e3, Written { ms: 0.0, bytes: 0.0 });
        let mut before = origin;
        let mut slope = 0.0;
        for &point in self.points {
            slope = (point.bytes - before.bytes) / (point.ms - before.ms).max(1e-9);
            if ms <= point.ms {
                return (before.bytes + slope * (ms - before.ms)).min(self.most);
            }
            before = point;
        }
        (before.bytes + slope * (ms - before.ms)).min(self.most)
    }
}

/// How much of its work a guest does.
#[derive(Default)]
struct Paced {
    seconds: f64,
    done: f64,
}

impl Paced {
    fn note(&mut self, seconds: f64, free: f64, written: f64) {
        self.seconds += seconds;
        self.done += seconds * if free > 0.0 { written / free } else { 1.0 };
    }

    fn share(&self) -> f64 {
        if self.seconds > 0.0 { self.done / self.seconds } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    fn carrier(mb_per_s: f64) -> Carrier {
        let round_trip = Duration::from_millis(1);
        Carrier { bytes_per_s: mb_per_s * MB, round_trip, ratio: 1.0, encode_bytes_per_s: None }
    }

    fn work(converge: Converge) -> Work {
        Work { downtime: Duration::from_millis(300), max_rounds: 30, converge }
    }

    /// A guest that writes pages of a hot set at random.
    #[derive(Clone)]
    struct Writer {
        hot: u64,
        pages_per_s: f64,
        random: u64,
    }

    impl Writer {
        fn new(hot_mb: f64, mb_per_s: f64) -> Self {
            let pages = |mb: f64| mb * MB / PAGE as f64;
            Self { hot: pages(hot_mb) as u64, pages_per_s: pages(mb_per_s), random: 0x2545_F491_4F6C_DD1D }
        }

        /// Bytes of the pages that it writes in this time.
        fn write(&mut self, seconds: f64) -> f64 {
            let (mut is_written, mut count) = (vec![false; self.hot as usize], 0);
            for _ in 0..(self.pages_per_s * seconds) as u64 {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                let page = &mut is_written[(self.random % self.hot) as usize];
                count += u64::from(!*page);
                *page = true;
            }
            (count * PAGE) as f64
        }

        /// As it would be sampled in five seconds.
        fn sample(&self, data_mb: f64) -> GuestSample {
            let point = |ticks: u32| Written {
                ms: f64::from(ticks) * 100.0,
                bytes: self.clone().write(f64::from(ticks) / 10.0),
            };
            let written = [1, 2, 4, 8, 16, 50].map(point).into();
            GuestSample { data_bytes: (data_mb * MB) as u64, written, state_ms: 30.0, ..GuestSample::default() }
        }

        /// Its move, page by page, as the rules of a move have it; none if it never fits.
        fn move_over(&self, data_mb: f64, mb_per_s: f64) -> (f64, Option<u32>) {
            let (mut writer, mut rest, mut bytes) = (self.clone(), data_mb * MB, 0.0);
            for round in 1..=30 {
                bytes += rest;
                rest = writer.write(rest / (mb_per_s * MB) + 0.006);
                if rest / (mb_per_s * MB) + 0.03 <= 0.3 {
                    return (bytes + rest, Some(round + 1));
                }
            }
            (bytes, None)
        }
    }

    /// Page by page and by the curve, for guests of all kinds.
    #[test]
    fn the_model_tells_what_a_simulation_does() {
        let (mut converging, mut hopeless) = (0, 0);
        for data_mb in [200.0, 1000.0] {
            for hot_mb in [5.0, 20.0, 60.0, 200.0] {
                for writes in [1.0, 20.0, 60.0, 90.0, 150.0, 400.0] {
                    let writer = Writer::new(hot_mb, writes);
                    let story = format!("{data_mb} MB, of which {hot_mb} MB are written with {writes} MB/s");
                    let outlook = predict(&writer.sample(data_mb), &carrier(100.0), &work(Converge::Never));
                    let (bytes, rounds) = writer.move_over(data_mb, 100.0);
                    assert_eq!(outlook.converges, rounds.is_some(), "{story}: {outlook:?}");
                    if rounds.is_none() {
                        hopeless += 1;
                        continue;
                    }
                    converging += 1;
                    let error = outlook.bytes as f64 / bytes;
                    assert!((0.8..1.25).contains(&error), "{story}: {outlook:?}, {bytes} bytes");
                }
            }
        }
        assert!(converging > 10 && hopeless > 5, "{converging} {hopeless}");
    }

    #[test]
    fn a_guest_that_writes_nothing_takes_what_its_memory_takes() {
        let sample = GuestSample { data_bytes: 1_000_000_000, zero_share: 0.5, ..GuestSample::default() };
        let outlook = predict(&sample, &carrier(100.0), &work(Converge::Never));
        assert!(outlook.converges && outlook.rounds == 2 && outlook.bytes == 500_000_000, "{outlook:?}");
        assert!((5000.0..5100.0).contains(&outlook.total_ms) && outlook.downtime_ms < 20.0, "{outlook:?}");
        let smaller = Carrier { ratio: 4.0, encode_bytes_per_s: Some(1e9), ..carrier(100.0) };
        let outlook = predict(&sample, &smaller, &work(Converge::Never));
        assert!(outlook.bytes == 125_000_000 && outlook.total_ms < 1300.0, "{outlook:?}");
        let slow = Carrier { encode_bytes_per_s: Some(50e6), ..smaller };
        assert!(predict(&sample, &slow, &work(Converge::Never)).total_ms > 10_000.0, "encoders are slower");
    }

    #[test]
    fn what_ends_a_hopeless_move_is_known() {
        let sample = Writer::new(200.0, 200.0).sample(400.0);
        let never = predict(&sample, &carrier(100.0), &work(Converge::Never));
        assert!(!never.converges && never.downtime_ms > 300.0, "{never:?}");
        let paced = predict(&sample, &carrier(100.0), &work(Converge::Pace));
        assert!(paced.converges && paced.work_share.is_some_and(|share| (0.1..0.95).contains(&share)), "{paced:?}");
        let longer = Work { downtime: Duration::from_secs_f64(never.downtime_ms * 1.25e-3), ..work(Converge::Never) };
        let longer = predict(&sample, &carrier(100.0), &longer);
        assert!(longer.converges && longer.downtime_ms > 300.0 && longer.work_share == Some(1.0), "{longer:?}");
        // Four seconds for all of it, and two for what was written meanwhile, which would be written again by then.
        let followed = predict_post_copy(&sample, &carrier(100.0), &work(Converge::Never));
        assert!(followed.converges && followed.rounds == 1 && followed.work_share.is_none(), "{followed:?}");
        assert!((180_000_000..=200_000_000).contains(&followed.follows_bytes), "{followed:?}");
        assert!((5900.0..6200.0).contains(&followed.total_ms) && followed.downtime_ms < 50.0, "{followed:?}");
    }

    #[test]
    fn pages_follow_a_guest_only_if_rounds_do_not_end_it() {
        let follow = |memory: f64, hot: f64, writes: f64| {
            predict_post_copy(&Writer::new(hot, writes).sample(memory), &carrier(100.0), &work(Converge::Never))
        };
        // What it writes in four seconds fits.
        let little = follow(400.0, 20.0, 10.0);
        assert!(little.converges && little.follows_bytes == 0 && little.rounds == 2, "{little:?}");
        // A second round leaves a fifth, and that does not fit.
        let fifth = follow(1000.0, 500.0, 20.0);
        assert!(fifth.rounds == 2 && (31_000_000..45_000_000).contains(&fifth.follows_bytes), "{fifth:?}");
        assert!(fifth.bytes > 1_150_000_000 + fifth.follows_bytes, "{fifth:?}");
        // One that would leave half of it is not sent.
        let half = follow(400.0, 200.0, 60.0);
        assert!(half.rounds == 1 && (100_000_000..=200_000_000).contains(&half.follows_bytes), "{half:?}");
    }

    #[test]
    fn the_curve_goes_on_behind_its_end_and_no_further_than_memory() {
        let points = [(100.0, 10.0), (200.0, 15.0)].map(|(ms, bytes)| Written { ms, bytes });
        let curve = Curve { points: &points, most: 30.0 };
        assert_eq!(
            [0.0, 0.05, 0.1, 0.15, 0.2, 0.4, 9.0].map(|s| curve.bytes(s)),
            [0.0, 5.0, 10.0, 12.5, 15.0, 25.0, 30.0]
        );
        assert_eq!(Curve { points: &[], most: 1.0 }.bytes(1.0), 0.0);
    }
}
