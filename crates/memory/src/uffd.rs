//! The kernel's interface to faults: userfaultfd. Structures and numbers are those of Linux 6.7
//! (`linux/userfaultfd.h`), which promises to keep them.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicI64, AtomicU64, Ordering},
};

use crate::ByteRange;

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

/// To have writers wait.
pub(crate) const PROTECT: Use = Use { features: PAGEFAULT_WP | WP_HUGETLBFS_SHMEM | WP_UNPOPULATED, mode: 1 << 1 };
/// Write protection at all.
const PAGEFAULT_WP: u64 = 1 << 0;

/// To have writers wait for a moment, and to know which thread each is: private memory (Linux 5.7).
pub(crate) const WAIT: Use = Use { features: PAGEFAULT_WP | THREAD_ID, mode: 1 << 1 };
/// The same, of memory of any kind (Linux 5.19).
pub(crate) const WAIT_SHARED: Use = Use { features: WAIT.features | WP_HUGETLBFS_SHMEM, mode: 1 << 1 };
/// A message names the thread that waits.
const THREAD_ID: u64 = 1 << 8;

/// To have those wait who touch what is not there (Linux 4.11).
pub(crate) const MISSING: Use = Use { features: MISSING_HUGETLBFS | MISSING_SHMEM, mode: 1 << 0 };
const MISSING_HUGETLBFS: u64 = 1 << 4;
const MISSING_SHMEM: u64 = 1 << 5;

/// To map what a hugetlbfs file has (Linux 5.13).
pub(crate) const MINOR: Use = Use { features: MINOR_HUGETLBFS, mode: 1 << 2 };
/// The same of a tmpfs (Linux 5.14).
pub(crate) const MINOR_SHMEM: Use = Use { features: MINOR_OF_SHMEM, mode: 1 << 2 };
/// Pages that are in the file and not in the mapping are ours to map.
const MINOR_HUGETLBFS: u64 = 1 << 9;
const MINOR_OF_SHMEM: u64 = 1 << 10;

const API_VERSION: u64 = 0xaa;
/// A userfaultfd that needs no privilege.
const USER_MODE_ONLY: libc::c_int = 1;

const UFFDIO_API: libc::Ioctl = read_write(0xaa, 0x3f, size_of::<Api>());
const UFFDIO_REGISTER: libc::Ioctl = read_write(0xaa, 0x00, size_of::<Register>());
const UFFDIO_UNREGISTER: libc::Ioctl = number(READ, 0xaa, 0x01, size_of::<Range>());
const UFFDIO_WAKE: libc::Ioctl = number(READ, 0xaa, 0x02, size_of::<Range>());
const UFFDIO_COPY: libc::Ioctl = read_write(0xaa, 0x03, size_of::<CopyCall>());
const UFFDIO_ZEROPAGE: libc::Ioctl = read_write(0xaa, 0x04, size_of::<ZeroPage>());
const UFFDIO_WRITEPROTECT: libc::Ioctl = read_write(0xaa, 0x06, size_of::<WriteProtect>());
const UFFDIO_CONTINUE: libc::Ioctl = read_write(0xaa, 0x07, size_of::<Continue>());
/// What the kernel calls reading is what it gives; userfaultfd calls some ioctls so that take only.
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// The number of an ioctl that takes and gives back a structure of `size` bytes.
pub(crate) const fn read_write(group: u8, ioctl: u8, size: usize) -> libc::Ioctl {
    number(READ_WRITE, group, ioctl, size)
}

const fn number(direction: u32, group: u8, ioctl: u8, size: usize) -> libc::Ioctl {
    ((direction << 30) | ((size as u32) << 16) | ((group as u32) << 8) | ioctl as u32) as libc::Ioctl
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Continue {
    range: Range,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

impl From<ByteRange> for Range {
    fn from(range: ByteRange) -> Self {
        Self { start: range.start, len: range.len() }
    }
}

/// What UFFDIO_COPY takes, and where it says how much it has put: in bytes, or below 0 the error.
#[repr(C)]
#[derive(Default)]
pub(crate) struct CopyCall {
    to: AtomicU64,
    from: AtomicU64,
    len: AtomicU64,
    mode: AtomicU64,
    pub(crate) copied: AtomicI64,
}

#[repr(C)]
struct ZeroPage {
    range: Range,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

const _: () = {
    assert!(size_of::<Api>() == 24);
    assert!(size_of::<Register>() == 32);
    assert!(size_of::<Continue>() == 32);
    assert!(UFFDIO_API as u32 == 0xc018_aa3f);
    assert!(UFFDIO_REGISTER as u32 == 0xc020_aa00);
    assert!(UFFDIO_UNREGISTER as u32 == 0x8010_aa01);
    assert!(UFFDIO_WAKE as u32 == 0x8010_aa02);
    assert!(UFFDIO_COPY as u32 == 0xc028_aa03);
    assert!(UFFDIO_ZEROPAGE as u32 == 0xc020_aa04);
    assert!(UFFDIO_WRITEPROTECT as u32 == 0xc018_aa06);
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

/// Whether the kernel knows this use. Asks by a userfaultfd of our own; none: we may not make one.
pub(crate) fn is_known(wanted: Use) -> Option<bool> {
    let uffd = create().ok()?;
    let mut api = Api { api: API_VERSION, features: 0, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one Api, whose size the number holds.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) }).ok()?;
    Some(api.features & wanted.features == wanted.features)
}

/// Agrees with the kernel on the use. To be called once, before anything else.
pub(crate) fn negotiate(uffd: BorrowedFd<'_>, wanted: Use) -> io::Result<()> {
    let mut api = Api { api: API_VERSION, features: wanted.features, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one Api, whose size the number holds.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) }).map(drop)
}

/// Takes addresses of the process that created the userfaultfd into use. What is in this use stays so.
pub(crate) fn register(uffd: BorrowedFd<'_>, wanted: Use, addresses: ByteRange) -> io::Result<()> {
    let mut register = Register { range: addresses.into(), mode: wanted.mode, ioctls: 0 };
    // SAFETY: UFFDIO_REGISTER reads and writes one Register, whose size the number holds. It changes no memory of ours:
    // `TRACK` and `MINOR` decide about faults, not about contents.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) }).map(drop)
}

/// Maps the pages that the file has, up to the first hole, in memory that is registered for [`MINOR`] or
/// [`MINOR_SHMEM`], and is not mapped there yet. How many bytes.
pub(crate) fn map_present(uffd: BorrowedFd<'_>, addresses: ByteRange) -> io::Result<u64> {
    let mut proceed = Continue { range: addresses.into(), mode: 0, mapped: 0 };
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

/// Leaves the memory to the kernel again, and wakes the threads that wait there.
pub(crate) fn unregister(uffd: BorrowedFd<'_>, addresses: ByteRange) -> io::Result<()> {
    let mut range = Range::from(addresses);
    // SAFETY: UFFDIO_UNREGISTER reads one Range, whose size the number holds. It changes who answers faults, and no
    // contents.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER, &raw mut range) }).map(drop)
}

/// Wakes the threads that wait there; they check again whether they may go on.
pub(crate) fn wake(uffd: BorrowedFd<'_>, addresses: ByteRange) -> io::Result<()> {
    let mut range = Range::from(addresses);
    // SAFETY: UFFDIO_WAKE reads one Range, whose size the number holds, and no other memory.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE, &raw mut range) }).map(drop)
}

/// Whether writers wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writes {
    Wait,
    /// And those that wait are woken.
    Pass,
}

/// Has writers to memory registered for [`PROTECT`] wait, or lets them through.
pub(crate) fn write_protect(uffd: BorrowedFd<'_>, addresses: ByteRange, writes: Writes) -> io::Result<()> {
    const PROTECT: u64 = 1;
    let mode = if writes == Writes::Wait { PROTECT } else { 0 };
    let mut protect = WriteProtect { range: addresses.into(), mode };
    // SAFETY: UFFDIO_WRITEPROTECT reads one WriteProtect, whose size the number holds. It decides about faults, and
    // changes no contents.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) }).map(drop)
}

/// Repeats what the kernel can't do at the moment, because the process is changing its mappings.
pub(crate) fn while_changing(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => std::thread::yield_now(),
            result => return result,
        }
    }
}

/// Places pages where there are none, up to the first that is there, and wakes the threads that wait for them. How many
/// bytes, and why not all.
///
/// # Safety
/// Nobody writes as many bytes at `from` during the call, or they need not be anything certain. They need not be
/// readable: then it is an error.
pub(crate) unsafe fn copy(uffd: BorrowedFd<'_>, to: ByteRange, from: *const u8) -> (u64, io::Result<()>) {
    let mut call = CopyCall::default();
    // SAFETY: a structure of our own; the rest by the caller's word.
    let result = unsafe { copy_by(uffd, &raw mut call, to, from, 0) };
    (u64::try_from(call.copied.into_inner()).unwrap_or(0), result)
}

/// As [`copy`], but wakes nobody, and leaves in `call` how many bytes were put; also if the thread is killed meanwhile.
///
/// # Safety
/// As [`copy`]; and `call` is a structure that nobody else uses during the call but to look at its atomics.
pub(crate) unsafe fn copy_noted(
    uffd: BorrowedFd<'_>,
    call: *mut CopyCall,
    to: ByteRange,
    from: *const u8,
) -> io::Result<()> {
    const DONT_WAKE: u64 = 1;
    // SAFETY: by the caller's word.
    unsafe { copy_by(uffd, call, to, from, DONT_WAKE) }
}

/// # Safety
/// As [`copy_noted`].
unsafe fn copy_by(
    uffd: BorrowedFd<'_>,
    call: *mut CopyCall,
    to: ByteRange,
    from: *const u8,
    mode: u64,
) -> io::Result<()> {
    {
        // SAFETY: the caller's structure; all fields are atomics.
        let call = unsafe { &*call };
        call.to.store(to.start, Ordering::Relaxed);
        call.from.store(from.expose_provenance() as u64, Ordering::Relaxed);
        call.len.store(to.len(), Ordering::Relaxed);
        call.mode.store(mode, Ordering::Relaxed);
        call.copied.store(0, Ordering::Relaxed);
    }
    // SAFETY: UFFDIO_COPY reads and writes one CopyCall, whose size the number holds, and reads what it points to by
    // the caller's word. Pages are put only into registered memory, where there were none: no bytes that anybody knew
    // change.
    done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY, call) }).map(drop)
}

/// As [`copy`], with zeros; not for huge pages.
pub(crate) fn zero(uffd: BorrowedFd<'_>, addresses: ByteRange) -> (u64, io::Result<()>) {
    let mut zero = ZeroPage { range: addresses.into(), mode: 0, zeroed: 0 };
    // SAFETY: UFFDIO_ZEROPAGE reads and writes one ZeroPage, whose size the number holds. As with copying, no bytes
    // that anybody knew change.
    let result = done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zero) });
    (u64::try_from(zero.zeroed).unwrap_or(0), result.map(drop))
}

/// Bytes of a message.
pub(crate) const MESSAGE_BYTES: usize = 32;

/// The address of the fault that a message tells of, and the thread, which is 0 where it was not asked for; none if it
/// tells of something else.
pub(crate) fn fault_address(message: &[u8; MESSAGE_BYTES]) -> Option<(u64, u32)> {
    const PAGEFAULT: u8 = 0x12;
    let (head, rest) = message.split_first_chunk::<16>()?;
    let (address, rest) = rest.split_first_chunk()?;
    let (thread, _) = rest.split_first_chunk()?;
    (head[0] == PAGEFAULT).then(|| (u64::from_ne_bytes(*address), u32::from_ne_bytes(*thread)))
}

pub(crate) fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
