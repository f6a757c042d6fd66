//! How the file is opened: under which name, in whose place, and whether pages may go past the page cache.
use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use rustix::fs::{Mode, OFlags};
use transship_memory::{Error as MemoryError, FileIo, FileQueue, GuestMemory, PAGE_BYTES, PageBuffer, Region};
use transship_wire::qemu::PAGES_ALIGNMENT;

use super::{
    filesystem,
    target::{Named, Target, TargetKind},
    temporary::{make_temporary, temporary_name},
};
use crate::{
    Error, Misfit,
    snapshot::{DirectIo, FileUri},
};

impl Target {
    pub(super) fn named(uri: &FileUri, path: &Path, memory: &GuestMemory) -> Result<Self, Error> {
        let failed = |source: io::Error| Error::Io { what: format!("save to {uri}"), source };
        // The file that a symbolic link points to is replaced, not the link.
        let path = match fs::symlink_metadata(path) {
            Ok(meta) if meta.is_symlink() => fs::canonicalize(path).map_err(failed)?,
            _ => path.to_path_buf(),
        };
        let old = match fs::metadata(&path) {
            Ok(meta) if !meta.is_file() => {
                return Err(
                    Misfit::NotRegular.file(format!("{uri} is not a regular file; name a regular file, or a new one"))
                );
            }
            Ok(_) => Some(File::open(&path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        if let Some(Ok(old)) = &old {
            check_not_memory(uri, old, memory)?;
        }
        let name = path.file_name().ok_or_else(|| Error::file(format!("{uri} names no file")))?.to_owned();
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = rustix::fs::open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let folder = folder.map_err(|errno| failed(errno.into()))?;
        let temporary = temporary_name(&name);
        let file = make_temporary(uri, &folder, &temporary)?;
        let target = Self::new(uri, file, None, TargetKind::Named(Named { folder, name, temporary }));
        if let Some(old) = old {
            target.take_over(old).map_err(failed)?;
        }
        Ok(target)
    }

    /// The owner and the mode of the file that is to be replaced, and what it has before the snapshot.
    fn take_over(&self, old: io::Result<File>) -> io::Result<()> {
        let old = match old {
            Ok(old) => old,
            // It may be replaced by someone who may not read it.
            Err(_) if self.uri.offset == 0 => return Ok(()),
            Err(error) => return Err(error),
        };
        let (meta, ours) = (old.metadata()?, self.buffered.metadata()?);
        let same_owner = (meta.uid(), meta.gid()) == (ours.uid(), ours.gid())
            || std::os::unix::fs::fchown(&self.buffered, Some(meta.uid()), Some(meta.gid())).is_ok();
        if same_owner {
            self.buffered.set_permissions(fs::Permissions::from_mode(meta.mode() & 0o777))?;
        }
        io::copy(&mut io::Read::take(old, self.uri.offset), &mut &self.buffered).map(drop)
    }

    pub(super) fn open_direct(&mut self, wish: DirectIo, memory: &GuestMemory) -> Result<(), Error> {
        if wish == DirectIo::Off {
            self.direct = None;
            return Ok(());
        }
        let opened = match (&self.place, self.direct.take()) {
            (TargetKind::Passed, Some(direct)) => Ok(direct),
            (TargetKind::Passed, None) => {
                Err("it was passed as one descriptor; also pass one with O_DIRECT, as fdset:N,M".to_owned())
            }
            (TargetKind::Named(named), _) => named.open_direct(),
            (TargetKind::Folder(folder), _) => folder.open_direct_first(),
        };
        let tried = match opened {
            Ok(direct) => self.try_direct(direct, memory)?,
            Err(why) => Err(why),
        };
        match tried {
            Ok(direct) => self.direct = Some(direct),
            Err(why) if wish == DirectIo::Auto => self.refused = Some(why),
            Err(why) => {
                return Err(Misfit::DirectIo.file(format!(
                    "{}: can't write pages past the page cache: {why}; use --direct-io=auto or off, or a disk file \
                     system such as ext4 or xfs",
                    self.uri
                )));
            }
        }
        Ok(())
    }

    /// Some file systems let a file be opened so, and then refuse the first write, or want larger pieces than pages.
    /// Says why it is refused.
    ///
    /// # Errors
    /// It fails for another reason.
    fn try_direct(&self, direct: File, memory: &GuestMemory) -> Result<Result<File, String>, Error> {
        let at = self.uri.offset.next_multiple_of(PAGES_ALIGNMENT);
        let descriptor = direct.try_clone().map_err(|source| self.failed("write", source))?;
        let mut queue = FileQueue::new(memory.clone(), descriptor.into(), 1, FileIo::Plain)
            .map_err(|source| self.failed("write", source))?;
        self.expect(PAGE_BYTES as u64);
        let written = queue.write_buffer(PageBuffer::new(1), at).and_then(|()| queue.finish());
        drop(queue);
        self.set_length(0)?;
        match written {
            Ok(()) => Ok(Ok(direct)),
            Err(MemoryError::System { source, .. }) if is_refusal(&source) => {
                Ok(Err(format!("the {} refuses it ({source})", filesystem::name(&self.buffered))))
            }
            Err(error) => Err(self.failed_pages(error)),
        }
    }
}

impl Named {
    fn open_direct(&self) -> Result<File, String> {
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.folder, &self.temporary, flags, Mode::empty()) {
            Ok(file) => Ok(file.into()),
            Err(errno) => {
                let folder = rustix::fs::openat(&self.folder, ".", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
                let system =
                    folder.map_or_else(|_| "file system".to_owned(), |folder| filesystem::name(&folder.into()));
                Err(format!("the {system} refuses it ({})", io::Error::from(errno)))
            }
        }
    }
}

/// A guest whose memory file became its snapshot would be gone, or its memory would have no name any more.
pub(super) fn check_not_memory(uri: &FileUri, file: &File, memory: &GuestMemory) -> Result<(), Error> {
    let id = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let Ok(ours) = rustix::fs::fstat(file).map(id) else { return Ok(()) };
    let is_it = |region: &&Region| region.file().is_some_and(|of| rustix::fs::fstat(of).map(id) == Ok(ours));
    match memory.regions().iter().find(is_it) {
        Some(region) => {
            let why = format!("is the memory of the guest itself (region {}); name another file", region.name());
            Err(Misfit::OwnMemory.file(format!("{uri} {why}")))
        }
        None => Ok(()),
    }
}

/// The file system can't do it, or not for pages of this size.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}
