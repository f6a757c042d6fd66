//! userfaultfds that a guest process makes for itself, and gives to its client.
use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use rustix::mm::{UserfaultfdFlags, userfaultfd};

/// `UFFD_USER_MODE_ONLY`: a process without privileges may make one of these. Asynchronous tracking sees the
/// kernel's writes nevertheless.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
const DEVICE: &str = "/dev/userfaultfd";
/// Makes a userfaultfd, as an ioctl on the device; the argument is the flags.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;

/// One that makes nobody wait.
pub(super) fn for_users() -> Result<OwnedFd, String> {
    made(UserfaultfdFlags::CLOEXEC | USER_MODE_ONLY).map_err(|e| format!("can't create a userfaultfd: {e}"))
}

/// One for which KVM and the kernel wait too. It does not block, so its reader polls.
pub(super) fn for_all() -> Result<OwnedFd, String> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    made(flags).or_else(|refused| {
        by_device(flags).map_err(|e| {
            format!(
                "can't create a userfaultfd for which the kernel waits: {refused}, nor through {DEVICE}: {e}; let this \
             process open that device, or let every process create one: sysctl vm.unprivileged_userfaultfd=1"
            )
        })
    })
}

fn made(flags: UserfaultfdFlags) -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is given away before it is used; what is done with it later is the client's affair, which
    // by file permissions acts for the same user or for root.
    Ok(unsafe { userfaultfd(flags) }?)
}

fn by_device(flags: UserfaultfdFlags) -> io::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open(DEVICE)?;
    // SAFETY: this ioctl takes flags and no pointer; what it makes is treated as in `made`.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags.bits()) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}
