//! The folder of an image while it is made: under one other name beside its own, with a lock on it.
use std::{
    ffi::{CString, OsString},
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::Path,
};

use rustix::{
    fs::{AtFlags, Dir, Mode, OFlags},
    io::Errno,
};

use super::temporary::{lock, temporary_name};
use crate::{
    Error,
    snapshot::{FilePlace, FileUri},
};

/// Attempts to make it while others make and remove theirs.
const ATTEMPTS: u32 = 100;
const OPEN_FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A folder, and the one that it is made in.
pub(crate) struct Folder {
    parent: OwnedFd,
    name: OsString,
    temporary: OsString,
    folder: OwnedFd,
    /// Its first file.
    first: std::sync::OnceLock<String>,
}

impl Folder {
    /// Makes it, after removing what a save that died has left.
    ///
    /// # Errors
    /// Another save makes it now; its name is taken; the system's own.
    pub(super) fn make(uri: &FileUri) -> Result<Self, Error> {
        let failed = |errno: Errno| Error::Io { what: format!("make a folder beside {uri}"), source: errno.into() };
        let FilePlace::Path(path) = &uri.place else {
            return Err(Error::file(format!("{uri} can't be an image, which is a folder; name a folder")));
        };
        if uri.offset > 0 {
            return Err(Error::file(format!("{uri}: an image is a folder and has no offset; leave it out")));
        }
        check_free(uri, path)?;
        let name = path.file_name().ok_or_else(|| Error::file(format!("{uri} names no folder")))?.to_owned();
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(parent, flags, Mode::empty()).map_err(failed)?;
        let temporary = temporary_name(&name);
        for _ in 0..ATTEMPTS {
            match rustix::fs::mkdirat(&parent, &temporary, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed(errno)),
            }
            let folder = match rustix::fs::openat(&parent, &temporary, OPEN_FOLDER, Mode::empty()) {
                Ok(folder) => folder,
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            match lock(&folder, &parent, &temporary) {
                Ok(true) => {
                    empty(&folder).map_err(failed)?;
                    return Ok(Self { parent, name, temporary, folder, first: std::sync::OnceLock::new() });
                }
                Ok(false) => {}
                Err(Errno::WOULDBLOCK) => {
                    let what = format!("another save makes {uri} at this moment; wait for it, or name another folder");
                    return Err(Error::file(what));
                }
                Err(errno) => return Err(failed(errno)),
            }
        }
        Err(Error::file(format!("others make and remove {uri} all the time; name another folder")))
    }

    /// A new file in it.
    pub(crate) fn make_file(&self, uri: &FileUri, name: &str) -> Result<File, Error> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.folder, name, flags, Mode::from_raw_mode(0o600));
        self.first.get_or_init(|| name.to_owned());
        let what = || format!("make the file {name} of {uri}");
        made.map(File::from).map_err(|errno| Error::Io { what: what(), source: errno.into() })
    }

    /// A file of it, past the page cache; or why not.
    pub(super) fn open_direct(&self, name: &str) -> Result<File, String> {
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.folder, name, flags, Mode::empty());
        opened.map(File::from).map_err(|errno| format!("the file system refuses it ({})", io::Error::from(errno)))
    }

    pub(super) fn open_direct_first(&self) -> Result<File, String> {
        self.open_direct(self.first.get().map_or("", String::as_str))
    }

    /// All of it is written: gives it its name, durably.
    ///
    /// # Errors
    /// Nothing has its name; `Ok(Err)`: it has, and may be gone after a power cut.
    pub(crate) fn complete(&self) -> Result<Result<(), Errno>, Errno> {
        rustix::fs::fsync(&self.folder)?;
        rustix::fs::renameat(&self.parent, &self.temporary, &self.parent, &self.name)?;
        Ok(rustix::fs::fsync(&self.parent))
    }

    /// Removes all of it.
    pub(super) fn remove(&self) {
        let _ = empty(&self.folder);
        let _ = rustix::fs::unlinkat(&self.parent, &self.temporary, AtFlags::REMOVEDIR);
    }
}

/// An image in use must not go because another one has its name.
fn check_free(uri: &FileUri, path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Io { what: format!("save to {uri}"), source };
    match fs::read_dir(path) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(Error::file(format!(
                "{uri} is a folder with something in it, perhaps an image that clones run from; name a new folder"
            ))),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            Err(Error::file(format!("{uri} is a file, and an image is a folder; name a new folder")))
        }
        Err(error) => Err(failed(error)),
    }
}

/// Removes the files of a folder, which has no folders.
fn empty(folder: &OwnedFd) -> Result<(), Errno> {
    let names: Vec<CString> = Dir::read_from(folder)?
        .map(|entry| entry.map(|entry| entry.file_name().to_owned()))
        .collect::<Result<_, _>>()?;
    for name in names.iter().filter(|name| ![&b"."[..], &b".."[..]].contains(&name.as_bytes())) {
        rustix::fs::unlinkat(folder, name, AtFlags::empty())?;
    }
    Ok(())
}
