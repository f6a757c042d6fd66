//! The source of a move: its phases, from the connection to the hand-over.
pub(crate) mod channels;
mod line;
mod post_copy;
mod sender;
mod serving;
mod session;
mod switchover;

use std::{sync::Arc, time::Instant};

use crate::{
    Error, MoveOptions, MoveTerms, Phase, Progress, Report, Uri,
    at_stop::AtStop,
    ending::{finish, too_late},
    filling::stand_in::StandIn,
    forecast::Aim,
    guarded::Guarded,
    guest::{Guard, SourceGuest},
    rounds::{MoveInProgress, Rounds},
    shortfall::Medium,
};
use line::Base;
use post_copy::PostCopy;
pub use serving::Serving;
use session::MoveSession;
use switchover::Transship;

/// Moves the guest to the `transship receive` that listens at `to`. `guard`: who puts the guest back as it was should
/// this process die before it is given up; none: nobody. `stand_in`: who goes on for this process should it die after
/// that, and before a guest that was handed over before its pages has them all; none: nobody.
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
    stand_in: Option<&mut dyn StandIn>,
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
    let result = MoveSession::open(&**guest, to, options, progress).and_then(|mut session| {
        let at_stop = AtStop::new(&options.terms.at_stop);
        let post_copy = options.post_copy;
        let mut course = MoveInProgress { guest, progress, report, begin, at_stop, post_copy };
        let result = run(&mut course, &mut session, (to, options, stand_in), &mut rounds);
        result.map_err(|error| too_late(error, progress)).inspect_err(|error| {
            // Nothing is sent after `Go`.
            if !matches!(progress.phase(), Phase::HandedOver | Phase::Filling) {
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
    course: &mut MoveInProgress<'_, '_>,
    session: &mut MoveSession,
    (to, options, stand_in): (&Uri, &MoveOptions, Option<&mut dyn StandIn>),
    rounds: &mut Option<Rounds>,
) -> Result<(), Error> {
    let MoveTerms { downtime, max_downtime, bandwidth, max_rounds, converge, .. } = options.terms;
    let aim = Aim { medium: Medium::Link, downtime, max_downtime, bandwidth, max_rounds, converge };
    let rounds = course.up_to_switchover(rounds, session, aim, &options.terms.hold)?;
    if !rounds.owes() {
        return course.hand_over(&mut Transship { session, verify: options.verify }, rounds);
    }
    let (session_id, memory, progress) = (session.id, course.guest.memory(), Arc::clone(course.progress));
    let base = Base { to, options, session: session_id, memory, progress };
    let stand_in = stand_in.map(|stand_in| stand_in as &mut dyn StandIn);
    let mut peer = PostCopy { session, base, stand_in, line: None, owed: 0, ran: true, is_confirmed: false };
    let by_hand = course.guest.resume_hint();
    let result = course.hand_over(&mut peer, rounds);
    let result = result.and_then(|()| peer.serve(&by_hand, course.progress, course.report));
    peer.end();
    result
}
