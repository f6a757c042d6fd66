//! What a source or destination QEMU is refused for, each with the line that cures it.
use std::{collections::HashSet, fs};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};
use transship_engine::guest::GuestError;
use transship_memory::{Freeing, GuestMemory};

use super::{
    balloon::OwnBalloon,
    machine::{Device, devices, may_be_anything, run_state},
    memory::{Backend, FileId, mappings},
    qmp::Qmp,
};

/// The kernel that first had PAGEMAP_SCAN with asynchronous write protection.
const KERNEL_MIN: (u32, u32) = (6, 7);
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The machine: x86-64, and a kernel that can track writes of another process.
pub(super) fn host() -> Result<(), GuestError> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err(GuestError("attaching to QEMU from outside works on x86-64 only, so far".to_owned()));
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    kernel(release.trim())
}

fn kernel(release: &str) -> Result<(), GuestError> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < KERNEL_MIN {
        return Err(GuestError(format!(
            "Linux {release} can't track a running guest's writes from outside; boot Linux 6.7 or newer"
        )));
    }
    Ok(())
}

/// The right to stop a thread of QEMU and take a descriptor from it. Changes nothing there.
pub(super) fn may_ptrace(pid: i32) -> Result<(), GuestError> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:")).map_or("0", str::trim);
    if tracer != "0" {
        return Err(GuestError(format!("process {tracer} (a debugger?) traces QEMU (process {pid}); detach it first")));
    }
    let refused = |e: rustix::io::Errno| {
        GuestError(format!(
            "no right to trace QEMU (process {pid}): {e}; run as root or as QEMU's user, the latter with \
             sysctl kernel.yama.ptrace_scope=0"
        ))
    };
    let process = Pid::from_raw(pid).ok_or_else(|| refused(rustix::io::Errno::SRCH))?;
    let handle = pidfd_open(process, PidfdFlags::empty()).map_err(refused)?;
    // Needs the same right as ptrace. Whether descriptor 0 is open does not matter.
    match pidfd_getfd(handle, 0, PidfdGetfdFlags::empty()) {
        Ok(_) | Err(rustix::io::Errno::BADF) => Ok(()),
        Err(e) => Err(refused(e)),
    }
}

/// Memory whose writes the kernel can track.
pub(super) fn trackable(memory: &GuestMemory) -> Result<(), GuestError> {
    for region in memory.regions() {
        let system = rustix::fs::fstatfs(region.file())
            .map_err(|e| GuestError(format!("guest memory {:?}: {e}", region.name())))?;
        if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&(system.f_type as u64)) {
            return Err(GuestError(format!(
                "guest memory {:?} is a file on a disk file system, whose writes the kernel can't track; put it on a tmpfs or \
                 hugetlbfs, as in mem-path=/dev/shm/guest",
                region.name()
            )));
        }
    }
    Ok(())
}

/// The run state and migration state of a source. What is in the way only until `balloon` is unplugged is let pass.
pub(super) fn source_state(qmp: &mut Qmp, balloon: Option<&OwnBalloon>) -> Result<(), GuestError> {
    let refused = |why: &str| Err(GuestError(format!("this QEMU {why}")));
    let run_state = run_state(qmp)?;
    match run_state.as_str() {
        "running" | "paused" | "prelaunch" | "io-error" => {}
        "inmigrate" => {
            return refused("waits for an incoming guest: it is a destination; name the source, or use receive");
        }
        "postmigrate" => {
            return refused(
                "has already saved its guest's devices, to give the guest away or to keep it stopped (postmigrate), and can't a second time; \
                 only if that guest runs nowhere else, let it run first: cont",
            );
        }
        "suspended" => return refused("holds a sleeping guest (suspended); wake it up first: system_wakeup"),
        other => {
            return refused(&format!("is in state {other:?}, in which a guest can't be moved; bring it to run first"));
        }
    }
    let migration = qmp.execute("query-migrate", json!({}))?;
    let status = migration["status"].as_str().unwrap_or("none");
    if !["none", "completed", "failed", "cancelled"].contains(&status) {
        return refused(&format!("is already migrating by itself ({status}); wait for it, or end it: migrate_cancel"));
    }
    let reasons = migration["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let reasons: Vec<&str> = reasons.filter(|reason| !balloon.is_some_and(|own| own.is_reason(reason))).collect();
    if reasons.is_empty() {
        return Ok(());
    }
    refused(&format!("can't save its devices' state: {}; remove that device{}", reasons.join("; "), balloon_hint(qmp)))
}

/// For a refusal: what may be the reason has a cure.
fn balloon_hint(qmp: &mut Qmp) -> &'static str {
    match devices(qmp, may_be_anything) {
        Ok(found) if !found.is_empty() => ", or name its socket with --balloon if it is a transship balloon",
        _ => "",
    }
}

/// The run state and migration state of a destination.
pub(super) fn destination_state(qmp: &mut Qmp) -> Result<(), GuestError> {
    let run_state = run_state(qmp)?;
    if run_state != "inmigrate" {
        return Err(GuestError(format!(
            "this QEMU does not wait for a guest, it is {run_state:?}; start it with -incoming defer"
        )));
    }
    let migration = qmp.execute("query-migrate", json!({}))?;
    match migration["status"].as_str().unwrap_or("none") {
        "none" => Ok(()),
        "failed" => {
            Err(GuestError("an earlier load failed in this QEMU, which it can't repeat; start a new one".to_owned()))
        }
        status => Err(GuestError(format!(
            "this QEMU already listens for a guest by itself ({status}); start it with -incoming defer"
        ))),
    }
}

/// A device that no guest can bring along: it would be there without its state.
pub(super) fn no_balloon_yet(qmp: &mut Qmp) -> Result<(), GuestError> {
    match devices(qmp, may_be_anything)?.first() {
        None => Ok(()),
        Some(device) => Err(GuestError(format!(
            "{device} of this QEMU is one that can't come with a guest; start it without, and plug it in when the guest is there: device_add"
        ))),
    }
}

/// Devices and processes that write guest memory behind the tracker.
pub(super) fn untracked_writers(
    qmp: &mut Qmp,
    backends: &[Backend],
    balloon: Option<&OwnBalloon>,
) -> Result<(), GuestError> {
    let is_own = |device: &Device| balloon.is_some_and(|own| own.is(device));
    let behind = devices(qmp, writes_behind)?;
    let mut found: Vec<String> = behind.iter().filter(|device| !is_own(device)).map(Device::to_string).collect();
    found.extend(network_backends(qmp)?);
    found.extend(direct_disks(qmp)?);
    let others = other_writers(qmp.pid(), backends);
    let strangers = others.iter().filter(|process| !balloon.is_some_and(|own| own.is_process(process.pid)));
    found.extend(strangers.map(Process::to_string));
    if found.is_empty() {
        return Ok(());
    }
    Err(GuestError(format!(
        "writes to guest memory that can't be tracked: {}; remove it, or give --allow-untracked-writers if it is quiet for the whole \
         move",
        found.join(", ")
    )))
}

/// A destination's memory that another process has open for writing is most likely another guest's.
pub(super) fn alone_in_memory(qmp: &Qmp, backends: &[Backend]) -> Result<(), GuestError> {
    match other_writers(qmp.pid(), backends).first() {
        None => Ok(()),
        Some(process) => Err(GuestError(format!(
            "the destination's memory file is also in use by {process}; loading would destroy what is in it: give each QEMU a \
             mem-path of its own"
        ))),
    }
}

/// Refuses devices that have to say something before the first page, but can say it only when the guest stands still.
pub(super) fn state_before_pages(qmp: &mut Qmp) -> Result<(), GuestError> {
    match devices(qmp, |kind| kind.starts_with("virtio-mem"))?.first() {
        None => Ok(()),
        Some(device) => Err(GuestError(format!(
            "{device} says how much memory is plugged before the first page, and we know it only when the guest stands still; have a transship \
             receive the guest, or save it and load the file there"
        ))),
    }
}

/// Whether the VM has a device by which the guest or its host gives memory back: then there may be new holes at any time.
pub(super) fn freeing(qmp: &mut Qmp) -> Result<Freeing, GuestError> {
    let gives_back = |kind: &str| kind.contains("balloon") || kind.starts_with("virtio-mem");
    Ok(if devices(qmp, |kind| gives_back(kind) || may_be_anything(kind))?.is_empty() {
        Freeing::Never
    } else {
        Freeing::Possible
    })
}

/// Its own processor or process writes to the guest: VFIO, vDPA, vhost-user, vhost-scsi.
fn writes_behind(device_type: &str) -> bool {
    ["vfio-", "vhost-user-", "vhost-vdpa-", "vhost-scsi", "x-vfio-user"]
        .iter()
        .any(|prefix| device_type.starts_with(prefix))
}

/// Network back ends are no objects: the only list of them is the monitor's text.
fn network_backends(qmp: &mut Qmp) -> Result<Vec<String>, GuestError> {
    let text = qmp.execute("human-monitor-command", json!({ "command-line": "info network" }))?;
    let behind = |line: &&str| line.contains("type=vhost-user") || line.contains("type=vhost-vdpa");
    let name = |line: &str| format!("network {}", line.trim().trim_start_matches("\\ "));
    Ok(text.as_str().unwrap_or("").lines().filter(behind).map(name).collect())
}

/// What is read past the page cache (O_DIRECT, or a driver outside the kernel) is written into guest memory by the disk.
/// The kernel looks at the page when the read begins; if a scan comes between, the data itself goes unseen.
fn direct_disks(qmp: &mut Qmp) -> Result<Vec<String>, GuestError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({}))?;
    Ok(nodes.as_array().into_iter().flatten().filter_map(direct_disk).collect())
}

fn direct_disk(node: &Value) -> Option<String> {
    let name = node["node-name"].as_str().unwrap_or("?");
    let driver = node["drv"].as_str().unwrap_or("?");
    if driver.starts_with("nvme") || driver.starts_with("virtio-blk-v") {
        return Some(format!("disk {name} (driver {driver})"));
    }
    let direct = node["cache"]["direct"].as_bool() == Some(true);
    direct.then(|| format!("disk {name} with cache.direct=on (use cache=writeback)"))
}

/// A process, for messages.
struct Process {
    pid: i32,
    name: String,
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Processes other than QEMU and ourselves that map the memory's files shared and writable. Those of other users are
/// seen only with the right to; processes that end meanwhile don't matter.
fn other_writers(qemu: i32, backends: &[Backend]) -> Vec<Process> {
    let files: HashSet<FileId> = backends.iter().map(|backend| backend.file).collect();
    let ourselves = rustix::process::getpid().as_raw_nonzero().get();
    let pids =
        fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| ![qemu, ourselves].contains(pid))
        .filter(|pid| {
            mappings(*pid).is_ok_and(|all| all.iter().any(|m| m.is_shared && m.is_writable && files.contains(&m.file)))
        })
        .map(|pid| Process {
            pid,
            name: fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn kernels_before_6_7_are_refused() {
        for new in ["6.7.0", "6.18.44-fc-v657", "10.0", "7.0-rc1", "6.7-arch1-1"] {
            assert!(kernel(new).is_ok(), "{new}");
        }
        for old in ["6.6.99", "5.15.0-1051-generic", "6.1.0-28-amd64", ""] {
            assert!(kernel(old).unwrap_err().to_string().contains("boot Linux 6.7 or newer"), "{old}");
        }
    }

    #[test]
    fn device_types_that_write_by_themselves_are_known() {
        for kind in ["vfio-pci", "vhost-user-fs-pci", "vhost-user-blk-pci-non-transitional", "vhost-vdpa-device-pci"] {
            assert!(writes_behind(kind), "{kind}");
        }
        for kind in ["virtio-net-pci", "virtio-blk-pci", "vhost-vsock-pci", "VGA"] {
            assert!(!writes_behind(kind), "{kind}");
        }
    }

    #[test]
    fn a_process_that_is_gone_can_not_be_traced() {
        assert!(may_ptrace(i32::MAX).unwrap_err().to_string().contains("run as root or as QEMU's user"));
    }
}
