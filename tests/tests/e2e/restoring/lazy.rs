//! Lazy restores that are held where a test wants them.
use std::{fs, path::Path};

use transship_lab::{LabError, Qemu, Result, Scratch, Transship, wait_until};

use super::restoring;

/// A restore that waits right after the guest has been started: only pages that somebody waits for come.
pub(crate) struct Stalled {
    folder: Scratch,
    pub(crate) restore: Transship,
}

impl Stalled {
    pub(crate) fn start(vm: &str, path: &Path) -> Result<Self> {
        Self::start_with(vm, path, &[])
    }

    pub(crate) fn start_with(vm: &str, path: &Path, flags: &[&str]) -> Result<Self> {
        Self::at("restore.started", vm, path, flags)
    }

    /// At another step.
    pub(crate) fn at(step: &str, vm: &str, path: &Path, flags: &[&str]) -> Result<Self> {
        let folder = Scratch::new()?;
        let gate = folder.join("gate");
        let armed = restoring(vm, path)
            .args(["--lazy"])
            .args(flags.iter().copied())
            .env("TRANSSHIP_FAIL_POINT", format!("{step}=stall"))
            .env("TRANSSHIP_FAIL_FILE", &gate);
        let mut restore = armed.start()?;
        wait_until("the restore to come to the step", || {
            if let Some(status) = restore.process().ended()? {
                return Err(LabError(format!("the restore ended early, {status}: {}", restore.stderr().tail())));
            }
            Ok(gate.exists())
        })?;
        Ok(Self { folder, restore })
    }

    pub(crate) fn go_on(self) -> Result<Transship> {
        fs::remove_file(self.folder.join("gate"))?;
        Ok(self.restore)
    }
}

/// The processes that stand by for the restore of this guest.
pub(crate) fn stand_ins(guest: &Qemu) -> Result<Vec<u32>> {
    let vm = guest.vm();
    let is_one = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains("stand-in") && line.contains(&vm)
    };
    let entries = fs::read_dir("/proc")?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter(is_one).collect())
}
