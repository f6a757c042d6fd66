//! Rounds of a guest that runs, be it moved or saved, until it can be stopped.
//!
//! The forecast judges each round. If the rest fits, the guest is stopped, or held ready until it may be. If it does
//! not fit yet, another round follows. If there is no hope, that is the end, or the rest follows the guest.
use std::sync::Arc;

use crate::{
    Error, PostCopyAfter, Progress, Report,
    forecast::{Forecast, Verdict},
    hold::{Holding, Kept},
    shortfall::TooLate,
};

/// A guest that runs while its pages are sent, to a destination or to a file.
pub(crate) trait RunningGuest: Kept {
    /// Sends the first round, and unplugs what can't go with the guest. What was written meanwhile is the rest then.
    fn send_first(&mut self, forecast: &Forecast, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error>;

    /// Whether a second round would leave far less than the first, or as little as fits, as far as that is known.
    fn another_gains(&self) -> bool {
        true
    }

    /// Marks the step: it could be stopped, and is held instead.
    fn mark_ready(&mut self) -> Result<(), Error>;
}

/// Why the guest is stopped now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Because {
    /// The rest can be sent meanwhile.
    ItFits,
    /// The rest can follow it.
    ItMayFollow,
}

/// Sends round after round, until the rest is small enough to be sent while the guest is stopped. `post_copy`: when
/// it may follow the guest; none: never.
pub(crate) fn until_the_rest_is_small(
    guest: &mut dyn RunningGuest,
    (mut forecast, holding): (Forecast, &mut Holding),
    post_copy: Option<PostCopyAfter>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<Because, Error> {
    guest.send_first(&forecast, progress, report)?;
    loop {
        let rest = guest.rest();
        let time_left = progress.time_left();
        let verdict = forecast.judge(report, rest, time_left);
        let verdict = holding.soften(verdict, &mut forecast, &mut || guest.check(), progress, report)?;
        guest.follow(&verdict, rest, forecast.room(report, time_left));
        let is_used_up = match post_copy {
            None => false,
            Some(PostCopyAfter::Rounds(rounds)) => report.rounds.len() >= rounds as usize,
            Some(PostCopyAfter::NoGain) => report.rounds.len() >= PostCopyAfter::NO_GAIN_MOST || !guest.another_gains(),
        };
        match verdict {
            Verdict::Fits if holding.is_over() => return Ok(Because::ItFits),
            Verdict::Fits => {
                guest.mark_ready()?;
                let is_ready = holding.stay_ready(guest, &mut forecast, progress, report);
                if is_ready.inspect_err(|_| holding.end_command())? {
                    return Ok(Because::ItFits);
                }
            }
            Verdict::AnotherRound if is_used_up => return Ok(Because::ItMayFollow),
            Verdict::Hopeless(_) | Verdict::TooLate(_) if post_copy.is_some() => return Ok(Because::ItMayFollow),
            Verdict::AnotherRound => {}
            Verdict::Hopeless(why) => return Err(Error::NotConverging(why)),
            Verdict::TooLate(why) => return Err(Error::TooLate(TooLate::NoTimeForARound(why))),
        }
        guest.send("round", progress, report)?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        Converge, RoundReport,
        forecast::{Aim, Room},
        hold::HoldOptions,
        shortfall::Medium,
    };

    const MIB: u64 = 1 << 20;

    /// A guest that leaves so much after each round, for ever as much as after the last one. A link carries 100 MiB in
    /// a second, of which 10 MiB fit the downtime.
    #[derive(Default)]
    struct Writer {
        rests: Vec<u64>,
        rest: u64,
        /// Written between two looks, the first time.
        writes: u64,
        /// It is known after the first round that a second one leaves as much.
        gains_nothing: bool,
        steps: Vec<&'static str>,
    }

    impl Writer {
        fn round(&mut self, step: &'static str, report: &mut Report) {
            self.steps.push(step);
            self.rest = if self.rests.len() > 1 { self.rests.remove(0) } else { self.rests[0] };
            report.rounds.push(RoundReport { bytes: 100 * MIB, ms: 1000.0, ..RoundReport::default() });
        }
    }

    impl RunningGuest for Writer {
        fn send_first(&mut self, _: &Forecast, _: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
            self.round("first", report);
            Ok(())
        }
        fn another_gains(&self) -> bool {
            !self.gains_nothing
        }
        fn mark_ready(&mut self) -> Result<(), Error> {
            self.steps.push("ready");
            Ok(())
        }
    }

    impl Kept for Writer {
        fn rest(&self) -> u64 {
            self.rest
        }
        /// Whoever holds it lets go after the first look.
        fn look(&mut self, progress: &Progress) -> Result<(), Error> {
            self.steps.push("look");
            self.rest += std::mem::take(&mut self.writes);
            progress.release();
            Ok(())
        }
        fn send(&mut self, step: &str, _: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
            assert_eq!(step, "round");
            self.round("round", report);
            Ok(())
        }
        fn follow(&mut self, _: &Verdict, _: u64, _: Room) {}
        fn check(&mut self) -> Result<(), Error> {
            Ok(())
        }
    }

    /// What came of it, and the steps that led there.
    fn end(
        rests_mib: &[u64],
        post_copy: Option<PostCopyAfter>,
        hold: Option<HoldOptions>,
        left: Option<Duration>,
    ) -> (&'static str, Vec<&'static str>) {
        let mut guest = Writer { rests: rests_mib.iter().map(|rest| rest * MIB).collect(), ..Writer::default() };
        guest.gains_nothing = rests_mib.len() == 1;
        guest.writes = if hold.is_some() { 50 * MIB } else { 0 };
        let (progress, mut report) = (Progress::new(), Report::default());
        left.into_iter().for_each(|left| progress.end_within(left));
        let downtime = Duration::from_millis(100);
        let (medium, converge, bandwidth) = (Medium::Link, Converge::Never, None);
        let aim = Aim { medium, downtime, max_downtime: downtime, bandwidth, max_rounds: 4, converge };
        let (forecast, mut holding) = (Forecast::new(aim, Duration::ZERO), Holding::new(&hold, &progress));
        let result = until_the_rest_is_small(&mut guest, (forecast, &mut holding), post_copy, &progress, &mut report);
        let end = match result {
            Ok(Because::ItFits) => "it fits",
            Ok(Because::ItMayFollow) => "it may follow",
            Err(Error::NotConverging(_)) => "not converging",
            Err(Error::TooLate(_)) => "too late",
            Err(_) => "another error",
        };
        (end, guest.steps)
    }

    #[test]
    fn rounds_go_on_until_the_rest_fits_or_there_is_no_hope() {
        assert_eq!(end(&[5], None, None, None), ("it fits", vec!["first"]));
        assert_eq!(end(&[80, 40, 5], None, None, None), ("it fits", vec!["first", "round", "round"]));
        let all = vec!["first", "round", "round", "round"];
        assert_eq!(end(&[80, 60, 50, 40, 5], None, None, None), ("not converging", all));
        assert_eq!(end(&[80, 5], None, None, Some(Duration::ZERO)), ("too late", vec!["first"]));
    }

    #[test]
    fn the_rest_may_follow_after_so_many_rounds_or_when_there_is_no_hope() {
        let after = |rounds| Some(PostCopyAfter::Rounds(rounds));
        assert_eq!(end(&[80, 60, 50], after(1), None, None), ("it may follow", vec!["first"]));
        assert_eq!(end(&[80, 60, 50], after(2), None, None), ("it may follow", vec!["first", "round"]));
        assert_eq!(end(&[80, 5], after(2), None, None), ("it fits", vec!["first", "round"]));
        let all = vec!["first", "round", "round", "round"];
        assert_eq!(end(&[80, 60, 50, 40, 5], after(9), None, None), ("it may follow", all));
        assert_eq!(end(&[80, 5], after(9), None, Some(Duration::ZERO)), ("it may follow", vec!["first"]));
    }

    #[test]
    fn the_rest_may_follow_as_soon_as_a_round_gains_nothing() {
        let no_gain = Some(PostCopyAfter::NoGain);
        assert_eq!(end(&[80], no_gain, None, None), ("it may follow", vec!["first"]));
        assert_eq!(end(&[80, 60, 50], no_gain, None, None), ("it may follow", vec!["first", "round"]));
        assert_eq!(end(&[80, 5], no_gain, None, None), ("it fits", vec!["first", "round"]));
        assert_eq!(end(&[5], no_gain, None, None), ("it fits", vec!["first"]));
    }

    /// It is told to go on when it has just written too much.
    #[test]
    fn a_guest_that_is_held_is_stopped_when_the_rest_fits_again() {
        let steps = vec!["first", "round", "ready", "look", "round", "ready", "look"];
        assert_eq!(end(&[80, 5], None, Some(HoldOptions::default()), None), ("it fits", steps));
    }
}
