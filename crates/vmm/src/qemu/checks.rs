//! What a source or destination QEMU is refused for, each with the line that cures it.
use std::{fs, os::fd::AsFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};
use transship_guest::GuestError;
use transship_memory::{GuestMemory, PAGE_BYTES, Region};

use super::{
    balloon::OwnBalloon,
    given_away,
    machine::{Device, devices, may_be_anything, run_state},
    qmp::{Qmp, Question},
    rights, security_module,
};

/// The kernel that first said which pages are protected from writes. What it can beyond that it is asked for.
const KERNEL_MIN: (u32, u32) = (5, 14);
/// The first one that does so at pages that are not there yet.
const WAIT_MIN: (u32, u32) = (6, 4);
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// Bytes of the largest pages whose writes the kernel tracks.
const LARGEST_TRACKED: u64 = 2 << 20;

/// The machine: x86-64, and a kernel that can track writes of another process.
pub(super) fn host() -> Result<(), GuestError> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err(GuestError::Unfit("attaching to QEMU from outside works only on x86-64 so far".to_owned()));
    }
    kernel(&release())
}

fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// Private huge pages can be given back only where they stay promised to their process: else another one could have
/// them meanwhile.
pub(super) fn huge_pages_stay_promised(memory: &GuestMemory) -> Result<(), GuestError> {
    /// The first kernel that does so.
    const NEEDED: (u32, u32) = (6, 9);
    let is_huge = |region: &&Region| region.is_private() && region.backing_page_bytes() > PAGE_BYTES as u64;
    match memory.regions().iter().find(is_huge) {
        Some(region) if version_of(&release()) < NEEDED => Err(GuestError::Unfit(format!(
            "guest memory {:?} is private memory on huge pages, which this kernel would give to other processes before \
             its pages are brought; leave out --lazy, or boot Linux 6.9 or newer",
            region.name()
        ))),
        _ => Ok(()),
    }
}

/// Version of the kernel that names its release so.
fn version_of(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn kernel(release: &str) -> Result<(), GuestError> {
    if version_of(release) < KERNEL_MIN {
        return Err(GuestError::Unfit(format!(
            "Linux {release} can't track a running guest's writes from outside; boot Linux 5.14 or newer (best 6.7)"
        )));
    }
    Ok(())
}

/// A kernel that can have writers wait at pages that are not there yet.
pub(super) fn can_make_writers_wait() -> Result<(), GuestError> {
    makes_writers_wait(&release())
}

fn makes_writers_wait(release: &str) -> Result<(), GuestError> {
    if version_of(release) < WAIT_MIN {
        return Err(GuestError::Unfit(format!(
            "Linux {release} can't make those wait who write to memory that is being saved; save with --live, or boot              Linux 6.4 or newer"
        )));
    }
    Ok(())
}

/// The right to stop a thread of QEMU and take a descriptor from it. Changes nothing there.
pub(super) fn may_ptrace(pid: i32) -> Result<(), GuestError> {
    let tracer = rights::field(&pid.to_string(), "TracerPid").unwrap_or_else(|| "0".to_owned());
    if tracer != "0" {
        return Err(GuestError::Unfit(format!(
            "process {tracer} (a debugger?) traces QEMU (process {pid}); detach it first"
        )));
    }
    let refused = |e: rustix::io::Errno| {
        GuestError::Unfit(format!(
            "can't trace QEMU (process {pid}): {e}{}; run as root, or as QEMU's user with sysctl \
             kernel.yama.ptrace_scope=0",
            security_module::hint(pid, e)
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
        // Seen on Linux 6.12: of larger ones the scan protects none, and goes no further.
        if region.backing_page_bytes() > LARGEST_TRACKED {
            return Err(GuestError::Unfit(format!(
                "guest memory {:?} is on huge pages of {} MiB, whose writes the kernel can't track; put it on pages of 2 MiB, as in mount -t \
                 hugetlbfs -o pagesize=2M",
                region.name(),
                region.backing_page_bytes() >> 20
            )));
        }
        let Some((file, _)) = region.shared_file() else { continue };
        let system = rustix::fs::fstatfs(file)
            .map_err(|e| GuestError::Unfit(format!("can't inspect guest memory {:?}: {e}", region.name())))?;
        if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&(system.f_type as u64)) {
            return Err(GuestError::Unfit(format!(
                "guest memory {:?} is a file on a disk file system, whose writes the kernel can't track; put it on a tmpfs or \
                 hugetlbfs, as in mem-path=/dev/shm/guest",
                region.name()
            )));
        }
    }
    Ok(())
}

pub(super) fn is_hugetlbfs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type as u64 == HUGETLBFS_MAGIC)
}

/// The run state and migration state of a source. What is in the way only until `balloon` is unplugged is let pass.
pub(super) fn source_state(qmp: &mut Qmp, balloon: Option<&OwnBalloon>) -> Result<(), GuestError> {
    let refused = |why: &str| Err(GuestError::Unfit(format!("this QEMU {why}")));
    let run_state = run_state(qmp)?;
    match run_state.as_str() {
        "paused" if given_away::is_marked(qmp)? => {
            return refused(
                "has given its guest away, and has it standing still; only if that guest runs nowhere else, let it \
                 run first: cont",
            );
        }
        "running" | "paused" | "prelaunch" | "io-error" => {}
        "inmigrate" => {
            return refused("waits for an incoming guest, so it is a destination; name the source, or use receive");
        }
        "postmigrate" => {
            return refused(
                "has already saved its guest's devices, to give the guest away or to keep it stopped (postmigrate), \
                 and can't do so again; only if that guest runs nowhere else, let it run first: cont",
            );
        }
        "suspended" => return refused("holds a sleeping guest (suspended); wake it up first: system_wakeup"),
        other => {
            return refused(&format!("is in state {other:?}, in which a guest can't be moved; let it run first"));
        }
    }
    let migration = qmp.execute("query-migrate", json!({}))?;
    let status = migration["status"].as_str().unwrap_or("none");
    if !["none", "completed", "failed", "cancelled"].contains(&status) {
        return refused(&format!("is already migrating by itself ({status}); wait for it, or end it: migrate_cancel"));
    }
    can_be_saved(qmp, &migration, balloon)
}

/// Refuses a guest with a device that QEMU can't save.
pub(super) fn savable(qmp: &mut Qmp) -> Result<(), GuestError> {
    let (command, arguments) = migration_question();
    let migration = qmp.execute(command, arguments)?;
    can_be_saved(qmp, &migration, None)
}

/// What [`savable`] asks.
pub(super) fn migration_question() -> Question {
    ("query-migrate", json!({}))
}

/// The same as that, by the answer. What is in the way only until `balloon` is unplugged is let pass.
fn can_be_saved(qmp: &mut Qmp, migration: &Value, balloon: Option<&OwnBalloon>) -> Result<(), GuestError> {
    let reasons = migration["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let reasons: Vec<&str> = reasons.filter(|reason| !balloon.is_some_and(|own| own.is_reason(reason))).collect();
    if reasons.is_empty() {
        return Ok(());
    }
    Err(GuestError::Unfit(format!(
        "this QEMU can't save the state of its devices: {}; remove that device{}",
        reasons.join("; "),
        balloon_hint(qmp)
    )))
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
        return Err(GuestError::Unfit(format!(
            "this QEMU does not wait for a guest, it is {run_state:?}; start it with -incoming defer"
        )));
    }
    let migration = qmp.execute("query-migrate", json!({}))?;
    match migration["status"].as_str().unwrap_or("none") {
        "none" => Ok(()),
        "failed" => Err(GuestError::Unfit(
            "an earlier load failed in this QEMU, and it can't load again; start a new one".to_owned(),
        )),
        status => Err(GuestError::Unfit(format!(
            "this QEMU already listens for a guest by itself ({status}); start it with -incoming defer"
        ))),
    }
}

/// A device that no guest can bring along: it would be there without its state.
pub(super) fn no_balloon_yet(qmp: &mut Qmp) -> Result<(), GuestError> {
    match devices(qmp, may_be_anything)?.first() {
        None => Ok(()),
        Some(device) => Err(GuestError::Unfit(format!(
            "{device} of this QEMU can't come with a guest; start QEMU without it, and plug it in when the guest is \
             there: device_add"
        ))),
    }
}

/// Refuses devices that have to say something before the first page, but can say it only when the guest stands still.
pub(super) fn state_before_pages(qmp: &mut Qmp) -> Result<(), GuestError> {
    match devices(qmp, |kind| kind.starts_with("virtio-mem"))?.first() {
        None => Ok(()),
        Some(device) => Err(GuestError::Unfit(format!(
            "{device} sends the amount of plugged memory before the first page, but transship knows it only when the \
             guest is stopped; have a transship receive the guest, or save the guest and load the file there"
        ))),
    }
}

/// A device whose memory is not in the state that QEMU saves by itself ([`super::device_state`]), if there is one.
pub(super) fn with_memory_of_its_own(qmp: &mut Qmp) -> Result<Option<Device>, GuestError> {
    Ok(devices(qmp, |kind| kind.starts_with("virtio-mem") || kind.starts_with("vfio-"))?.into_iter().next())
}

/// Refuses such devices.
pub(super) fn state_without_memory(qmp: &mut Qmp) -> Result<(), GuestError> {
    match with_memory_of_its_own(qmp)? {
        None => Ok(()),
        Some(device) => Err(GuestError::Unfit(format!(
            "{device} can't come with a guest whose memory is not in shared named files; remove it, or start the guest \
             with all memory in such files"
        ))),
    }
}

/// Refuses a guest that has got such a device since it was attached to.
pub(super) fn state_is_whole(qmp: &mut Qmp) -> Result<(), GuestError> {
    match with_memory_of_its_own(qmp)? {
        None => Ok(()),
        Some(device) => Err(GuestError::Unfit(format!("{device} was plugged in meanwhile; start again"))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn kernels_before_5_14_are_refused() {
        for new in
            ["5.14.0-427.el9.x86_64", "6.1.0-28-amd64", "6.7.0", "6.18.44-fc-v657", "10.0", "7.0-rc1", "6.7-arch1-1"]
        {
            assert!(kernel(new).is_ok(), "{new}");
        }
        for old in ["5.13.99", "5.4.0-1051-generic", "4.18.0-553.el8", ""] {
            assert!(kernel(old).unwrap_err().to_string().contains("boot Linux 5.14 or newer"), "{old}");
        }
    }

    #[test]
    fn kernels_before_6_4_make_no_writer_wait() {
        assert!(makes_writers_wait("6.4.0").is_ok() && makes_writers_wait("6.18.44-fc-v657").is_ok());
        let refused = makes_writers_wait("6.1.0-28-amd64").unwrap_err().to_string();
        assert!(refused.contains("Linux 6.1.0-28-amd64") && refused.contains("--live"), "{refused}");
    }

    #[test]
    fn a_process_that_is_gone_can_not_be_traced() {
        assert!(may_ptrace(i32::MAX).unwrap_err().to_string().contains("run as root, or as QEMU's user"));
    }
}
