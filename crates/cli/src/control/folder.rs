//! Where control sockets are, and how they are called.
use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::process::geteuid;

/// A name of a socket may have no more than 107 bytes together with its folder.
const NAME_MAX: usize = 40;

/// The folder of this user.
///
/// # Errors
/// He has none. The text says why.
pub(super) fn folder() -> Result<PathBuf, String> {
    if geteuid().is_root() {
        return Ok("/run/transship/control".into());
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(base) if Path::new(&base).is_absolute() => Ok(Path::new(&base).join("transship/control")),
        _ => Err("XDG_RUNTIME_DIR does not name the folder of this user's sockets".into()),
    }
}

/// The same, and it is there, and nobody else's.
///
/// # Errors
/// It can't be had. The text says why.
pub(super) fn made() -> Result<PathBuf, String> {
    let folder = folder()?;
    make(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

fn make(folder: &Path) -> io::Result<()> {
    // Others have their sockets beside it, so what is above it is not ours alone.
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

/// What a socket is called: the process, and what a person would call the VM.
pub(super) fn name(pid: u32, vm: &str) -> String {
    format!("{pid}-{}", short(vm))
}

/// The last part of a VM's address, of letters that any name can have.
pub(super) fn short(vm: &str) -> String {
    let last = vm.rsplit(['/', ':', '#']).next().unwrap_or_default();
    let plain = last.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' });
    plain.take(NAME_MAX).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_name_tells_process_and_vm() {
        assert_eq!(name(17, "qemu:/run/vm 1.qmp"), "17-vm_1.qmp");
        assert_eq!(name(17, "libvirt:qemu:///system#g1"), "17-g1");
        assert_eq!(name(17, &format!("handoff:/{}", "é".repeat(200))), format!("17-{}", "_".repeat(40)));
    }

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
