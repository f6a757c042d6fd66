//! Rounds of a guest that is held: they keep it ready.
use std::sync::Arc;

use super::{DONE_TIMEOUT, Link, Rounds, reach};
use crate::{
    Error, Progress, Report,
    forecast::{Forecast, Room, Verdict},
    guarded::Guarded,
    hold::Kept,
};

impl Rounds {
    /// Keeps the guest ready until it is released. Returns true when its rest fits then, and false when more rounds
    /// must follow, the next of which is pending.
    pub(super) fn stay_ready(
        &mut self,
        guest: &mut Guarded<'_>,
        link: &mut dyn Link,
        forecast: &mut Forecast,
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<bool, Error> {
        reach(link, "ready")?;
        let mut holding = std::mem::take(&mut self.holding);
        let mut kept = MovingGuest { rounds: &mut *self, guest, link };
        let is_ready = holding.stay_ready(&mut kept, forecast, progress, report)?;
        self.holding = holding;
        Ok(is_ready)
    }
}

/// A guest that could be stopped, with the way to where it goes.
struct MovingGuest<'a, 'g> {
    rounds: &'a mut Rounds,
    guest: &'a mut Guarded<'g>,
    link: &'a mut dyn Link,
}

impl Kept for MovingGuest<'_, '_> {
    fn rest(&self) -> u64 {
        self.rounds.scanner.pending_bytes()
    }

    fn look(&mut self, progress: &Progress) -> Result<(), Error> {
        self.rounds.pacing.between_rounds();
        self.rounds.scanner.scan_on(self.link.content(), progress)
    }

    fn send(&mut self, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
        let Self { rounds, guest, link } = self;
        guest.drain(report)?;
        rounds.send_pending(*link, DONE_TIMEOUT, progress, report)?;
        reach(*link, "held")?;
        rounds.scanner.scan(link.content(), report, progress)
    }

    fn follow(&mut self, verdict: &Verdict, rest: u64, room: Room) {
        self.rounds.pacing.follow(verdict, rest, room);
    }

    fn check(&mut self) -> Result<(), Error> {
        self.link.check_silence()
    }
}
