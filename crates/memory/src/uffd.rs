//! The kernel's interface to faults: userfaultfd. Structures and numbers are those of Linux 6.7 (`linux/userfaultfd.h`), which promises to
//! keep them.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// What a userfaultfd is used for.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    /// What `UFFDIO_API` is asked for.
    features: u64,
    /// What memory is registered for.
    mode: u64,
}

/// To track writes. All its features came with Linux 6.7 or before; without any one of them a write could be missed.
pub(crate) const TRACK: Use = Use { features: WP_HUGETLBFS_SHMEM | WP_UNPOPULATED | WP_ASYNC, mode: 1 << 1 };
/// Write protection of shared memory.
const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// Write protection also of pages that are not there yet.
const WP_UNPOPULATED: u64 = 1 << 13;
/// The kernel lets a write through by itself and takes note of it; nobody waits for us.
const WP_ASYNC: u64 = 1 << 15;

/// To map what a hugetlbfs file has (Linux 5.13).
pub(crate) const MINOR: Use = Use { features: MINOR_HUGETLBFS, mode: 1 << 2 };
/// Pages that are in the file and not in the mapping are ours to map.
const MINOR_HUGETLBFS: u64 = 1 << 9;

const API_VERSION: u64 = 0xaa;
/// A userfaultfd that needs no privilege.
const USER_MODE_ONLY: libc::c_int = 1;

const UFFDIO_API: libc::Ioctl = read_write(0xaa, 0x3f, size_of::<Api>());
const UFFDIO_REGISTER: libc::Ioctl = read_write(0xaa, 0x00, size_of::<Register>());
const UFFDIO_CONTINUE: libc::Ioctl = read_write(0xaa, 0x07, size_of::<Continue>());
/// The number of an ioctl that takes and gives back a structure of `size` bytes.
pub(crate) const fn read_write(group: u8, number: u8, size: usize) -> libc::Ioctl {
    const READ_WRITE: u32 = 3;
    ((READ_WRITE << 30) | ((size as u32) << 16) | ((group as u32) << 8) | number as u32) as libc::Ioctl
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Continue {
    start: u64,
    len: u64,
    mode: u64,
    mapped: i64,
}

const _: () = {
    assert!(size_of::<Api>() == 24);
    assert!(size_of::<Register>() == 32);
    assert!(size_of::<Continue>() == 32);
    assert!(UFFDIO_API as u32 == 0xc018_aa3f);
    assert!(UFFDIO_REGISTER as u32 == 0xc020_aa00);
    assert!(UFFDIO_CONTINUE as u32 == 0xc020_aa07);
};

/// A userfaultfd for memory of this process.
pub(crate) fn create() -> io::Result<OwnedFd> {
    // SAFETY: userfaultfd(2) takes flags and gives a descriptor; no memory is involved.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, USER_MODE_ONLY | libc::O_CLOEXEC) };
    let fd = done(fd as libc::c_int)?;
    // SAFETY: just made by the kernel, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Agrees with the kernel on the use. To be called once, before anything else.
pub(crate) fn negotiate(uffd: BorrowedFd<'_>, wanted: Use) -> io::Result<()> {
    let mut api = Api { api: API_VERSION, features: wanted.features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one Api, whose size the number holds.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) }).map(drop)
}

/// Takes `len` bytes from `start` in the process that created the userfaultfd into use. What is in this use stays so.
pub(crate) fn register(uffd: BorrowedFd<'_>, wanted: Use, start: u64, len: u64) -> io::Result<()> {
    let mut register = Register { start, len, mode: wanted.mode, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER reads and writes one Register, whose size the number holds. It changes no memory of ours:
    // `TRACK` and `MINOR` decide about faults, not about contents.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) }).map(drop)
}

/// Maps the pages that the file has, up to the first hole, in memory that is registered for [`MINOR`]. How many bytes.
pub(crate) fn map_present(uffd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<u64> {
    let mut proceed = Continue { start, len, mode: 0, mapped: 0 };
    // SAFETY: UFFDIO_CONTINUE reads and writes one Continue, whose size the number holds. The mapping gets pages of its
    // own file, which is what it holds anyway.
    let result = done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_CONTINUE, &raw mut proceed) });
    match (result, u64::try_from(proceed.mapped)) {
        (Ok(_), Ok(mapped)) => Ok(mapped),
        (Err(error), Ok(mapped)) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(mapped),
        (Err(error), _) if error.raw_os_error() == Some(libc::EFAULT) => Ok(0),
        (Err(error), _) => Err(error),
        (Ok(_), Err(_)) => Err(io::ErrorKind::InvalidData.into()),
    }
}

pub(crate) fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
