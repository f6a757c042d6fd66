//! The steps of a restore, whatever the file and the way.
use std::{
    io::{self, Read},
    panic::resume_unwind,
    sync::Arc,
    thread,
    time::Instant,
};

use crate::{
    Error, Phase, Progress, Report, fail_point,
    guest::{DestinationGuest, StateMade},
    snapshot::{
        RestoreOptions,
        mapped::{devices::DeviceStream, plan::RestorePlan},
        open::Snapshot,
    },
    stream::pieces::PieceReader,
};

/// What every way of restoring needs.
pub(super) struct Restore<'a> {
    pub(super) guest: &'a mut dyn DestinationGuest,
    pub(super) options: &'a RestoreOptions,
    pub(super) progress: &'a Arc<Progress>,
    pub(super) report: &'a mut Report,
    pub(super) begin: Instant,
}

impl Restore<'_> {
    /// Has the VMM load what is not memory.
    pub(super) fn load(&mut self, snapshot: &Snapshot, plan: &RestorePlan) -> Result<(), Error> {
        self.progress.set_phase(Phase::Loading);
        if let Some(state) = &plan.opaque {
            return Ok(self.guest.load_state(&mut &snapshot.tail[state.clone()])?);
        }
        let blocks = plan.fit.devices.iter().map(|&index| &snapshot.blocks[index]).collect();
        let mut stream = PieceReader::new(DeviceStream::new(snapshot, blocks)?);
        let loaded = self.guest.load_state(&mut Marked(&mut stream));
        // What the file has wrong is the cause; the VMM's complaint about it is the consequence.
        stream.failure().map_or(Ok(()), Err)?;
        Ok(loaded?)
    }

    /// The guest is whole: it runs if it ran when it was saved, unless the user has another wish.
    pub(super) fn start(&mut self, ran: bool) -> Result<(), Error> {
        let run = self.options.run.unwrap_or(ran);
        self.progress.set_phase(Phase::HandedOver);
        self.guest.start(run).map_err(|error| {
            Error::unknown(error, |error| {
                format!(
                    "the guest was loaded, but can't be started: {error}. It is whole; start it with: {}",
                    self.guest.start_hint()
                )
            })
        })?;
        self.report.started_ms = Some(self.elapsed_ms());
        Ok(())
    }

    pub(super) fn elapsed_ms(&self) -> f64 {
        self.begin.elapsed().as_secs_f64() * 1e3
    }
}

/// Reads pages while the VMM prepares itself for the state of a file.
pub(super) fn while_expecting<T>(
    guest: &mut dyn DestinationGuest,
    read: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    thread::scope(|scope| {
        let expecting = scope.spawn(|| guest.expect_state(StateMade::ByVmm));
        let read = read()?;
        expecting.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        Ok(read)
    })
}

/// Marks that the VMM loads.
struct Marked<'a, R>(&'a mut R);

impl<R: Read> Read for Marked<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        fail_point::reach("restore.loading").map_err(io::Error::other)?;
        self.0.read(buffer)
    }
}
