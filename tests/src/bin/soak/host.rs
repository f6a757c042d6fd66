//! A stock QEMU with the guest in it, or one that waits for it, with the disk that all of them share.
use crate::plan::{MACHINE, Memory, Version};
use crate::traces::Traces;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use transship_lab::process::status_field;
use transship_lab::{Backend, Balloon, LabError, PATIENCE, Qemu, QemuBuilder, Result, Workload, other_qemu};

const MEMORY_MIB: u32 = 128;
/// Checked in a fraction of a second, also under emulation. It is checked when somebody asks, and not in between.
const WORKLOAD: Workload = Workload { mib: 12, rate: 1000, hot_mib: None, idle: false, sweep_ms: 3_600_000 };
/// The disk has so much, and all of it is in use.
const DISK_MIB: u64 = 2;

/// A QEMU, and how it was before anything of ours came near it.
pub(crate) struct Host {
    pub(crate) qemu: Qemu,
    pub(crate) version: Version,
    pub(crate) memory: Memory,
    balloon: Option<Balloon>,
    had_balloon: bool,
    pub(crate) before: Traces,
}

impl Host {
    /// One with a guest that boots.
    pub(crate) fn boot(version: Version, disk: &Path) -> Result<Self> {
        let host = Self::start(version, Memory::of(version), disk, |qemu| qemu)?;
        host.qemu.ready()?;
        Ok(host)
    }

    /// One that waits, while the caller does something else.
    pub(crate) fn waiting(version: Version, memory: Memory, disk: &Path) -> JoinHandle<Result<Self>> {
        let disk = disk.to_owned();
        std::thread::spawn(move || Self::start(version, memory, &disk, QemuBuilder::incoming))
    }

    fn start(
        version: Version,
        memory: Memory,
        disk: &Path,
        how: impl FnOnce(QemuBuilder) -> QemuBuilder,
    ) -> Result<Self> {
        let builder = Qemu::linux().memory(MEMORY_MIB).machine(MACHINE).workload(WORKLOAD).named_as_by_default();
        let (backend, cache) = match memory {
            Memory::SharedFile => (Backend::SharedFile, "writeback"),
            Memory::Own => (Backend::Default, "none"),
        };
        let builder = builder.backend(backend);
        let builder = match other(version) {
            None => builder,
            Some(number) => {
                let found = other_qemu(number)?;
                builder.binary(found.ok_or_else(|| LabError(format!("no QEMU {number}: scripts/soak.sh fetches it")))?)
            }
        };
        let drive = format!("file={},format=raw,if=none,id=disk,cache={cache}", disk.display());
        // Threads have names then, by which ours could be told from QEMU's.
        let builder = builder.append(&format!("workload.disk={DISK_MIB}")).args([
            "-name",
            "soak,debug-threads=on",
            "-drive",
            &drive,
            "-device",
            "virtio-blk-pci,drive=disk",
        ]);
        let balloon = if version == Version::V11_1 { Some(Balloon::start()?) } else { None };
        let builder = match &balloon {
            Some(balloon) => balloon.connected(builder),
            None => builder.args(["-device", "pcie-root-port,id=port0"]),
        };
        let qemu = how(builder).start()?;
        let before = Traces::of(&qemu)?;
        Ok(Self { qemu, version, memory, balloon, had_balloon: false, before })
    }

    /// Ended QEMUs run nothing. One that is ending has ended: its threads go one after the other.
    pub(crate) fn is_alive(&mut self) -> Result<bool> {
        if status_field(self.qemu.pid(), "State").is_ok_and(|state| state.starts_with('Z')) {
            self.qemu.process().wait(PATIENCE)?;
        }
        Ok(self.qemu.process().ended()?.is_none())
    }

    pub(crate) fn runs(&mut self) -> Result<bool> {
        Ok(self.is_alive()? && self.qemu.status()? == "running")
    }

    /// Whether a waiting QEMU has ever let its guest run, also if it has ended since.
    pub(crate) fn has_run(&mut self) -> Result<bool> {
        match self.is_alive()? {
            true => Ok(self.qemu.status()? == "running"),
            // What it said before its end is still there to be read.
            false => Ok(self.qemu.wait_event("RESUME", |_| true).is_ok()),
        }
    }

    /// Plugs the balloon in, if it has one and it is `wanted` or has been before: the process keeps hold of the guest's
    /// memory once it had it, and is to be named from then on. Gives its socket.
    pub(crate) fn plug(&mut self, wanted: bool) -> Result<Option<String>> {
        self.had_balloon |= wanted;
        let Some(balloon) = self.balloon.as_ref().filter(|_| self.had_balloon) else { return Ok(None) };
        if !self.has_balloon()? {
            balloon.plug(&self.qemu)?;
            // The device has a connection of its own: the lab's doing, and nobody else's.
            self.before = Traces::of(&self.qemu)?;
        }
        Ok(Some(balloon.path().display().to_string()))
    }

    pub(crate) fn has_balloon(&self) -> Result<bool> {
        let devices = self.qemu.qmp("qom-list", json!({ "path": "/machine/peripheral" }))?;
        Ok(devices.as_array().into_iter().flatten().any(|device| device["name"] == "balloon"))
    }
}

/// An empty disk for the guest.
pub(crate) fn make_disk(path: &Path) -> Result<PathBuf> {
    let file = std::fs::File::create(path).and_then(|file| file.set_len(DISK_MIB << 20));
    file.map_err(|error| LabError(format!("{}: {error}", path.display())))?;
    Ok(path.to_owned())
}

/// Its number, if it is not the installed one.
fn other(version: Version) -> Option<&'static str> {
    match version {
        Version::V7_2 => Some("7.2"),
        Version::Installed => None,
        Version::V11_1 => Some("11.1"),
    }
}
