//! The life of a background save: the guest stands still only while its device state is taken and its memory is protected from writes.
use std::{sync::atomic::Ordering::Relaxed, thread, time::Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use transship_memory::{FileQueue, PAGE_BYTES, Protection};

use super::{
    Format, SaveOptions, Then,
    mapped::MappedFile,
    moment::{Failure, Moment, TICK},
    output::RegionBlock,
    save::Saving,
    state::DeviceState,
    writer::{DEPTH, Pages, Written},
};
use crate::{Error, Phase, RoundReport, fail_point, source::take_back};

impl Saving<'_> {
    /// What a background save can't be, also of a guest that stands still.
    pub(super) fn check_background(&self) -> Result<(), Error> {
        if self.options.format == Format::Stream {
            let why = "a background snapshot saves its pages in any order, which a plain stream can't hold; use --format mapped-ram";
            return Err(Error::Unfit(why.into()));
        }
        if self.options.then == Then::StayStopped {
            let why = "a background snapshot is of a guest that runs on, it can't be left as it was saved; use --live or --paused";
            return Err(Error::Unfit(why.into()));
        }
        Ok(())
    }

    /// Saves a guest that runs, as it is when it is stopped here.
    ///
    /// If anything fails, the protection is dropped first of all, and the guest runs on. The kernel does the same if this process dies.
    pub(super) fn in_background(&mut self, regions: &[RegionBlock]) -> Result<(), Error> {
        // The threads are of another kind than those of the rounds.
        let without_writers = SaveOptions { channels: 0, ..self.options.clone() };
        let memory = self.guest.memory();
        let mut output = MappedFile::begin(&memory, regions, &without_writers, self.target, self.progress)?;
        self.describe_file(&output);
        let protection = self.guest.protect()?;
        fail_point::reach("save.protecting")?;
        self.begin_rounds();
        self.progress.set_phase(Phase::Switchover);
        let stopped = Instant::now();
        let pages = output.writers.pages.clone();
        let (state, moment) =
            self.stop_and_protect(protection, &pages, regions).map_err(|error| take_back(self.guest, error, true))?;
        let (resumed, saved) = self.run_on(&moment, stopped);
        // Before anything else is asked of the VMM: now it waits for nobody.
        drop(moment);
        let saved = saved
            .and_then(|()| Ok(self.guest.check_protected()?))
            .and_then(|()| fail_point::reach("save.background"))
            .and_then(|()| self.complete(&state, &mut output));
        match resumed {
            Ok(()) => saved,
            // If it stands still now, its file is worth all the more.
            Err(error) => Err(self.stands_still(error, saved)),
        }
    }

    /// Everything for which the guest has to stand still. The device state comes first: saving it, a VMM may write to the guest's memory.
    fn stop_and_protect<'a>(
        &mut self,
        protection: Protection,
        pages: &'a Pages,
        regions: &[RegionBlock],
    ) -> Result<(DeviceState, Moment<'a>), Error> {
        self.guest.stop()?;
        fail_point::reach("save.stopped")?;
        let state = DeviceState::take(self.guest, regions, true)?;
        fail_point::reach("save.state")?;
        let moment = Moment::of(self.guest, protection, pages)?;
        fail_point::reach("save.protected")?;
        Ok((state, moment))
    }

    /// Lets the guest run, and returns when all of the moment is given to the kernel, or given up: whether the guest runs, and whether all is saved.
    fn run_on(&mut self, moment: &Moment<'_>, stopped: Instant) -> (Result<(), Error>, Result<(), Error>) {
        let begin = Instant::now();
        let data = moment.data_pages();
        for bytes in [&self.progress.round_total, &self.progress.round_left] {
            bytes.store(data * PAGE_BYTES as u64, Relaxed);
        }
        self.progress.round.store(1, Relaxed);
        let (resumed, saved) = thread::scope(|scope| {
            let (outcome, outcomes) = bounded(usize::from(self.options.channels) + 1);
            // The VMM itself writes to the guest's memory when it lets it run: somebody must serve it before.
            let started = self.start_threads(scope, moment, &outcome);
            drop(outcome);
            let resumed = self.guest.resume(true).map_err(Error::from);
            self.report.downtime_ms = stopped.elapsed().as_secs_f64() * 1e3;
            self.progress.set_phase(Phase::Rounds);
            let started = started.and_then(|()| fail_point::reach("save.resumed"));
            let mut failure = started.inspect_err(|_| moment.give_up()).err();
            let mut written = Written::default();
            loop {
                match outcomes.recv_timeout(TICK) {
                    Ok(Ok(part)) => written.add(&part),
                    Ok(Err(error)) => {
                        moment.give_up();
                        failure = failure.or(Some(error.into_error(self.target)));
                    }
                    Err(RecvTimeoutError::Timeout) if failure.is_none() && self.progress.is_cancelled() => {
                        moment.give_up();
                        failure = Some(Error::Cancelled);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
            (resumed, failure.map_or(Ok(written), Err))
        });
        let saved = saved.map(|written| self.note_background(&written, moment, begin));
        (resumed, saved)
    }

    /// One thread for those who wait, and those that write. Each tells its outcome.
    fn start_threads<'scope, 'env>(
        &self,
        scope: &'scope thread::Scope<'scope, 'env>,
        moment: &'env Moment<'_>,
        outcome: &Sender<Result<Written, Failure>>,
    ) -> Result<(), Error> {
        let failed = |source| Error::Io { what: "can't start a thread".into(), source };
        let (sender, receiver) = moment.copies();
        let tell = outcome.clone();
        let serve = move || drop(tell.send(moment.serve(&sender)));
        thread::Builder::new().name("faults".into()).spawn_scoped(scope, serve).map_err(failed)?;
        for number in 0..self.options.channels {
            let (tell, copies, io) = (outcome.clone(), receiver.clone(), self.options.io);
            let descriptor = self.target.page_descriptor()?;
            let memory = self.guest.memory();
            // The requests are this thread's own.
            let write = move || {
                let queue = FileQueue::new(memory, descriptor, DEPTH, io)
                    .map_err(|source| Error::Io { what: "prepare to write pages".into(), source })
                    .and_then(|queue| fail_point::reach("save.writing").map(|()| queue))
                    .map_err(Failure::Begin);
                let written = queue.and_then(|mut queue| moment.write(&mut queue, &copies));
                drop(tell.send(written));
            };
            thread::Builder::new().name(format!("writer{number}")).spawn_scoped(scope, write).map_err(failed)?;
        }
        Ok(())
    }

    fn note_background(&mut self, written: &Written, moment: &Moment<'_>, begin: Instant) {
        let report = &mut *self.report;
        let data = moment.data_pages();
        let all = report.bytes.guest / PAGE_BYTES as u64;
        let bytes = written.normal * PAGE_BYTES as u64;
        report.rounds.push(RoundReport {
            number: 1,
            scanned: all,
            written: data,
            zero: written.zero,
            hole: all - data,
            bytes,
            ms: begin.elapsed().as_secs_f64() * 1e3,
            ..RoundReport::default()
        });
        report.pages.normal += written.normal;
        report.pages.zero += written.zero;
        report.pages.hole += all - data;
        report.bytes.wire += bytes;
        report.cpu.channels += written.cpu_seconds;
        if let Some(file) = &mut report.file {
            file.pages_first = moment.faulted_pages();
            file.io_uring = moment.is_uring();
        }
    }
}
