//! Memory that a QEMU has for itself is emptied before its pages are brought.
//!
//! Of shared memory a hole can be punched from here. Of private memory only QEMU can give a page back, so it is made to
//! (`madvise`, [`super::inject`]).
use transship_guest::GuestError;
use transship_memory::{Area, GuestMemory, PAGE_BYTES, PageSet};

use super::{inject, qmp::Qmp};

/// Has QEMU give back the pages of `lacks`, by region, where its memory is private. To be called when `areas` are
/// watched already, so that whoever touches a page from then on waits.
pub(super) fn give_back(qmp: &Qmp, memory: &GuestMemory, areas: &[Area], lacks: &[PageSet]) -> Result<(), GuestError> {
    let is_private = |area: &&Area| memory.get(area.region).is_some_and(|region| region.is_private());
    let pieces: Vec<_> = areas
        .iter()
        .filter(is_private)
        .flat_map(|area| lacks.get(area.region).into_iter().flat_map(|lacks| pieces(area, lacks)))
        .collect();
    if pieces.is_empty() {
        return Ok(());
    }
    // The first thread runs QEMU's main loop, never a vCPU.
    inject::give_back(qmp.pid(), qmp.pid(), &pieces)
}

/// Addresses and lengths of those pages that an area has.
fn pieces(area: &Area, lacks: &PageSet) -> Vec<(u64, u64)> {
    let page = PAGE_BYTES as u64;
    let (first, end) = (area.first_page, area.first_page + area.bytes / page);
    let clipped = lacks.ranges().map(|range| (range.first.max(first), range.end().min(end)));
    let inside = clipped.filter(|(from, to)| from < to);
    inside.map(|(from, to)| (area.address + (from - first) * page, (to - from) * page)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_memory::PageRange;

    #[test]
    fn only_what_is_lacking_and_in_the_area_is_given_back() {
        let area = Area { region: 0, first_page: 10, address: 0x10_0000, bytes: 0x5000 };
        let mut lacks = PageSet::empty(100);
        [(0, 11), (12, 1), (14, 50)].iter().for_each(|&(first, count)| lacks.insert(PageRange::new(first, count)));
        assert_eq!(pieces(&area, &lacks), [(0x10_0000, 0x1000), (0x10_2000, 0x1000), (0x10_4000, 0x1000)]);
        assert_eq!(pieces(&area, &PageSet::full(100)), [(0x10_0000, 0x5000)]);
        assert_eq!(pieces(&area, &PageSet::empty(100)), []);
    }
}
