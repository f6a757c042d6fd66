//! Has another process make system calls that only it can make: for a userfaultfd, which we take from there, or to
//! give its memory back.
//!
//! A userfaultfd tracks the memory of the process that made it, so QEMU must make it. One thread of QEMU is stopped
//! (ptrace), runs `userfaultfd` (or an `ioctl` on /dev/userfaultfd) and, after we have taken a copy of the descriptor,
//! `close`; then it goes on exactly where it was, an interrupted system call included. That takes less than a
//! millisecond. Private memory, too, only its process can give back: by `madvise`.
//!
//! A seccomp filter that would answer the call, perhaps by killing QEMU, is suspended meanwhile. Without permission for
//! that, attaching is refused, unless the filter is known to let the call pass.
//!
//! If the tracing process died in between, the kernel would let the thread run on with our registers. So a short-lived
//! child process traces, in a session of its own with all signals blocked: Ctrl-C, a closed terminal or a `kill -9` of
//! us leave it alone, and it restores the thread and ends. What remains is a SIGKILL aimed at that child itself (or at
//! a whole control group) within that millisecond; nothing in user space can undo that.
mod call;
mod child;
mod failure;
mod filter;
mod rseq;
mod tracee;

use std::{
    fs::File,
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    thread,
    time::Duration,
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt},
};
use transship_guest::GuestError;
use transship_lines::receive_with_fds;

use super::maps::mappings_of;
use call::Errand;
pub(super) use call::Faults;
use child::Target;
use failure::{DONE, InjectionFailure, Step};
pub(super) use tracee::Tracee;

/// How long we wait for the child: longer than it waits for the thread.
const CHILD_WAIT: Duration = Duration::from_secs(20);
/// The `syscall` instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Why there is no userfaultfd.
#[derive(Debug, thiserror::Error)]
pub(super) enum InjectError {
    /// The process has no right to make one that sees the kernel's faults.
    #[error("not permitted")]
    NotPermitted,
    /// Anything else.
    #[error(transparent)]
    Failed(GuestError),
}

/// Whether a thread of process `pid` can be made to make calls, as far as its seccomp filter goes. Changes nothing
/// there.
pub(super) fn may_visit(pid: i32, thread: i32) -> Result<(), GuestError> {
    if filter::lets_pass(pid, thread) || filter::can_be_suspended() {
        return Ok(());
    }
    let refused = InjectionFailure { step: Step::Filter, errno: libc::EPERM };
    Err(error(pid, MAKE, &refused.explain(pid)))
}

/// A userfaultfd of process `pid`, made in its thread `thread`. In the process nothing of it remains.
pub(super) fn userfaultfd_of(pid: i32, thread: i32, faults: Faults) -> Result<OwnedFd, InjectError> {
    let brought = errand(pid, thread, Errand::Make(faults))?;
    brought.ok_or_else(|| InjectError::Failed(error(pid, MAKE, "its descriptor did not come with the answer")))
}

/// Stops thread `thread` of process `pid` where it is. The same thread of ours must let it go.
pub(super) fn hold(pid: i32, thread: i32) -> Result<Tracee, GuestError> {
    let failed = |why: InjectionFailure| {
        GuestError::Unfit(format!("can't hold a processor of the guest, thread {thread}: {}", why.explain(pid)))
    };
    Tracee::hold(thread).map_err(failed)
}

/// Has process `pid` give pieces of its memory back, addresses and lengths, in its thread `thread`: what is its own
/// there is gone, and nothing else of it changes.
pub(super) fn give_back(pid: i32, thread: i32, pieces: &[(u64, u64)]) -> Result<(), GuestError> {
    match errand(pid, thread, Errand::GiveBack(pieces)) {
        Ok(_) => Ok(()),
        Err(InjectError::Failed(error)) => Err(error),
        Err(InjectError::NotPermitted) => Err(error(pid, GIVE_BACK, "not permitted")),
    }
}

fn errand(pid: i32, thread: i32, errand: Errand<'_>) -> Result<Option<OwnedFd>, InjectError> {
    let syscall_at = syscall_instruction(pid).map_err(|why| InjectError::Failed(error(pid, doing(errand), &why)))?;
    visit(Target { pid, thread, syscall_at, errand, filter_lets_pass: filter::lets_pass(pid, thread) }, CHILD_WAIT)
}

/// Has a child of ours make the calls there, and waits for what it brings.
fn visit(target: Target<'_>, wait: Duration) -> Result<Option<OwnedFd>, InjectError> {
    let Target { pid, thread, errand, .. } = target;
    let failed = |why: String| InjectError::Failed(error(pid, doing(errand), &why));
    let (ours, childs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|e| failed(e.to_string()))?;
    sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(wait)).map_err(|e| failed(e.to_string()))?;
    let child = start_child(target, &childs).map_err(|e| failed(e.to_string()))?;
    drop(childs);
    let result = receive(&ours);
    reap(child, matches!(result, Err(Received::Silence)));
    result.map_err(|received| match received {
        // A program may always see its own faults: if not, something else is wrong.
        Received::InjectionFailure(InjectionFailure { step: Step::Userfaultfd, errno: libc::EPERM })
            if matches!(errand, Errand::Make(Faults::All)) =>
        {
            InjectError::NotPermitted
        }
        Received::InjectionFailure(failure) => failed(failure.explain(pid)),
        Received::Silence => {
            failed(format!("its thread {thread} did not continue within {} s; is QEMU frozen?", wait.as_secs()))
        }
        Received::Nothing => failed("the process that should have traced it was killed".to_owned()),
    })
}

const MAKE: &str = "create a userfaultfd";
const GIVE_BACK: &str = "give its memory back";

fn doing(errand: Errand<'_>) -> &'static str {
    match errand {
        Errand::Make(_) => MAKE,
        Errand::GiveBack(_) => GIVE_BACK,
    }
}

fn error(pid: i32, doing: &str, why: &str) -> GuestError {
    GuestError::Unfit(format!("can't make QEMU (process {pid}) {doing}: {why}"))
}

/// An address of a `syscall` instruction in the process: in the vDSO, or in some library.
fn syscall_instruction(pid: i32) -> Result<u64, String> {
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(|e| format!("can't read its memory: {e}"))?;
    let mut executable = mappings_of(pid).map_err(|e| e.to_string())?;
    executable.retain(|mapping| mapping.is_executable && mapping.path != "[vsyscall]");
    executable.sort_by_key(|mapping| mapping.path != "[vdso]");
    let mut code = vec![0; 64 << 10];
    for mapping in executable {
        for start in (mapping.start..mapping.end).step_by(code.len()) {
            let length = code.len().min((mapping.end - start) as usize);
            if memory.read_exact_at(&mut code[..length], start).is_err() {
                continue;
            }
            if let Some(at) = code[..length].windows(2).position(|two| two == SYSCALL) {
                return Ok(start + at as u64);
            }
        }
    }
    Err("no syscall instruction found in it; is it a 64-bit x86 program?".to_owned())
}

/// What the child reports, besides what it was sent for.
enum Received {
    InjectionFailure(InjectionFailure),
    /// Nothing within the limit: the child still tries to restore the thread.
    Silence,
    /// The child ended without a word.
    Nothing,
}

fn receive(from: &OwnedFd) -> Result<Option<OwnedFd>, Received> {
    let mut bytes = [0; 8];
    let received = match retry_on_intr(|| receive_with_fds(from, &mut bytes, RecvFlags::empty())) {
        Ok(received) => received,
        Err(Errno::AGAIN) => return Err(Received::Silence),
        Err(_) => return Err(Received::Nothing),
    };
    match (received.bytes, received.fds.into_iter().next()) {
        (8, Some(fd)) => Ok(Some(fd)),
        (8, None) if bytes == DONE => Ok(None),
        (8, None) => Err(Received::InjectionFailure(InjectionFailure::from_bytes(bytes))),
        _ => Err(Received::Nothing),
    }
}

/// Waits for the child's end, so that it leaves no zombie. One that still repairs is left to it, and to a thread that
/// waits.
fn reap(child: libc::pid_t, still_at_work: bool) {
    let wait = move || {
        // SAFETY: waitpid accepts any process id and a null status.
        while unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) } == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    };
    if still_at_work {
        // Without a thread to be had, a zombie until we end.
        let _ = thread::Builder::new().name("reap".to_owned()).spawn(wait);
    } else {
        wait();
    }
}

/// Forks the child that traces. Returns its process id.
fn start_child(target: Target<'_>, result: &OwnedFd) -> io::Result<libc::pid_t> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are writable; sigfillset initialises `all` before it is used. The mask is put back below.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    // SAFETY: the child runs only `child::main`, which allocates nothing, takes no lock, calls async-signal-safe
    // functions only and never returns; so it does not matter what other threads did at the moment of the fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        child::main(target, result.as_raw_fd());
    }
    let error = io::Error::last_os_error();
    // SAFETY: `before` was filled by the first pthread_sigmask, which can't fail with valid arguments.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    if child < 0 { Err(error) } else { Ok(child) }
}
#[cfg(test)]
mod tests;
