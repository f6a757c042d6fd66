//! Whether the rest fits the downtime, and whether it ever will.
use std::time::Duration;

use transship_memory::PAGE;

use crate::{
    Converge, Report, RoundReport,
    shortfall::{Medium, Shortfall},
};

/// Rounds in a row that may pass without a smaller rest than ever before.
const PATIENCE: u32 = 6;
/// A round with fewer bytes says nothing about the link or disk.
const MEANINGFUL_BYTES: u64 = 1 << 20;
/// What it is taken for while nothing was measured: a gigabit.
const UNMEASURED_BYTES_PER_S: f64 = 125e6;

/// What to do after a round.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// The rest can be sent while the guest stands still.
    Fits,
    AnotherRound,
    /// It writes faster than its pages can be carried.
    Hopeless(Box<Shortfall>),
    /// It can't end by its deadline.
    TooLate(Box<Shortfall>),
}

/// What is to be reached, and by when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Aim {
    pub(crate) medium: Medium,
    /// How long the guest may stand still.
    pub(crate) downtime: Duration,
    /// The same, rather than that it is given up.
    pub(crate) max_downtime: Duration,
    /// Bytes a second that it is held below.
    pub(crate) bandwidth: Option<u64>,
    pub(crate) max_rounds: u32,
    pub(crate) converge: Converge,
}

/// What is left for the guest to converge in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Room {
    /// Bytes that can be sent while it stands still for no longer than it may.
    pub(crate) fits_bytes: u64,
    /// Rounds that may follow.
    pub(crate) rounds_left: u32,
    /// Bytes that can be sent until the deadline, if there is one, and the guest be stopped then.
    pub(crate) until_deadline: Option<u64>,
    /// How fast pages are carried.
    pub(crate) bytes_per_s: f64,
}

/// Looks at what rounds achieve.
#[derive(Debug)]
pub(crate) struct Forecast {
    aim: Aim,
    state: Duration,
    smallest_rest: u64,
    rounds_without_gain: u32,
    /// Rounds of the report that don't count.
    before: usize,
}

impl Forecast {
    /// `state`: how long saving, sending and loading the device state is thought to take.
    pub(crate) fn new(aim: Aim, state: Duration) -> Self {
        Self { aim, state, smallest_rest: u64::MAX, rounds_without_gain: 0, before: 0 }
    }

    /// Judges after a round, with `rest` bytes written since its scan. `time_left`: until the deadline.
    pub(crate) fn judge(&mut self, report: &Report, rest: u64, time_left: Option<Duration>) -> Verdict {
        let rate = self.bytes_per_s(&report.rounds);
        let stop = self.stop(report, rest);
        let is_last_chance = time_left.is_some_and(|left| left < stop + self.next_round(report, rest, rate));
        if time_left.is_some_and(|left| left < stop) {
            return Verdict::TooLate(self.shortfall(report, rest, stop));
        }
        if stop <= self.aim.downtime || rest == 0 {
            return Verdict::Fits;
        }
        if rest < self.smallest_rest / 100 * 95 {
            self.smallest_rest = rest;
            self.rounds_without_gain = 0;
        } else {
            self.rounds_without_gain += 1;
        }
        let rounds = self.rounds(report);
        let is_stuck = rounds >= self.aim.max_rounds || self.rounds_without_gain >= PATIENCE;
        if !is_stuck && !is_last_chance {
            return Verdict::AnotherRound;
        }
        if stop <= self.aim.max_downtime {
            return Verdict::Fits;
        }
        if is_last_chance {
            return Verdict::TooLate(self.shortfall(report, rest, stop));
        }
        Verdict::Hopeless(self.shortfall(report, rest, stop))
    }

    fn shortfall(&self, report: &Report, rest_bytes: u64, stop: Duration) -> Box<Shortfall> {
        let Aim { medium, downtime, max_downtime, converge, .. } = self.aim;
        let written = report.rounds.last().map_or(0.0, |round| round.dirty_pages_per_s);
        Box::new(Shortfall {
            rounds: report.rounds.len(),
            medium,
            written_bytes_per_s: written * PAGE as f64,
            carried_bytes_per_s: self.bytes_per_s(&report.rounds),
            rest_bytes,
            stop,
            state: self.state,
            downtime,
            max_downtime,
            converge,
        })
    }

    /// What is to be reached, and how long the device state is thought to take.
    pub(crate) fn aim(&self) -> (Aim, Duration) {
        (self.aim, self.state)
    }

    /// The rounds so far don't count any more, and nothing is known of what was gained.
    pub(crate) fn begin_again(&mut self, report: &Report) {
        (self.before, self.smallest_rest, self.rounds_without_gain) = (report.rounds.len(), u64::MAX, 0);
    }

    fn rounds(&self, report: &Report) -> u32 {
        report.rounds.len().saturating_sub(self.before) as u32
    }

    /// Whether so much can be sent within the downtime.
    pub(crate) fn fits(&self, report: &Report, rest: u64) -> bool {
        rest == 0 || self.stop(report, rest) <= self.aim.downtime
    }

    /// Whether so much can be sent within what is allowed rather than that it is given up.
    pub(crate) fn is_permitted(&self, report: &Report, rest: u64) -> bool {
        rest == 0 || self.stop(report, rest) <= self.aim.max_downtime.max(self.aim.downtime)
    }

    /// For how long it would stand still.
    fn stop(&self, report: &Report, rest: u64) -> Duration {
        self.state + Duration::from_secs_f64(rest as f64 / self.bytes_per_s(&report.rounds))
    }

    /// How long what is written during the next round would take at least.
    fn next_round(&self, report: &Report, rest: u64, rate: f64) -> Duration {
        let dirty = report.rounds.last().map_or(0.0, |round| round.dirty_pages_per_s) * PAGE as f64;
        let written = match self.aim.converge {
            Converge::Never => dirty * (rest as f64 / rate),
            // As hard as it can be.
            Converge::Pace => 0.0,
        };
        Duration::from_secs_f64(written.min(rest as f64) / rate)
    }

    /// What is left for the guest to converge in.
    pub(crate) fn room(&self, report: &Report, time_left: Option<Duration>) -> Room {
        let rate = self.bytes_per_s(&report.rounds);
        let bytes_in = |time: Duration| (time.saturating_sub(self.state).as_secs_f64() * rate) as u64;
        let rounds_left = self.aim.max_rounds.saturating_sub(self.rounds(report));
        let (fits_bytes, until_deadline) = (bytes_in(self.aim.downtime), time_left.map(bytes_in));
        Room { fits_bytes, rounds_left, until_deadline, bytes_per_s: rate }
    }

    /// Bytes a second over the rounds so far.
    fn bytes_per_s(&self, rounds: &[RoundReport]) -> f64 {
        let measured = carried_bytes_per_s(rounds).unwrap_or(UNMEASURED_BYTES_PER_S);
        self.aim.bandwidth.map_or(measured, |limit| measured.min(limit as f64))
    }
}

/// Bytes a second over these rounds: the later half counts, the first rounds may have been another load. None: they say
/// nothing.
pub(crate) fn carried_bytes_per_s(rounds: &[RoundReport]) -> Option<f64> {
    let meaningful: Vec<_> = rounds.iter().filter(|round| round.bytes >= MEANINGFUL_BYTES && round.ms > 0.0).collect();
    let recent = &meaningful[meaningful.len() / 2..];
    let (bytes, ms) = recent.iter().fold((0.0, 0.0), |(b, t), round| (b + round.bytes as f64, t + round.ms));
    (ms > 0.0).then_some(bytes / ms * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn aim(downtime_ms: u64) -> Aim {
        let downtime = Duration::from_millis(downtime_ms);
        let (max_downtime, converge) = (downtime, Converge::Never);
        Aim { medium: Medium::Link, downtime, max_downtime, bandwidth: None, max_rounds: 30, converge }
    }

    fn forecast(downtime_ms: u64) -> Forecast {
        Forecast::new(aim(downtime_ms), Duration::from_millis(50))
    }

    /// Rounds that each carried 100 MiB in a second.
    fn report(rounds: usize) -> Report {
        let round = RoundReport { bytes: 100 * MIB, ms: 1000.0, ..RoundReport::default() };
        Report { rounds: vec![round; rounds], ..Report::default() }
    }

    #[test]
    fn the_device_state_counts_as_downtime() {
        // 25 MiB at 100 MiB/s are 250 ms, and 50 ms for the state: just what is allowed.
        assert_eq!(forecast(300).judge(&report(1), 25 * MIB, None), Verdict::Fits);
        assert_eq!(forecast(299).judge(&report(1), 25 * MIB, None), Verdict::AnotherRound);
    }

    #[test]
    fn a_limit_lowers_the_forecast() {
        let aim = Aim { bandwidth: Some(MIB), ..aim(300) };
        assert_eq!(Forecast::new(aim, Duration::ZERO).judge(&report(1), MIB, None), Verdict::AnotherRound);
    }

    #[test]
    fn a_shrinking_rest_gets_time_and_a_constant_one_a_verdict() {
        let mut patient = forecast(100);
        for round in 1..20 {
            let rest = (900 >> (round / 4)) * MIB;
            assert_eq!(patient.judge(&report(round), rest, None), Verdict::AnotherRound, "round {round}");
        }
        let mut stuck = forecast(100);
        let verdicts: Vec<_> = (1..9).map(|round| stuck.judge(&report(round), 500 * MIB, None)).collect();
        assert_eq!(verdicts.iter().position(|v| *v != Verdict::AnotherRound), Some(PATIENCE as usize));
        let Verdict::Hopeless(shortfall) = &verdicts[PATIENCE as usize] else { panic!("{verdicts:?}") };
        assert_eq!((shortfall.rest_bytes, shortfall.stop), (500 * MIB, Duration::from_millis(5050)), "{shortfall}");
        assert_eq!(shortfall.carried_bytes_per_s, (100 * MIB) as f64, "{shortfall}");
    }

    /// The place of the first rest that ends it, where none fits.
    fn ends_at(rests: &[u64]) -> Option<usize> {
        let mut forecast = forecast(1);
        rests.iter().position(|&rest| forecast.judge(&report(1), rest, None) != Verdict::AnotherRound)
    }

    #[test]
    fn only_a_rest_smaller_by_a_twentieth_is_a_gain() {
        assert_eq!(ends_at(&[10_000, 9_500, 9_500, 9_500, 9_500, 9_500, 9_500]), Some(6));
        assert_eq!(ends_at(&[10_000, 9_499, 9_499, 9_499, 9_499, 9_499, 9_499, 9_499]), Some(7));
        // What counts is the smallest so far, not the one before.
        assert_eq!(ends_at(&[10_000, 20_000, 9_900, 20_000, 9_900, 20_000, 9_900]), Some(6));
    }

    #[test]
    fn the_last_round_is_the_last_whatever_was_gained() {
        let mut forecast = Forecast::new(Aim { max_rounds: 3, ..aim(1) }, Duration::from_millis(50));
        assert_eq!(forecast.judge(&report(1), 400 * MIB, None), Verdict::AnotherRound);
        assert_eq!(forecast.judge(&report(2), 200 * MIB, None), Verdict::AnotherRound);
        assert!(matches!(forecast.judge(&report(3), 100 * MIB, None), Verdict::Hopeless(_)));
    }

    #[test]
    fn the_speed_is_that_of_the_later_rounds_that_carried_something() {
        let speed = |rounds: &[(u64, f64)]| {
            let rounds: Vec<_> =
                rounds.iter().map(|&(bytes, ms)| RoundReport { bytes, ms, ..RoundReport::default() }).collect();
            forecast(1).bytes_per_s(&rounds)
        };
        assert_eq!(speed(&[]), UNMEASURED_BYTES_PER_S);
        assert_eq!(speed(&[(MIB - 1, 1000.0)]), UNMEASURED_BYTES_PER_S);
        assert_eq!(speed(&[(MIB, 1000.0)]), MIB as f64);
        // A round without a duration says nothing.
        assert_eq!(speed(&[(2 * MIB, 1000.0), (4 * MIB, 0.0)]), (2 * MIB) as f64);
        assert_eq!(speed(&[(MIB, 1000.0), (2 * MIB, 1000.0), (3 * MIB, 250.0), (4 * MIB, 750.0)]), (7 * MIB) as f64);
        let bounded = |limit| Forecast::new(Aim { bandwidth: Some(limit), ..aim(1) }, Duration::ZERO);
        assert_eq!(bounded(200 * MIB).bytes_per_s(&report(1).rounds), (100 * MIB) as f64);
        assert_eq!(bounded(50 * MIB).bytes_per_s(&report(1).rounds), (50 * MIB) as f64);
    }

    #[test]
    fn the_verdict_has_the_numbers() {
        let round =
            RoundReport { bytes: 100_000_000, ms: 1000.0, dirty_pages_per_s: 25_000.0, ..RoundReport::default() };
        let report = Report { rounds: vec![round; 3], ..Report::default() };
        let mut forecast = Forecast::new(Aim { max_rounds: 3, ..aim(100) }, Duration::from_millis(50));
        let numbers = "after 3 rounds it writes 102.4 MB/s, the link carries 100.0 MB/s, and the rest of 50.0 MB would \
                       stop it for 550 ms, but --downtime allows 100 ms; it runs on here. Repeat the command with \
                       --converge pace, which slows its writers, or allow --downtime 687ms or more";
        let verdict = forecast.judge(&report, 50_000_000, None);
        assert!(matches!(&verdict, Verdict::Hopeless(why) if why.to_string().contains(numbers)), "{verdict:?}");
    }

    #[test]
    fn the_verdict_knows_what_would_help() {
        for (medium, said, unsaid) in [(Medium::Link, "link carries", "--paused"), (Medium::File, "--paused", "link")] {
            let aim = Aim { medium, max_rounds: 1, ..aim(100) };
            let Verdict::Hopeless(why) = Forecast::new(aim, Duration::ZERO).judge(&report(1), 500 * MIB, None) else {
                panic!("it goes on after the last round")
            };
            let why = why.to_string();
            assert!(why.contains(said) && !why.contains(unsaid), "{why}");
        }
    }

    /// Holding its writers helps where it was not done, and where the rest is what takes so long.
    #[test]
    fn the_verdict_names_the_pace_where_that_would_end_it() {
        use Converge::{Never, Pace};
        for (converge, downtime_ms, named, held) in
            [(Never, 100, true, false), (Pace, 100, false, true), (Never, 50, false, false), (Pace, 50, false, false)]
        {
            let aim = Aim { converge, max_rounds: 1, ..aim(downtime_ms) };
            let verdict = Forecast::new(aim, Duration::from_millis(50)).judge(&report(1), 500 * MIB, None);
            let Verdict::Hopeless(why) = verdict else { panic!("it goes on after the last round") };
            let why = why.to_string();
            assert_eq!((why.contains("--converge pace"), why.contains("were held")), (named, held), "{why}");
        }
    }

    fn with(aim: Aim) -> Forecast {
        Forecast::new(aim, Duration::from_millis(50))
    }

    /// Of which kind the verdict is.
    fn kind(verdict: &Verdict) -> &'static str {
        match verdict {
            Verdict::Fits => "fits",
            Verdict::AnotherRound => "another",
            Verdict::Hopeless(_) => "hopeless",
            Verdict::TooLate(_) => "too late",
        }
    }

    #[test]
    fn a_longer_downtime_is_taken_rather_than_that_it_is_given_up() {
        for (max_ms, end) in [(100, "hopeless"), (549, "hopeless"), (550, "fits")] {
            let aim = Aim { max_downtime: Duration::from_millis(max_ms), max_rounds: 2, ..aim(100) };
            let mut forecast = with(aim);
            assert_eq!(kind(&forecast.judge(&report(1), 50 * MIB, None)), "another", "there is still hope");
            assert_eq!(kind(&forecast.judge(&report(2), 50 * MIB, None)), end, "{max_ms}");
        }
    }

    #[test]
    fn the_last_chance_is_the_round_after_which_there_is_no_time_for_another() {
        let busy = |converge, dirty_pages_per_s, max_ms, left_ms| {
            let round = RoundReport { bytes: 100 * MIB, ms: 1000.0, dirty_pages_per_s, ..RoundReport::default() };
            let report = Report { rounds: vec![round], ..Report::default() };
            let aim = Aim { converge, max_downtime: Duration::from_millis(max_ms), ..aim(100) };
            kind(&with(aim).judge(&report, 100 * MIB, Some(Duration::from_millis(left_ms))))
        };
        use Converge::{Never, Pace};
        // It writes all of it again in a second, which is how long it takes: two seconds, and the state.
        assert_eq!(busy(Never, 25_600.0, 5000, 2051), "another");
        assert_eq!(busy(Never, 25_600.0, 5000, 2049), "fits");
        assert_eq!(busy(Never, 25_600.0, 100, 2049), "too late");
        // It writes half as much.
        assert_eq!(busy(Never, 12_800.0, 100, 1600), "another");
        // Its writers can be held as hard as it takes.
        assert_eq!(busy(Pace, 25_600.0, 100, 1100), "another");
        // There is not even time to stop it.
        assert_eq!(busy(Pace, 25_600.0, 60_000, 1049), "too late");
        assert_eq!(busy(Never, 25_600.0, 60_000, 1049), "too late");
    }

    #[test]
    fn what_fits_is_too_late_if_there_is_no_time_for_it() {
        assert_eq!(kind(&forecast(300).judge(&report(1), 20 * MIB, Some(Duration::from_millis(300)))), "fits");
        assert_eq!(kind(&forecast(300).judge(&report(1), 20 * MIB, Some(Duration::from_millis(200)))), "too late");
    }

    #[test]
    fn room_is_what_fits_beside_the_device_state() {
        // 100 MiB/s for 250 ms.
        let room = forecast(300).room(&report(7), None);
        assert_eq!((room.fits_bytes, room.rounds_left), (25 * MIB, 23));
        let room = forecast(50).room(&report(31), None);
        assert_eq!((room.fits_bytes, room.rounds_left, room.until_deadline), (0, 0, None));
        let room = forecast(300).room(&report(7), Some(Duration::from_millis(2050)));
        assert_eq!(room.until_deadline, Some(200 * MIB));
    }

    #[test]
    fn nothing_left_fits_whatever_the_state_takes() {
        assert_eq!(forecast(1).judge(&Report::default(), 0, None), Verdict::Fits);
    }
}
