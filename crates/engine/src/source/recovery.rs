//! Goes on for a move whose guest was handed over before all its pages were there, when nobody is left who knew it:
//! with what a record says, and the memory that the VMM still has.
use std::{sync::Arc, time::Instant};

use serde::{Deserialize, Serialize};
use transship_memory::{GuestMemory, PageCount, Region};
use transship_wire::SessionId;

use super::{
    line::Base,
    post_copy::{never_said, serve},
    serving::FIRST_LINE,
};
use crate::{Error, Misfit, MoveOptions, Phase, Progress, Report, Status, Uri};

/// So many processes can go on, one after the other: the number of a line says which one dials.
const MOST: u32 = u32::MAX / FIRST_LINE;

/// What is to be known of a move to go on with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOver {
    /// The number of the session.
    session: [u8; 16],
    /// Push connections of a supply line.
    channels: u8,
    /// The guest ran when it was stopped.
    ran: bool,
    /// By region: its name, and its length in bytes.
    regions: Vec<(String, u64)>,
}

impl HandedOver {
    pub(super) fn of(base: &Base<'_>, ran: bool) -> Self {
        let regions = regions(&base.memory);
        Self { session: base.session.0, channels: base.options.channels, ran, regions }
    }

    /// Sends the rest of `memory`, which the guest had when it was handed over, to the transship at `to`, or to the
    /// second process that goes on for that. `before`: so many processes have taken over since, after the second one.
    /// Returns when the destination has all pages. That can't be cancelled, but the process may end at any time: the
    /// guest waits for the next.
    ///
    /// # Errors
    /// The memory is another guest's, or can't be read; the destination has ended the session.
    pub fn recover(
        &self,
        memory: GuestMemory,
        before: u32,
        (to, options): (&Uri, &MoveOptions),
        progress: &Arc<Progress>,
        report: &mut Report,
    ) -> Result<(), Error> {
        let begin = Instant::now();
        let (first_line, options) = self.check(&memory, before, options)?;
        progress.settle();
        progress.set_phase(Phase::Filling);
        let (session, watched) = (SessionId(self.session), Arc::clone(progress));
        let base = Base { to, options: &options, session, memory, progress: watched, carries: None };
        let result = serve((&base, self.ran), &|| None, (None, first_line), PageCount::ZERO, report);
        report.total_ms = begin.elapsed().as_secs_f64() * 1e3;
        report.status = Status::Unknown;
        if !result? {
            return Err(Error::Unknown(never_said().into()));
        }
        report.status = Status::Completed;
        progress.set_phase(Phase::Done);
        Ok(())
    }

    /// The number of the line before the first one, and options that the receiver knows already.
    fn check(&self, memory: &GuestMemory, before: u32, options: &MoveOptions) -> Result<(u32, MoveOptions), Error> {
        let here = regions(memory);
        if here != self.regions {
            return Err(Misfit::Memory.unfit(format!(
                "the memory that was handed over is {:?} (names and bytes), and this VMM has {here:?}; name the VMM from \
                 which the guest was moved",
                self.regions
            )));
        }
        let number = before.checked_add(2).filter(|number| *number <= MOST);
        let number = number.ok_or_else(|| {
            Misfit::Attempts.unfit(format!("{before} processes have gone on with this move: no more can"))
        })?;
        Ok((number * FIRST_LINE, MoveOptions { channels: self.channels, ..options.clone() }))
    }
}

fn regions(memory: &GuestMemory) -> Vec<(String, u64)> {
    let of = |region: &Region| (region.name().to_owned(), region.bytes());
    memory.regions().iter().map(of).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use transship_memory::{Access, ByteRange};

    use super::*;

    fn memory(name: &str, pages: u64) -> GuestMemory {
        let (bytes, file) = (pages * transship_memory::PAGE, memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
        rustix::fs::ftruncate(&file, bytes).unwrap();
        GuestMemory::new(vec![Region::map(name, file, ByteRange::sized(0, bytes), Access::Read).unwrap()])
    }

    fn handed_over() -> HandedOver {
        HandedOver { session: [7; 16], channels: 3, ran: true, regions: vec![("mem0".into(), 8192)] }
    }

    #[test]
    fn a_line_is_newer_than_those_of_all_processes_before() {
        let first =
            |before| handed_over().check(&memory("mem0", 2), before, &MoveOptions::default()).map(|(line, _)| line);
        assert_eq!(first(0).unwrap(), 2 * FIRST_LINE, "the second process has the first of these");
        assert_eq!(first(1).unwrap(), 3 * FIRST_LINE);
        assert_eq!(first(MOST - 2).unwrap(), MOST * FIRST_LINE);
        for before in [MOST - 1, u32::MAX] {
            assert!(matches!(first(before), Err(Error::Unfit { what: Misfit::Attempts, .. })));
        }
    }

    #[test]
    fn another_guest_is_refused_and_the_receiver_finds_as_many_channels_as_before() {
        let check = |memory| handed_over().check(&memory, 0, &MoveOptions { channels: 9, ..MoveOptions::default() });
        assert_eq!(check(memory("mem0", 2)).unwrap().1.channels, 3);
        for other in [memory("mem1", 2), memory("mem0", 3)] {
            assert!(matches!(check(other), Err(Error::Unfit { what: Misfit::Memory, .. })));
        }
    }
}
