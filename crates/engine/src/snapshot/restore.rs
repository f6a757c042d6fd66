//! The life of a restore: from the file that the user named to the running guest.
use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use transship_memory::{PAGE_BYTES, PageRange};
use transship_wire::GuestDescription;

use super::{
    FileUri, Format, RestoreOptions,
    devices::{DeviceStream, check_sizes},
    fit::{Fit, fit},
    info::check_complete,
    lazy, opaque,
    open::{Opened, Snapshot, open},
    origin::wrong,
    pages::{self, Source},
    pieces::PieceReader,
    sequential,
    stand_in::StandIn,
};
use crate::{
    Error, FileReport, Phase, Progress, Report, RoundReport, fail_point,
    guest::{DestinationGuest, StateFormat},
    source::finish,
};

/// Restores the guest of a snapshot file into one that waits: its memory first, then its devices; then it runs. With `lazily` it runs first, and this
/// returns when all of its memory has followed.
///
/// On success the guest is there, and runs if the file or `options` say so. On failure it does not run and never will by our doing, except that
/// [`Error::Unknown`] means what it says. Everything about the file that can be known from its structure, and whether it fits the guest, is known
/// before anything of the guest is touched; after that the memory of the waiting guest may have been overwritten.
///
/// # Errors
/// See [`Error`].
pub fn restore_guest(
    guest: &mut dyn DestinationGuest,
    from: &FileUri,
    options: &RestoreOptions,
    lazily: Option<&mut dyn StandIn>,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    report.bytes.guest = guest.memory().bytes();
    let result = open(from, options.direct_io).and_then(|opened| {
        let mut restore = Restore { guest, options, progress, report, begin };
        match (opened, lazily) {
            (Opened::Mapped(snapshot), None) => restore.mapped(*snapshot),
            (Opened::Mapped(snapshot), Some(stand_in)) => lazy::restore(&mut restore, *snapshot, stand_in),
            (Opened::Stream(stream), None) => sequential::restore(&mut restore, *stream),
            (Opened::Stream(stream), Some(_)) => {
                let what = "it is a plain stream, whose pages have no places of their own; restore it without --lazy";
                Err(wrong(&stream.origin.name, what))
            }
        }
    });
    finish(result, begin, progress, report)
}

/// What every way of restoring needs.
pub(super) struct Restore<'a> {
    pub(super) guest: &'a mut dyn DestinationGuest,
    pub(super) options: &'a RestoreOptions,
    pub(super) progress: &'a Arc<Progress>,
    pub(super) report: &'a mut Report,
    pub(super) begin: Instant,
}

impl Restore<'_> {
    fn mapped(&mut self, mut snapshot: Snapshot) -> Result<(), Error> {
        let plan = Plan::make(&snapshot, &self.guest.description(), &self.guest.state_format())?;
        snapshot.settle_direct_io(self.options.direct_io, plan.any_page())?;
        self.clear(Huge::Ask)?;
        self.report.setup_ms = self.elapsed_ms();
        self.read_pages(&snapshot, &plan)?;
        fail_point::reach("restore.pages")?;
        self.load(&snapshot, &plan)?;
        fail_point::reach("restore.loaded")?;
        self.start(plan.ran)
    }

    /// Makes all memory read as zero, whatever it held.
    pub(super) fn clear(&self, huge: Huge) -> Result<(), Error> {
        for region in self.guest.memory().regions() {
            region.clear(PageRange::new(0, region.pages()))?;
            if huge == Huge::Ask {
                region.advise_huge();
            }
        }
        Ok(())
    }

    /// Reads the pages of all regions into place.
    fn read_pages(&mut self, snapshot: &Snapshot, plan: &Plan) -> Result<(), Error> {
        let begin = Instant::now();
        let (total, stored) = (self.guest.memory().bytes(), plan.stored_pages());
        self.progress.round.store(1, Ordering::Relaxed);
        self.progress.round_total.store(stored * PAGE_BYTES as u64, Ordering::Relaxed);
        self.progress.round_left.store(stored * PAGE_BYTES as u64, Ordering::Relaxed);
        self.progress.set_phase(Phase::Reading);
        let options = self.options;
        let memory = self.guest.memory();
        let done = pages::read(&snapshot.origin, &plan.sources, &memory, options.channels, options.io, self.progress)?;
        self.report.cpu.channels = done.cpu_seconds;
        self.report.file =
            Some(FileReport { io_uring: done.uring, ..snapshot.origin.report(Format::MappedRam, stored) });
        self.report.pages.normal = stored;
        self.report.pages.hole = total / PAGE_BYTES as u64 - stored;
        self.report.bytes.wire = stored * PAGE_BYTES as u64;
        self.report.rounds.push(RoundReport {
            number: 1,
            scanned: total / PAGE_BYTES as u64,
            hole: self.report.pages.hole,
            bytes: stored * PAGE_BYTES as u64,
            ms: begin.elapsed().as_secs_f64() * 1e3,
            ..RoundReport::default()
        });
        Ok(())
    }

    /// Has the VMM load what is not memory.
    pub(super) fn load(&mut self, snapshot: &Snapshot, plan: &Plan) -> Result<(), Error> {
        self.progress.set_phase(Phase::Loading);
        if let Some(state) = &plan.opaque {
            return Ok(self.guest.load_state(&mut &snapshot.tail[state.clone()])?);
        }
        let blocks = plan.fit.devices.iter().map(|&index| &snapshot.blocks[index]).collect();
        let mut stream = PieceReader::new(DeviceStream::new(snapshot, blocks)?);
        let loaded = self.guest.load_state(&mut stream);
        // What the file has wrong is the cause; the VMM's complaint about it is the consequence.
        stream.failure().map_or(Ok(()), Err)?;
        Ok(loaded?)
    }

    /// The guest is whole: it runs if it ran when it was saved, unless the user has another wish.
    pub(super) fn start(&mut self, ran: bool) -> Result<(), Error> {
        let run = self.options.run.unwrap_or(ran);
        self.progress.set_phase(Phase::HandedOver);
        self.guest.start(run).map_err(|error| {
            Error::Unknown(format!(
                "the guest was loaded, but it could not be started: {error}. It is whole; start it with: {}",
                self.guest.start_hint()
            ))
        })?;
        self.report.started_ms = Some(self.elapsed_ms());
        Ok(())
    }

    pub(super) fn elapsed_ms(&self) -> f64 {
        self.begin.elapsed().as_secs_f64() * 1e3
    }
}

/// Whether memory is better made of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Huge {
    Ask,
    /// Pages come one by one.
    Leave,
}

/// Where everything that the guest needs is in the file.
pub(super) struct Plan {
    pub(super) fit: Fit,
    /// By region.
    pub(super) sources: Vec<Source>,
    /// Whether the guest ran when it was saved.
    pub(super) ran: bool,
    /// The device state of a guest that is no QEMU, in the tail.
    pub(super) opaque: Option<std::ops::Range<usize>>,
}

impl Plan {
    /// # Errors
    /// The file is of another guest, or lacks something.
    pub(super) fn make(snapshot: &Snapshot, guest: &GuestDescription, format: &StateFormat) -> Result<Self, Error> {
        let name = &snapshot.origin.name;
        check_complete(snapshot)?;
        let fit = fit(name, &snapshot.configuration, &snapshot.blocks, guest, format)?;
        let devices: Vec<_> = fit.devices.iter().map(|&index| &snapshot.blocks[index]).collect();
        check_sizes(name, &devices)?;
        let (ran, opaque) = match format {
            StateFormat::Qemu { .. } => (snapshot.global_state()?.is_none_or(|state| state.runs()), None),
            StateFormat::Opaque => {
                let state = opaque::find(name, &snapshot.tail, snapshot.tail_offset)?;
                (state.ran, Some(state.bytes))
            }
        };
        let source = |&index: &usize| {
            let block = &snapshot.blocks[index];
            let pages_offset = block.geometry().map_or(0, |geometry| geometry.pages_offset);
            Ok(Source { stored: snapshot.stored(block)?, pages_offset })
        };
        let sources = fit.regions.iter().map(source).collect::<Result<_, Error>>()?;
        Ok(Self { fit, sources, ran, opaque })
    }

    /// Pages of the regions that are in the file.
    pub(super) fn stored_pages(&self) -> u64 {
        self.sources.iter().map(|source| source.stored.count()).sum()
    }

    /// Where a page is.
    pub(super) fn any_page(&self) -> Option<u64> {
        self.sources.iter().find_map(|source| {
            let first = source.stored.ranges().next()?.first;
            Some(source.pages_offset + first * PAGE_BYTES as u64)
        })
    }
}
