//! The last step of making an image: from files that are written to an image that is there, and that nobody changes.
use std::{
    fs::{File, Permissions},
    io::Write,
    os::unix::fs::{MetadataExt, PermissionsExt},
    sync::atomic::Ordering::Relaxed,
};

use rustix::fs::IFlags;
use transship_wire::qemu::{Configuration, Name};

use super::{
    MANIFEST, STATE, checksum,
    manifest::{Manifest, Memory, Pinned, VERSION},
    memory_name,
};
use crate::{
    Error, Progress, fail_point,
    guest::DiskFile,
    snapshot::file::target::{Target, TargetKind},
};

/// Nobody is to write to it, and only its owner reads it.
const READ_ONLY: u32 = 0o400;

impl Target {
    /// All but `head`, which belongs at the start of the first file, is written: makes the image whole, and durably
    /// so. Its files are read-only from now on, and immutable where the file system has that and we may say so.
    /// `memory`: by region, the name of its block and the number of its file.
    ///
    /// # Errors
    /// As [`Target::complete`].
    pub(crate) fn complete_image(
        &self,
        head: &[u8],
        memory: &[(Name, usize)],
        machine: &Configuration,
        disks: Option<&[DiskFile]>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let TargetKind::Folder(folder) = &self.place else {
            return Err(Error::file(format!("{} is one file, and an image is a folder", self.uri)));
        };
        self.write_at(head, 0)?;
        let files: Vec<File> =
            (0..self.files()).map(|file| self.cached_descriptor(file).map(File::from)).collect::<Result<_, _>>()?;
        fail_point::reach("save.image-written")?;
        let pinned = |file: usize, name: String| self.pin(&files[file], name, progress);
        let region = |(name, file): &(Name, usize)| {
            Ok(Memory { region: name.to_string(), pinned: pinned(*file, memory_name(file - 1))? })
        };
        let manifest = Manifest {
            version: VERSION,
            transship: env!("CARGO_PKG_VERSION").into(),
            machine: machine.machine.to_string(),
            memory: memory.iter().map(region).collect::<Result<_, Error>>()?,
            state: pinned(0, STATE.into())?,
            disks: disks.map(<[DiskFile]>::to_vec),
        };
        let text = serde_json::to_string_pretty(&manifest).map_err(|error| self.failed("describe", error.into()))?;
        let mut file = folder.make_file(&self.uri, MANIFEST)?;
        let read_only = Permissions::from_mode(READ_ONLY);
        let written = file.write_all(text.as_bytes()).and_then(|()| file.set_permissions(read_only));
        written.and_then(|()| file.sync_all()).map_err(|source| self.failed("write", source))?;
        self.sync(progress)?;
        fail_point::reach("save.synced")?;
        if progress.is_cancelled() {
            return Err(Error::CANCELLED);
        }
        let durable = folder.complete().map_err(|errno| self.failed("rename the new folder to", errno.into()))?;
        self.completed.store(true, Relaxed);
        fail_point::reach("save.renamed")?;
        files.iter().chain([&file]).for_each(keep_for_ever);
        durable.map_err(|errno| Error::Io {
            what: format!("sync the folder of {} (complete, but it may be gone after a power cut)", self.uri),
            source: errno.into(),
        })
    }

    /// What is to be remembered of a file that is written.
    fn pin(&self, file: &File, name: String, progress: &Progress) -> Result<Pinned, Error> {
        let failed = |source| self.failed("inspect", source);
        file.set_permissions(Permissions::from_mode(READ_ONLY)).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let checksum = checksum::of(file, meta.len(), progress).map_err(|source| match progress.is_cancelled() {
            true => Error::CANCELLED,
            false => self.failed("read", source),
        })?;
        let modified = (meta.mtime(), meta.mtime_nsec());
        Ok(Pinned { file: name, bytes: meta.len(), checksum, modified, inode: meta.ino() })
    }
}

/// `chattr +i`: even root can't write to it, nor remove it. Where that can't be had, it is read-only all the same.
fn keep_for_ever(file: &File) {
    let flags = rustix::fs::ioctl_getflags(file).unwrap_or(IFlags::empty());
    let _ = rustix::fs::ioctl_setflags(file, flags | IFlags::IMMUTABLE);
}
