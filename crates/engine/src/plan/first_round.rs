//! A move whose first round was sent, which has shown what there is to know of the rest.
use std::time::Duration;

use transship_memory::PAGE;

use super::{
    model::{Carrier, Curve, Outlook, Start, Work, run_on},
    sample::Written,
};
use crate::{
    ForecastReport, Report, RoundReport,
    forecast::{Forecast, Room},
};

/// What the first round of a move has shown: what the link carries, how much was written meanwhile, and when.
pub(crate) struct FirstRound {
    first: RoundReport,
    carrier: Carrier,
    points: Vec<Written>,
    rest: u64,
    /// What can be sent while the guest stands still.
    fits: f64,
    /// Of all memory.
    most: f64,
}

impl FirstRound {
    /// None, if the report does not end with the first round. `looks`: what was seen of the guest's writing meanwhile.
    pub(crate) fn seen(report: &Report, rest: u64, forecast: &Forecast, looks: &[Written]) -> Option<Self> {
        let [first] = &report.rounds[..] else { return None };
        let sent = (report.pages.normal * PAGE) as f64;
        let ratio = if first.bytes > 0 { (sent / first.bytes as f64).max(1.0) } else { 1.0 };
        let Room { bytes_per_s, fits_bytes, .. } = forecast.room(report, None);
        let carrier = Carrier { bytes_per_s, round_trip: Duration::ZERO, ratio, encode_bytes_per_s: None };
        // A look counts holes, too.
        let looks = looks.iter().filter(|look| look.ms < first.ms);
        let mut points: Vec<_> = looks.map(|look| Written { bytes: look.bytes.min(rest as f64), ..*look }).collect();
        points.push(Written { ms: first.ms, bytes: rest as f64 });
        let (fits, most) = (fits_bytes as f64, report.bytes.guest as f64);
        Some(Self { first: first.clone(), carrier, points, rest, fits, most })
    }

    /// What is written in no time at all fits in any case.
    fn curve(&self) -> Curve<'_> {
        Curve { points: &self.points, most: self.most }
    }

    /// Whether a second round would leave far less, or so little that the guest may be stopped for it.
    pub(crate) fn another_gains(&self) -> bool {
        let rest = self.rest as f64;
        self.curve().another_gains(rest, rest / self.carrier.pages_per_s(), |left| left <= self.fits)
    }

    /// What is thought of the move now.
    pub(crate) fn forecast(&self, report: &Report, forecast: &Forecast) -> ForecastReport {
        let Self { first, carrier, rest, .. } = self;
        let (aim, state) = forecast.aim();
        let work = Work { downtime: aim.downtime, max_rounds: aim.max_rounds, converge: aim.converge };
        let left = match forecast.fits(report, *rest) {
            true => {
                let downtime_ms = state.as_secs_f64() * 1e3 + *rest as f64 / carrier.pages_per_s() * 1e3;
                let bytes = (*rest as f64 / carrier.ratio) as u64;
                Outlook { converges: true, total_ms: downtime_ms, rounds: 1, bytes, downtime_ms, ..Outlook::default() }
            }
            false => {
                let start = Start { rest: *rest as f64, rounds: vec![first.clone()] };
                run_on(start, &self.curve(), carrier, &work, state)
            }
        };
        ForecastReport {
            converges: left.converges,
            total_ms: report.setup_ms + first.ms + left.total_ms,
            downtime_ms: left.downtime_ms,
            bytes: first.bytes + left.bytes,
            rounds: 1 + left.rounds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Converge, forecast::Aim, shortfall::Medium};

    const MB: f64 = 1e6;

    /// A guest that goes through a hot set again and again has written all of it long before the first round ends.
    #[test]
    fn looks_during_the_first_round_tell_how_fast_the_hot_set_is_written() {
        let hot = 500.0 * MB;
        let times = (0..12).map(|look| 100.0 * 1.5_f64.powi(look));
        let looks: Vec<_> = times.map(|ms| Written { ms, bytes: (ms / 1e3 * 125.0 * MB).min(hot) }).collect();
        let first = RoundReport { number: 1, bytes: 1_000_000_000, ms: 10_000.0, ..RoundReport::default() };
        let mut report = Report { rounds: vec![first], ..Report::default() };
        report.bytes.guest = 1_000_000_000;
        report.pages.normal = 1_000_000_000 / PAGE;
        let aim = |converge| Aim {
            medium: Medium::Link,
            downtime: Duration::from_millis(300),
            max_downtime: Duration::from_millis(300),
            bandwidth: None,
            max_rounds: 30,
            converge,
        };
        let forecast = |converge, looks: &[Written]| {
            let judge = Forecast::new(aim(converge), Duration::from_millis(30));
            let seen = FirstRound::seen(&report, hot as u64, &judge, looks).unwrap();
            assert!(!seen.another_gains(), "much of it is written again while it is sent");
            seen.forecast(&report, &judge)
        };
        // Five seconds for the hot set, in which it is written again: six rounds without a gain.
        let never = forecast(Converge::Never, &looks);
        assert!(!never.converges && never.rounds == 7, "{never:?}");
        assert!((38_000.0..42_000.0).contains(&never.total_ms), "{never:?}");
        let paced = forecast(Converge::Pace, &looks);
        assert!(paced.converges && (20_000.0..38_000.0).contains(&paced.total_ms), "{paced:?}");
        // Writing more slowly, it leaves less: half as much is no gain, a sixth is.
        let slower = [2.0, 6.0].map(|times| {
            let looks: Vec<_> = looks.iter().map(|look| Written { ms: look.ms * times, ..*look }).collect();
            let judge = Forecast::new(aim(Converge::Never), Duration::from_millis(30));
            FirstRound::seen(&report, hot as u64, &judge, &looks).unwrap().another_gains()
        });
        assert_eq!(slower, [false, true]);
        // The first round alone looks like half as much.
        assert!(forecast(Converge::Never, &[]).converges);
    }
}
