//! Where QEMU keeps the guest's memory: which backends there are (QMP), which files back them, and where they are
//! mapped in its process (`/proc/PID/maps`).
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor};
use serde_json::{Value, json};
use transship_guest::GuestError;
use transship_memory::{Access, Area, GuestMemory, Keep, PAGE_BYTES, Region};
use transship_wire::RegionDescription;

use super::{blocks, checks, qmp::Qmp};

/// One memory backend of the guest: a part of a file that QEMU maps shared.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Backend {
    pub(super) id: String,
    pub(super) bytes: u64,
    pub(super) file_offset: u64,
    pub(super) file: FileId,
    /// What QEMU was told about having all of it from the start (`prealloc`, and to which NUMA nodes it is bound).
    keep: Keep,
    /// How we reach the file.
    path: PathBuf,
}

/// The identity of a file, whatever it is called: device (major, minor) and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    fn of(file: &fs::Metadata) -> Self {
        Self { device: (major(file.dev()), minor(file.dev())), inode: file.ino() }
    }
}

/// All backends, sorted by id, each checked to be memory that we can share.
pub(super) fn backends(qmp: &mut Qmp) -> Result<Vec<Backend>, GuestError> {
    let devices = qmp.execute("query-memdev", json!({}))?;
    let types = object_types(qmp)?;
    let mut backends = Vec::new();
    for device in devices.as_array().into_iter().flatten() {
        let (Some(id), Some(bytes)) = (device["id"].as_str(), device["size"].as_u64()) else {
            return Err(GuestError(format!(
                "QEMU has a memory backend without id or size ({device}): give it one, id=mem0"
            )));
        };
        let kind = types.iter().find(|(name, _)| name == id).map_or("a backend of unknown type", |(_, kind)| kind);
        check_shared(id, kind, device["share"].as_bool() == Some(true), bytes)?;
        backends.push(backend(qmp, id, bytes)?);
    }
    blocks::check_all_covered(qmp, &backends)?;
    backends.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(backends)
}

/// Names and types of the objects under /objects.
fn object_types(qmp: &mut Qmp) -> Result<Vec<(String, String)>, GuestError> {
    let objects = qmp.execute("qom-list", json!({ "path": "/objects" }))?;
    let named = |object: &Value| {
        let kind = object["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
        Some((object["name"].as_str()?.to_owned(), kind.to_owned()))
    };
    Ok(objects.as_array().into_iter().flatten().filter_map(named).collect())
}

fn check_shared(id: &str, kind: &str, share: bool, bytes: u64) -> Result<(), GuestError> {
    let what = match (kind, share) {
        ("memory-backend-file", true) => return Ok(()),
        ("memory-backend-file", false) => "is private to QEMU (share=off)".to_owned(),
        ("memory-backend-memfd", _) => "is a memfd, which QEMU would not leave out of its own stream".to_owned(),
        ("memory-backend-ram", _) => "is anonymous memory of QEMU".to_owned(),
        _ => format!("is {kind}"),
    };
    Err(GuestError(format!("guest memory {id:?} {what}; it must be a shared named file: {}", cure(bytes))))
}

/// The options that make guest memory shareable.
pub(super) fn cure(bytes: u64) -> String {
    format!(
        "-object memory-backend-file,id=mem0,size={},mem-path=/dev/shm/guest,share=on -machine memory-backend=mem0",
        qemu_size(bytes)
    )
}

/// A size as QEMU's options take it.
fn qemu_size(bytes: u64) -> String {
    match bytes {
        b if b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b => b.to_string(),
    }
}

fn backend(qmp: &mut Qmp, id: &str, bytes: u64) -> Result<Backend, GuestError> {
    let mut property =
        |name: &str| qmp.execute("qom-get", json!({ "path": format!("/objects/{id}"), "property": name })).ok();
    if property("readonly") == Some(json!(true)) {
        return Err(GuestError(format!(
            "guest memory {id:?} is opened read-only, which can't be tracked; remove readonly=on"
        )));
    }
    let file_offset = property("offset").and_then(|offset| offset.as_u64()).unwrap_or(0);
    let keep = match (property("prealloc"), property("policy")) {
        (Some(Value::Bool(true)), Some(Value::String(policy))) if policy == "bind" => Keep::AllOnTheirNodes,
        (Some(Value::Bool(true)), _) => Keep::All,
        _ => Keep::Nothing,
    };
    let Some(Value::String(mem_path)) = property("mem-path") else {
        return Err(GuestError(format!("QEMU does not say which file backs guest memory {id:?}: {}", cure(bytes))));
    };
    let (path, file) = locate(qmp.pid(), id, Path::new(&mem_path))?;
    Ok(Backend { id: id.to_owned(), bytes, file_offset, file, keep, path })
}

/// Finds the file that QEMU maps, by the name that QEMU knows it by, which may be in another root than ours, and
/// makes sure that it is the same file.
fn locate(pid: i32, id: &str, mem_path: &Path) -> Result<(PathBuf, FileId), GuestError> {
    let mappings = mappings(pid)?;
    let mut candidates = if mem_path.is_absolute() {
        let below = mem_path.strip_prefix("/").unwrap_or(mem_path);
        vec![Path::new(&format!("/proc/{pid}/root")).join(below), mem_path.to_owned()]
    } else {
        vec![Path::new(&format!("/proc/{pid}/cwd")).join(mem_path)]
    };
    // With a directory as mem-path QEMU makes a file in it and removes its name: reachable by QEMU's descriptor.
    candidates.extend(unnamed_file(pid, mem_path, id, &mappings));
    for path in candidates {
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let file = FileId::of(&metadata);
        if metadata.is_file() && mappings.iter().any(|mapping| mapping.is_shared && mapping.file == file) {
            return Ok((path, file));
        }
    }
    Err(GuestError(format!(
        "guest memory {id:?}: process {pid}, which listens on the QMP socket, maps no file {} that can be opened from \
         here; was it deleted or replaced, or is the socket not QEMU's own?",
        mem_path.display()
    )))
}

fn unnamed_file(pid: i32, directory: &Path, id: &str, mappings: &[Mapping]) -> Option<PathBuf> {
    let prefix = format!("{}/qemu_back_mem.{id}.", directory.display());
    let wanted = mappings.iter().find(|mapping| mapping.is_shared && mapping.path.starts_with(&prefix))?.file;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    descriptors
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| fs::metadata(path).is_ok_and(|metadata| FileId::of(&metadata) == wanted))
}

impl Backend {
    pub(super) fn description(&self) -> RegionDescription {
        RegionDescription { name: self.id.clone(), bytes: self.bytes }
    }

    fn open(&self, access: Access) -> Result<OwnedFd, GuestError> {
        let failed = |why: String| GuestError(format!("guest memory {:?} in {}: {why}", self.id, self.path.display()));
        let open = |access| OpenOptions::new().read(true).write(access == Access::ReadWrite).open(&self.path);
        let mut file = open(access).map_err(|e| failed(format!("{e}; run as root or as QEMU's user")))?;
        if checks::is_hugetlbfs(&file) {
            // Only by a descriptor for writing the kernel says where such a file has holes. Without the right to it all
            // pages count as data.
            file = open(Access::ReadWrite).unwrap_or(file);
        }
        let opened = file.metadata().map_err(|e| failed(e.to_string()))?;
        if FileId::of(&opened) != self.file {
            return Err(failed("the file was replaced while it was opened".to_owned()));
        }
        Ok(File::into(file))
    }
}

/// Maps all backends into our process.
pub(super) fn map(backends: &[Backend], access: Access) -> Result<GuestMemory, GuestError> {
    let regions = backends.iter().map(|backend| {
        let file = backend.open(access)?;
        Region::map(&backend.id, file, backend.file_offset, backend.bytes, access)
            .map(|region| region.keeping(backend.keep))
            .map_err(|e| GuestError(e.to_string()))
    });
    Ok(GuestMemory::new(regions.collect::<Result<_, _>>()?))
}

/// Where QEMU maps the backends, ascending, with neighbours joined. Every page of every backend is in some area.
pub(super) fn areas(pid: i32, backends: &[Backend]) -> Result<Vec<Area>, GuestError> {
    let mappings = mappings(pid)?;
    let mut areas = Vec::new();
    for (region, backend) in backends.iter().enumerate() {
        let of_region: Vec<Area> = mappings.iter().filter_map(|mapping| mapping.area_of(region, backend)).collect();
        if !covers_all(&of_region, backend.bytes) {
            return Err(GuestError(format!(
                "guest memory {:?}: process {pid} maps only a part of its file; is it QEMU itself that listens on the QMP \
                 socket?",
                backend.id
            )));
        }
        areas.extend(joined(of_region));
    }
    Ok(areas)
}

fn covers_all(areas: &[Area], bytes: u64) -> bool {
    let mut parts: Vec<(u64, u64)> =
        areas.iter().map(|area| (area.first_page * PAGE_BYTES as u64, area.bytes)).collect();
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
                    && last.first_page * PAGE_BYTES as u64 + last.bytes == area.first_page * PAGE_BYTES as u64 =>
            {
                last.bytes += area.bytes;
            }
            _ => joined.push(area),
        }
    }
    joined
}

/// A line of `/proc/PID/maps`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) is_executable: bool,
    pub(super) is_writable: bool,
    pub(super) is_shared: bool,
    pub(super) file_offset: u64,
    pub(super) file: FileId,
    pub(super) path: String,
}

impl Mapping {
    /// `7f76fffff000-7f7703fff000 rw-s 00000000 00:1b 2      /dev/shm/guest`
    fn parse(line: &str) -> Option<Self> {
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
            is_writable: permissions.contains('w'),
            is_shared: permissions.contains('s'),
            file_offset: hex(file_offset)?,
            file: FileId { device: (device(major)?, device(minor)?), inode },
            path: fields.next().unwrap_or("").trim_start().to_owned(),
        })
    }

    /// The part of the backend that this mapping shows.
    fn area_of(&self, region: usize, backend: &Backend) -> Option<Area> {
        if !self.is_shared || self.file != backend.file {
            return None;
        }
        let start = self.file_offset.max(backend.file_offset);
        let end = (self.file_offset + (self.end - self.start)).min(backend.file_offset + backend.bytes);
        (start < end).then(|| Area {
            region,
            first_page: (start - backend.file_offset) / PAGE_BYTES as u64,
            address: self.start + (start - self.file_offset),
            bytes: end - start,
        })
    }
}

/// All mappings of QEMU, ascending.
pub(super) fn mappings(pid: i32) -> Result<Vec<Mapping>, GuestError> {
    mappings_of(pid).map_err(|e| {
        GuestError(format!("/proc/{pid}/maps: {e}; run as root or as QEMU's user to see where guest memory is mapped"))
    })
}

/// All mappings of a process, ascending.
pub(super) fn mappings_of(pid: i32) -> io::Result<Vec<Mapping>> {
    let text = fs::read(format!("/proc/{pid}/maps"))?;
    // File names need not be UTF-8; those that aren't are not looked for by name.
    Ok(String::from_utf8_lossy(&text).lines().filter_map(Mapping::parse).collect())
}

#[cfg(test)]
impl FileId {
    const TEST: Self = Self { device: (0, 0x1b), inode: 2 };
}

#[cfg(test)]
impl Backend {
    pub(super) fn test(id: &str, bytes: u64) -> Self {
        Self { id: id.into(), bytes, file_offset: 0, file: FileId::TEST, keep: Keep::Nothing, path: PathBuf::new() }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const FILE: FileId = FileId::TEST;

    fn backend(bytes: u64, file_offset: u64) -> Backend {
        Backend { file_offset, ..Backend::test("mem0", bytes) }
    }

    fn area(first_page: u64, address: u64, bytes: u64) -> Area {
        Area { region: 0, first_page, address, bytes }
    }

    #[test]
    fn a_line_of_maps_is_taken_apart() {
        let line = "7f76fffff000-7f7703fff000 rw-s 00001000 00:1b 2                          /dev/shm/a b (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.file_offset), (0x7f76_ffff_f000, 0x7f77_03ff_f000, 0x1000));
        assert_eq!((mapping.is_shared, mapping.is_writable, mapping.is_executable), (true, true, false));
        assert_eq!((mapping.file, &*mapping.path), (FILE, "/dev/shm/a b (deleted)"));
        assert_eq!(Mapping::parse("00400000-00401000 r-xp 00000000 00:00 0 ").unwrap().path, "");
        assert_eq!(Mapping::parse("nothing"), None);
    }

    #[test]
    fn an_area_is_the_part_of_a_mapping_that_shows_the_backend() {
        let mapping = Mapping::parse("10000-20000 rw-s 00004000 00:1b 2 /dev/shm/g").unwrap();
        assert_eq!(mapping.area_of(0, &backend(0x100_0000, 0)), Some(area(4, 0x10000, 0x10000)));
        assert_eq!(mapping.area_of(0, &backend(0x2000, 0x8000)), Some(area(0, 0x14000, 0x2000)));
        assert_eq!(mapping.area_of(0, &backend(0x4000, 0)), None);
        let private = Mapping::parse("10000-20000 rw-p 00004000 00:1b 2 /dev/shm/g").unwrap();
        assert_eq!(private.area_of(0, &backend(0x100_0000, 0)), None);
        let other = Mapping::parse("10000-20000 rw-s 00004000 00:1b 3 /dev/shm/g").unwrap();
        assert_eq!(other.area_of(0, &backend(0x100_0000, 0)), None);
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

    #[test]
    fn every_kind_of_memory_that_is_not_shareable_is_refused_with_its_cure() {
        assert!(check_shared("m", "memory-backend-file", true, 1 << 30).is_ok());
        for (kind, share) in [
            ("memory-backend-file", false),
            ("memory-backend-memfd", true),
            ("memory-backend-ram", true),
            ("memory-backend-epc", true),
        ] {
            let error = check_shared("m", kind, share, 3 << 30).unwrap_err().to_string();
            assert!(error.contains("size=3G,mem-path=/dev/shm/guest,share=on -machine memory-backend=mem0"), "{error}");
        }
    }
}
