//! The files that a QEMU has its disks in.
use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use serde_json::json;
use transship_guest::{DiskFile, GuestError};

use super::qmp::Qmp;

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
    let meta = fs::metadata(&path).or_else(|_| fs::metadata(name)).ok()?;
    let (device, inode) = match meta.file_type().is_block_device() {
        true => (meta.rdev(), 0),
        false => (meta.dev(), meta.ino()),
    };
    Some(DiskFile { name: name.to_owned(), device, inode })
}
