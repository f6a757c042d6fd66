//! A guest that has converged is kept so until somebody says that it may be stopped.
//!
//! ```text
//!   rounds ─► the rest fits ─► held: look, wait, look, send, wait, … ─► told to go on, and the rest fits ─► stop
//!     ▲                          │ too much was written
//!     ╰──────────────────────────╯ more rounds; no verdict ends them before it is told to go on
//! ```
//!
//! A look finds what was written, and adds it to the rest. The rest is sent only when it is about to outgrow what fits
//! the downtime, so a guest that writes the same pages again and again costs no more than one that writes them once;
//! and every few seconds in any case, which shows that the other end is still there and shows it that we are.
mod pulse;

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::{
    Error, HoldReport, Misfit, Phase, Progress, ReleasedBy, Report,
    commands::{Started, UserCommand},
    control::TICK,
    forecast::{Forecast, Room, Verdict},
};
use pulse::{LOOK_EVERY, Pulse};

/// Of the rounds that a hold has sent, so many are in the report one by one.
const ROUNDS_KEPT: usize = 30;

/// What ends a hold, beside [`Progress::release`] and a failure.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HoldOptions {
    /// So much time since the guest had converged for the first time.
    pub time: Option<Duration>,
    /// The success of this command, which is started then, in the phase `held`. If it fails, the guest stays.
    pub until: Option<UserCommand>,
}

/// The hold of one move or save, if there is to be one.
#[derive(Default)]
pub(crate) struct Holding {
    options: Option<HoldOptions>,
    /// When it had converged for the first time, and how many rounds were in the report by then.
    begin: Option<(Instant, usize)>,
    /// While it runs.
    command: Option<Box<dyn Started>>,
    report: HoldReport,
    is_over: bool,
}

/// A guest that is kept ready: what was written and not sent yet is the rest.
pub(crate) trait Kept {
    /// How many bytes that is.
    fn rest(&self) -> u64;

    /// Adds to the rest what was written since the last look.
    fn look(&mut self, progress: &Progress) -> Result<(), Error>;

    /// Sends the rest, and marks the step. What was written meanwhile is the rest then.
    fn send(&mut self, step: &str, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error>;

    /// Tells those who hold writers.
    fn follow(&mut self, verdict: &Verdict, rest: u64, room: Room);

    /// An error if the other end has gone.
    fn check(&mut self) -> Result<(), Error>;
}

impl Holding {
    pub(crate) fn new(options: &Option<HoldOptions>, progress: &Progress) -> Self {
        if options.is_some() {
            progress.hold();
        }
        let (options, is_over) = (options.clone(), options.is_none());
        Self { options, begin: None, command: None, report: HoldReport::default(), is_over }
    }

    /// Whether there is to be none, or there was one. A release before it has begun counts.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Of a guest that stands still already.
    pub(crate) fn refuse_standing(&self) -> Result<(), Error> {
        if self.is_over {
            return Ok(());
        }
        Err(Error::unfit(
            "a guest that stands still already can't be held ready: there is nothing to stop; leave out --hold",
        ))
    }

    /// What the forecast says of a guest that was ready once is no reason to give up as long as nobody wants it
    /// stopped: it gets as many rounds as it takes, some time apart.
    ///
    /// # Errors
    /// As [`Holding::wait`].
    pub(crate) fn soften(
        &mut self,
        verdict: Verdict,
        forecast: &mut Forecast,
        check: &mut dyn FnMut() -> Result<(), Error>,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<Verdict, Error> {
        if self.is_over || self.begin.is_none() || !matches!(verdict, Verdict::Hopeless(_)) {
            return Ok(verdict);
        }
        self.wait(LOOK_EVERY, check, progress)?;
        self.shorten(report);
        forecast.begin_again(report);
        Ok(Verdict::AnotherRound)
    }

    /// Keeps a guest ready that has just become so. Returns true when it was told to go on and the rest fits; false
    /// when the rest fits no more: it is to be sent, and more rounds must follow.
    ///
    /// # Errors
    /// Somebody has cancelled, the command has failed, or the other end is gone.
    pub(crate) fn stay_ready(
        &mut self,
        kept: &mut dyn Kept,
        forecast: &mut Forecast,
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<bool, Error> {
        self.begin(progress, report)?;
        let mut pulse = Pulse::new(kept.rest());
        let is_ready = loop {
            let room = forecast.room(report, None);
            let is_over = self.wait(pulse.pause(&room), &mut || kept.check(), progress)?;
            let begin = Instant::now();
            kept.look(progress)?;
            self.report.looks += 1;
            let rest = kept.rest();
            pulse.looked(rest, begin);
            progress.round_left.store(rest, Relaxed);
            if is_over || !forecast.is_permitted(report, rest) {
                break is_over && forecast.fits(report, rest);
            }
            if !pulse.is_send_due(&room) {
                kept.follow(&Verdict::Fits, rest, room);
                continue;
            }
            kept.follow(&Verdict::AnotherRound, rest, room);
            kept.send("held", progress, report)?;
            self.sent(report);
            let rest = kept.rest();
            pulse.sent(rest, &room);
            if !forecast.is_permitted(report, rest) {
                break false;
            }
            kept.follow(&Verdict::Fits, rest, room);
        };
        if !is_ready {
            kept.follow(&Verdict::AnotherRound, kept.rest(), forecast.room(report, None));
            progress.set_phase(Phase::Rounds);
        }
        self.shorten(report);
        forecast.begin_again(report);
        self.tell(report);
        Ok(is_ready)
    }

    fn begin(&mut self, progress: &Progress, report: &mut Report) -> Result<(), Error> {
        if self.begin.is_none() {
            self.begin = Some((Instant::now(), report.rounds.len()));
            if let Some(command) = self.options.as_ref().and_then(|options| options.until.as_ref()) {
                let failed = |source| Error::Io { what: "run the command of --hold-until".into(), source };
                self.command = Some(command.start("held").map_err(failed)?);
            }
        }
        progress.held_now();
        progress.set_phase(Phase::Held);
        self.tell(report);
        Ok(())
    }

    /// Waits for the word to go on, for `time` at most. Whether it has come.
    fn wait(
        &mut self,
        time: Duration,
        check: &mut dyn FnMut() -> Result<(), Error>,
        progress: &Progress,
    ) -> Result<bool, Error> {
        let end = Instant::now() + time;
        loop {
            if progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
            check()?;
            if let Some(by) = self.released(progress)? {
                self.report.released_by = Some(by);
                self.is_over = true;
                progress.release();
                self.end_command();
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            progress.await_release(left.min(TICK));
        }
    }

    fn released(&mut self, progress: &Progress) -> Result<Option<ReleasedBy>, Error> {
        if progress.await_release(Duration::ZERO) {
            return Ok(Some(ReleasedBy::Go));
        }
        if let Some(command) = &mut self.command {
            let failed = |source| Error::Io { what: "wait for the command of --hold-until".into(), source };
            if let Some(status) = command.status().map_err(failed)? {
                self.command = None;
                return match status.success() {
                    true => Ok(Some(ReleasedBy::Command)),
                    false => Err(Misfit::Command.unfit(format!(
                        "the command of --hold-until has failed ({status}); the guest runs on here. See what it said"
                    ))),
                };
            }
        }
        let time = self.options.as_ref().and_then(|options| options.time);
        let is_time = self.begin.zip(time).is_some_and(|((begin, _), time)| begin.elapsed() >= time);
        Ok(is_time.then_some(ReleasedBy::Time))
    }

    fn sent(&mut self, report: &mut Report) {
        let Some(round) = report.rounds.last() else { return };
        self.report.rounds += 1;
        self.report.bytes += round.bytes;
        self.shorten(report);
    }

    /// A hold may take for ever, and its report shall not: of its rounds only the last ones are kept.
    fn shorten(&self, report: &mut Report) {
        let Some((_, first)) = self.begin else { return };
        let excess = report.rounds.len().saturating_sub(first + ROUNDS_KEPT);
        report.rounds.drain(first..first + excess);
    }

    fn tell(&mut self, report: &mut Report) {
        self.report.ms = self.begin.map_or(0.0, |(begin, _)| begin.elapsed().as_secs_f64() * 1e3);
        report.hold = Some(self.report);
    }

    /// With all that it has started.
    pub(crate) fn end_command(&mut self) {
        if let Some(mut command) = self.command.take() {
            // It may have ended by itself.
            let _ = command.end();
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.end_command();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest whose rest grows by so much with each look, and that is given up by the other end in the end.
    struct Writer {
        rest: u64,
        grows: u64,
        sends: u32,
    }

    impl Kept for Writer {
        fn rest(&self) -> u64 {
            self.rest
        }
        fn look(&mut self, progress: &Progress) -> Result<(), Error> {
            self.rest += self.grows;
            if self.sends >= 3 {
                progress.release();
            }
            Ok(())
        }
        fn send(&mut self, _: &str, _: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
            self.sends += 1;
            let round = crate::RoundReport { bytes: self.rest, ms: self.rest as f64 / 1e5, ..Default::default() };
            report.rounds.push(round);
            self.rest = 0;
            Ok(())
        }
        fn follow(&mut self, _: &Verdict, _: u64, _: Room) {}
        fn check(&mut self) -> Result<(), Error> {
            Ok(())
        }
    }

    fn forecast() -> Forecast {
        use crate::{Converge, forecast::Aim, shortfall::Medium};
        let time = Duration::from_millis(300);
        let (medium, converge) = (Medium::Link, Converge::Never);
        let aim = Aim { medium, downtime: time, max_downtime: time, bandwidth: None, max_rounds: 2, converge };
        Forecast::new(aim, Duration::ZERO)
    }

    #[test]
    fn what_is_written_is_gathered_sent_and_reported() {
        let (progress, mut report) = (Progress::new(), Report::default());
        let mut holding = Holding::new(&Some(HoldOptions::default()), &progress);
        // 37.5 MB fit the downtime; 26 of them are too many.
        let mut writer = Writer { rest: 0, grows: 9_000_000, sends: 0 };
        let mut forecast = forecast();
        assert!(holding.stay_ready(&mut writer, &mut forecast, &progress, &mut report).is_ok_and(|ready| ready));
        let hold = report.hold.unwrap_or_default();
        assert_eq!((hold.rounds, hold.bytes, hold.released_by), (3, 81_000_000, Some(ReleasedBy::Go)));
        assert!(hold.looks >= 10 && holding.is_over(), "{hold:?}");
    }

    #[test]
    fn too_much_at_once_takes_it_back_to_the_rounds() {
        let (progress, mut report) = (Progress::new(), Report::default());
        let mut holding = Holding::new(&Some(HoldOptions::default()), &progress);
        let mut writer = Writer { rest: 0, grows: 50_000_000, sends: 0 };
        let mut forecast = forecast();
        assert!(holding.stay_ready(&mut writer, &mut forecast, &progress, &mut report).is_ok_and(|ready| !ready));
        assert_eq!((progress.phase(), holding.is_over()), (Phase::Rounds, false));
        // No verdict ends it before it is told to go on.
        let mut last = Forecast::new(crate::forecast::Aim { max_rounds: 0, ..forecast.aim().0 }, Duration::ZERO);
        let mut hopeless = || last.judge(&Report::default(), 1 << 40, None);
        assert!(matches!(hopeless(), Verdict::Hopeless(_)));
        let mut soften = |holding: &mut Holding, report: &mut Report| {
            holding.soften(hopeless(), &mut forecast, &mut || Ok(()), &progress, report)
        };
        assert!(soften(&mut holding, &mut report).is_ok_and(|verdict| verdict == Verdict::AnotherRound));
        progress.release();
        assert!(soften(&mut holding, &mut report).is_ok_and(|verdict| verdict == Verdict::AnotherRound));
        assert!(soften(&mut holding, &mut report).is_ok_and(|verdict| verdict == hopeless()));
    }

    #[test]
    fn a_long_hold_has_a_short_report() {
        let round = |number| crate::RoundReport { number, ..Default::default() };
        let mut report = Report { rounds: (1..=3).map(round).collect(), ..Report::default() };
        let mut holding = Holding::default();
        holding.begin = Some((Instant::now(), 3));
        for number in 4..=100 {
            report.rounds.push(round(number));
            holding.sent(&mut report);
        }
        let numbers: Vec<_> = report.rounds.iter().map(|round| round.number).collect();
        assert_eq!(numbers, [1, 2, 3].into_iter().chain(71..=100).collect::<Vec<_>>());
        assert_eq!(holding.report.rounds, 97);
    }

    #[test]
    fn a_time_or_a_command_ends_it_and_a_command_that_fails_is_an_error() {
        let hold = |time, shell: Option<&str>| {
            let until = shell.map(|shell| UserCommand { shell: shell.into(), environment: Vec::new() });
            let (progress, mut report) = (Progress::new(), Report::default());
            let mut holding = Holding::new(&Some(HoldOptions { time, until }), &progress);
            let mut writer = Writer { rest: 0, grows: 0, sends: 0 };
            let ready = holding.stay_ready(&mut writer, &mut forecast(), &progress, &mut report)?;
            assert!(ready);
            Ok::<_, Error>(report.hold.and_then(|hold| hold.released_by))
        };
        assert!(matches!(hold(Some(Duration::ZERO), None), Ok(Some(ReleasedBy::Time))));
        assert!(matches!(hold(None, Some("test $TRANSSHIP_PHASE = held")), Ok(Some(ReleasedBy::Command))));
        let failed = hold(None, Some("exit 7")).unwrap_err();
        assert!(matches!(failed, Error::Unfit { what: Misfit::Command, .. }), "{failed}");
    }
}
