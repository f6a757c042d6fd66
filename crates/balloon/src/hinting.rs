//! The command ids by which free pages are asked for. They are what makes a hint safe to believe: see
//! docs/free-pages.md.
//!
//! The device shows an id in its configuration. A driver that sees a new one sends that id through the hint queue, then
//! the ranges that it has set aside, then [`STOP`]. The queue keeps their order, so a hint that comes behind the id was
//! made after the id was shown.
//!
//! ```text
//!                 ask                 id                STOP
//!      Done ───────────────► Asked ────────► Naming ───────────► Named
//!        ▲                     │  stop          │  stop            │  stop
//!        │                     ▼                ▼                  ▼
//!        └──── done ──────── Stopped ◄──────────┴──────────────────┘        ask: from any state, to Asked with a new id
//! ```

/// In the configuration: name no more, and keep what is set aside. In the queue: that was all.
pub(crate) const STOP: u32 = 0;
/// In the configuration: what is set aside may be used again.
pub(crate) const DONE: u32 = 1;
/// Ids go round from here to the largest number. 2 would do; QEMU does it this way, and so it is what drivers have
/// seen.
const FIRST_ID: u32 = 1 << 31;

/// What an answer of the driver in the hint queue means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It begins to name ranges for this id.
    Begins(u32),
    /// It has named all that it had for this id.
    NamedAll(u32),
    /// Nothing that was asked for.
    Stale,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    Done,
    Asked,
    Naming,
    Named,
    Stopped,
}

/// What the device knows of the driver's answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Hinting {
    /// The id that was shown last.
    id: u32,
    state: State,
}

impl Hinting {
    /// Nothing is asked for. `seed`: any number, a different one in each process: the queue may still hold the ids of a
    /// process before this one, whose hints must not be taken for answers to ours.
    pub(crate) fn new(seed: u32) -> Self {
        Self { id: seed | FIRST_ID, state: State::Done }
    }

    /// What the configuration shows.
    pub(crate) fn shown(&self) -> u32 {
        match self.state {
            State::Done => DONE,
            State::Stopped => STOP,
            State::Asked | State::Naming | State::Named => self.id,
        }
    }

    /// Asks for hints: the new id, to be shown now. Hints for earlier ids no longer count.
    pub(crate) fn ask(&mut self) -> u32 {
        self.id = self.id.wrapping_add(1) | FIRST_ID;
        self.state = State::Asked;
        self.id
    }

    /// No more hints count until the next id. The driver keeps what it has set aside.
    pub(crate) fn stop(&mut self) {
        if self.state != State::Done {
            self.state = State::Stopped;
        }
    }

    /// As `stop`, and the driver may use what it has set aside.
    pub(crate) fn done(&mut self) {
        self.state = State::Done;
    }

    /// The driver sent a number through the hint queue.
    pub(crate) fn answered(&mut self, number: u32) -> Answer {
        match self.state {
            // A driver that was started anew sends the same id once more.
            State::Asked | State::Naming | State::Named if number == self.id => {
                self.state = State::Naming;
                Answer::Begins(self.id)
            }
            State::Naming => {
                self.state = State::Named;
                Answer::NamedAll(self.id)
            }
            _ => Answer::Stale,
        }
    }

    /// The id that a range in the hint queue now answers to, if it counts.
    pub(crate) fn counting(&self) -> Option<u32> {
        (self.state == State::Naming).then_some(self.id)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_driver_names_its_pages() {
        let mut hinting = Hinting::new(0);
        assert_eq!((hinting.shown(), hinting.counting()), (DONE, None));
        let id = hinting.ask();
        assert_eq!((hinting.shown(), hinting.counting()), (id, None));
        assert_eq!(hinting.answered(id), Answer::Begins(id));
        assert_eq!((hinting.shown(), hinting.counting()), (id, Some(id)));
        assert_eq!(hinting.answered(STOP), Answer::NamedAll(id));
        assert_eq!((hinting.shown(), hinting.counting()), (id, None));
        hinting.stop();
        assert_eq!((hinting.shown(), hinting.counting()), (STOP, None));
        hinting.done();
        assert_eq!(hinting.shown(), DONE);
    }

    #[test]
    fn hints_for_an_older_id_do_not_count() {
        let mut hinting = Hinting::new(0);
        let old = hinting.ask();
        assert_eq!(hinting.answered(old), Answer::Begins(old));
        let new = hinting.ask();
        assert_eq!(hinting.counting(), None, "the queue still holds ranges for the old id");
        assert_eq!(hinting.answered(old), Answer::Stale);
        assert_eq!(hinting.answered(STOP), Answer::Stale, "this ends the old one");
        assert_eq!(hinting.answered(new), Answer::Begins(new));
        assert_eq!(hinting.counting(), Some(new));
    }

    #[test]
    fn nothing_counts_once_stopped() {
        let mut hinting = Hinting::new(0);
        let id = hinting.ask();
        hinting.answered(id);
        hinting.stop();
        assert_eq!(hinting.counting(), None);
        assert_eq!(hinting.answered(id), Answer::Stale, "the driver may only now come to answer");
        assert_eq!(hinting.counting(), None);
    }

    #[test]
    fn ids_go_round_and_never_mean_something_else() {
        for seed in [0, 5, u32::MAX - 1, u32::MAX] {
            let mut hinting = Hinting::new(seed);
            let ids: Vec<_> = (0..5).map(|_| hinting.ask()).collect();
            assert!(ids.iter().all(|&id| id >= FIRST_ID), "{ids:?}");
            assert!(ids.windows(2).all(|two| two[0] != two[1]), "{ids:?}");
        }
    }
}
