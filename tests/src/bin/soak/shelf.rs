//! The shared disk, and the last snapshot of the guest with a copy of the disk of the same moment.
use crate::host::make_disk;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use transship_lab::{LabError, Result, Scratch};

const SNAPSHOT: &str = "guest.snap";
const DISK: &str = "disk";
const COPY: &str = "disk.copy";

pub(crate) struct Shelf {
    folder: Scratch,
}

impl Shelf {
    /// With an empty disk, and no snapshot yet.
    pub(crate) fn new() -> Result<Self> {
        let folder = Scratch::on_disk()?;
        make_disk(&folder.join(DISK))?;
        Ok(Self { folder })
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.folder.join(DISK)
    }

    pub(crate) fn snapshot(&self) -> PathBuf {
        self.folder.join(SNAPSHOT)
    }

    /// Tells one snapshot from the next.
    pub(crate) fn identity(&self) -> Option<(u64, i64, i64)> {
        let found = std::fs::metadata(self.snapshot()).ok()?;
        Some((found.ino(), found.mtime(), found.mtime_nsec()))
    }

    /// The disk, which is at rest, belongs to the snapshot.
    pub(crate) fn keep_disk(&self) -> Result<()> {
        copy(&self.disk(), &self.folder.join(COPY))
    }

    /// The disk is again as it was at the snapshot. No guest runs.
    pub(crate) fn put_disk_back(&self) -> Result<()> {
        copy(&self.folder.join(COPY), &self.disk())
    }

    /// Names in its folder that are nobody's.
    pub(crate) fn strangers(&self) -> Vec<String> {
        let names =
            std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let names = names.map(|name| name.to_string_lossy().into_owned());
        names.filter(|name| ![SNAPSHOT, DISK, COPY].contains(&name.as_str())).collect()
    }
}

/// In place: a QEMU may have the file open.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = File::open(from).and_then(|mut from| {
        let mut to = OpenOptions::new().write(true).create(true).truncate(false).open(to)?;
        std::io::copy(&mut from, &mut to)
    });
    copied.map(drop).map_err(|error| LabError(format!("can't copy {} to {}: {error}", from.display(), to.display())))
}
