//! Other versions of QEMU and libvirt than those that are installed, and programs that are not, as
//! `scripts/qemu-versions.sh`, `scripts/libvirt-versions.sh` and `scripts/back-ends.sh` unpack them.
use crate::{LabError, Result, lacks};
use std::path::PathBuf;

/// The command of a QEMU of this version, such as `11.1`: for [`crate::QemuBuilder::binary`]. They are in
/// `TRANSSHIP_QEMUS/VERSION`; nothing without that variable, since they come from the network.
///
/// # Errors
/// The variable is set, but has no such version.
pub fn other_qemu(version: &str) -> Result<Option<String>> {
    let folder = other("TRANSSHIP_QEMUS", "qemu-versions.sh", version, "qemu-system-x86_64")?;
    Ok(folder.map(|folder| folder.join("qemu-system-x86_64").display().to_string()))
}

/// A program that is a device of a guest, such as `passt`. They are in `TRANSSHIP_BACK_ENDS/NAME`; nothing without that
/// variable.
///
/// # Errors
/// The variable is set, but has no such program.
pub fn back_end(name: &str) -> Result<Option<PathBuf>> {
    Ok(other("TRANSSHIP_BACK_ENDS", "back-ends.sh", name, name)?.map(|folder| folder.join(name)))
}

/// The folder with the programs of a libvirt of this version, such as `9.0`. They are in `TRANSSHIP_LIBVIRTS/VERSION`;
/// nothing without that variable.
///
/// # Errors
/// The variable is set, but has no such version.
pub(crate) fn other_libvirt(version: &str) -> Result<Option<PathBuf>> {
    other("TRANSSHIP_LIBVIRTS", "libvirt-versions.sh", version, "libvirtd")
}

fn other(variable: &str, script: &str, version: &str, program: &str) -> Result<Option<PathBuf>> {
    let Some(folder) = std::env::var_os(variable).map(|all| PathBuf::from(all).join(version)) else {
        lacks(format_args!("{variable} names no folder with {version} (scripts/{script} makes one)"));
        return Ok(None);
    };
    let path = folder.join(program);
    match path.exists() {
        true => Ok(Some(folder)),
        false => Err(LabError(format!(
            "{variable}: {} is missing: run scripts/{script} {version} {}",
            path.display(),
            folder.display()
        ))),
    }
}
