//! The files that a QEMU has its disks in.
use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::json;
use transship_guest::{DiskFile, GuestError};

use super::{qmp::Qmp, writers};

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    All,
    /// Those that it may write to.
    Writable,
}

/// The files of all its disks that have a name which can be followed from here.
pub(super) fn list(qmp: &mut Qmp, which: Which) -> Result<Vec<DiskFile>, GuestError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut found: Vec<DiskFile> = Vec::new();
    for node in nodes.as_array().into_iter().flatten() {
        let is_file = ["file", "host_device", "host_cdrom"].iter().any(|driver| node["drv"] == *driver);
        let wanted = which == Which::All || node["ro"] != true;
        let Some(name) = node["file"].as_str().filter(|_| is_file && wanted) else { continue };
        let Some(file) = file_of(qmp.pid(), name) else { continue };
        if !found.iter().any(|known| known.is(&file)) {
            found.push(file);
        }
    }
    Ok(found)
}

/// QEMU may have another root, and another folder that names begin in.
fn file_of(pid: i32, name: &str) -> Option<DiskFile> {
    let path = match Path::new(name).strip_prefix("/") {
        Ok(below) => Path::new(&format!("/proc/{pid}/root")).join(below),
        Err(_) => PathBuf::from(format!("/proc/{pid}/cwd")).join(name),
    };
    DiskFile::at(name, &path).or_else(|| DiskFile::at(name, Path::new(name)))
}

/// One of these files that another process than QEMU has open for writing, and that process, in words. One that can't
/// be looked into says nothing.
pub(super) fn written_elsewhere(qemu: i32, disks: &[DiskFile]) -> Option<(DiskFile, String)> {
    if disks.is_empty() {
        return None;
    }
    let others = writers::processes().filter(|pid| *pid != qemu);
    others.filter_map(|pid| Some((written_by(pid, disks)?, writers::Process::named(pid).to_string()))).next()
}

fn written_by(pid: i32, disks: &[DiskFile]) -> Option<DiskFile> {
    let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?;
    for info in infos.flatten() {
        if !fs::read_to_string(info.path()).is_ok_and(|text| writes(&text)) {
            continue;
        }
        let descriptor = PathBuf::from(format!("/proc/{pid}/fd")).join(info.file_name());
        // What has no place in a file system is no disk, and a network's file system may never answer.
        if !fs::read_link(&descriptor).is_ok_and(|link| link.is_absolute()) {
            continue;
        }
        let Ok(meta) = fs::metadata(&descriptor) else { continue };
        if let Some(disk) = disks.iter().find(|disk| disk.has(&meta)) {
            return Some(disk.clone());
        }
    }
    None
}

/// Whether a descriptor may be written to, as its fdinfo says.
fn writes(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & 0o3 != 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_by_whom_has_it_open_for_that() {
        let path = std::env::temp_dir().join(format!("transship-disk-{}", std::process::id()));
        let file = fs::File::create(&path).unwrap();
        let disk = DiskFile::at("disk", &path).unwrap();
        let ourselves = std::process::id() as i32;
        assert_eq!(written_by(ourselves, std::slice::from_ref(&disk)), Some(disk.clone()));
        drop(file);
        let _read = fs::File::open(&path).unwrap();
        assert_eq!(written_by(ourselves, &[disk]), None);
        fs::remove_file(path).unwrap();
    }
}
