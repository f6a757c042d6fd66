//! A lazy restore: the guest runs first, and its pages come when they are touched.
//!
//! | before | may fail by | then |
//! | --- | --- | --- |
//! | the guest is started | anything | nothing runs; the VMM is to be ended |
//! | all pages are in place | the file | the guest is stopped where it is; the stand-in holds the userfaultfd until the VMM has ended |
//! | | the death of this process | the stand-in goes on |
//! | | the end of the VMM | nothing is left to do |
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::Ordering,
    thread,
    time::Instant,
};

use transship_memory::{Claims, GuestMemory, PageCount, PageSet};

use super::{
    from_file::{FromFile, URGENT_THREADS},
    restoring::Restore,
    stand_in::TakeOver,
};
use crate::{
    Error, LazyReport, Phase, fail_point,
    filling::{
        EndOnDrop, Event, check_units,
        stand_in::{Ending, StandIn},
    },
    guest::GuestError,
    snapshot::{Format, file::origin::Origin, image::opened::Image, mapped::plan::RestorePlan, open::Snapshot},
    stream::whence::wrong,
};

/// Restores from a file whose pages have their places.
pub(super) fn restore(
    restore: &mut Restore<'_>,
    mut snapshot: Snapshot,
    stand_in: &mut dyn StandIn,
) -> Result<(), Error> {
    let plan = RestorePlan::make(&snapshot, &restore.guest.description(), &restore.guest.state_format())?;
    if let Some(at) = plan.any_page() {
        snapshot.origin.settle_direct_io(restore.options.direct_io, at)?;
    }
    let origin = snapshot.origin.clone();
    restore_from(restore, &snapshot, plan, &origin, stand_in)
}

/// Restores from an image whose memory is one file.
pub(super) fn restore_image(restore: &mut Restore<'_>, image: Image, stand_in: &mut dyn StandIn) -> Result<(), Error> {
    let (plan, origins) = RestorePlan::of_image(&image, &restore.guest.description(), &restore.guest.state_format())?;
    match origins.as_slice() {
        [origin] => restore_from(restore, &image.snapshot, plan, origin, stand_in),
        _ => Err(wrong(&image.name, "its memory is in several files, which can't be brought later; leave out --lazy")),
    }
}

/// The same, with all pages in one file.
pub(super) fn restore_from(
    restore: &mut Restore<'_>,
    snapshot: &Snapshot,
    mut plan: RestorePlan,
    origin: &Origin,
    stand_in: &mut dyn StandIn,
) -> Result<(), Error> {
    // No huge pages of a tmpfs: pages come one by one.
    let memory = restore.guest.memory();
    memory.empty()?;
    // A guest that runs and can't have a page is lost, while its disks are not as they were saved any more.
    memory.set_aside(plan.sources.iter().map(|source| &source.stored))?;
    let missing = restore.guest.missing(&full(&memory))?;
    fail_point::reach("restore.missing")?;
    check_units(&missing, plan.sources.len())?;
    let claims = Claims::new(&plan.sources.iter().map(|source| source.stored.pages()).collect::<Vec<_>>())?;
    let will = restore.guest.last_will()?;
    let take_over = TakeOver::of(snapshot, origin, &plan.fit.regions, &missing, restore.options.channels, will);
    stand_in.arm(&take_over.charge(), &files(origin, missing.fd(), claims.fd()))?;

    let stored = plan.stored_pages();
    begin_report(restore, origin, take_over.format(), stored);
    let filling = FromFile::new(origin, std::mem::take(&mut plan.sources), missing, claims);
    let result = run(restore, snapshot, &plan, &filling);
    stand_in.end(result.as_ref().err().map_or(Ending::Complete, |(_, ending)| *ending));
    restore.report.cpu.channels = filling.cpu_seconds();
    result.map_err(|(error, _)| error)
}

/// All pages of all regions.
fn full(memory: &GuestMemory) -> Vec<PageSet> {
    memory.regions().iter().map(|region| PageSet::full(region.pages())).collect()
}

/// What [`TakeOver`] names: the file in all ways that it was opened in comes last.
fn files<'a>(origin: &'a Origin, uffd: BorrowedFd<'a>, claims: BorrowedFd<'a>) -> Vec<BorrowedFd<'a>> {
    let direct = origin.direct.iter().map(|file| file.as_fd());
    [uffd, claims, origin.file.as_fd()].into_iter().chain(direct).collect()
}

fn begin_report(restore: &mut Restore<'_>, origin: &Origin, format: Format, stored: PageCount) {
    let total = PageCount::within(restore.guest.memory().bytes());
    let bytes = stored.bytes();
    restore.report.setup_ms = restore.elapsed_ms();
    restore.report.pages.normal = stored.get();
    restore.report.pages.hole = (total - stored).get();
    restore.report.bytes.wire = bytes;
    restore.report.file = Some(origin.report(format, stored));
    restore.progress.round.store(1, Ordering::Relaxed);
    restore.progress.round_total.store(bytes, Ordering::Relaxed);
    restore.progress.round_left.store(bytes, Ordering::Relaxed);
}

/// What went wrong, and what the stand-in is to do about it.
type Failed = (Error, Ending);

/// With threads that bring pages: loads, starts, and waits until all is in place.
fn run(restore: &mut Restore<'_>, snapshot: &Snapshot, plan: &RestorePlan, filling: &FromFile) -> Result<(), Failed> {
    // Only to have fewer waits.
    let _ = filling.release_holes();
    thread::scope(|scope| {
        let _ended = EndOnDrop(filling);
        (0..URGENT_THREADS).for_each(|_| drop(scope.spawn(|| filling.urgent())));
        if restore.progress.is_cancelled() {
            return Err((Error::RESTORE_CANCELLED, Ending::Complete));
        }
        let loaded = restore.load(snapshot, plan).and_then(|()| fail_point::reach("restore.loaded"));
        if let Err(error) = loaded {
            return Err(unloaded(filling, error));
        }
        // Somebody in the VMM may wait for a page that does not come, although it has loaded everything.
        if let Ok(Event::Failed(cause)) = filling.events().try_recv() {
            return Err(unusable(&cause));
        }
        let started = restore.start(plan.ran);
        let _ = fail_point::reach("restore.started");
        restore.progress.set_phase(Phase::Filling);
        let progress = restore.progress;
        (0..restore.options.channels).for_each(|_| drop(scope.spawn(|| filling.background(progress))));
        wait(restore, filling)?;
        restore.report.lazy = Some(LazyReport { faults: filling.faults(), filled_ms: restore.elapsed_ms() });
        started.map_err(|error| (error, Ending::Complete))
    })?;
    // Without it the same happens when the last holder ends.
    let _ = filling.release_all();
    Ok(())
}

/// The state could not be loaded: perhaps because of a page that could not be read.
fn unloaded(filling: &FromFile, error: Error) -> Failed {
    match filling.events().try_iter().next() {
        Some(Event::Failed(cause)) => unusable(&cause),
        Some(Event::Gone) => (error, Ending::Complete),
        // If it is about to load after all, it must find its memory.
        Some(Event::Complete) | None => (error, Ending::GoOn),
    }
}

/// Nothing runs, and nothing may: the VMM waits for a page that does not come.
fn unusable(cause: &Error) -> Failed {
    let what = format!("{cause}; nothing runs, and the waiting VMM can't be used any more: end it and start a new one");
    let error = match cause {
        Error::Memory(_) => Error::Guest(GuestError::Unfit(what)),
        _ => Error::file(what),
    };
    (error, Ending::Hold)
}

/// Waits until all pages are in place.
fn wait(restore: &mut Restore<'_>, filling: &FromFile) -> Result<(), Failed> {
    let begin = Instant::now();
    match filling.events().recv() {
        Ok(Event::Complete) | Err(_) => Ok(()),
        Ok(Event::Gone) => {
            let what = format!(
                "the VMM has ended, {:.1} s after its guest was started and before all of its memory was brought",
                begin.elapsed().as_secs_f64()
            );
            Err((Error::Guest(GuestError::vmm(what)), Ending::Complete))
        }
        Ok(Event::Failed(error)) => {
            // Pages that can be read are still brought meanwhile: the VMM may need them to stop its guest.
            let found = match restore.guest.stop() {
                Ok(found) => found,
                Err(why) => format!("can't stop it: {why}"),
            };
            let again = error.restore_anew();
            let error = Error::unknown(error, |error| {
                format!(
                    "{error}. The guest had been started, and was stopped where it was, before it read any wrong data: \
                     {found}. Until it has ended, a second process makes sure that missing pages are not read as \
                     zeros. {again}"
                )
            });
            Err((error, Ending::Hold))
        }
    }
}
