//! What is aimed at.
use super::{
    Way,
    results::{Results, Series},
};
use crate::{
    aims::{Aim, Aims, Bound},
    results::Spread,
};

/// Of the time of QEMU's best way.
const OF_BEST: f64 = 1.0;
/// Ways in which a guest does so much less are still equal: its rate is taken in a second.
const EQUAL_WORK: f64 = 0.02;
/// Of its work, what a guest keeps that writes twice what the link carries.
const WORK_AT_TWICE: f64 = 0.40;
/// Of its work, what a guest keeps that needs no pacing.
const WORK_UNPACED: f64 = 0.99;
/// For a page, at the median.
const ROUND_TRIPS: f64 = 1.5;
const BEYOND_ROUND_TRIPS_MS: f64 = 0.1;
/// In 99 of 100 cases.
const WAIT_P99_MS: f64 = 5.0;
/// Forecasts that are wrong by less are right, and so many are to be so.
pub(super) const FORECAST_ERROR: f64 = 0.25;
const FORECASTS_RIGHT: f64 = 0.80;

pub(super) fn of(results: &Results) -> Aims {
    let cases = results.cases();
    let mut aims: Vec<Aim> = cases.iter().flat_map(|(_, all)| of_case(all, results)).collect();
    if let Some((within, _)) = forecasts(&results.series) {
        let what = format!("forecasts of time that are within {:.0} %", FORECAST_ERROR * 100.0);
        aims.push(Aim::new(what, Bound::AtLeast, FORECASTS_RIGHT, within, "of them"));
    }
    aims.into_iter().collect()
}

/// Which share of all forecasts was right, and the error of half of them at most.
pub(super) fn forecasts(series: &[Series]) -> Option<(f64, f64)> {
    let errors: Vec<f64> =
        series.iter().flat_map(|series| &series.runs).filter_map(super::results::Run::forecast_error).collect();
    let right = errors.iter().filter(|error| **error <= FORECAST_ERROR).count() as f64;
    (!errors.is_empty()).then(|| (right / errors.len() as f64, Spread::of(errors.iter().copied()).median))
}

fn of_case(all: &[&Series], results: &Results) -> Vec<Aim> {
    let find = |way| all.iter().copied().find(|series| series.way == way && !series.runs.is_empty());
    let mut aims = Vec::new();
    for ours in [find(Way::Pace), find(Way::Postcopy)].into_iter().flatten() {
        let title = ours.title();
        aims.push(Aim::new(format!("{title}: moves that end"), Bound::AtLeast, 1.0, ours.arrived(), "of them"));
        if let Some(best) = best_of_qemu(all, ours) {
            let what = format!("{title}: time by that of {}", best.way.title());
            let share = ours.median(|run| run.ms) / best.median(|run| run.ms);
            aims.push(Aim::new(what, Bound::AtMost, OF_BEST, share, "of it"));
        }
    }
    if let Some(paced) = find(Way::Pace) {
        let work = |bound: f64, of: f64| {
            let what = format!("{}: work of the guest", paced.title());
            Aim::new(what, Bound::AtLeast, bound, paced.median(|run| run.work) / of, "of it")
        };
        match (paced.case.times, find(Way::Never)) {
            (times, _) if times == 2.0 && paced.case.pages_per_s > 0 => aims.push(work(WORK_AT_TWICE, 1.0)),
            (times, Some(never)) if times < 1.0 => aims.push(work(WORK_UNPACED, never.median(|run| run.work))),
            _ => {}
        }
    }
    aims.extend(find(Way::Postcopy).into_iter().flat_map(|series| waits(series, results)));
    aims
}

/// The quickest of QEMU's ways that all ended, and in which the guest did as much.
fn best_of_qemu<'a>(all: &[&'a Series], ours: &Series) -> Option<&'a Series> {
    let work = ours.median(|run| run.work) - EQUAL_WORK;
    let ended = all.iter().filter(|series| !series.way.is_ours() && series.arrived() >= 1.0);
    let equal = ended.filter(|series| series.median(|run| run.work) >= work);
    let ms = |series: &Series| series.median(|run| run.ms);
    equal.copied().min_by(|one, other| ms(one).total_cmp(&ms(other)))
}

fn waits(series: &Series, results: &Results) -> Vec<Aim> {
    let link = results.links.iter().find(|link| link.wire == series.case.wire);
    let waited = || series.runs.iter().filter_map(|run| run.waits).filter(|waits| waits.count > 0);
    let (Some(link), true) = (link, waited().next().is_some()) else { return Vec::new() };
    let median = ROUND_TRIPS * link.round_trip_ms + BEYOND_ROUND_TRIPS_MS;
    let aim = |what: &str, wanted, got| {
        let what = format!("{}: wait for a page, {what}", series.title());
        Aim::new(what, Bound::AtMost, wanted, got, "ms")
    };
    vec![
        aim("median", median, Spread::of(waited().map(|waits| waits.median_ms)).median),
        aim("99 of 100", WAIT_P99_MS, Spread::of(waited().map(|waits| waits.p99_ms)).median),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::converge::results::{
        Run, Waits,
        tests::{results, series},
    };

    fn verdict(results: &Results, what: &str) -> String {
        let aims = of(results).to_string();
        let line = aims.lines().find(|line| line.contains(what));
        line.and_then(|line| line.split_whitespace().next()).unwrap_or("none").to_owned()
    }

    #[test]
    fn only_a_way_in_which_the_guest_does_as_much_is_better() {
        let mut all = vec![
            series(2.0, Way::Pace, "completed", (9000.0, 0.5)),
            series(2.0, Way::AutoConverge, "completed", (5000.0, 0.1)),
            series(2.0, Way::QemuPostcopy, "completed", (20_000.0, 0.6)),
            series(2.0, Way::QemuPreempt, "no end in 60 s", (1000.0, 0.9)),
        ];
        assert_eq!(verdict(&results(all.clone()), "time by that of QEMU, post-copy"), "met");
        all[2].runs[0].ms = 8000.0;
        all[2].runs[1].ms = 8000.0;
        assert_eq!(verdict(&results(all), "time by that of QEMU, post-copy"), "MISSED");
    }

    #[test]
    fn work_has_a_bound_where_a_guest_is_paced_and_where_it_need_not_be() {
        let paced = |times, work| series(times, Way::Pace, "completed", (1.0, work));
        assert_eq!(verdict(&results(vec![paced(2.0, 0.41)]), "work of the guest"), "met");
        assert_eq!(verdict(&results(vec![paced(2.0, 0.39)]), "work of the guest"), "MISSED");
        assert_eq!(verdict(&results(vec![paced(5.0, 0.1)]), "work of the guest"), "none");
        let never = series(0.5, Way::Never, "completed", (1.0, 0.98));
        assert_eq!(verdict(&results(vec![never.clone(), paced(0.5, 0.98)]), "work of the guest"), "met");
        assert_eq!(verdict(&results(vec![never, paced(0.5, 0.9)]), "work of the guest"), "MISSED");
    }

    #[test]
    fn a_wait_is_measured_by_round_trips() {
        let waiting = |median_ms| {
            let waits = Some(Waits { count: 5, median_ms, p99_ms: 6.0 });
            let mut series = series(2.0, Way::Postcopy, "completed", (1.0, 1.0));
            series.runs = vec![Run { waits, ..series.runs[0].clone() }];
            results(vec![series])
        };
        assert_eq!(verdict(&waiting(0.4), "for a page, median"), "met", "1.5 × 0.2 ms, and 0.1 ms");
        assert_eq!(verdict(&waiting(0.41), "for a page, median"), "MISSED");
        assert_eq!(verdict(&waiting(0.4), "99 of 100"), "MISSED");
    }

    #[test]
    fn forecasts_are_right_within_a_quarter() {
        let mut all = series(0.5, Way::Never, "completed", (1000.0, 1.0));
        for (run, forecast) in all.runs.iter_mut().zip([750.0, 1251.0, 900.0]) {
            run.forecast_ms = Some(forecast);
        }
        let (right, median) = forecasts(&[all.clone()]).unwrap();
        assert!((right - 2.0 / 3.0).abs() < 1e-9 && (median - 0.25).abs() < 1e-9, "{right} {median}");
        assert_eq!(verdict(&results(vec![all]), "forecasts of time"), "MISSED");
        assert_eq!(forecasts(&[]), None);
    }
}
