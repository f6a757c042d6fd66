//! Holds the guest's writers so that each round is smaller than the one before, until the rest fits the downtime.
//!
//! ```text
//!   pages that may be written
//!     share ┤          ╭────    the rest of it grows in the time that the round takes, as its pages are sent
//!           │      ╭───╯
//!   at once ┤──────╯            so much may be written as soon as the round begins
//!           └──────────────── of the round
//! ```
//!
//! Writers beyond that are held at their page for some milliseconds, then let go in any case: so pages pass even then.
//! If they are so many that the rounds would not shrink, writers are held for up to four times as long, and what passes
//! all the same is taken off what may be written at once. What would fit the downtime may always be written at once: a
//! guest that writes little is never held.
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use transship_memory::{PAGE, Waits, WriterPace};

use crate::{
    Converge, Error, Misfit, Progress,
    forecast::{Room, Verdict},
};

/// A round may write this share of the pages of the round before at most. A guest that writes twice what the link
/// carries does 40 % of its work then.
const SHARE: f64 = 0.8;
/// It may be less where few rounds are left, but no less than this.
const SHARE_MIN: f64 = 0.1;
/// Of the share, what may be written at once.
const AT_ONCE: f64 = 0.5;
/// Of what fits the downtime, what a round aims at: the speed is not known for certain.
const MARGIN: f64 = 0.8;
/// Of that, what may be written at once even if much passes while writers are held.
const LEAST: f64 = 0.5;
/// A round of more than this share of the one before has not become smaller.
const STALLED: f64 = 0.95;
/// Writers may be held for so many times as long as usual.
const PATIENCE_MAX: u32 = 4;

/// Whoever holds the writers of one guest. Dropping it lets them go.
#[derive(Default)]
pub(crate) struct Pacing {
    /// None: nobody is held.
    waits: Option<Arc<Waits>>,
    progress: Arc<Progress>,
    /// Of the round that is under way, if writers are held in it.
    round: Option<Round>,
    forced: Forced,
}

/// What passes because nobody is held for long.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Forced {
    /// The most so far, as a share of the pages of the round, had everybody been held for as long as usual.
    share: f64,
    /// How many times as long as usual writers are held.
    patience: u32,
}

impl Default for Forced {
    fn default() -> Self {
        Self { share: 0.0, patience: 1 }
    }
}

impl Forced {
    /// More pages than were to be were written in a round: this share of its pages passed.
    fn note(&mut self, share: f64) {
        self.share = self.share.max(share * f64::from(self.patience));
        let enough = (self.share / (SHARE * AT_ONCE)).ceil() as u32;
        self.patience = self.patience.max(enough).min(PATIENCE_MAX);
    }

    /// All the same the rounds do not become smaller.
    fn insist(&mut self) {
        self.patience = (self.patience + 1).min(PATIENCE_MAX);
    }

    /// As long as writers are held now.
    fn now(&self) -> f64 {
        self.share / f64::from(self.patience)
    }
}

#[derive(Debug, Clone, Copy)]
struct Round {
    pages: f64,
    credit: Credit,
}

/// How many pages may be written while a round is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Credit {
    at_once: f64,
    /// Beyond that, until all pages of the round are sent.
    growing: f64,
    /// In any case.
    least: f64,
}

impl Credit {
    /// For a round of so many pages. `forced`: the share of them that is written however long writers are held.
    fn of(pages: f64, room: &Room, forced: f64) -> Self {
        let fits = MARGIN * (room.fits_bytes / PAGE) as f64;
        let by_rounds = (fits / pages).powf(1.0 / f64::from(room.rounds_left.max(1)));
        // Rounds of p, p·s, p·s² … pages are p / (1 - s) together: they must fit what can be sent until the deadline.
        let by_time = room.until_deadline.map_or(SHARE, |bytes| 1.0 - pages / (MARGIN * (bytes / PAGE) as f64));
        let share = by_rounds.min(by_time).clamp(SHARE_MIN, SHARE);
        let at_once = (share - forced).clamp(0.0, AT_ONCE * share);
        // What passes comes on top of what is free.
        let least = (fits - forced * pages).max(LEAST * fits);
        Self { at_once: at_once * pages, growing: (share - at_once) * pages, least }
    }

    /// When this share of the round is over.
    fn pages(&self, over: f64) -> f64 {
        (self.at_once + self.growing * over).max(self.least)
    }
}

/// How many bytes may be written at most while a round of so many is sent.
pub(crate) fn most(bytes: f64, room: &Room) -> f64 {
    match room.fits_bytes {
        // Nobody would be held.
        0 => f64::MAX,
        _ => Credit::of(bytes / PAGE as f64, room, 0.0).pages(1.0) * PAGE as f64,
    }
}

/// A round that is under way, as the tracker asks about it.
struct Running {
    credit: Credit,
    patience: u32,
    total_bytes: f64,
    begin: Instant,
    /// How long it should take.
    seconds: f64,
    progress: Arc<Progress>,
}

impl Running {
    /// How much of the round is over: of its pages and of its time. Pages count as sent as soon as they are read, which
    /// for a small round is at once.
    fn over(&self) -> f64 {
        let sent = 1.0 - load(&self.progress.round_left) / self.total_bytes;
        sent.min(self.begin.elapsed().as_secs_f64() / self.seconds).clamp(0.0, 1.0)
    }
}

impl WriterPace for Running {
    fn may_pass(&self, passed: u64) -> bool {
        (passed as f64) < self.credit.pages(self.over())
    }

    fn patience(&self) -> u32 {
        self.patience
    }
}

fn load(number: &AtomicU64) -> f64 {
    // Relaxed: which moment it is does not matter, as a round is sent in many steps.
    number.load(Relaxed) as f64
}

impl Pacing {
    /// `waits`: the writers, if the tracker can hold them.
    ///
    /// # Errors
    /// They are to be held, and can't be.
    pub(crate) fn new(converge: Converge, waits: Option<Arc<Waits>>, progress: &Arc<Progress>) -> Result<Self, Error> {
        if let Some(waits) = &waits {
            progress.watch_writers(waits);
        }
        if converge == Converge::Pace && waits.is_none() {
            return Err(Misfit::Pace.unfit(
                "the writes of this guest are tracked in a way that can't hold its writers; leave out --converge pace",
            ));
        }
        let waits = waits.filter(|_| converge == Converge::Pace);
        Ok(Self { waits, progress: Arc::clone(progress), round: None, forced: Forced::default() })
    }

    /// After a scan that has found `rest` bytes, of which the verdict is known: how fast the guest may write while they
    /// are sent, or until it is stopped.
    pub(crate) fn follow(&mut self, verdict: &Verdict, rest: u64, room: Room) {
        let Some(waits) = &self.waits else { return };
        let pages = (rest / PAGE) as f64;
        if let Some(Round { pages: before, credit }) = self.round.filter(|round| pages > round.credit.pages(1.0)) {
            self.forced.note((pages - credit.at_once.max(credit.least)) / before);
            if pages > STALLED * before {
                self.forced.insist();
            }
        }
        let fits = (room.fits_bytes / PAGE) as f64;
        let credit = match verdict {
            // Until it stands still it may write what would still fit. If it was never held this is not the time.
            Verdict::Fits if self.round.is_some() => {
                let least = (fits - pages).max(fits * (1.0 - MARGIN));
                Credit { at_once: 0.0, growing: 0.0, least }
            }
            Verdict::AnotherRound if room.fits_bytes > 0 => Credit::of(pages, &room, self.forced.now()),
            // Nothing would be gained.
            _ => return self.end(),
        };
        tracing::debug!(pages, fits, ?credit, forced = ?self.forced, "writers are held beyond this");
        self.round = Some(Round { pages, credit });
        // It is stored once more when the round begins.
        self.progress.round_left.store(rest, Relaxed);
        let total_bytes = (rest as f64).max(1.0);
        waits.set_pace(Some(Box::new(Running {
            credit,
            patience: self.forced.patience,
            total_bytes,
            begin: Instant::now(),
            seconds: total_bytes / room.bytes_per_s.max(1.0),
            progress: Arc::clone(&self.progress),
        })));
    }

    /// The next scan adds to what an earlier one has found, which was not sent. That is more than passed in a round,
    /// and says nothing about writers that could not be held.
    pub(crate) fn between_rounds(&mut self) {
        if let Some(round) = &mut self.round {
            round.credit.least = f64::INFINITY;
        }
    }

    /// Nobody is held any more.
    pub(crate) fn end(&mut self) {
        self.round = None;
        if let Some(waits) = &self.waits {
            waits.set_pace(None);
        }
    }
}

impl Drop for Pacing {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(fits_mib: u64, rounds_left: u32) -> Room {
        Room { fits_bytes: fits_mib * MIB, rounds_left, until_deadline: None, bytes_per_s: 1e6 }
    }

    fn rounded(credit: Credit, sent: f64) -> u64 {
        credit.pages(sent).round() as u64
    }

    #[test]
    fn half_of_four_fifths_may_be_written_at_once_and_the_rest_in_time() {
        let credit = Credit::of(10_000.0, &room(1, 100), 0.0);
        assert_eq!([0.0, 0.5, 1.0].map(|sent| rounded(credit, sent)), [4000, 6000, 8000]);
        // What passes however long writers are held is taken off what may be written at once.
        let credit = Credit::of(10_000.0, &room(1, 100), 0.6);
        assert_eq!([0.0, 0.5, 1.0].map(|sent| rounded(credit, sent)), [2000, 5000, 8000]);
        // If it is more than the share, nothing may but half of what fits.
        let credit = Credit::of(10_000.0, &room(1, 100), 2.0);
        assert_eq!([0.0, 1.0].map(|sent| rounded(credit, sent)), [102, 8000]);
        // Of a round that nearly fits, what passes is taken off that: both together must fit.
        let credit = Credit::of(210.0, &room(1, 30), 0.2);
        assert_eq!(rounded(credit, 0.0), 163);
    }

    #[test]
    fn what_fits_may_always_be_written_at_once() {
        // 1 GiB, less the margin.
        let credit = Credit::of(10_000.0, &room(1024, 30), 0.0);
        assert_eq!([0.0, 1.0].map(|sent| rounded(credit, sent)), [209_715, 209_715]);
    }

    #[test]
    fn few_rounds_that_are_left_make_for_a_smaller_share() {
        // From 10,000 pages to 0.8 MiB: by two rounds.
        let credit = Credit::of(10_000.0, &room(1, 2), 0.0);
        assert_eq!(rounded(credit, 1.0), 1431);
        assert_eq!(rounded(Credit::of(10_000.0, &room(1, 0), 0.0), 1.0), 1000, "no less than a tenth");
    }

    #[test]
    fn little_time_that_is_left_makes_for_a_smaller_share() {
        let share = |until_mib: u64| {
            let room = Room { until_deadline: Some(until_mib * MIB), ..room(1, 100) };
            rounded(Credit::of(2560.0, &room, 0.0), 1.0)
        };
        // Ten MiB, again and again: five times as much, and the margin.
        assert_eq!(share(1000), 2048);
        assert_eq!(share(63), 2048);
        // Half of it each time is twice as much in the end.
        assert_eq!(share(25), 1280);
        assert_eq!(share(1), 256, "no less than a tenth");
        assert_eq!(share(0), 256);
    }

    #[test]
    fn writers_are_held_for_longer_only_if_too_many_pages_pass() {
        let mut forced = Forced::default();
        forced.note(0.3);
        assert_eq!((forced.patience, forced.now()), (1, 0.3));
        forced.note(0.9);
        assert_eq!((forced.patience, forced.now()), (3, 0.3));
        // That is with three times the patience.
        forced.note(0.6);
        assert_eq!(forced.patience, PATIENCE_MAX);
        assert!((forced.now() - 0.45).abs() < 1e-9, "{forced:?}");
        forced.note(0.1);
        assert_eq!(forced.patience, PATIENCE_MAX, "it does not become impatient");
    }

    /// Rounds that are short let a page pass for each time that a writer is held, which may be as many as were sent.
    #[test]
    fn writers_are_held_for_longer_if_the_rounds_stay_as_they_are() {
        let progress = Progress::new();
        let mut pacing = Pacing::new(Converge::Pace, Some(Arc::default()), &progress).unwrap();
        let mut patience = Vec::new();
        for pages in [256, 256, 250, 230, 230, 230, 230] {
            pacing.follow(&Verdict::AnotherRound, pages * PAGE, room(1, 30));
            patience.push(pacing.forced.patience);
        }
        assert_eq!(patience, [1, 2, 3, 3, 4, PATIENCE_MAX, PATIENCE_MAX]);
    }

    #[test]
    fn what_may_be_written_grows_with_what_is_sent() {
        let progress = Progress::new();
        progress.round_left.store(100, Relaxed);
        let credit = Credit { at_once: 10.0, growing: 10.0, least: 0.0 };
        let mut running = Running {
            credit,
            patience: 1,
            total_bytes: 100.0,
            begin: Instant::now(),
            seconds: 1e-9,
            progress: Arc::clone(&progress),
        };
        assert!(running.may_pass(9) && !running.may_pass(10));
        progress.round_left.store(50, Relaxed);
        assert!(running.may_pass(14) && !running.may_pass(15));
        progress.round_left.store(0, Relaxed);
        assert!(running.may_pass(19) && !running.may_pass(20));
        // All its pages are read, but it is not over.
        running.seconds = 1e9;
        assert!(running.may_pass(9) && !running.may_pass(11));
    }

    #[test]
    fn nobody_is_held_without_being_asked_for_and_who_is_to_be_must_wait() {
        let progress = Progress::new();
        assert!(Pacing::new(Converge::Never, None, &progress).is_ok());
        let refused = Pacing::new(Converge::Pace, None, &progress).err().unwrap();
        assert!(matches!(&refused, Error::Unfit { what: Misfit::Pace, .. }), "{refused}");
        let mut pacing = Pacing::new(Converge::Never, Some(Arc::default()), &progress).unwrap();
        pacing.follow(&Verdict::AnotherRound, 100 * MIB, room(1, 30));
        assert!(pacing.round.is_none());
    }

    #[test]
    fn what_was_found_before_did_not_pass_in_spite_of_a_hold() {
        let progress = Progress::new();
        for (between, patience) in [(true, 1), (false, PATIENCE_MAX)] {
            let mut pacing = Pacing::new(Converge::Pace, Some(Arc::default()), &progress).unwrap();
            pacing.follow(&Verdict::AnotherRound, 100 * MIB, room(2, 30));
            // 1 MiB still fits, and the next look finds this one and another.
            pacing.follow(&Verdict::Fits, MIB, room(2, 30));
            if between {
                pacing.between_rounds();
            }
            pacing.follow(&Verdict::Fits, 3 * MIB, room(2, 30));
            assert_eq!(pacing.forced.patience, patience, "{between}");
        }
    }

    #[test]
    fn a_guest_that_fits_is_held_before_it_stops_only_if_it_was_before() {
        let progress = Progress::new();
        let mut pacing = Pacing::new(Converge::Pace, Some(Arc::default()), &progress).unwrap();
        pacing.follow(&Verdict::Fits, MIB, room(2, 30));
        assert!(pacing.round.is_none());
        pacing.follow(&Verdict::AnotherRound, 100 * MIB, room(2, 30));
        assert_eq!(progress.round_left.load(Relaxed), 100 * MIB);
        pacing.follow(&Verdict::Fits, MIB, room(2, 30));
        // It may write what still fits.
        assert_eq!(rounded(pacing.round.unwrap().credit, 0.0), 256);
        pacing.end();
        assert!(pacing.round.is_none());
        // The state of the devices alone takes longer than it may stand still: holding would help nobody.
        pacing.follow(&Verdict::AnotherRound, 100 * MIB, room(0, 30));
        assert!(pacing.round.is_none());
    }
}
