//! Where the guest's memory is in QEMU's process.
use transship_guest::GuestError;
use transship_memory::{Area, PageNumber};

use super::{Backend, Held};
use crate::qemu::{maps::Mapping, qmp::Qmp};

/// Where QEMU has the backends, ascending, with neighbours joined. Every page of every backend is in some area.
pub(in crate::qemu) fn areas(qmp: &mut Qmp, backends: &[Backend]) -> Result<Vec<Area>, GuestError> {
    let pid = qmp.pid();
    let mappings = qmp.process().mappings()?;
    let mut areas = Vec::new();
    for (region, backend) in backends.iter().enumerate() {
        let of_region = of_region(&mappings, region, backend);
        if !covers_all(&of_region, backend.bytes) {
            return Err(GuestError::Unfit(format!(
                "guest memory {:?}: process {pid} maps only a part of it; is it QEMU itself that listens on the QMP socket?",
                backend.id
            )));
        }
        areas.extend(joined(of_region));
    }
    Ok(areas)
}

/// Where another process, which has these mappings, shares the backends for writing: perhaps a part of them.
pub(in crate::qemu) fn shared_areas(mappings: &[Mapping], backends: &[Backend]) -> Vec<Area> {
    let shared: Vec<Mapping> = mappings.iter().filter(|one| one.is_shared && one.is_writable).cloned().collect();
    let backends = backends.iter().enumerate().filter(|(_, backend)| !backend.is_private());
    backends.flat_map(|(region, backend)| joined(of_region(&shared, region, backend))).collect()
}

fn of_region(mappings: &[Mapping], region: usize, backend: &Backend) -> Vec<Area> {
    mappings.iter().filter_map(|mapping| area_of(backend, region, mapping)).collect()
}

fn covers_all(areas: &[Area], bytes: u64) -> bool {
    let mut parts: Vec<(u64, u64)> = areas.iter().map(|area| (area.first_page.offset(), area.bytes)).collect();
    parts.sort_unstable();
    let covered = parts.into_iter().fold(
        0,
        |covered, (start, length)| {
            if start <= covered { covered.max(start + length) } else { covered }
        },
    );
    covered >= bytes
}

/// The kernel splits a mapping whose parts were advised differently; for tracking they are one.
fn joined(areas: Vec<Area>) -> Vec<Area> {
    let mut joined: Vec<Area> = Vec::with_capacity(areas.len());
    for area in areas {
        match joined.last_mut() {
            Some(last)
                if last.address + last.bytes == area.address
                    && last.first_page.offset() + last.bytes == area.first_page.offset() =>
            {
                last.bytes += area.bytes;
            }
            _ => joined.push(area),
        }
    }
    joined
}

/// The part of a backend that a mapping shows.
fn area_of(backend: &Backend, region: usize, mapping: &Mapping) -> Option<Area> {
    let (first, start) = match &backend.held {
        // From the beginning of the memory on, and of the mapping.
        Held::Shared { file, offset, .. } if mapping.is_shared && mapping.file == *file => {
            (mapping.file_offset.saturating_sub(*offset), offset.saturating_sub(mapping.file_offset))
        }
        Held::Private { address, .. } if !mapping.is_shared && mapping.is_writable => {
            (mapping.start.saturating_sub(*address), address.saturating_sub(mapping.start))
        }
        _ => return None,
    };
    let here = mapping.start.checked_add(start).filter(|here| *here < mapping.end && first < backend.bytes)?;
    let bytes = (mapping.end - here).min(backend.bytes - first);
    Some(Area { region, first_page: PageNumber::at(first), address: here, bytes })
}

#[cfg(test)]
mod tests {
    use transship_memory::Keep;

    use super::*;

    fn backend(bytes: u64, file_offset: u64) -> Backend {
        Backend::shared("mem0", bytes, file_offset)
    }

    fn area(first_page: u64, address: u64, bytes: u64) -> Area {
        Area { region: 0, first_page: PageNumber::new(first_page), address, bytes }
    }

    #[test]
    fn an_area_is_the_part_of_a_mapping_that_shows_the_backend() {
        let mapping = Mapping::test("10000-20000 rw-s 00004000 00:1b 2 /dev/shm/g");
        assert_eq!(area_of(&backend(0x100_0000, 0), 0, &mapping), Some(area(4, 0x10000, 0x10000)));
        assert_eq!(area_of(&backend(0x2000, 0x8000), 0, &mapping), Some(area(0, 0x14000, 0x2000)));
        assert_eq!(area_of(&backend(0x4000, 0), 0, &mapping), None);
        assert_eq!(area_of(&backend(0x4000, 0x14000), 0, &mapping), None);
        let private = Mapping::test("10000-20000 rw-p 00004000 00:1b 2 /dev/shm/g");
        assert_eq!(area_of(&backend(0x100_0000, 0), 0, &private), None);
        let other = Mapping::test("10000-20000 rw-s 00004000 00:1b 3 /dev/shm/g");
        assert_eq!(area_of(&backend(0x100_0000, 0), 0, &other), None);
    }

    #[test]
    fn an_area_of_private_memory_is_the_part_of_a_mapping_at_its_addresses() {
        let backend = |address, bytes| Backend {
            held: Held::Private { address, page_bytes: 4096, below: None, keep: Keep::Nothing },
            ..Backend::test("pc.ram", bytes)
        };
        let mapping = Mapping::test("10000-20000 rw-p 00000000 00:00 0 ");
        assert_eq!(area_of(&backend(0x10000, 0x10000), 0, &mapping), Some(area(0, 0x10000, 0x10000)));
        assert_eq!(area_of(&backend(0x12000, 0x2000), 0, &mapping), Some(area(0, 0x12000, 0x2000)));
        // Two mappings show it, which the kernel has split.
        assert_eq!(area_of(&backend(0xf000, 0x20000), 0, &mapping), Some(area(1, 0x10000, 0x10000)));
        assert_eq!(area_of(&backend(0x20000, 0x1000), 0, &mapping), None);
        assert_eq!(area_of(&backend(0x8000, 0x8000), 0, &mapping), None);
        let guard = Mapping::test("10000-20000 ---p 00000000 00:00 0 ");
        assert_eq!(area_of(&backend(0x10000, 0x10000), 0, &guard), None);
    }

    #[test]
    fn a_backend_is_covered_when_no_page_is_left_out() {
        assert!(covers_all(&[area(0, 0x10000, 0x3000)], 0x3000));
        assert!(covers_all(&[area(1, 0x10000, 0x2000), area(0, 0x50000, 0x1000)], 0x3000));
        assert!(!covers_all(&[area(0, 0x10000, 0x1000), area(2, 0x12000, 0x1000)], 0x3000));
        assert!(!covers_all(&[area(0, 0x10000, 0x2000)], 0x3000));
        assert!(!covers_all(&[], 0x1000));
    }

    #[test]
    fn neighbours_in_memory_and_in_the_file_are_joined() {
        let split = vec![area(0, 0x10000, 0x1000), area(1, 0x11000, 0x2000), area(3, 0x20000, 0x1000)];
        assert_eq!(joined(split), [area(0, 0x10000, 0x3000), area(3, 0x20000, 0x1000)]);
        let same_page_twice = vec![area(0, 0x10000, 0x1000), area(0, 0x11000, 0x1000)];
        assert_eq!(joined(same_page_twice.clone()), same_page_twice);
    }
}
