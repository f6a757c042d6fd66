//! Whether a process maps a file where it says that it does.
//!
//! The tracker watches addresses, the channels read files. A guest process that names a wrong address would have its
//! writes missed, so the kernel's own list of its mappings is asked.
use rustix::fs::{major, minor};

use super::message::CheckedRegion;

/// One line of /proc/PID/maps.
struct Mapping {
    start: u64,
    end: u64,
    shared: bool,
    writable: bool,
    offset: u64,
    device: (u32, u32),
    inode: u64,
}

/// Checks that `maps` (the text of /proc/PID/maps) shows the whole region, shared, at its address.
pub(super) fn check_mapped(maps: &str, region: &CheckedRegion) -> Result<(), String> {
    let entry = &region.entry;
    let end = entry.address + entry.bytes;
    let mut covered = entry.address;
    for mapping in maps.lines().filter_map(parse) {
        if mapping.end <= covered {
            continue;
        }
        if mapping.start > covered || covered >= end {
            break;
        }
        let same_file = mapping.inode == region.inode && mapping.device == (major(region.device), minor(region.device));
        let offset = mapping.offset.wrapping_add(covered - mapping.start);
        if !same_file || offset != entry.file_offset + (covered - entry.address) {
            return Err(format!("region {:?}: the process maps something else at {covered:#x}", entry.name));
        }
        if !mapping.shared {
            return Err(format!(
                "region {:?}: the process maps it privately at {covered:#x}; map it shared",
                entry.name
            ));
        }
        if !mapping.writable {
            return Err(format!("region {:?}: the process maps it read-only at {covered:#x}", entry.name));
        }
        covered = mapping.end;
    }
    if covered < end {
        return Err(format!("region {:?}: the process maps nothing at {covered:#x}", entry.name));
    }
    Ok(())
}

/// `7f0c-7f0d rw-s 00000000 00:01 1234 /memfd:name (deleted)`
fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = words.next()?.split_once('-')?;
    let access = words.next()?.as_bytes();
    let offset = hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = words.next()?.parse().ok()?;
    let (writable, shared) = (access.get(1) == Some(&b'w'), access.get(3) == Some(&b's'));
    Some(Mapping { start: hex(start)?, end: hex(end)?, shared, writable, offset, device, inode })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;

    use rustix::fs::makedev;

    use super::*;
    use crate::handoff::message::RegionEntry;

    const TWO_PIECES: &str = "\
00010000-00014000 rw-s 00002000 00:05 77                 /memfd:ram (deleted)
00014000-00018000 rw-s 00006000 00:05 77                 /memfd:ram (deleted)
7ffd0000-7ffd4000 rw-p 00000000 00:00 0                  [stack]
";

    fn region(address: u64, bytes: u64, file_offset: u64) -> CheckedRegion {
        CheckedRegion {
            entry: RegionEntry { name: "ram".into(), bytes, file_offset, address },
            file: File::open("/dev/null").unwrap().into(),
            device: makedev(0, 5),
            inode: 77,
        }
    }

    #[test]
    fn a_region_may_lie_in_several_mappings() {
        check_mapped(TWO_PIECES, &region(0x10000, 0x8000, 0x2000)).unwrap();
        check_mapped(TWO_PIECES, &region(0x12000, 0x4000, 0x4000)).unwrap();
    }

    #[test]
    fn everything_else_is_refused() {
        let error = |maps: &str, region| check_mapped(maps, &region).unwrap_err();
        let whole = || region(0x10000, 0x8000, 0x2000);
        assert!(error(TWO_PIECES, region(0x10000, 0x9000, 0x2000)).contains("nothing at 0x18000"));
        assert!(error(TWO_PIECES, region(0xf000, 0x4000, 0x2000)).contains("nothing at 0xf000"));
        assert!(error(TWO_PIECES, region(0x10000, 0x8000, 0)).contains("something else at 0x10000"));
        assert!(error(&TWO_PIECES.replace("00006000", "00007000"), whole()).contains("something else at 0x14000"));
        assert!(error(&TWO_PIECES.replace(" 77", " 78"), whole()).contains("something else"));
        assert!(error(&TWO_PIECES.replace("00:05", "00:06"), whole()).contains("something else"));
        assert!(error(&TWO_PIECES.replace("rw-s", "rw-p"), whole()).contains("privately"));
        assert!(error(&TWO_PIECES.replace("rw-s", "r--s"), whole()).contains("read-only"));
        assert!(error("", whole()).contains("nothing at"));
    }
}
