//! An eager restore: all memory is in place before the devices are loaded and the guest runs.
use std::{sync::atomic::Ordering, time::Instant};

use transship_memory::{GuestMemory, PageCount, PageSet};

use super::restoring::{Restore, while_expecting};
use crate::{
    Error, FileReport, Phase, RoundReport, fail_point,
    snapshot::{
        Format,
        file::origin::Origin,
        image::opened::Image,
        mapped::{
            pages::{self, Source},
            plan::RestorePlan,
        },
        open::Snapshot,
    },
};

/// Restores from a file whose pages have their places.
pub(super) fn restore(restore: &mut Restore<'_>, mut snapshot: Snapshot) -> Result<(), Error> {
    let plan = RestorePlan::make(&snapshot, &restore.guest.description(), &restore.guest.state_format())?;
    if let Some(at) = plan.any_page() {
        snapshot.origin.settle_direct_io(restore.options.direct_io, at)?;
    }
    clear_what_is_not_stored(&restore.guest.memory(), &plan.sources)?;
    restore.report.setup_ms = restore.elapsed_ms();
    let report = snapshot.origin.report(Format::MappedRam, plan.stored_pages());
    read_pages(restore, &[(&snapshot.origin, plan.sources.as_slice())], report)?;
    fail_point::reach("restore.pages")?;
    restore.load(&snapshot, &plan)?;
    fail_point::reach("restore.loaded")?;
    restore.start(plan.ran)
}

/// Restores from an image: copies what clones would map.
pub(super) fn restore_image(restore: &mut Restore<'_>, image: Image) -> Result<(), Error> {
    let (plan, origins) = RestorePlan::of_image(&image, &restore.guest.description(), &restore.guest.state_format())?;
    restore_whole(restore, &image.snapshot, &plan, &origins)
}

/// The same once it is known what is where.
pub(super) fn restore_whole(
    restore: &mut Restore<'_>,
    snapshot: &Snapshot,
    plan: &RestorePlan,
    origins: &[Origin],
) -> Result<(), Error> {
    clear_what_is_not_stored(&restore.guest.memory(), &plan.sources)?;
    restore.report.setup_ms = restore.elapsed_ms();
    let nothing = || Source { stored: PageSet::empty(PageCount::ZERO), pages_offset: 0 };
    // A file at a time: each has the pages of one region.
    let mut files = Vec::new();
    for (region, source) in plan.sources.iter().enumerate() {
        let mut sources: Vec<Source> = plan.sources.iter().map(|_| nothing()).collect();
        sources[region] = Source { stored: source.stored.clone(), pages_offset: 0 };
        files.push(sources);
    }
    let files: Vec<_> = origins.iter().zip(files.iter().map(Vec::as_slice)).collect();
    let mut report = snapshot.origin.report(Format::Raw, plan.stored_pages());
    report.bytes += origins.iter().filter_map(|origin| origin.bytes).sum::<u64>();
    report.allocated += origins.iter().map(Origin::allocated).sum::<u64>();
    read_pages(restore, &files, report)?;
    fail_point::reach("restore.pages")?;
    restore.load(snapshot, plan)?;
    fail_point::reach("restore.loaded")?;
    restore.start(plan.ran)
}

/// Makes all memory read as zero that no page of the file comes to: the rest is overwritten.
fn clear_what_is_not_stored(memory: &GuestMemory, sources: &[Source]) -> Result<(), Error> {
    for ((region, old), source) in memory.regions().iter().zip(memory.ready()?).zip(sources) {
        let mut cleared = old;
        cleared.subtract(&source.stored);
        region.clear_set(&cleared)?;
    }
    Ok(())
}

/// Reads the pages of all regions into place: from each file those that it has.
fn read_pages(restore: &mut Restore<'_>, files: &[(&Origin, &[Source])], report: FileReport) -> Result<(), Error> {
    let begin = Instant::now();
    let total = PageCount::within(restore.guest.memory().bytes());
    let stored = PageCount::new(report.pages_stored);
    restore.progress.round.store(1, Ordering::Relaxed);
    restore.progress.round_total.store(stored.bytes(), Ordering::Relaxed);
    restore.progress.round_left.store(stored.bytes(), Ordering::Relaxed);
    restore.progress.set_phase(Phase::Reading);
    let memory = restore.guest.memory();
    let Restore { guest, options, progress, report: told, .. } = restore;
    let uring = while_expecting(*guest, || {
        let mut uring = false;
        for (origin, sources) in files {
            let done = pages::read(origin, sources, &memory, options.channels, options.io, progress)?;
            told.cpu.channels += done.cpu_seconds;
            uring |= done.uring;
        }
        Ok(uring)
    })?;
    restore.report.file = Some(FileReport { io_uring: uring, ..report });
    restore.report.pages.normal = stored.get();
    restore.report.pages.hole = (total - stored).get();
    restore.report.bytes.wire = stored.bytes();
    restore.report.rounds.push(RoundReport {
        number: 1,
        scanned: total.get(),
        hole: restore.report.pages.hole,
        bytes: stored.bytes(),
        ms: begin.elapsed().as_secs_f64() * 1e3,
        ..RoundReport::default()
    });
    Ok(())
}
