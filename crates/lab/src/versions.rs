//! Other versions of QEMU than the one that is installed, as `scripts/qemu-versions.sh` unpacks them.
use crate::{LabError, Result, lacks};
use std::path::PathBuf;

/// The command of a QEMU of this version, such as `11.1`: for [`crate::QemuBuilder::binary`]. They are in
/// `TRANSSHIP_QEMUS/VERSION`; nothing without that variable, since they come from the network.
///
/// # Errors
/// The variable is set, but has no such version.
pub fn other_qemu(version: &str) -> Result<Option<String>> {
    let Some(folder) = std::env::var_os("TRANSSHIP_QEMUS").map(PathBuf::from) else {
        lacks(format_args!("TRANSSHIP_QEMUS names no folder with QEMU {version} (scripts/qemu-versions.sh makes one)"));
        return Ok(None);
    };
    let command = folder.join(version).join("qemu-system-x86_64");
    match command.exists() {
        true => Ok(Some(command.display().to_string())),
        false => Err(LabError(format!(
            "TRANSSHIP_QEMUS: {} is missing: run scripts/qemu-versions.sh {version} {}",
            command.display(),
            folder.join(version).display()
        ))),
    }
}
