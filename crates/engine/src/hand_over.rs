//! The end of a move, for every kind of peer: the guest is stopped, the rest of it is sent, and it is given up.
//!
//! ```text
//!   stop              the guest stands still                              ┐
//!   bring the rest    the last round, the device state; "it could run"    ├ what fails here leads back: hang up, take back
//!   at the stop       the user's command                                  │
//!   give up           the point of no return                              ┘
//!   await the word    "it runs"                                             what fails here is for a person: nobody can tell
//! ```
use crate::{
    Error, Phase, Progress,
    ending::take_back,
    fail_point,
    guarded::Guarded,
    guest::Found,
    rounds::{MoveInProgress, Rounds},
};

/// The other end during the hand-over.
pub(crate) trait Peer {
    /// The prefix of its fail points.
    fn name(&self) -> &'static str;

    /// Sends everything that is needed to run the guest, and waits until the peer confirms that it could run it.
    fn bring_the_rest(
        &mut self,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
        found: Found,
    ) -> Result<(), Error>;

    /// An error if the peer has sent anything, or has disconnected: nothing is expected from it now.
    fn check_silence(&mut self) -> Result<(), Error>;

    /// Sends the message that gives the guest to the peer.
    ///
    /// # Errors
    /// Not a single byte of it has left this side.
    fn commit(&mut self, found: Found) -> Result<(), Error>;

    /// Waits for the confirmation that the peer has the guest. The move can no longer be cancelled.
    fn await_word(&mut self) -> Result<(), Error>;

    /// The guest stays here: data in transit must not become a whole guest there.
    fn hang_up(&mut self);

    /// The message to the user when the confirmation did not come. `by_hand` is the command that resumes the guest
    /// here.
    fn without_word(&self, error: &Error, by_hand: &str) -> String;
}

impl MoveInProgress<'_, '_> {
    /// Stops the guest and hands it over: it runs there if it ran until it was stopped.
    pub(crate) fn hand_over(&mut self, peer: &mut dyn Peer, rounds: &mut Rounds) -> Result<(), Error> {
        let found = match self.up_to_no_return(peer, rounds) {
            Ok(found) => found,
            Err(error) => {
                peer.hang_up();
                self.at_stop.back();
                return Err(take_back(self.guest, error));
            }
        };
        let word = peer.await_word();
        self.report.downtime_ms = if found.ran() { self.guest.stood_ms() } else { 0.0 };
        // Not before: on one host it would take cores from whoever has the guest run.
        self.guest.unguarded().tidy();
        word.map_err(|error| {
            let by_hand = self.guest.resume_hint();
            Error::unknown(error, |error| peer.without_word(error, &by_hand))
        })
    }

    fn up_to_no_return(&mut self, peer: &mut dyn Peer, rounds: &mut Rounds) -> Result<Found, Error> {
        let asked = rounds.ask_what_it_gave_back(self.guest.unguarded());
        let found = asked.and_then(|()| self.guest.stop_at_once().map_err(Error::from));
        rounds.let_writers_go();
        let found = found?;
        fail_point::reach_by(peer.name(), "stopped")?;
        peer.bring_the_rest(self, rounds, found)?;
        self.at_stop.stopped(self.progress, self.report)?;
        give_up(self.guest, peer, self.progress, found)?;
        Ok(found)
    }
}

/// The point of no return. An error means that the guest is still ours. Otherwise we must assume from here on that the
/// peer runs it, whatever it sends or does not send afterwards.
fn give_up(guest: &mut Guarded<'_>, peer: &mut dyn Peer, progress: &Progress, found: Found) -> Result<(), Error> {
    peer.check_silence()?;
    // Whoever cancels from here on learns that it is too late.
    if !progress.give_up() {
        return Err(Error::CANCELLED);
    }
    let told = guest.give_up().map_err(Error::from).and_then(|()| peer.commit(found));
    told.inspect_err(|_| progress.set_phase(Phase::Switchover))
}
