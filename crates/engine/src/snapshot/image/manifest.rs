//! What an image says of itself.
use std::{fs::File, io, os::unix::fs::MetadataExt};

use serde::{Deserialize, Serialize};

use crate::guest::DiskFile;

/// The layout of an image.
pub(crate) const VERSION: u32 = 1;

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Of the layout.
    pub(crate) version: u32,
    /// The version of transship that has made it.
    pub(crate) transship: String,
    /// The machine's type.
    pub(crate) machine: String,
    /// Guest memory, by region.
    pub(crate) memory: Vec<Memory>,
    /// Everything else.
    pub(crate) state: Pinned,
    /// Files of the disks that the guest had; none if nothing is known of them.
    pub(crate) disks: Option<Vec<DiskFile>>,
}

/// A region, and the file that it is in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Name of the block.
    pub(crate) region: String,
    #[serde(flatten)]
    pub(crate) pinned: Pinned,
}

/// A file as it was when the image was complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pinned {
    /// Its name in the folder.
    pub(crate) file: String,
    pub(crate) bytes: u64,
    /// See [`super::checksum`].
    pub(crate) checksum: String,
    /// Seconds and nanoseconds.
    pub(crate) modified: (i64, i64),
    pub(crate) inode: u64,
}

impl Pinned {
    /// Why the file is not the one that it was, if it is not.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn changed(&self, file: &File) -> io::Result<Option<String>> {
        let now = file.metadata()?;
        Ok(if now.len() != self.bytes {
            Some(format!("it has {} bytes, and had {} when the image was complete", now.len(), self.bytes))
        } else if (now.mtime(), now.mtime_nsec()) != self.modified {
            Some("it was written after the image was complete".into())
        } else if now.ino() != self.inode {
            Some("it is another file than the one that the image was completed with, such as a copy".into())
        } else {
            None
        })
    }
}
