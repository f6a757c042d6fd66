//! What a thread of another process is made to do.
use std::os::fd::RawFd;

/// What it is sent for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Errand<'a> {
    /// To make a userfaultfd, of which we get a copy.
    Make(Faults),
    /// To give these pieces of the process's memory back: addresses and lengths.
    GiveBack(&'a [(u64, u64)]),
}

/// The system call that gives a piece back: its number and arguments.
pub(super) fn give_back((start, len): (u64, u64)) -> (i64, [u64; 3]) {
    (libc::SYS_madvise, [start, len, libc::MADV_DONTNEED as u64])
}

/// Lets an unprivileged process make a userfaultfd.
const UFFD_USER_MODE_ONLY: u64 = 1;
/// Makes a userfaultfd, as an ioctl on /dev/userfaultfd.
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

/// Whose faults a userfaultfd is to see, and so how it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qemu) enum Faults {
    /// Those of the program itself. Any process may make this one.
    Users,
    /// Those of the kernel too. Needs a right of the process.
    All,
    /// The same, made by the process's descriptor of /dev/userfaultfd. Needs nothing but that descriptor.
    AllByDevice(RawFd),
}

impl Faults {
    /// The system call: its number and arguments.
    pub(super) fn call(self) -> (i64, [u64; 3]) {
        let flags = libc::O_CLOEXEC as u64;
        // The reader of faults polls, which the kernel allows only on a userfaultfd that does not block.
        let all = flags | libc::O_NONBLOCK as u64;
        match self {
            Self::Users => (libc::SYS_userfaultfd, [flags | UFFD_USER_MODE_ONLY, 0, 0]),
            Self::All => (libc::SYS_userfaultfd, [all, 0, 0]),
            Self::AllByDevice(device) => (libc::SYS_ioctl, [device as u64, USERFAULTFD_IOC_NEW, all]),
        }
    }
}
