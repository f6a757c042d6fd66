//! Where QEMU keeps the guest's memory: which backends there are (QMP), which files back them, and where they are in
//! its process (`info ramblock`, `/proc/PID/maps`).
mod areas;
mod mapped;

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use transship_guest::GuestError;
use transship_memory::Keep;
use transship_wire::RegionDescription;

pub(super) use self::{
    areas::{areas, shared_areas},
    mapped::{map, open_process},
};
use super::{
    blocks::{self, RamBlock},
    maps::{FileId, Mapping, path_to},
    places,
    qmp::{Qmp, Question},
};

/// The kind of backend that has a file which it was told.
const OF_A_FILE: &str = "memory-backend-file";
/// All that is asked of such a one. What is asked of all kinds is in the answer to `query-memdev`.
const PROPERTIES: [&str; 3] = ["readonly", "offset", "mem-path"];

/// One memory backend of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Backend {
    pub(super) id: String,
    pub(super) bytes: u64,
    held: Held,
}

/// How QEMU has it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Held {
    /// A part of a file that it maps shared.
    Shared {
        file: FileId,
        offset: u64,
        /// How we reach the file; none: only through QEMU's process, as it has no name.
        path: Option<PathBuf>,
        /// What QEMU was told about having all of it from the start (`prealloc`, and to which NUMA nodes it is bound).
        keep: Keep,
    },
    /// Its own. Where it has not written the file shows, if there is one.
    Private { address: u64, page_bytes: u64, below: Option<(FileId, u64)>, keep: Keep },
}

/// All backends, sorted by id.
pub(super) fn backends(qmp: &mut Qmp) -> Result<Vec<Backend>, GuestError> {
    backends_again(qmp, &[])
}

/// All backends of a QEMU that had these before, sorted by id. What one was made with is not asked again of those that
/// are where they were: it does not change.
pub(super) fn backends_again(qmp: &mut Qmp, before: &[Backend]) -> Result<Vec<Backend>, GuestError> {
    let devices = qmp.execute("query-memdev", json!({}))?;
    let mut known = blocks::list(qmp)?;
    let (mut backends, mut types) = (Vec::new(), None);
    for device in devices.as_array().into_iter().flatten() {
        let (Some(id), Some(bytes)) = (device["id"].as_str(), device["size"].as_u64()) else {
            return Err(GuestError::Unfit(format!(
                "QEMU has a memory backend without id or size ({device}): give it one, id=mem0"
            )));
        };
        if let Some(same) = before.iter().find(|backend| backend.id == id && backend.bytes == bytes)
            && same.is_there(qmp, &mut known)?
        {
            backends.push(same.clone());
            continue;
        }
        if types.is_none() {
            let found = object_types(qmp)?;
            ask_ahead(qmp, &devices, &found)?;
            types = Some(found);
        }
        let kind = kind_of(types.as_deref().unwrap_or_default(), id);
        // With rom=off only the file is so: what the guest writes is its own, as with any private mapping.
        let is_rom = |qmp: &mut Qmp| property(qmp, id, "rom") != Some(json!("off"));
        if kind == OF_A_FILE && property(qmp, id, "readonly") == Some(json!(true)) && is_rom(qmp) {
            return Err(GuestError::Unfit(format!(
                "guest memory {id:?} is opened read-only, which can't be tracked; remove readonly=on, or add rom=off"
            )));
        }
        check_kind(id, kind, bytes)?;
        let held = match (kind, device["share"].as_bool() == Some(true)) {
            (OF_A_FILE, true) => Some(named_file(qmp, id, bytes, keep(device), blocks::find(&known, id))?),
            _ => {
                places::add(qmp, &mut known)?;
                blocks::find(&known, id).map(|block| in_process(qmp, id, bytes, keep(device), block)).transpose()?
            }
        };
        // Memory of QEMU's that nothing uses is not the guest's.
        backends.extend(held.map(|held| Backend { id: id.to_owned(), bytes, held }));
    }
    backends.sort_by(|a, b| a.id.cmp(&b.id));
    if backends != before {
        blocks::check_all_covered(qmp, &backends, &known)?;
    }
    Ok(backends)
}

/// Asks for all that somebody may want to know of each of these backends, in one go if that saves time.
fn ask_ahead(qmp: &mut Qmp, devices: &Value, types: &[(String, String)]) -> Result<(), GuestError> {
    let ids = devices.as_array().into_iter().flatten().filter_map(|device| device["id"].as_str());
    let of_a_file = ids.filter(|id| kind_of(types, id) == OF_A_FILE);
    Ok(qmp.ask_ahead(&of_a_file.flat_map(|id| PROPERTIES.map(|name| asked(id, name))).collect::<Vec<_>>())?)
}

/// The question that [`property`] asks.
fn asked(id: &str, name: &str) -> Question {
    ("qom-get", json!({ "path": format!("/objects/{id}"), "property": name }))
}

fn property(qmp: &mut Qmp, id: &str, name: &str) -> Option<Value> {
    let (command, arguments) = asked(id, name);
    qmp.execute(command, arguments).ok()
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

fn kind_of<'a>(types: &'a [(String, String)], id: &str) -> &'a str {
    types.iter().find(|(name, _)| name == id).map_or("a backend of unknown type", |(_, kind)| kind)
}

/// Memory that no process may look at, or that nobody has told us how to.
fn check_kind(id: &str, kind: &str, bytes: u64) -> Result<(), GuestError> {
    if [OF_A_FILE, "memory-backend-memfd", "memory-backend-ram"].contains(&kind) {
        return Ok(());
    }
    Err(GuestError::Unfit(format!(
        "guest memory {id:?} is {kind}, which can't be read from outside; use another, such as {}",
        cure(bytes)
    )))
}

/// The options that make guest memory a shared file.
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

/// By the answer to `query-memdev`.
fn keep(device: &Value) -> Keep {
    match (device["prealloc"].as_bool(), device["policy"].as_str()) {
        (Some(true), Some("bind")) => Keep::AllOnTheirNodes,
        (Some(true), _) => Keep::All,
        _ => Keep::Nothing,
    }
}

/// A shared file that was opened by its name. Where that leads nowhere any more, the mapping that its block is at shows
/// it.
fn named_file(qmp: &mut Qmp, id: &str, bytes: u64, keep: Keep, block: Option<&RamBlock>) -> Result<Held, GuestError> {
    let offset = property(qmp, id, "offset").and_then(|offset| offset.as_u64()).unwrap_or(0);
    let Some(Value::String(mem_path)) = property(qmp, id, "mem-path") else {
        return Err(GuestError::Unfit(format!(
            "QEMU does not say which file backs guest memory {id:?}: {}",
            cure(bytes)
        )));
    };
    let address = block.and_then(|block| block.address);
    let (path, file) = locate(qmp, id, Path::new(&mem_path), address)?;
    Ok(Held::Shared { file, offset, path: Some(path), keep })
}

/// Memory that QEMU has under no name: the mapping that its block is at says what it is.
fn in_process(qmp: &mut Qmp, id: &str, bytes: u64, keep: Keep, block: &RamBlock) -> Result<Held, GuestError> {
    let Some(address) = block.address else {
        let (major, minor) = qmp.version();
        return Err(GuestError::Unfit(format!(
            "QEMU {major}.{minor} does not say where in its process guest memory {id:?} is, and it can't be found with certainty; use QEMU \
             8.2 or newer, which says it, or give the guest memory in a shared named file: {}",
            cure(bytes)
        )));
    };
    let pid = qmp.pid();
    let mappings = qmp.process().mappings()?;
    let Some(mapping) = mappings.iter().find(|mapping| (mapping.start..mapping.end).contains(&address)) else {
        return Err(GuestError::Unfit(format!(
            "guest memory {id:?}: process {pid}, which listens on the QMP socket, has nothing at address {address:#x}, where QEMU says it is; is \
             the socket not QEMU's own?"
        )));
    };
    let offset = mapping.file_offset + (address - mapping.start);
    Ok(match mapping.is_shared {
        true => Held::Shared { file: mapping.file, offset, path: None, keep },
        false => {
            let below = mapping.has_file().then_some((mapping.file, offset));
            Held::Private { address, page_bytes: block.page_bytes, below, keep }
        }
    })
}

/// Finds the file that QEMU maps, by the name that QEMU knows it by, which may be in another root than ours, and
/// makes sure that it is the same file. One that was found by this name before, and is mapped still, is that one.
fn locate(qmp: &mut Qmp, id: &str, mem_path: &Path, address: Option<u64>) -> Result<(PathBuf, FileId), GuestError> {
    let pid = qmp.pid();
    let mappings = qmp.process().mappings()?;
    let is_mapped = |file: FileId| mappings.iter().any(|mapping| mapping.is_shared && mapping.file == file);
    if let Some(found) = qmp.process().found(id, mem_path).filter(|(_, file)| is_mapped(*file)) {
        return Ok(found.clone());
    }
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
        if metadata.is_file() && is_mapped(file) {
            let found = (path, file);
            qmp.process().note(id, mem_path, &found);
            return Ok(found);
        }
    }
    let is_there = |mapping: &&Mapping| address.is_some_and(|at| (mapping.start..mapping.end).contains(&at));
    if let Some(mapping) = mappings.iter().find(is_there).filter(|mapping| mapping.is_shared)
        && let Ok(path) = path_to(pid, mapping.file)
    {
        let found = (path, mapping.file);
        qmp.process().note(id, mem_path, &found);
        return Ok(found);
    }
    Err(GuestError::Unfit(format!(
        "guest memory {id:?}: process {pid}, which listens on the QMP socket, maps no file {} that can be opened from \
         here; was the file deleted or replaced, or is the socket not QEMU's own?",
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
    /// Whether QEMU has it where it had it. Where in a file that is [`areas`] tells.
    fn is_there(&self, qmp: &mut Qmp, blocks: &mut [RamBlock]) -> Result<bool, GuestError> {
        match &self.held {
            Held::Shared { file, .. } => {
                Ok(qmp.process().mappings()?.iter().any(|mapping| mapping.is_shared && mapping.file == *file))
            }
            Held::Private { address, .. } => {
                places::add(qmp, blocks)?;
                Ok(blocks::find(blocks, &self.id).is_some_and(|block| block.address == Some(*address)))
            }
        }
    }

    pub(super) fn description(&self) -> RegionDescription {
        RegionDescription { name: self.id.clone(), bytes: self.bytes }
    }

    /// The file that others can map to have this memory.
    pub(super) fn shared_file(&self) -> Option<FileId> {
        match &self.held {
            Held::Shared { file, .. } => Some(*file),
            Held::Private { .. } => None,
        }
    }

    /// Whether QEMU can be told to leave it out of its own stream (`x-ignore-shared`).
    fn can_be_left_out(&self) -> bool {
        matches!(&self.held, Held::Shared { path: Some(_), .. })
    }

    /// How QEMU has it, in words.
    pub(super) fn kind(&self) -> String {
        match &self.held {
            Held::Shared { path: Some(path), .. } => format!("shared file {}", path.display()),
            Held::Shared { path: None, .. } => "shared, without a name".to_owned(),
            Held::Private { below: Some(_), .. } => "private, over a file".to_owned(),
            Held::Private { below: None, .. } => "private".to_owned(),
        }
    }

    fn is_private(&self) -> bool {
        matches!(&self.held, Held::Private { .. })
    }
}

/// Whether QEMU can be told to leave all of it out of its own stream.
pub(super) fn can_be_left_out(backends: &[Backend]) -> bool {
    backends.iter().all(Backend::can_be_left_out)
}

#[cfg(test)]
impl Backend {
    pub(super) fn test(id: &str, bytes: u64) -> Self {
        Self::shared(id, bytes, 0)
    }

    fn shared(id: &str, bytes: u64, offset: u64) -> Self {
        let held = Held::Shared { file: FileId::TEST, offset, path: Some(PathBuf::new()), keep: Keep::Nothing };
        Self { id: id.into(), bytes, held }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_of_unknown_kind_is_refused_with_its_cure() {
        for kind in ["memory-backend-file", "memory-backend-memfd", "memory-backend-ram"] {
            assert!(check_kind("m", kind, 1 << 30).is_ok(), "{kind}");
        }
        let error = check_kind("m", "memory-backend-epc", 3 << 30).unwrap_err().to_string();
        assert!(error.contains("size=3G,mem-path=/dev/shm/guest,share=on -machine memory-backend=mem0"), "{error}");
    }
}
