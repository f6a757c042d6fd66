//! The rounds of a snapshot: the same scan as in a move, with a file at the other end.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use transship_memory::PageCount;

use super::output::Output;
use crate::{
    Converge, Error, Progress, Report,
    converging::{RunningGuest, until_the_rest_is_small},
    fail_point,
    forecast::{Aim, Forecast, Room, Verdict},
    free::{FreePages, Patience},
    guarded::Guarded,
    guest::SourceGuest,
    hold::{Holding, Kept},
    pacing::Pacing,
    scan::Scanner,
    shortfall::Medium,
    snapshot::{SaveOptions, file::target::Target},
    unplug::unplug,
};

/// What is written in each round.
pub(crate) struct Rounds {
    scanner: Scanner,
    pacing: Pacing,
    number: u32,
}

impl Rounds {
    /// Arms the tracking of a guest that runs.
    pub(crate) fn begin(
        guest: &mut dyn SourceGuest,
        converge: Converge,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let tracker = guest.track()?;
        let scanner = Scanner::begin(guest.memory(), tracker, guest.freeing())?;
        let pacing = Pacing::new(converge, scanner.waits(), progress)?;
        Ok(Self { scanner, pacing, number: 0 })
    }

    /// The one round of a guest that stands still.
    pub(crate) fn standing_still(guest: &dyn SourceGuest) -> Result<Self, Error> {
        let (scanner, pacing) = (Scanner::standing_still(guest.memory())?, Pacing::default());
        Ok(Self { scanner, pacing, number: 0 })
    }

    /// Bytes that the next round looks at.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.scanner.pending_bytes()
    }

    /// The guest has been stopped, or could not be: nobody is held any more.
    pub(crate) fn let_writers_go(&mut self) {
        self.pacing.end();
    }

    /// Before the guest is stopped: whether the last scan is to search for holes.
    pub(crate) fn ask_what_it_gave_back(&mut self, guest: &mut dyn SourceGuest) -> Result<(), Error> {
        self.scanner.ask_what_it_gave_back(&mut || guest.gave_back())
    }

    /// The last look at a guest that has been stopped after rounds.
    pub(crate) fn scan_again(&mut self, output: &dyn Output, report: &mut Report) -> Result<(), Error> {
        self.scanner.note_tracker(report);
        self.scanner.scan_again(output.content())
    }

    /// Processes beside the VMM have written their last, and may end.
    pub(crate) fn let_others_end(&mut self) {
        self.scanner.let_others_end();
    }

    /// One more look, when the device state is saved. Returns how many pages were written since the last one; they are
    /// pending.
    pub(crate) fn scan_once_more(&mut self, output: &dyn Output) -> Result<PageCount, Error> {
        self.scanner.scan_once_more(output.content())
    }

    /// Writes what is pending. With `sync` it waits until the disk has it.
    pub(crate) fn write_pending(
        &mut self,
        output: &mut dyn Output,
        target: &Target,
        sync: bool,
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        progress.round.store(self.number + 1, Relaxed);
        let bytes = self.pending_bytes();
        target.expect(output.needs(bytes));
        progress.round_total.store(bytes, Relaxed);
        progress.round_left.store(bytes, Relaxed);
        let written = output.write(self.scanner.pending(), target)?;
        fail_point::reach("save.round-written")?;
        if sync {
            target.sync(progress)?;
        }
        let mut round = self.scanner.take_report();
        round.number = self.number + 1;
        round.zero = written.zero.get();
        round.bytes = written.normal.bytes();
        round.ms = begin.elapsed().as_secs_f64() * 1e3;
        report.cpu.channels += written.cpu_seconds;
        report.add_round(round, written.normal, written.rewritten);
        self.number += 1;
        Ok(())
    }

    /// Rounds until the rest can be written while the guest stands still for no longer than it may. It was scanned
    /// then, and not written.
    ///
    /// The forecast needs the speed of the disk. What goes through the page cache is written at that of memory until
    /// the cache is full, and the disk follows later: so such a round ends when the disk has all of it. This also
    /// leaves the cache empty for the last round, which then takes less time than is forecast.
    pub(crate) fn until_the_rest_is_small(
        &mut self,
        guest: &mut Guarded<'_>,
        options: &SaveOptions,
        output: &mut dyn Output,
        target: &Target,
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let SaveOptions { downtime, max_downtime, max_rounds, converge, .. } = *options;
        let aim = Aim { medium: Medium::File, downtime, max_downtime, bandwidth: None, max_rounds, converge };
        let forecast = Forecast::new(aim, guest.state_estimate());
        let mut holding = Holding::new(&options.hold, progress);
        let mut free = FreePages::of(guest.unguarded());
        self.scanner.plan_first_round(Some(free.ask(Patience::Writing, progress)?))?;
        let mut live = LiveGuest { rounds: self, guest, output, target, free };
        until_the_rest_is_small(&mut live, (forecast, &mut holding), None, progress, report).map(drop)
    }
}

/// A guest that runs while it is saved.
struct LiveGuest<'a, 'g> {
    rounds: &'a mut Rounds,
    guest: &'a mut Guarded<'g>,
    output: &'a mut dyn Output,
    target: &'a Target,
    free: FreePages,
}

impl RunningGuest for LiveGuest<'_, '_> {
    fn send_first(&mut self, _: &Forecast, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
        self.write("round", progress, report)?;
        self.rounds.scanner.not_seen(self.free.end().1);
        unplug(self.guest, &|| progress.is_cancelled())?;
        fail_point::reach("save.unplugged")?;
        self.scan(progress, report)
    }

    fn mark_ready(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

impl Kept for LiveGuest<'_, '_> {
    fn rest(&self) -> u64 {
        self.rounds.pending_bytes()
    }

    fn look(&mut self, progress: &Progress) -> Result<(), Error> {
        self.rounds.pacing.between_rounds();
        let Self { rounds, guest, output, .. } = self;
        rounds.scanner.scan_on(&mut || guest.unguarded().gave_back(), output.content(), progress)
    }

    fn send(&mut self, step: &str, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
        self.write(step, progress, report)?;
        self.scan(progress, report)
    }

    fn follow(&mut self, verdict: &Verdict, rest: u64, room: Room) {
        self.rounds.pacing.follow(verdict, rest, room);
    }

    fn check(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

impl LiveGuest<'_, '_> {
    fn write(&mut self, step: &str, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
        let Self { rounds, guest, output, target, .. } = self;
        guest.drain(report)?;
        rounds.write_pending(*output, target, !target.is_direct(), progress, report)?;
        fail_point::reach_by("save", step)
    }

    fn scan(&mut self, progress: &Progress, report: &mut Report) -> Result<(), Error> {
        let Self { rounds, guest, output, .. } = self;
        rounds.scanner.scan(&mut || guest.unguarded().gave_back(), output.content(), report, progress)?;
        rounds.scanner.note_tracker(report);
        Ok(())
    }
}
