//! Guests to save, and QEMUs that wait for one; and what files leave in memory.
use std::{fs::File, path::Path, time::SystemTime};

use rustix::fs::Advice;
use serde_json::json;
use transship_lab::Qemu;

use crate::{pair::text, processes};

/// A guest with memory to save.
pub(super) struct Source {
    pub(super) qemu: Qemu,
    /// Of memory.
    pub(super) bytes: u64,
    vcpus: Vec<u32>,
}

impl Source {
    pub(super) fn new(qemu: Qemu, bytes: u64) -> Result<Self, String> {
        let vcpus = vcpus(&qemu)?;
        Ok(Self { qemu, bytes, vcpus })
    }

    /// CPU seconds that QEMU has used so far, without those of the guest in it.
    pub(super) fn cpu_seconds(&self) -> Result<f64, String> {
        cpu_seconds(&self.qemu, &self.vcpus)
    }

    /// When the guest was stopped.
    pub(super) fn stopped_at(&self, since: SystemTime) -> Result<SystemTime, String> {
        self.qemu.wait_event_time("STOP", since, |_| true).map_err(text)
    }

    /// When the guest was started.
    pub(super) fn resumed_at(&self, since: SystemTime) -> Result<SystemTime, String> {
        self.qemu.wait_event_time("RESUME", since, |_| true).map_err(text)
    }
}

/// The threads of QEMU that execute its guest.
pub(super) fn vcpus(qemu: &Qemu) -> Result<Vec<u32>, String> {
    let cpus = qemu.qmp("query-cpus-fast", json!({})).map_err(text)?;
    let ids = cpus.as_array().into_iter().flatten().map(|cpu| cpu["thread-id"].as_u64());
    let mut ids = ids
        .map(|id| id.and_then(|id| u32::try_from(id).ok()))
        .collect::<Option<Vec<u32>>>()
        .ok_or_else(|| format!("QEMU's CPUs have no threads: {cpus}"))?;
    // An emulating QEMU may have one for all.
    ids.dedup();
    Ok(ids)
}

/// CPU seconds that QEMU has used so far, without these threads of it.
pub(super) fn cpu_seconds(qemu: &Qemu, vcpus: &[u32]) -> Result<f64, String> {
    let mut seconds = processes::cpu_seconds(qemu.pid())?;
    for &vcpu in vcpus {
        seconds -= processes::thread_cpu_seconds(qemu.pid(), vcpu)?;
    }
    Ok(seconds)
}

/// Leaves nothing of the file in the page cache, so that whoever reads it has to ask the disk.
pub(super) fn forget(file: &Path) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let open = File::open(file).map_err(|error| failed(&error))?;
    // Only pages that are on the disk already can be dropped.
    open.sync_all().map_err(|error| failed(&error))?;
    rustix::fs::fadvise(&open, 0, None, Advice::DontNeed).map_err(|error| failed(&error))
}
