//! The guest's memory as it is read, or written, from here: files that are mapped, and QEMU's process.
use std::{
    fs::{File, OpenOptions},
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
};

use transship_guest::GuestError;
use transship_memory::{Access, ByteRange, GuestMemory, InProcess, Process, Region};

use super::{Backend, Held};
use crate::qemu::{
    checks,
    maps::{FileId, path_to},
};

/// QEMU's process, for its private memory.
pub(in crate::qemu) fn open_process(pid: i32, access: Access) -> Result<Arc<Process>, GuestError> {
    Process::open(pid, access)
        .map(Arc::new)
        .map_err(|e| GuestError::Unfit(format!("{e}; run as root or as QEMU's user")))
}

/// Makes all backends readable, or writable, from here.
pub(in crate::qemu) fn map(pid: i32, backends: &[Backend], access: Access) -> Result<GuestMemory, GuestError> {
    let process = backends.iter().any(Backend::is_private).then(|| open_process(pid, access)).transpose()?;
    let regions = backends.iter().map(|backend| backend.region(pid, process.as_ref(), access));
    Ok(GuestMemory::new(regions.collect::<Result<_, _>>()?))
}

impl Backend {
    fn open_file(&self, file: FileId, path: &Path, access: Access) -> Result<OwnedFd, GuestError> {
        let failed = |why: String| {
            GuestError::Unfit(format!("can't open guest memory {:?} in {}: {why}", self.id, path.display()))
        };
        let open = |access| OpenOptions::new().read(true).write(access == Access::ReadWrite).open(path);
        let opened = open(access).map_err(|e| failed(format!("{e}; run as root or as QEMU's user")))?;
        let about = opened.metadata().map_err(|e| failed(e.to_string()))?;
        if FileId::of(&about) != file {
            return Err(failed("the file was replaced while it was opened".to_owned()));
        }
        Ok(File::into(opened))
    }

    fn open_unnamed(&self, pid: i32, file: FileId, access: Access) -> Result<OwnedFd, GuestError> {
        let path = path_to(pid, file).map_err(|e| {
            GuestError::Unfit(format!("can't open guest memory {:?} of process {pid}: {e}; run as root", self.id))
        })?;
        self.open_file(file, &path, access)
    }

    /// The file that is the memory. For writing if that is allowed, also if it is only read here: by such a descriptor
    /// alone the kernel lets pages that are given back be noticed, and says where a hugetlbfs file has holes.
    fn open_shared(&self, pid: i32, file: FileId, path: Option<&Path>, access: Access) -> Result<OwnedFd, GuestError> {
        let open = |access| match path {
            Some(path) => self.open_file(file, path, access),
            None => self.open_unnamed(pid, file, access),
        };
        match open(Access::ReadWrite) {
            Err(_) if access == Access::Read => open(access),
            opened => opened,
        }
    }

    /// The file that private memory shows where it was not written. For writing only on a hugetlbfs, whose holes the
    /// kernel names by such a descriptor alone, or if it is wanted and the file has no name: then nobody else can find
    /// it.
    fn open_below(&self, pid: i32, file: FileId, access: Access) -> Result<OwnedFd, GuestError> {
        let opened = self.open_unnamed(pid, file, Access::Read)?;
        let is_nameless = rustix::fs::fstat(&opened).is_ok_and(|stat| stat.st_nlink == 0);
        if !checks::is_hugetlbfs(&opened) && (access == Access::Read || !is_nameless) {
            return Ok(opened);
        }
        // Without the right to it, it can be read all the same.
        Ok(self.open_unnamed(pid, file, Access::ReadWrite).unwrap_or(opened))
    }

    fn region(&self, pid: i32, process: Option<&Arc<Process>>, access: Access) -> Result<Region, GuestError> {
        let region = match (&self.held, process) {
            (Held::Shared { file, offset, path, keep }, _) => {
                let opened = self.open_shared(pid, *file, path.as_deref(), access)?;
                let region = Region::map(&self.id, opened, ByteRange::sized(*offset, self.bytes), access);
                let region = region.map(|region| region.keeping(*keep));
                if access == Access::Read { region.map(Region::lendable) } else { region }
            }
            (Held::Private { address, page_bytes, below, keep }, Some(process)) => {
                let below = below.map(|(file, offset)| Ok((self.open_below(pid, file, access)?, offset)));
                let file = below.transpose().map_err(|e: GuestError| e)?;
                let (process, address, page_bytes) = (Arc::clone(process), *address, *page_bytes);
                let memory = InProcess { process, address, bytes: self.bytes, page_bytes, file };
                Region::in_process(&self.id, memory, access).map(|region| region.keeping(*keep))
            }
            (Held::Private { .. }, None) => return Err(GuestError::Bug(format!("process {pid} was not opened"))),
        };
        Ok(region?)
    }
}
