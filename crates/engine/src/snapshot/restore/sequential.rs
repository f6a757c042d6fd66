//! Restoring from a plain stream: pages go into place as they come, and the VMM has the rest when all of it is there.
use std::sync::Arc;

use transship_memory::PageCount;
use transship_wire::qemu::{Configuration, GlobalState, RunState};

use super::restoring::{Restore, while_expecting};
use crate::{
    Error, Phase, RoundReport, fail_point,
    guest::StateFormat,
    snapshot::{Format, file::origin::Origin, open::Stream, read_stream::ReadStream},
    stream::{
        fit::{check_sizes, fit},
        guest_store::GuestStore,
        opaque,
        store::Store,
        whence::damaged,
    },
};

/// Restores from a stream that has been read up to its pages.
pub(super) fn restore(restore: &mut Restore<'_>, mut stream: Stream) -> Result<(), Error> {
    stream.check_whole()?;
    stream.settle_direct_io(restore.options.direct_io)?;
    let (origin, configuration) = (stream.origin.clone(), stream.configuration.clone());
    let (name, blocks) = (&origin.name, &stream.blocks);
    let (guest, format) = (restore.guest.description(), restore.guest.state_format());
    let fit = fit(name, &configuration, blocks, &guest, &format)?;
    let devices: Vec<_> = fit.devices.iter().map(|&index| &blocks[index]).collect();
    check_sizes(name, &devices)?;
    let memory = restore.guest.memory();
    let store = Arc::new(GuestStore::new(name.clone(), memory, &fit, blocks, format)?);
    restore.report.setup_ms = restore.elapsed_ms();
    restore.progress.set_phase(Phase::Reading);
    let progress = restore.progress;
    let read = while_expecting(restore.guest, || {
        stream.read_into(Arc::clone(&store) as Arc<dyn Store>, progress, Error::RESTORE_CANCELLED)
    });
    note(restore, &store, &origin);
    let read = read?;
    store.settle()?;
    let ran = load(restore, &store, &configuration, read, name)?;
    fail_point::reach("restore.loaded")?;
    restore.start(origin.ran(ran))
}

/// Has the VMM load what is not memory. Returns whether the guest ran.
fn load(
    restore: &mut Restore<'_>,
    store: &GuestStore,
    configuration: &Configuration,
    read: ReadStream,
    name: &str,
) -> Result<bool, Error> {
    let ReadStream { mut tail, base, .. } = read;
    let mut ran = true;
    if let Some(mut state) = GlobalState::find(&tail, base).map_err(|error| damaged(name, error))? {
        ran = state.runs();
        state.patch(&mut tail, RunState::Paused);
    }
    restore.progress.set_phase(Phase::Loading);
    match restore.guest.state_format() {
        StateFormat::Qemu { .. } => restore.guest.load_state(&mut store.device_stream(configuration, tail))?,
        StateFormat::Opaque => {
            let state = opaque::find(name, &tail, base)?;
            restore.guest.load_state(&mut &tail[state.bytes])?;
        }
    }
    Ok(ran)
}

/// What the report says of the memory.
fn note(restore: &mut Restore<'_>, store: &GuestStore, origin: &Origin) {
    let counts = store.counts();
    let total = PageCount::within(restore.guest.memory().bytes());
    let ms = restore.elapsed_ms() - restore.report.setup_ms;
    let report = &mut *restore.report;
    report.pages.normal = counts.normal.get();
    report.pages.zero = counts.zero.get();
    report.pages.hole = total.saturating_sub(store.stored()).get();
    report.file = Some(origin.report(Format::Stream, counts.normal));
    report.bytes.wire = counts.normal.bytes();
    report.rounds.push(RoundReport {
        number: 1,
        scanned: total.get(),
        zero: counts.zero.get(),
        bytes: report.bytes.wire,
        ms,
        ..RoundReport::default()
    });
}
