//! The source of a move: its phases, from the connection to the hand-over.
pub(crate) mod channels;
mod sender;
mod session;
mod switchover;

use std::{sync::Arc, time::Instant};

use crate::{
    Error, MoveOptions, Phase, Progress, Report, Uri,
    at_stop::AtStop,
    ending::{finish, too_late},
    forecast::{Aim, Medium},
    guarded::Guarded,
    guest::{Guard, SourceGuest},
    rounds::{Course, Rounds},
};
use session::Session;
use switchover::Transship;

/// Moves the guest to the `transship receive` that listens at `to`. `guard`: who puts the guest back as it was should
/// this process die before it is given up; none: nobody.
///
/// On success the guest belongs to the destination and is stopped here for good. On every failure except
/// [`Error::Unknown`] it runs here as if nothing had happened (or stays stopped, if it was stopped before). The report
/// is filled as far as the move got, even on failure.
///
/// # Errors
/// See [`Error`]; [`Error::outcome`] says where the guest is.
pub fn move_guest(
    guest: &mut dyn SourceGuest,
    guard: Option<&mut dyn Guard>,
    to: &Uri,
    options: &MoveOptions,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    // Ending the tracking takes time that grows with the memory. By then the guest runs again, here or there, and
    // nothing waits for this.
    let mut rounds = None;
    let guest = &mut Guarded::new(guest, guard);
    let result = Session::open(&**guest, to, options, progress).and_then(|mut session| {
        let at_stop = AtStop::new(&options.at_stop);
        let mut course = Course { guest, progress, report, begin, at_stop };
        let result = run(&mut course, &mut session, options, &mut rounds);
        result.map_err(|error| too_late(error, progress)).inspect_err(|error| {
            // Nothing is sent after `Go`.
            if progress.phase() != Phase::HandedOver {
                session.control.abort(error);
            }
        })
    });
    if !matches!(result, Ok(()) | Err(Error::Unknown(_))) {
        guest.plug_back();
    }
    finish(result, begin, progress, report)
}

fn run(
    course: &mut Course<'_, '_>,
    session: &mut Session,
    options: &MoveOptions,
    rounds: &mut Option<Rounds>,
) -> Result<(), Error> {
    let MoveOptions { downtime, max_downtime, bandwidth, max_rounds, converge, verify, .. } = *options;
    let aim = Aim { medium: Medium::Link, downtime, max_downtime, bandwidth, max_rounds, converge };
    let rounds = course.up_to_switchover(rounds, session, aim, &options.hold)?;
    course.hand_over(&mut Transship { session, verify }, rounds)
}
