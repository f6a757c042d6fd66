//! The files that a guest's disks are in.
use std::{
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

/// A file that is a disk of a guest, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DiskFile {
    /// Its name, as the VMM knows it.
    pub name: String,
    /// The device that it is on, and its number there; of a block device its own number, and 0.
    pub device: u64,
    /// See `device`.
    pub inode: u64,
}

impl DiskFile {
    /// The file at a path of this process, if it is there.
    pub fn at(name: &str, path: &Path) -> Option<Self> {
        let (device, inode) = Self::id(&std::fs::metadata(path).ok()?);
        Some(Self { name: name.to_owned(), device, inode })
    }

    /// Whether this is what the system says of it.
    pub fn has(&self, meta: &std::fs::Metadata) -> bool {
        Self::id(meta) == (self.device, self.inode)
    }

    fn id(meta: &std::fs::Metadata) -> (u64, u64) {
        match meta.file_type().is_block_device() {
            true => (meta.rdev(), 0),
            false => (meta.dev(), meta.ino()),
        }
    }

    /// Whether both are the same file, whatever they are called.
    pub fn is(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// A disk of which a snapshot is taken: the guest writes to another file from then on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DiskSnapshot {
    /// Its name, as the one that keeps the guest knows it, such as `vda`.
    pub disk: String,
    /// What stays as it was when the guest stood still.
    pub kept: PathBuf,
    /// Where the guest writes to: what is not in there is read from `kept`.
    pub overlay: PathBuf,
}

/// Why the disks of a guest that nobody keeps are left to others.
pub const NO_DISK_SNAPSHOT: &str = "only libvirt takes a snapshot of its guest's disks; name the guest by --vm \
                                    libvirt:DOMAIN, or have --at-stop CMD do it";
