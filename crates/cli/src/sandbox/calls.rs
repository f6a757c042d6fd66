//! The system calls that a confined process still makes, by what they are for.
//!
//! Found by strace of real runs, and by what the C library may do in its place on other systems.
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// Calls for one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Calls {
    /// What every process of ours does: memory of its own, threads of its own, clocks, signals to itself, its end.
    Threads,
    /// Reading and writing what is open, sockets that were made before, and pairs of new ones.
    Streams,
    /// Guest memory: mapped files, and descriptors of another process's memory.
    Memory,
    /// A guest that runs before its pages are there: which of them were brought, and what its memory is.
    Filling,
    /// What waits for many descriptors.
    Events,
    /// Files with many requests in flight. What is asked for by such a ring the filter does not see; the user and
    /// Landlock hold for that, too.
    Rings,
    /// Completing a file in its folder. Which paths, Landlock says.
    Files,
    /// The end of processes that it has started before.
    Children,
    /// New sockets of this host, which nobody reaches who has no path to them.
    LocalSockets,
}

/// A call, and what its arguments must be: one of these rules, or anything if there is none.
pub(super) type Allowed = (i64, Vec<SeccompRule>);

impl Calls {
    pub(super) fn list(self) -> Vec<Allowed> {
        match self {
            Self::Threads => plain(THREADS).chain(threads()).collect(),
            Self::Streams => plain(STREAMS).chain(streams()).collect(),
            Self::Memory => plain(MEMORY).chain([own_faults()]).collect(),
            Self::Filling => plain(FILLING).collect(),
            Self::Events => plain(EVENTS).collect(),
            Self::Rings => plain(RINGS).collect(),
            Self::Files => plain(FILES).collect(),
            Self::Children => plain(CHILDREN).collect(),
            Self::LocalSockets => {
                let local = vec![rule(&[is(0, libc::AF_UNIX as u64)])];
                plain(LOCAL).chain([(libc::SYS_socket, local)]).collect()
            }
        }
    }
}

/// More than libc has a name for on every system: cachestat (Linux 6.5).
const SYS_CACHESTAT: i64 = 451;

const THREADS: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    // Never done: another filter says that there is none, and the C library takes clone.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

const STREAMS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_eventfd2,
    libc::SYS_fstat,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_lseek,
    libc::SYS_pipe2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_write,
    libc::SYS_writev,
];

const MEMORY: &[i64] = &[
    SYS_CACHESTAT,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
];

const FILLING: &[i64] = &[libc::SYS_mlock, libc::SYS_readlinkat];

const EVENTS: &[i64] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

const RINGS: &[i64] = &[libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_io_uring_setup];

const FILES: &[i64] = &[
    libc::SYS_fchmod,
    libc::SYS_fchown,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_sync_file_range,
    libc::SYS_unlinkat,
];

const CHILDREN: &[i64] = &[libc::SYS_wait4, libc::SYS_waitid];

const LOCAL: &[i64] = &[
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// Of terminals, sockets, guest memory and files; by number, as libc lacks some.
const IOCTLS: [u64; 16] = [
    libc::TCGETS,
    libc::TIOCGWINSZ,
    libc::FIONBIO,
    libc::FIONREAD,
    0x802c_542a, // TCGETS2
    0xc018_aa3f, // UFFDIO_API
    0xc020_aa00, // UFFDIO_REGISTER
    0x8010_aa01, // UFFDIO_UNREGISTER
    0xc018_aa06, // UFFDIO_WRITEPROTECT
    0x8010_aa02, // UFFDIO_WAKE
    0xc060_6610, // PAGEMAP_SCAN
    0xc028_aa03, // UFFDIO_COPY
    0xc020_aa04, // UFFDIO_ZEROPAGE
    0xc020_aa07, // UFFDIO_CONTINUE
    0x8008_6601, // FS_IOC_GETFLAGS
    0x4008_6602, // FS_IOC_SETFLAGS
];

/// What fcntl has for a signal to another process when something comes: F_SETOWN, F_SETSIG, F_SETOWN_EX.
const SIGNALLING: [u64; 3] = [8, 10, 15];

/// A name for a thread, and two questions of the standard library's.
const PRCTLS: [u64; 3] = [libc::PR_SET_NAME as u64, libc::PR_GET_NAME as u64, 0x4155_5856 /* PR_GET_AUXV */];

fn plain(calls: &'static [i64]) -> impl Iterator<Item = Allowed> {
    calls.iter().map(|call| (*call, Vec::new()))
}

/// New threads but no new processes, and no memory that can be executed.
fn threads() -> Vec<Allowed> {
    let ourselves = u64::from(std::process::id());
    let not_executable = || vec![rule(&[none_of(2, libc::PROT_EXEC as u64)])];
    vec![
        (libc::SYS_clone, vec![rule(&[all_of(0, libc::CLONE_THREAD as u64)])]),
        (libc::SYS_kill, vec![rule(&[is(0, ourselves)])]),
        (libc::SYS_tgkill, vec![rule(&[is(0, ourselves)])]),
        (libc::SYS_mmap, not_executable()),
        (libc::SYS_mprotect, not_executable()),
        (libc::SYS_prctl, PRCTLS.iter().map(|&option| rule(&[is(0, option)])).collect()),
    ]
}

/// A userfaultfd of this process's own, for which no other one and no part of the kernel waits: by that it is seen
/// which huge pages a file has.
fn own_faults() -> Allowed {
    const USER_MODE_ONLY: u64 = 1;
    (libc::SYS_userfaultfd, vec![rule(&[all_of(0, USER_MODE_ONLY)])])
}

/// The memory of the process with this number, and of no other.
pub(super) fn reading(process: i32) -> Allowed {
    (libc::SYS_process_vm_readv, vec![rule(&[is(0, process as u64)])])
}

/// Of descriptors all but whom they signal. Of pairs only those that are connected for good: nothing goes from them to
/// another address.
fn streams() -> Vec<Allowed> {
    const KIND_OF_SOCKET: u64 = 0xf;
    let signals_nobody = SIGNALLING.map(|request| condition(1, SeccompCmpOp::Ne, request));
    let stream = condition(1, SeccompCmpOp::MaskedEq(KIND_OF_SOCKET), libc::SOCK_STREAM as u64);
    vec![
        (libc::SYS_fcntl, vec![rule(&signals_nobody)]),
        (libc::SYS_ioctl, IOCTLS.iter().map(|&request| rule(&[is(1, request)])).collect()),
        (libc::SYS_socketpair, vec![rule(&[is(0, libc::AF_UNIX as u64), stream])]),
    ]
}

fn is(argument: u8, value: u64) -> SeccompCondition {
    condition(argument, SeccompCmpOp::Eq, value)
}

fn all_of(argument: u8, bits: u64) -> SeccompCondition {
    condition(argument, SeccompCmpOp::MaskedEq(bits), bits)
}

fn none_of(argument: u8, bits: u64) -> SeccompCondition {
    condition(argument, SeccompCmpOp::MaskedEq(bits), 0)
}

/// The kernel takes these arguments as 32 bits.
fn condition(argument: u8, op: SeccompCmpOp, value: u64) -> SeccompCondition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value).expect("a call has six arguments")
}

fn rule(conditions: &[SeccompCondition]) -> SeccompRule {
    SeccompRule::new(conditions.to_vec()).expect("there is a condition")
}
