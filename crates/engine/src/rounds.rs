//! The rounds of a move, for every kind of peer: each round sends the pages that the scan before it found.
mod running;

use std::{
    panic::resume_unwind,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use transship_memory::{Freeing, PageCount, PageSet};

use crate::{
    Converge, Error, MoveTerms, Phase, PostCopyAfter, Progress, Report,
    at_stop::AtStop,
    channels::{RoundWork, Sent},
    fail_point,
    forecast::{Aim, Forecast},
    free::{FreePages, Patience},
    guarded::Guarded,
    guest::{RegionPages, SourceGuest},
    hold::Holding,
    pacing::Pacing,
    page_map::PageMap,
    plan::{Tracked, Written},
    scan::{Pending, Scanner},
    shortfall::Medium,
    unplug::unplug,
};

/// How long sent data may take to arrive while the guest runs: a slow link with deep buffers is slow, not dead.
const DONE_TIMEOUT: Duration = Duration::from_secs(600);

/// The other end of a move, and the way there.
pub(crate) trait Link {
    /// By region: the pages for which the destination holds content.
    fn content(&self) -> &[PageMap];

    /// Sends a round. Returns the pages that were left out because they have become holes.
    fn send(&mut self, work: &RoundWork<'_>, free: &mut FreePages) -> Result<(Sent, Vec<RegionPages>), Error>;

    /// Waits until the destination has all of the round in place. What was sent is then known exactly: of pages that it
    /// reads itself, only the destination knows which are zero.
    fn confirm(&mut self, round: u32, sent: &mut Sent, patience: Duration) -> Result<(), Error>;

    /// An error if the destination has spoken, or has gone: nothing is expected from it between two rounds.
    fn check_silence(&mut self) -> Result<(), Error>;

    /// Adds the work of its encoders so far to the report.
    fn report(&self, report: &mut Report);

    /// The prefix of its fail points.
    fn name(&self) -> &'static str;
}

/// Marks a step.
fn reach(link: &dyn Link, step: &str) -> Result<(), Error> {
    fail_point::reach_by(link.name(), step)
}

/// The rounds of a move.
pub(crate) struct Rounds {
    scanner: Scanner,
    free: FreePages,
    pacing: Pacing,
    holding: Holding,
    number: u32,
    /// The guest is to go without what has not been sent.
    owes: bool,
    /// What is seen of its writing while the first round is sent, if it runs.
    looks: Option<Vec<Written>>,
}

/// A move in progress.
pub(crate) struct MoveInProgress<'a, 'g> {
    pub(crate) guest: &'a mut Guarded<'g>,
    pub(crate) progress: &'a Arc<Progress>,
    pub(crate) report: &'a mut Report,
    pub(crate) begin: Instant,
    pub(crate) at_stop: AtStop,
    /// When the rest may follow the guest; none: never.
    pub(crate) post_copy: Option<PostCopyAfter>,
    /// All memory is compared at the end, also what no guest relies on.
    pub(crate) compares: bool,
}

impl MoveInProgress<'_, '_> {
    /// The phases up to the switchover: arms the tracking, then sends rounds while the guest runs, until the rest is
    /// small. The rounds are recorded in `rounds`, even on failure.
    pub(crate) fn up_to_switchover<'r>(
        &mut self,
        rounds: &'r mut Option<Rounds>,
        link: &mut dyn Link,
        terms: &MoveTerms,
    ) -> Result<&'r mut Rounds, Error> {
        let MoveTerms { downtime, max_downtime, bandwidth, max_rounds, converge, ref hold, .. } = *terms;
        let aim = Aim { medium: Medium::Link, downtime, max_downtime, bandwidth, max_rounds, converge };
        let Self { guest, progress, report, begin, post_copy, compares, .. } = self;
        let is_running = guest.unguarded().is_running()?;
        let holding = Holding::new(hold, progress);
        if !is_running {
            holding.refuse_standing()?;
        }
        let rounds = rounds.insert(Rounds::begin(guest.unguarded(), converge, *compares, progress)?);
        rounds.holding = holding;
        reach(link, "tracking")?;
        report.setup_ms = begin.elapsed().as_secs_f64() * 1e3;
        progress.set_phase(Phase::Rounds);
        if is_running && *post_copy == Some(PostCopyAfter::Rounds(0)) {
            rounds.owes = true;
        } else if is_running {
            rounds.ask_for_free_pages(bandwidth, progress)?;
            reach(link, "hinted")?;
            let forecast = Forecast::new(aim, guest.state_estimate());
            rounds.send_while_it_runs(guest, link, (forecast, *post_copy), progress, report)?;
        }
        progress.set_phase(Phase::Switchover);
        Ok(rounds)
    }
}

impl Rounds {
    /// Arms the tracking.
    fn begin(
        guest: &mut dyn SourceGuest,
        converge: Converge,
        compares: bool,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let tracker = guest.track()?;
        let freeing = match guest.freeing() {
            Freeing::Announced if compares => Freeing::Possible,
            freeing => freeing,
        };
        let scanner = Scanner::begin(guest.memory(), tracker, freeing)?;
        let pacing = Pacing::new(converge, scanner.waits(), progress)?;
        Ok(Self {
            scanner,
            free: FreePages::of(guest),
            pacing,
            holding: Holding::default(),
            number: 0,
            owes: false,
            looks: None,
        })
    }

    /// Asks a running guest which pages the first round can leave out; the rest of its data is the first round. `speed`
    /// is the maximum sending rate in bytes a second. A stopped guest is not asked: the last round has all its
    /// memory.
    fn ask_for_free_pages(&mut self, speed: Option<u64>, progress: &Progress) -> Result<(), Error> {
        self.scanner.plan_first_round(Some(self.free.ask(Patience::Sending(speed), progress)?))
    }

    /// By region: pages that were left out and have not been written since.
    pub(crate) fn dead(&self) -> &[PageSet] {
        self.scanner.dead()
    }

    /// Whether the guest is to go without what has not been sent: [`Rounds::find_owed`] says what that is.
    pub(crate) fn owes(&self) -> bool {
        self.owes
    }

    /// Whether the other end may hold pages already.
    pub(crate) fn sent_any(&self) -> bool {
        self.number > 0
    }

    /// By region, for a guest that runs: the pages that the other end lacks, and those that it has and that are holes
    /// now. All of these will be owed, or gone.
    pub(crate) fn find_stale(
        &mut self,
        guest: &mut dyn SourceGuest,
        link: &dyn Link,
        progress: &Progress,
    ) -> Result<Vec<PageSet>, Error> {
        self.scanner.scan_on(&mut || guest.gave_back(), link.content(), progress)?;
        let pending = self.scanner.pending().iter().map(|pending| {
            let mut stale = pending.send.clone();
            stale.union_with(&pending.gone);
            stale
        });
        Ok(pending.collect())
    }

    /// By region, for a guest that is stopped and whose device state was saved: all pages that the other end lacks, and
    /// those that it has and that are holes now.
    pub(crate) fn find_owed(&mut self, link: &dyn Link) -> Result<&[Pending], Error> {
        self.find_the_rest(link)?;
        Ok(self.scanner.pending())
    }

    /// Sends the first round and unplugs the device that can't go with the guest: during the round if the guest has
    /// named all its free pages, otherwise after it. Until the device is gone, it writes to guest memory past the
    /// tracker; the pages of its rings count as written in the last scan.
    fn send_first_and_unplug(
        &mut self,
        guest: &mut Guarded<'_>,
        link: &mut dyn Link,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<(), Error> {
        let Some(ending) = self.free.take_ending() else {
            self.send_pending(link, DONE_TIMEOUT, progress, report)?;
            reach(link, "round")?;
            unplug(guest, &|| progress.is_cancelled())?;
            return reach(link, "unplugged");
        };
        // Relaxed: it says nothing about other memory.
        let broken = AtomicBool::new(false);
        let (sent, (unseen, unplugged)) = thread::scope(|scope| {
            let unplugging = scope.spawn(|| {
                let unseen = ending.settle();
                (unseen, unplug(guest, &|| progress.is_cancelled() || broken.load(Relaxed)))
            });
            let sent = self.send_pending(link, DONE_TIMEOUT, progress, report).and_then(|()| reach(link, "round"));
            broken.store(sent.is_err(), Relaxed);
            (sent, unplugging.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        self.scanner.not_seen(&unseen);
        sent?;
        unplugged?;
        reach(link, "unplugged")
    }

    /// The guest has been stopped, or could not be: nobody is held any more.
    pub(crate) fn let_writers_go(&mut self) {
        self.pacing.end();
    }

    /// Before the guest is stopped: whether the last scan is to search for holes.
    pub(crate) fn ask_what_it_gave_back(&mut self, guest: &mut dyn SourceGuest) -> Result<(), Error> {
        self.scanner.ask_what_it_gave_back(&mut || guest.gave_back())
    }

    /// The last scan, while the guest is stopped.
    pub(crate) fn find_the_rest(&mut self, link: &dyn Link) -> Result<(), Error> {
        self.scanner.scan_again(link.content())
    }

    /// Processes beside the VMM have written their last, and may end.
    pub(crate) fn let_others_end(&mut self) {
        self.scanner.let_others_end();
    }

    /// The last round, while the guest is stopped: what [`Rounds::find_the_rest`] has found.
    pub(crate) fn send_the_rest(
        &mut self,
        link: &mut dyn Link,
        patience: Duration,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<(), Error> {
        self.send_pending(link, patience, progress, report)?;
        reach(link, "last-round")
    }

    /// One more scan, when the guest is stopped and its device state is saved: from now on nothing has a reason to
    /// write. Pages written since the last round are sent as well, and counted.
    pub(crate) fn send_the_late(
        &mut self,
        link: &mut dyn Link,
        patience: Duration,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<(), Error> {
        let late = self.scanner.scan_once_more(link.content())?;
        if late.is_zero() {
            return Ok(());
        }
        report.late_pages += late.get();
        self.send_pending(link, patience, progress, report)
    }

    /// Sends the pending pages and waits until the destination has them all in place, at most `patience` after it has
    /// accepted the last byte.
    fn send_pending(
        &mut self,
        link: &mut dyn Link,
        patience: Duration,
        progress: &Progress,
        report: &mut Report,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        progress.round.store(self.number + 1, Relaxed);
        let bytes = self.scanner.pending_bytes();
        progress.round_total.store(bytes, Relaxed);
        progress.round_left.store(bytes, Relaxed);

        let freeing = self.scanner.freeing();
        let (pending, tracker, since) = self.scanner.pending_and_tracker();
        let work = RoundWork { round: self.number, pending, freeing };
        let mut send = || {
            let (mut sent, new_holes) = link.send(&work, &mut self.free)?;
            reach(link, "round-sent")?;
            link.confirm(work.round, &mut sent, patience)?;
            Ok::<_, Error>((sent, new_holes))
        };
        let (sent, new_holes) = match &mut self.looks {
            Some(looks) => {
                let tracked = Tracked { tracker, regions: pending.len(), since };
                let (result, seen) = tracked.while_doing(send);
                *looks = seen;
                result
            }
            None => send(),
        }?;

        if self.number == 0 {
            let (left_out, unseen) = self.free.end();
            self.scanner.left_out(left_out);
            self.scanner.not_seen(unseen);
        }
        let mut round = self.scanner.take_report();
        round.number = self.number + 1;
        round.zero = sent.zero.get();
        round.hole += new_holes.iter().map(|place| place.pages.count).sum::<PageCount>().get();
        self.scanner.not_sent(new_holes);
        round.bytes = sent.bytes;
        round.lent = sent.lent.bytes();
        round.ms = begin.elapsed().as_secs_f64() * 1e3;
        report.cpu.channels += sent.cpu_seconds;
        link.report(report);
        self.scanner.note_tracker(report);
        report.add_round(round, sent.normal, sent.resent);
        self.number += 1;
        Ok(())
    }
}
