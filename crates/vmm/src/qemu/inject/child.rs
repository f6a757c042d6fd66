//! What the child process does: it traces, and reports. No allocation, no lock, no panic, no destructor that matters.
use std::{io::Write, os::fd::RawFd};

use super::{
    call::{Errand, Faults, give_back},
    failure::{DONE, InjectionFailure, Step},
    rseq,
    tracee::Tracee,
};

/// Where to inject.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) pid: libc::pid_t,
    pub(super) thread: libc::pid_t,
    pub(super) syscall_at: u64,
    pub(super) errand: Errand<'a>,
    /// The thread's seccomp filter, if it has one, need not be suspended.
    pub(super) filter_lets_pass: bool,
}

pub(super) fn main(target: Target<'_>, result: RawFd) -> ! {
    // SAFETY: plain system calls on integers. Descriptors other than the result's are closed so that connections of the
    // parent do not stay open if it dies; nobody in this process uses them.
    let result = unsafe {
        libc::setsid();
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        if result != 3 {
            libc::dup3(result, 3, libc::O_CLOEXEC);
        }
        libc::syscall(libc::SYS_close_range, 0, 2, 0);
        libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0);
        3
    };
    let outcome = inject(target);
    report(result, outcome);
    // SAFETY: ends this process without running anything of the parent's. Open descriptors are closed by the kernel.
    unsafe { libc::_exit(0) }
}

fn report(result: RawFd, outcome: Result<Option<RawFd>, InjectionFailure>) {
    let (mut bytes, fd) = match outcome {
        Ok(fd) => (DONE, fd),
        Err(failure) => (failure.to_bytes(), None),
    };
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0u64; 4];
    // SAFETY: all-zero is a valid msghdr (null pointers, zero lengths).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: `control` is aligned for cmsghdr and has room for one with an int (24 of 32 bytes), so the first
        // header and its data lie inside it.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        }
    }
    // SAFETY: the message points to `bytes` and `control`, which live until after the call. If the parent is gone, the
    // descriptor simply dies with us.
    unsafe { libc::sendmsg(result, &message, libc::MSG_NOSIGNAL) };
}

/// The whole visit: seize, stop, borrow, restore, let go.
fn inject(target: Target<'_>) -> Result<Option<RawFd>, InjectionFailure> {
    let tracee = Tracee::stop(target.thread)?;
    let mut saved = tracee.registers()?;
    if saved.cs != 0x33 {
        return Err(InjectionFailure::new(Step::Mode));
    }
    // Only now: from here on it runs none of its own code until it is let go, and then the filter is in force again.
    match tracee.suspend_filter() {
        Err(failure) if !target.filter_lets_pass => return Err(failure),
        _ => {}
    }
    let mask = tracee.block_signals()?;
    if let Some(anew) = rseq::begins_anew_at(target.thread, &saved) {
        saved.rip = anew;
    }
    // From here on the thread is not its own until `restore`.
    let done = match target.errand {
        Errand::Make(faults) => borrow(&tracee, &saved, target, faults).map(Some),
        Errand::GiveBack(pieces) => give_all_back(&tracee, &saved, target, pieces).map(|()| None),
    };
    tracee.restore(&saved, mask)?;
    done
}

fn give_all_back(
    tracee: &Tracee,
    saved: &libc::user_regs_struct,
    target: Target<'_>,
    pieces: &[(u64, u64)],
) -> Result<(), InjectionFailure> {
    for piece in pieces {
        let (number, arguments) = give_back(*piece);
        match tracee.call(saved, target.syscall_at, number, arguments)? {
            0 => {}
            error => return Err(InjectionFailure { step: Step::GiveBack, errno: -error as i32 }),
        }
    }
    Ok(())
}

fn borrow(
    tracee: &Tracee,
    saved: &libc::user_regs_struct,
    target: Target<'_>,
    faults: Faults,
) -> Result<RawFd, InjectionFailure> {
    let (number, arguments) = faults.call();
    let theirs = tracee.call(saved, target.syscall_at, number, arguments)?;
    if theirs < 0 {
        return Err(InjectionFailure { step: Step::Userfaultfd, errno: -theirs as i32 });
    }
    // Whatever has answered, nothing but a userfaultfd is taken or closed.
    if !is_userfaultfd(target.pid, theirs) {
        return Err(InjectionFailure { step: Step::Foreign, errno: theirs as i32 });
    }
    // SAFETY: system calls on integers; a failure is -1, which is reported after the target has closed its copy.
    let ours = unsafe {
        let handle = libc::syscall(libc::SYS_pidfd_open, target.pid, 0) as i32;
        libc::syscall(libc::SYS_pidfd_getfd, handle, theirs as i32, 0) as i32
    };
    let taken = if ours < 0 { Err(InjectionFailure::new(Step::Take)) } else { Ok(ours) };
    tracee.call(saved, target.syscall_at, libc::SYS_close, [theirs as u64, 0, 0])?;
    taken
}

/// Is descriptor `fd` of process `pid` a userfaultfd?
fn is_userfaultfd(pid: libc::pid_t, fd: i64) -> bool {
    const NAME: &[u8] = b"anon_inode:[userfaultfd]";
    let (mut path, mut name) = ([0u8; 64], [0u8; 64]);
    if write!(&mut path[..], "/proc/{pid}/fd/{fd}\0").is_err() {
        return false;
    }
    // SAFETY: the path ends with a 0, and `name` is writable for its length.
    let length = unsafe { libc::readlink(path.as_ptr().cast(), name.as_mut_ptr().cast(), name.len()) };
    usize::try_from(length).is_ok_and(|length| name[..length] == *NAME)
}
