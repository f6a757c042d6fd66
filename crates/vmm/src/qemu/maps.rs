//! What a process has mapped (`/proc/PID/maps`), and the files behind it.
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};
use transship_guest::GuestError;

/// The identity of a file, whatever it is called: device (major, minor) and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    pub(super) fn of(file: &fs::Metadata) -> Self {
        Self { device: (major(file.dev()), minor(file.dev())), inode: file.ino() }
    }
}

/// A line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) is_executable: bool,
    pub(super) is_readable: bool,
    pub(super) is_writable: bool,
    pub(super) is_shared: bool,
    pub(super) file_offset: u64,
    pub(super) file: FileId,
    pub(super) path: String,
}

impl Mapping {
    /// `7f76fffff000-7f7703fff000 rw-s 00000000 00:1b 2      /dev/shm/guest`
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let permissions = fields.next()?;
        let file_offset = fields.next()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let device = |text: &str| u32::from_str_radix(text, 16).ok();
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            is_executable: permissions.contains('x'),
            is_readable: permissions.contains('r'),
            is_writable: permissions.contains('w'),
            is_shared: permissions.contains('s'),
            file_offset: hex(file_offset)?,
            file: FileId { device: (device(major)?, device(minor)?), inode },
            path: fields.next().unwrap_or("").trim_start().to_owned(),
        })
    }

    /// Whether it shows a file, be it one without a name.
    pub(super) fn has_file(&self) -> bool {
        self.file.inode != 0
    }
}

/// Why the mappings of QEMU are not known.
pub(super) fn unread(pid: i32, source: io::Error) -> GuestError {
    GuestError::System {
        what: format!("read /proc/{pid}/maps"),
        source,
        cure: "run as root or as QEMU's user to see where guest memory is mapped",
    }
}

/// All mappings of a process, ascending.
pub(super) fn mappings_of(pid: i32) -> io::Result<Vec<Mapping>> {
    Ok(parse(&fs::read(format!("/proc/{pid}/maps"))?))
}

/// Those of a text like `/proc/PID/maps`.
pub(super) fn parse(text: &[u8]) -> Vec<Mapping> {
    // File names need not be UTF-8; those that aren't are not looked for by name.
    String::from_utf8_lossy(text).lines().filter_map(Mapping::parse).collect()
}

/// A path by which a file can be opened that a process has mapped, whatever its name was: by a descriptor of the
/// process, or by the mapping itself, which takes more rights.
pub(super) fn path_to(pid: i32, file: FileId) -> io::Result<PathBuf> {
    let is_it = |path: &Path| fs::metadata(path).is_ok_and(|metadata| FileId::of(&metadata) == file);
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?;
    if let Some(path) = descriptors.filter_map(|entry| Some(entry.ok()?.path())).find(|path| is_it(path)) {
        return Ok(path);
    }
    let mapping = mappings_of(pid)?.into_iter().find(|mapping| mapping.file == file);
    let (start, end) = mapping.map(|mapping| (mapping.start, mapping.end)).ok_or(io::ErrorKind::NotFound)?;
    Ok(PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{end:x}")))
}

#[cfg(test)]
impl FileId {
    pub(super) const TEST: Self = Self { device: (0, 0x1b), inode: 2 };
}

#[cfg(test)]
impl Mapping {
    pub(super) fn test(line: &str) -> Self {
        Self::parse(line).expect("a line of maps")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_line_of_maps_is_taken_apart() {
        let line = "7f76fffff000-7f7703fff000 rw-s 00001000 00:1b 2                          /dev/shm/a b (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.file_offset), (0x7f76_ffff_f000, 0x7f77_03ff_f000, 0x1000));
        assert_eq!((mapping.is_shared, mapping.is_writable, mapping.is_executable), (true, true, false));
        assert_eq!((mapping.file, &*mapping.path), (FileId::TEST, "/dev/shm/a b (deleted)"));
        assert_eq!(Mapping::parse("00400000-00401000 r-xp 00000000 00:00 0 ").unwrap().path, "");
        assert_eq!(Mapping::parse("nothing"), None);
    }
}
