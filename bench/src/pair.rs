//! A guest to move and the QEMU that it is moved to: new ones for each run.
use std::{ops::Range, path::Path};

use serde_json::json;
use transship_lab::{Accel, Qemu, QemuBuilder, Scratch, SlowLink, Workload};

use crate::{
    at_hand,
    content::{SourceMemory, first_difference},
    ends::Ends,
    guest_memory::GuestMemory,
    processes::cpu_seconds,
    results::Sides,
};

/// Below this address nothing is warmed: a PC has video memory and ROMs there.
const WARM_FROM: u64 = 1 << 20;

/// How to start both.
#[derive(Clone, Copy)]
pub(crate) struct Recipe<'a> {
    /// QEMU's program.
    pub(crate) peer: &'a str,
    /// The file system of the destination's memory.
    pub(crate) base: &'a Path,
    /// Let the firmware run meanwhile.
    pub(crate) running: bool,
    /// Leave the source's memory out of its page tables.
    pub(crate) cold: bool,
    /// What the guest does; none: there is only firmware.
    pub(crate) workload: Option<Workload>,
    /// Which guest that is.
    pub(crate) kind: GuestKind,
    /// More arguments for that guest.
    pub(crate) append: &'a str,
    /// What lies between the two; none: they are on one host.
    pub(crate) link: Option<&'a SlowLink>,
    /// Of which kind it is.
    pub(crate) memory: GuestMemory,
    /// KVM tells of written pages by a ring of so many places; none: by a bitmap, as it usually does.
    pub(crate) ring_places: Option<u32>,
}

/// What writes the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestKind {
    /// The 32-bit program.
    Small(Accel),
    /// A distribution's kernel with one program, emulated.
    Linux,
}

/// Both QEMUs.
pub(crate) struct Pair<'a> {
    pub(crate) source: Qemu,
    pub(crate) destination: Qemu,
    pub(crate) link: Option<&'a SlowLink>,
    memory: GuestMemory,
    bytes: u64,
    /// Has the destination's memory; goes away last.
    _folder: Scratch,
}

impl<'a> Recipe<'a> {
    /// Guests that have only firmware and stand still, on one host.
    pub(crate) fn new(peer: &'a str, base: &'a Path) -> Self {
        let (kind, memory) = (GuestKind::Small(Accel::Tcg), GuestMemory::default());
        let (running, cold, workload, link) = (false, false, None, None);
        Self { peer, base, running, cold, workload, kind, append: "", link, memory, ring_places: None }
    }

    /// Starts a source on this memory, and a destination with new memory.
    pub(crate) fn start(&self, memory: &SourceMemory) -> Result<Pair<'a>, String> {
        let folder = Scratch::within(self.base).map_err(text)?;
        let source = self.source(memory)?;
        let destination = self.destination(folder.path(), memory.bytes())?;
        let sent: u64 = memory.touched()?.iter().map(|range| range.end - range.start).sum();
        at_hand::have(sent)?;
        let (memory, bytes) = (self.memory, memory.bytes());
        Ok(Pair { source, destination, link: self.link, memory, bytes, _folder: folder })
    }

    /// Starts a source on this memory, and waits until its guest is ready.
    pub(crate) fn source(&self, memory: &SourceMemory) -> Result<Qemu, String> {
        memory.restore_holes()?;
        let home = memory.path().parent().ok_or("guest memory without a folder")?;
        let stopped: &[&str] = if self.running { &[] } else { &["-S"] };
        let builder = self.qemu(memory.bytes(), SlowLink::source)?.memory_folder(home).args(stopped.iter().copied());
        let source = self.memory.of(builder).start().map_err(text)?;
        self.memory.fill(&source, memory)?;
        if self.workload.is_some() {
            source.ready().map_err(text)?;
        }
        if !self.cold {
            warm(&source, memory)?;
        }
        Ok(source)
    }

    /// Starts a destination with new memory in this folder.
    pub(crate) fn destination(&self, folder: &Path, bytes: u64) -> Result<Qemu, String> {
        self.waiting(folder, bytes)?.start().map_err(text)
    }

    /// How such a destination is started.
    pub(crate) fn waiting(&self, folder: &Path, bytes: u64) -> Result<QemuBuilder, String> {
        let builder = self.qemu(bytes, SlowLink::destination)?.memory_folder(folder).incoming();
        Ok(self.memory.of_destination(builder))
    }

    fn qemu(&self, bytes: u64, prefix: fn(&SlowLink) -> Vec<String>) -> Result<QemuBuilder, String> {
        let mib = u32::try_from(bytes >> 20).map_err(text)?;
        let prefix = self.link.map(prefix).unwrap_or_default();
        let qemu = self.guest().binary(self.peer).memory(mib).append(self.append).prefix(&prefix);
        Ok(match self.ring_places {
            Some(places) => qemu.dirty_ring(places),
            None => qemu,
        })
    }

    fn guest(&self) -> QemuBuilder {
        match (self.workload, self.kind) {
            (None, _) => Qemu::firmware(),
            (Some(workload), GuestKind::Small(accel)) => Qemu::multiboot_under(accel).workload(workload),
            (Some(workload), GuestKind::Linux) => Qemu::linux().workload(workload),
        }
    }
}

impl Pair<'_> {
    /// For transship.
    pub(crate) fn ends(&self) -> Ends<'_> {
        let (source, destination) = (self.source.vm(), self.destination.vm());
        Ends { source, destination, folder: self.destination.folder(), link: self.link }
    }

    /// CPU seconds that each QEMU has used so far.
    pub(crate) fn cpu_seconds(&self) -> Result<Sides<f64>, String> {
        Ok(Sides { source: cpu_seconds(self.source.pid())?, destination: cpu_seconds(self.destination.pid())? })
    }

    /// Are both memories equal? A move that loses pages is quick, and its time worth nothing.
    pub(crate) fn compared(&self, compare: bool) -> Result<Option<bool>, String> {
        if !compare {
            return Ok(None);
        }
        let [source, destination] = [&self.source, &self.destination].map(|side| self.memory.open(side));
        match first_difference(source?, destination?, 0, self.bytes)? {
            Some(offset) => Err(format!("the guest's memory differs after the move, first in the page at {offset:#x}")),
            None => Ok(Some(true)),
        }
    }
}

/// Has QEMU look at all memory that is not a hole: a guest that touched its memory did so through this process, so that
/// nothing of it has to be faulted in when it's moved.
fn warm(source: &Qemu, memory: &SourceMemory) -> Result<(), String> {
    for range in memory.touched()?.into_iter().flat_map(|range| guest_physical(range, memory.bytes())) {
        let arguments = json!({ "val": range.start, "size": range.end - range.start, "filename": "/dev/null" });
        source.qmp("pmemsave", arguments).map_err(text)?;
    }
    Ok(())
}

/// Where the guest sees these bytes of its memory: a q35 machine has a part of it below 4 GiB, and the rest above.
fn guest_physical(range: Range<u64>, memory: u64) -> impl Iterator<Item = Range<u64>> {
    let below = if memory >= 0xb000_0000 { 0x8000_0000 } else { memory };
    let shift = (4 << 30) - below;
    let low = range.start.max(WARM_FROM)..range.end.min(below);
    let high = range.start.max(below) + shift..range.end.max(below) + shift;
    [low, high].into_iter().filter(|part| part.start < part.end)
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn parts(range: Range<u64>, memory: u64) -> Vec<(u64, u64)> {
        guest_physical(range, memory).map(|part| (part.start, part.end)).collect()
    }

    #[test]
    fn memory_beyond_the_hole_for_devices_is_above_4_gib() {
        assert_eq!(parts(0..GIB, GIB), [(WARM_FROM, GIB)]);
        assert_eq!(parts(0..4 * GIB, 4 * GIB), [(WARM_FROM, 2 * GIB), (4 * GIB, 6 * GIB)]);
        assert_eq!(parts(3 * GIB..4 * GIB, 4 * GIB), [(5 * GIB, 6 * GIB)]);
        assert_eq!(parts(GIB..2 * GIB, 4 * GIB), [(GIB, 2 * GIB)]);
        assert_eq!(parts(0..4096, GIB), []);
    }
}
