//! A move, for every kind of receiver: its phases, and what becomes of the guest.
//!
//! ```text
//!   connect     the guest fits, the receiver is there and agrees; nothing has changed in the guest       Receiver
//!   rounds      its writes are tracked; it runs while its pages are sent, and with the first round it    rounds
//!               loses what can't go with it
//!   hand over   it is stopped, the rest is sent, it is given up; what fails before that takes it back    hand_over
//!   part        the receiver learns how it ended                                                         Receiver
//!   plug back   a guest that stays gets back what it has lost
//!   finish      the report says how it ended                                                             ending
//! ```
use std::{sync::Arc, time::Instant};

use crate::{
    Error, MoveTerms, PostCopyAfter, Progress, Report,
    at_stop::AtStop,
    ending::{finish, too_late},
    guarded::Guarded,
    guest::{Guard, SourceGuest},
    rounds::{Link, MoveInProgress, Rounds},
};

/// A kind of receiver: how a move to it differs from one to others.
pub(crate) trait Receiver {
    /// The connections to it.
    type Session: Link;

    /// Refuses a guest that can't go there, connects, and has the receiver agree to it.
    fn connect(&mut self, guest: &mut Guarded<'_>, progress: &Arc<Progress>) -> Result<Self::Session, Error>;

    /// When the rest may follow the guest; none: never.
    fn post_copy(&self) -> Option<PostCopyAfter>;

    /// Whether all memory is compared before the guest is given up.
    fn compares(&self) -> bool;

    /// Hands the guest over by [`MoveInProgress::hand_over`], and does what remains to be done after that.
    fn hand_over(
        &mut self,
        session: &mut Self::Session,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
    ) -> Result<(), Error>;

    /// Tells the receiver how the move has ended, and ends the connections.
    fn part(&mut self, session: Self::Session, result: &Result<(), Error>, progress: &Progress);
}

/// Moves the guest. On every failure except [`Error::Unknown`] it is here as it was.
pub(crate) fn carry_out(
    receiver: &mut impl Receiver,
    terms: &MoveTerms,
    (guest, guard): (&mut dyn SourceGuest, Option<&mut dyn Guard>),
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    // Ending the tracking takes time that grows with the memory. By then the guest runs again, here or there, and
    // nothing waits for this.
    let mut rounds = None;
    let guest = &mut Guarded::new(guest, guard);
    let result = receiver.connect(guest, progress).and_then(|mut session| {
        let (at_stop, post_copy) = (AtStop::new(&terms.at_stop), receiver.post_copy());
        let compares = receiver.compares();
        let mut course = MoveInProgress { guest: &mut *guest, progress, report, begin, at_stop, post_copy, compares };
        let result = course
            .up_to_switchover(&mut rounds, &mut session, terms)
            .and_then(|rounds| receiver.hand_over(&mut session, &mut course, rounds))
            .map_err(|error| too_late(error, progress));
        receiver.part(session, &result, progress);
        result
    });
    if !matches!(result, Ok(()) | Err(Error::Unknown(_))) {
        guest.plug_back();
    }
    finish(result, begin, progress, report)
}
