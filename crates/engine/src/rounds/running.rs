//! Rounds of a guest that runs.
use std::sync::Arc;

use super::{DONE_TIMEOUT, Link, Rounds, reach};
use crate::{
    Error, PostCopyAfter, Progress, Report,
    converging::{Because, RunningGuest, until_the_rest_is_small},
    forecast::{Forecast, Room, Verdict},
    guarded::Guarded,
    hold::Kept,
    plan,
};

impl Rounds {
    /// Sends round after round, until the rest is small enough to be sent while the guest is stopped, or may follow it.
    pub(super) fn send_while_it_runs(
        &mut self,
        guest: &mut Guarded<'_>,
        link: &mut dyn Link,
        (forecast, post_copy): (Forecast, Option<PostCopyAfter>),
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let mut holding = std::mem::take(&mut self.holding);
        let mut moving = MovingGuest { rounds: self, guest, link, gains: true };
        let because = until_the_rest_is_small(&mut moving, (forecast, &mut holding), post_copy, progress, report);
        self.holding = holding;
        self.owes = because? == Because::ItMayFollow;
        Ok(())
    }
}

/// A guest that runs, with the way to where it goes.
struct MovingGuest<'a, 'g> {
    rounds: &'a mut Rounds,
    guest: &'a mut Guarded<'g>,
    link: &'a mut dyn Link,
    /// Another round would leave less, as far as is known.
    gains: bool,
}

impl RunningGuest for MovingGuest<'_, '_> {
    fn send_first(&mut self, forecast: &Forecast, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
        let Self { rounds, guest, link, .. } = self;
        guest.drain(report)?;
        rounds.looks = Some(Vec::new());
        rounds.send_first_and_unplug(guest, *link, progress, report)?;
        let looks = rounds.looks.take().unwrap_or_default();
        rounds.scanner.scan(&mut || guest.unguarded().gave_back(), link.content(), report, progress)?;
        let rest = rounds.scanner.pending_bytes();
        let seen = plan::FirstRound::seen(report, rest, forecast, &looks);
        report.forecast = seen.as_ref().map(|seen| seen.forecast(report, forecast));
        self.gains = seen.is_none_or(|seen| seen.another_gains());
        Ok(())
    }

    fn another_gains(&self) -> bool {
        self.gains
    }

    fn mark_ready(&mut self) -> Result<(), Error> {
        reach(self.link, "ready")
    }
}

impl Kept for MovingGuest<'_, '_> {
    fn rest(&self) -> u64 {
        self.rounds.scanner.pending_bytes()
    }

    fn look(&mut self, progress: &Progress) -> Result<(), Error> {
        self.rounds.pacing.between_rounds();
        let Self { rounds, guest, link, .. } = self;
        rounds.scanner.scan_on(&mut || guest.unguarded().gave_back(), link.content(), progress)
    }

    fn send(&mut self, step: &str, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
        let Self { rounds, guest, link, .. } = self;
        guest.drain(report)?;
        rounds.send_pending(*link, DONE_TIMEOUT, progress, report)?;
        reach(*link, step)?;
        rounds.scanner.scan(&mut || guest.unguarded().gave_back(), link.content(), report, progress)
    }

    fn follow(&mut self, verdict: &Verdict, rest: u64, room: Room) {
        self.rounds.pacing.follow(verdict, rest, room);
    }

    fn check(&mut self) -> Result<(), Error> {
        self.link.check_silence()
    }
}
