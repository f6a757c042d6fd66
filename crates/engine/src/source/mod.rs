//! A guest moves to a transship that receives it: the source.
mod beside;
pub(crate) mod channels;
mod give_way;
mod lending;
mod line;
mod post_copy;
mod recovery;
mod room;
mod sender;
mod serving;
mod session;
mod slots;
mod standing;
mod switchover;
mod urgent;

use std::sync::Arc;

use transship_memory::PageCount;

use crate::{
    Error, MoveOptions, Phase, PostCopyAfter, Progress, Report, Uri,
    filling::stand_in::StandIn,
    guarded::Guarded,
    guest::{Guard, SourceGuest},
    moving::{Receiver, carry_out},
    rounds::{MoveInProgress, Rounds},
};
use line::Base;
use post_copy::PostCopy;
pub use recovery::HandedOver;
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
    let stand_in = stand_in.map(|stand_in| stand_in as &mut dyn StandIn);
    let mut receiver = ToTransship { to, options, stand_in };
    carry_out(&mut receiver, &options.terms, (guest, guard), progress, report)
}

/// The transship at `to`.
struct ToTransship<'a> {
    to: &'a Uri,
    options: &'a MoveOptions,
    stand_in: Option<&'a mut dyn StandIn>,
}

impl Receiver for ToTransship<'_> {
    type Session = MoveSession;

    fn connect(&mut self, guest: &mut Guarded<'_>, progress: &Arc<Progress>) -> Result<MoveSession, Error> {
        guest.unguarded().hurry_state();
        MoveSession::open(&**guest, self.to, self.options, progress)
    }

    fn post_copy(&self) -> Option<PostCopyAfter> {
        self.options.post_copy
    }

    fn compares(&self) -> bool {
        self.options.verify
    }

    fn hand_over(
        &mut self,
        session: &mut MoveSession,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
    ) -> Result<(), Error> {
        let Self { to, options, .. } = *self;
        if !rounds.owes() {
            return course.hand_over(&mut Transship { session, verify: options.verify }, rounds);
        }
        let (session_id, memory, progress) = (session.id, course.guest.memory(), Arc::clone(course.progress));
        let carries = session.carries(course.report);
        let base = Base { to, options, session: session_id, memory, progress, carries };
        let stand_in = self.stand_in.take().map(|stand_in| stand_in as &mut dyn StandIn);
        let mut peer =
            PostCopy { session, base, stand_in, line: None, owed: PageCount::ZERO, ran: true, is_confirmed: false };
        let by_hand = course.guest.resume_hint();
        if rounds.sent_any() {
            peer.drop_stale(course.guest, rounds, course.progress)?;
        }
        let result = course.hand_over(&mut peer, rounds);
        let result = result.and_then(|()| peer.serve(&by_hand, course.progress, course.report));
        peer.end();
        result
    }

    /// Nothing is sent after `Go`.
    fn part(&mut self, mut session: MoveSession, result: &Result<(), Error>, progress: &Progress) {
        if let Err(error) = result
            && !matches!(progress.phase(), Phase::HandedOver | Phase::Filling)
        {
            session.control.abort(error);
        }
    }
}
