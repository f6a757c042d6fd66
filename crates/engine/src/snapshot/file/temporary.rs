//! The one other name that a file has until it is complete.
//!
//! The save that makes it holds a lock on it. A file without a lock is what a save that died has left.
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
};

use rustix::{
    fs::{AtFlags, FlockOperation, Mode, OFlags},
    io::Errno,
};

use crate::{Error, Misfit, snapshot::FileUri};

/// Attempts to make the file while others make and remove theirs.
const ATTEMPTS: u32 = 100;

/// The name for a file that is to be called `name`.
pub(super) fn temporary_name(name: &OsStr) -> OsString {
    OsStr::from_bytes(&[b".", name.as_bytes(), b".transship-part"].concat()).to_owned()
}

/// Makes the file anew and locks it, after removing what a save that died has left.
pub(super) fn make_temporary(uri: &FileUri, folder: &OwnedFd, name: &OsStr) -> Result<File, Error> {
    let failed = |errno: Errno| Error::Io { what: format!("make a file beside {uri}"), source: errno.into() };
    let busy =
        || Misfit::Busy.file(format!("another save writes {uri} at this moment; wait for it, or name another file"));
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..ATTEMPTS {
        match rustix::fs::openat(folder, name, flags | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(0o600)) {
            Ok(file) => match lock(&file, folder, name) {
                Ok(true) => return Ok(file.into()),
                Ok(false) => continue, // somebody took it for what a dead one has left
                Err(Errno::WOULDBLOCK) => return Err(busy()),
                Err(errno) => return Err(failed(errno)),
            },
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let left = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
            Ok(left) => left,
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(failed(errno)),
        };
        match lock(&left, folder, name) {
            Ok(true) => rustix::fs::unlinkat(folder, name, AtFlags::empty()).map_err(failed)?,
            Ok(false) => {}
            Err(Errno::WOULDBLOCK) => return Err(busy()),
            Err(errno) => return Err(failed(errno)),
        }
    }
    Err(busy())
}

/// Locks the file, or the folder; false if it does not have the name any more, because whoever held the lock before has
/// renamed or removed it.
pub(super) fn lock(file: &OwnedFd, folder: &OwnedFd, name: &OsStr) -> Result<bool, Errno> {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?;
    let ours = rustix::fs::fstat(file)?;
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(named) => Ok((named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}
