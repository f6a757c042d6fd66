//! An eager restore: all memory is in place before the devices are loaded and the guest runs.
use std::{sync::atomic::Ordering, time::Instant};

use transship_memory::PAGE_BYTES;

use super::restoring::Restore;
use crate::{
    Error, FileReport, Phase, RoundReport, fail_point,
    snapshot::{
        Format,
        mapped::{pages, plan::Plan},
        open::Snapshot,
    },
};

/// Restores from a file whose pages have their places.
pub(super) fn restore(restore: &mut Restore<'_>, mut snapshot: Snapshot) -> Result<(), Error> {
    let plan = Plan::make(&snapshot, &restore.guest.description(), &restore.guest.state_format())?;
    snapshot.settle_direct_io(restore.options.direct_io, plan.any_page())?;
    restore.guest.memory().clear_all()?;
    restore.report.setup_ms = restore.elapsed_ms();
    read_pages(restore, &snapshot, &plan)?;
    fail_point::reach("restore.pages")?;
    restore.load(&snapshot, &plan)?;
    fail_point::reach("restore.loaded")?;
    restore.start(plan.ran)
}

/// Reads the pages of all regions into place.
fn read_pages(restore: &mut Restore<'_>, snapshot: &Snapshot, plan: &Plan) -> Result<(), Error> {
    let begin = Instant::now();
    let (total, stored) = (restore.guest.memory().bytes(), plan.stored_pages());
    restore.progress.round.store(1, Ordering::Relaxed);
    restore.progress.round_total.store(stored * PAGE_BYTES as u64, Ordering::Relaxed);
    restore.progress.round_left.store(stored * PAGE_BYTES as u64, Ordering::Relaxed);
    restore.progress.set_phase(Phase::Reading);
    let options = restore.options;
    let memory = restore.guest.memory();
    let done = pages::read(&snapshot.origin, &plan.sources, &memory, options.channels, options.io, restore.progress)?;
    restore.report.cpu.channels = done.cpu_seconds;
    restore.report.file =
        Some(FileReport { io_uring: done.uring, ..snapshot.origin.report(Format::MappedRam, stored) });
    restore.report.pages.normal = stored;
    restore.report.pages.hole = total / PAGE_BYTES as u64 - stored;
    restore.report.bytes.wire = stored * PAGE_BYTES as u64;
    restore.report.rounds.push(RoundReport {
        number: 1,
        scanned: total / PAGE_BYTES as u64,
        hole: restore.report.pages.hole,
        bytes: stored * PAGE_BYTES as u64,
        ms: begin.elapsed().as_secs_f64() * 1e3,
        ..RoundReport::default()
    });
    Ok(())
}
