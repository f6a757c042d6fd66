//! Memory that a QEMU has for itself is emptied before its pages are brought.
//!
//! Of shared memory a hole can be punched from here. Of private memory only QEMU can give a page back, so it is made to
//! (`madvise`, [`super::inject`]). A process that has given up the right to trace it has somebody else do so.
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use transship_guest::GuestError;
use transship_memory::{Area, GuestMemory, PageSet};

use super::{inject, qmp::Qmp};

type Other = Box<dyn Fn(&str) -> Result<(), GuestError> + Send + Sync>;

/// Set once, before anything is to be given back by it.
static OTHER: OnceLock<Other> = OnceLock::new();

/// From now on `other` has memory given back in the place of this process, which may not do so by itself any more. It
/// is told what, as [`DestinationGuest::own_memory`](transship_guest::DestinationGuest::own_memory) says it. If there
/// was one before, that one stays.
pub fn give_back_by(other: impl Fn(&str) -> Result<(), GuestError> + Send + Sync + 'static) {
    let _ = OTHER.set(Box::new(other));
}

/// What a process is to give back: addresses and lengths.
#[derive(Debug, Serialize, Deserialize)]
struct Wanted {
    pid: i32,
    pieces: Vec<(u64, u64)>,
}

impl Wanted {
    /// Of those regions that its process has for itself.
    fn of(qmp: &Qmp, memory: &GuestMemory, areas: &[Area], lacks: &[PageSet]) -> Self {
        let is_private = |area: &&Area| memory.get(area.region).is_some_and(|region| region.is_private());
        let pieces_of =
            |area: &Area| lacks.get(area.region).into_iter().flat_map(|lacks| pieces(area, lacks)).collect();
        let pieces = areas.iter().filter(is_private).map(pieces_of).collect::<Vec<Vec<_>>>().concat();
        Self { pid: qmp.pid(), pieces }
    }

    fn to_text(&self) -> Result<String, GuestError> {
        serde_json::to_string(self).map_err(|e| GuestError::Bug(format!("can't say what is to be given back: {e}")))
    }

    /// The first thread runs QEMU's main loop, never a vCPU.
    fn give_back(&self) -> Result<(), GuestError> {
        inject::give_back(self.pid, self.pid, &self.pieces)
    }
}

/// All that [`give_back`] could ever be asked for, for somebody who does it; none: that is nothing.
pub(super) fn all(qmp: &Qmp, memory: &GuestMemory, areas: &[Area]) -> Option<String> {
    let all: Vec<_> = memory.regions().iter().map(|region| PageSet::full(region.pages())).collect();
    let wanted = Wanted::of(qmp, memory, areas, &all);
    if wanted.pieces.is_empty() { None } else { wanted.to_text().ok() }
}

/// Has a QEMU give memory back in the place of a process that has given up the right to. `wanted`: what its
/// [`DestinationGuest::own_memory`](transship_guest::DestinationGuest::own_memory) has said.
///
/// # Errors
/// That was no such text; QEMU can't be traced.
pub fn give_back_there(wanted: &str) -> Result<(), GuestError> {
    let wanted: Wanted = serde_json::from_str(wanted)
        .map_err(|e| GuestError::Bug(format!("can't read what is to be given back: {e}")))?;
    wanted.give_back()
}

/// Has QEMU give back the pages of `lacks`, by region, where its memory is private. To be called when `areas` are
/// watched already, so that whoever touches a page from then on waits.
pub(super) fn give_back(qmp: &Qmp, memory: &GuestMemory, areas: &[Area], lacks: &[PageSet]) -> Result<(), GuestError> {
    let wanted = Wanted::of(qmp, memory, areas, lacks);
    match OTHER.get() {
        _ if wanted.pieces.is_empty() => Ok(()),
        Some(other) => other(&wanted.to_text()?),
        None => wanted.give_back(),
    }
}

/// Addresses and lengths of those pages that an area has.
fn pieces(area: &Area, lacks: &PageSet) -> Vec<(u64, u64)> {
    let (first, end) = (area.first_page, area.range().end());
    let clipped = lacks.ranges().map(|range| (range.first.max(first), range.end().min(end)));
    let inside = clipped.filter(|(from, to)| from < to);
    inside.map(|(from, to)| (area.address + (from - first).bytes(), (to - from).bytes())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_memory::{PageCount, PageNumber, PageRange};

    #[test]
    fn only_what_is_lacking_and_in_the_area_is_given_back() {
        let area = Area { region: 0, first_page: PageNumber::new(10), address: 0x10_0000, bytes: 0x5000 };
        let mut lacks = PageSet::empty(PageCount::new(100));
        [(0, 11), (12, 1), (14, 50)].iter().for_each(|&(first, count)| lacks.insert(PageRange::new(first, count)));
        assert_eq!(pieces(&area, &lacks), [(0x10_0000, 0x1000), (0x10_2000, 0x1000), (0x10_4000, 0x1000)]);
        assert_eq!(pieces(&area, &PageSet::full(PageCount::new(100))), [(0x10_0000, 0x5000)]);
        assert_eq!(pieces(&area, &PageSet::empty(PageCount::new(100))), []);
    }
}
