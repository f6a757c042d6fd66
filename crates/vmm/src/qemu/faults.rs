//! Whose faults a userfaultfd of QEMU sees, and how QEMU comes to make it.
//!
//! To track writes, a userfaultfd for the program's own faults is enough: nobody waits, and the kernel takes note of
//! its own writes by itself. Where writers and readers are to *wait* for us, also KVM must, and system calls that read
//! a disk or a network packet into guest memory: with a userfaultfd that does not see the kernel's faults, these would
//! fail instead. Such a one needs a right, which QEMU often lacks (under libvirt it is an ordinary user) and we often
//! have. So where the system call is refused, QEMU gets our open /dev/userfaultfd by QMP, makes it by that, and gives
//! the device back.
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
};

use transship_guest::GuestError;

use super::{
    inject::{self, Faults, InjectError, userfaultfd_of},
    qmp::Qmp,
    rights,
};

const DEVICE: &str = "/dev/userfaultfd";

/// Whether a process, QEMU or one that shares its memory, can be made to make one for tracking. Changes nothing there.
pub(super) fn may_track(pid: i32) -> Result<(), GuestError> {
    inject::may_visit(pid, pid)
}

/// Whether QEMU can be made to make one for which everybody waits. Changes nothing there.
pub(super) fn may_make_wait(qmp: &Qmp) -> Result<(), GuestError> {
    may_track(qmp.pid())?;
    if makes_one_by_itself(qmp.pid()) { Ok(()) } else { device(qmp).map(drop) }
}

/// As the kernel decides it.
fn makes_one_by_itself(pid: i32) -> bool {
    const CAP_SYS_PTRACE: u32 = 19;
    let everybody = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/user")).ok();
    // The right of a namespace of its own does not count.
    let outermost = || namespace(&pid.to_string()).is_some_and(|own| Some(own) == namespace("1"));
    everybody.trim() == "1" || rights::has(&pid.to_string(), CAP_SYS_PTRACE) && outermost()
}

/// A userfaultfd for tracking.
pub(super) fn for_users(pid: i32) -> Result<OwnedFd, GuestError> {
    made(pid, Faults::Users).map_err(|error| refused(pid, error, "not even for itself"))
}

/// A userfaultfd that makes everybody wait, KVM and the kernel too.
pub(super) fn for_all(qmp: &mut Qmp) -> Result<OwnedFd, GuestError> {
    match made(qmp.pid(), Faults::All) {
        Err(InjectError::NotPermitted) => by_device(qmp),
        other => other.map_err(|error| refused(qmp.pid(), error, "")),
    }
}

fn made(pid: i32, faults: Faults) -> Result<OwnedFd, InjectError> {
    // The first thread runs QEMU's main loop, never a vCPU.
    userfaultfd_of(pid, pid, faults)
}

/// The device, and its number.
fn device(qmp: &Qmp) -> Result<(File, u64), GuestError> {
    let unusable =
        |e: io::Error| refused(qmp.pid(), InjectError::NotPermitted, &format!("can't open {DEVICE} from here: {e}"));
    let device = OpenOptions::new().read(true).write(true).open(DEVICE).map_err(unusable)?;
    let number = device.metadata().map_err(unusable)?.rdev();
    Ok((device, number))
}

fn by_device(qmp: &mut Qmp) -> Result<OwnedFd, GuestError> {
    let (device, expected) = device(qmp)?;
    let added = qmp.add_fd(device.as_fd(), &[])?;
    let theirs = added.number;
    // An ioctl on anything else could do anything.
    let found = fs::metadata(format!("/proc/{}/fd/{theirs}", qmp.pid())).map(|file| file.rdev());
    let uffd = match found {
        Ok(number) if number == expected => made(qmp.pid(), Faults::AllByDevice(theirs)),
        _ => Err(InjectError::Failed(GuestError::vmm(format!(
            "QEMU reports {DEVICE} as its descriptor {theirs}, but it is not"
        )))),
    };
    qmp.remove_fd(&added);
    uffd.map_err(|error| refused(qmp.pid(), error, DEVICE))
}

fn refused(pid: i32, error: InjectError, why: &str) -> GuestError {
    match error {
        InjectError::Failed(error) => error,
        InjectError::NotPermitted => GuestError::Unfit(format!(
            "process {pid} may not create a userfaultfd for which KVM and the kernel wait, which --background, \
             --lazy, --tracker sync and kernels before 6.7 need, and {why}; run transship as root, or let every \
             process create one: sysctl \
             vm.unprivileged_userfaultfd=1"
        )),
    }
}
