//! The life of a background save: the guest stands still only while its device state is taken and its memory is
//! protected from writes.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Instant,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use transship_memory::{Freeing, PageCount, Turns};
use transship_wire::qemu::Configuration;

use super::{
    Saving,
    appended::{Appended, Appender},
    mapped::MappedFile,
    moment::{Copies, Moment, MomentFailure, Outlet, TICK},
    output::Output,
    stream::StreamFile,
    writer::{Pages, Written},
};
use crate::{
    Error, Phase, RoundReport, fail_point,
    guest::GuestError,
    snapshot::{
        SaveOptions, Then,
        file::{queues::Queues, target::DEPTH},
    },
    stream::{
        regions::RegionBlock,
        state::{DeviceState, machine_name},
    },
};

impl Saving<'_, '_> {
    /// What a background save can't be, also of a guest that stands still.
    pub(super) fn check_background(&self) -> Result<(), Error> {
        if self.options.then == Then::StayStopped {
            let why = "after a background snapshot the guest runs on, so it can't be left as it was saved; use --live \
                       or --paused";
            return Err(Error::unfit(why));
        }
        Ok(())
    }

    /// Saves a guest that runs, as it is when it is stopped here.
    ///
    /// If anything fails, the protection is dropped first of all, and the guest runs on. The kernel does the same if
    /// this process dies.
    pub(super) fn in_background(&mut self, regions: &[RegionBlock]) -> Result<(), Error> {
        let Prepared { mut output, pages, appended } = self.prepare(regions)?;
        self.describe_file(output.as_ref());
        let protection = self.guest.unguarded().protect()?;
        let moment = Moment::expected(&**self.guest, protection, &pages)?;
        fail_point::reach("save.protecting")?;
        self.begin_rounds();
        let ended = self.save_moment(&moment, regions, appended);
        // Before anything else is asked of the VMM: now it waits for nobody.
        drop(moment);
        let Ended { state, resumed, saved } = ended.map_err(|error| self.take_back(error))?;
        let saved = saved
            .and_then(|()| Ok(self.guest.unguarded().check_protected()?))
            .and_then(|()| fail_point::reach("save.background"))
            .and_then(|()| self.complete(&state, output.as_mut()));
        match resumed {
            Ok(()) => saved,
            // If it stands still now, its file is worth all the more.
            Err(error) => Err(self.stands_still(error, saved)),
        }
    }

    /// The file, up to where its pages begin.
    fn prepare(&mut self, regions: &[RegionBlock]) -> Result<Prepared, Error> {
        let memory = self.guest.memory();
        if self.options.format.is_sequential() {
            let configuration = Configuration::new(machine_name(&**self.guest)?);
            let (target, progress) = (&*self.target, self.progress);
            let mut file = StreamFile::begin(&memory, Freeing::Never, regions, configuration, target, progress)?;
            let appended = Some(file.append(target)?);
            return Ok(Prepared { pages: Arc::clone(&file.pages), output: Box::new(file), appended });
        }
        // The threads are of another kind than those of the rounds.
        let without_writers = SaveOptions { channels: 0, ..self.options.clone() };
        let mut file =
            MappedFile::begin(&memory, Freeing::Never, regions, &without_writers, false, self.target, self.progress)?;
        file.disks = self.of_image.take();
        Ok(Prepared { pages: Arc::clone(&file.writers.pages), output: Box::new(file), appended: None })
    }

    /// Stops the guest for a moment, and returns when all of it is given to the kernel, or given up. An error is from
    /// before the guest ran again.
    fn save_moment(
        &mut self,
        moment: &Moment<'_>,
        regions: &[RegionBlock],
        appended: Option<Arc<Appended>>,
    ) -> Result<Ended, Error> {
        thread::scope(|scope| {
            let writers = self.options.channels.max(1);
            let (tell, outcomes) = bounded(usize::from(writers) + 1);
            let (sender, copies) = moment.copies();
            let serving = tell.clone();
            let shared = Shared { moment, copies, tell, turns: Turns::default(), appended };
            let serve = move || drop(serving.send(moment.serve(&sender)));
            spawn(scope, "faults".into(), serve)?;
            let begin = Instant::now();
            // All threads are there before the guest runs: the VMM itself writes to the guest's memory when it lets it
            // run, and may have to wait for one whose copies wait for the file.
            let state = self.stop_in(moment, regions).and_then(|state| {
                let mut numbers = 0..writers;
                numbers.try_for_each(|number| self.start_writer(scope, number, &shared))?;
                Ok(state)
            });
            let state = state.inspect_err(|_| moment.give_up());
            let state = state.map_err(|error| match outcomes.try_recv() {
                // The one that serves the guest's writers knows better.
                Ok(Err(first)) => first.into_error(self.target),
                _ => error,
            })?;
            drop(shared);
            let resumed = self.guest.resume(true);
            self.report.downtime_ms = self.guest.stood_ms();
            self.progress.set_phase(Phase::Rounds);
            let saved = self.wait_for_all(moment, fail_point::reach("save.resumed"), &outcomes);
            let saved = saved.map(|written| self.note_background(&written, moment, begin));
            Ok(Ended { state, resumed, saved })
        })
    }

    /// Everything for which the guest has to stand still, and what can be done before. The device state comes first:
    /// saving it, a VMM may write to the guest's memory.
    fn stop_in(&mut self, moment: &Moment<'_>, regions: &[RegionBlock]) -> Result<DeviceState, Error> {
        self.guest.prepare_stop()?;
        moment.protect_beforehand()?;
        self.progress.set_phase(Phase::Switchover);
        let found = self.guest.stop()?;
        self.found = found;
        fail_point::reach("save.stopped")?;
        self.guest.unguarded().stays_here();
        let state = DeviceState::take(self.guest.unguarded(), regions, found)?;
        fail_point::reach("save.state")?;
        moment.come()?;
        fail_point::reach("save.protected")?;
        self.end_of_stop()?;
        self.begin_round(moment);
        Ok(state)
    }

    fn start_writer<'scope>(
        &self,
        scope: &'scope thread::Scope<'scope, '_>,
        number: u8,
        shared: &Shared<'scope, '_>,
    ) -> Result<(), Error> {
        let Shared { moment, tell, copies, turns, appended } = shared.clone();
        let (files, memory, io) = (self.target.page_descriptors()?, self.guest.memory(), self.options.io);
        let appender = appended.map(|to| Ok::<_, Error>(Appender::new(to, self.target.cached_descriptor(0)?.into())));
        let appender = appender.transpose()?;
        let write = move || {
            let outlet = match appender {
                Some(appender) => Ok(Outlet::Appended(appender)),
                // The requests are this thread's own.
                None => Queues::new(&memory, files, (io, DEPTH), &turns).map(Outlet::Placed),
            };
            let written = outlet
                .map_err(|source| Error::Io { what: "prepare to write pages".into(), source })
                .and_then(|outlet| fail_point::reach("save.writing").map(|()| outlet))
                .map_err(MomentFailure::Begin)
                .and_then(|mut outlet| moment.write(&mut outlet, &copies));
            drop(tell.send(written));
        };
        spawn(scope, format!("writer{number}"), write)
    }

    /// Waits for all threads, also when it is given up.
    fn wait_for_all(
        &self,
        moment: &Moment<'_>,
        resumed: Result<(), Error>,
        outcomes: &Receiver<Outcome>,
    ) -> Result<Written, Error> {
        let mut failure = resumed.inspect_err(|_| moment.give_up()).err();
        let mut written = Written::default();
        loop {
            if failure.is_none() && self.progress.is_cancelled() {
                moment.give_up();
                failure = Some(Error::CANCELLED);
            }
            match outcomes.recv_timeout(TICK) {
                Ok(Ok(part)) => written.add(&part),
                Ok(Err(error)) => {
                    moment.give_up();
                    failure = failure.or(Some(error.into_error(self.target)));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return failure.map_or(Ok(written), Err),
            }
        }
    }

    fn begin_round(&self, moment: &Moment<'_>) {
        let bytes = moment.data_pages().bytes();
        for total in [&self.progress.round_total, &self.progress.round_left] {
            total.store(bytes, Relaxed);
        }
        self.progress.round.store(1, Relaxed);
    }

    fn note_background(&mut self, written: &Written, moment: &Moment<'_>, begin: Instant) {
        let report = &mut *self.report;
        let data = moment.data_pages();
        let all = PageCount::within(report.bytes.guest);
        let bytes = written.normal.bytes();
        report.rounds.push(RoundReport {
            number: 1,
            scanned: all.get(),
            written: data.get(),
            zero: written.zero.get(),
            hole: (all - data).get(),
            bytes,
            ms: begin.elapsed().as_secs_f64() * 1e3,
            ..RoundReport::default()
        });
        report.pages.normal += written.normal.get();
        report.pages.zero += written.zero.get();
        report.pages.hole += (all - data).get();
        report.bytes.wire += bytes;
        report.cpu.channels += written.cpu_seconds;
        if let Some(file) = &mut report.file {
            file.pages_first = moment.faulted_pages().get();
            file.io_uring = moment.is_uring();
        }
    }
}

/// A file that is about to get the pages of a moment.
struct Prepared {
    output: Box<dyn Output>,
    pages: Arc<Pages>,
    /// Where they follow one another, if they have no places.
    appended: Option<Arc<Appended>>,
}

/// What the threads that write have in common.
#[derive(Clone)]
struct Shared<'m, 'p> {
    moment: &'m Moment<'p>,
    copies: Receiver<Copies>,
    tell: Sender<Outcome>,
    turns: Turns,
    appended: Option<Arc<Appended>>,
}

/// What one thread has done.
type Outcome = Result<Written, MomentFailure>;

/// How it went once the guest was told to run again.
struct Ended {
    state: DeviceState,
    resumed: Result<(), GuestError>,
    saved: Result<(), Error>,
}

fn spawn<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: String,
    run: impl FnOnce() + Send + 'scope,
) -> Result<(), Error> {
    let spawned = thread::Builder::new().name(name).spawn_scoped(scope, run);
    spawned.map(drop).map_err(|source| Error::Io { what: "start a thread".into(), source })
}
