//! Rounds of a guest that runs, be it moved or saved, until it can be stopped.
//!
//! The forecast judges each round. If the rest fits, the guest is stopped, or held ready until it may be. If it does
//! not fit yet, another round follows. If there is no hope, that is the end, or the rest follows the guest.
use std::sync::Arc;

use crate::{
    Error, Progress, Report,
    forecast::{Forecast, Verdict},
    hold::{Holding, Kept},
    shortfall::TooLate,
};

/// A guest that runs while its pages are sent, to a destination or to a file.
pub(crate) trait RunningGuest: Kept {
    /// Sends the first round, and unplugs what can't go with the guest. What was written meanwhile is the rest then.
    fn send_first(&mut self, forecast: &Forecast, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error>;

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

/// Sends round after round, until the rest is small enough to be sent while the guest is stopped. `post_copy`: after so
/// many rounds it may follow the guest; none: never.
pub(crate) fn until_the_rest_is_small(
    guest: &mut dyn RunningGuest,
    (mut forecast, holding): (Forecast, &mut Holding),
    post_copy: Option<u32>,
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
        let is_used_up = post_copy.is_some_and(|rounds| report.rounds.len() as u32 >= rounds);
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
