//! Folders of what concerns commands that run, or VMs that do. They are gone when the host is started anew.
use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::process::geteuid;

/// What a folder is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Folder {
    /// Sockets by which moves and saves are steered
    Control,
    /// Records of guests that were handed over before their pages
    HandedOver,
}

impl Folder {
    /// Where this user has it.
    ///
    /// # Errors
    /// Nowhere. The text says why.
    pub(crate) fn path(self) -> Result<PathBuf, String> {
        let name = match self {
            Self::Control => "transship/control",
            Self::HandedOver => "transship/handed-over",
        };
        if geteuid().is_root() {
            return Ok(Path::new("/run").join(name));
        }
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(base) if Path::new(&base).is_absolute() => Ok(Path::new(&base).join(name)),
            _ => Err("XDG_RUNTIME_DIR does not name the folder of what this user runs".into()),
        }
    }

    /// The same, and it is there, and nobody else's.
    ///
    /// # Errors
    /// It can't be had. The text says why.
    pub(crate) fn made(self) -> Result<PathBuf, String> {
        let folder = self.path()?;
        make(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(folder)
    }
}

fn make(folder: &Path) -> io::Result<()> {
    // Others have their folders beside it, so what is above it is not ours alone.
    folder.parent().map_or(Ok(()), fs::create_dir_all)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let is = fs::symlink_metadata(folder)?;
    if !is.is_dir() || is.uid() != geteuid().as_raw() {
        return Err(io::Error::other("is not a folder of this user; remove it"));
    }
    if is.mode() & 0o077 != 0 {
        fs::set_permissions(folder, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_folder_is_made_for_one_user_alone() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("a/control");
        let mode = || fs::metadata(&folder).unwrap().mode() & 0o777;
        make(&folder).unwrap();
        assert_eq!(mode(), 0o700);
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        make(&folder).unwrap();
        assert_eq!(mode(), 0o700);

        let other = base.path().join("b/control");
        fs::create_dir(base.path().join("b")).unwrap();
        std::os::unix::fs::symlink(&folder, &other).unwrap();
        assert!(make(&other).is_err(), "a link may lead anywhere");
        fs::remove_file(&other).unwrap();
        fs::write(&other, "").unwrap();
        assert!(make(&other).is_err());
    }
}
