//! Has another process make a userfaultfd and takes it from there.
//!
//! A userfaultfd tracks the memory of the process that made it, so QEMU must make it. One thread of QEMU is stopped
//! (ptrace), runs `userfaultfd` (or an `ioctl` on /dev/userfaultfd) and, after we have taken a copy of the descriptor, `close`;
//! then it goes on exactly where it was, an interrupted system call included. That takes less than a millisecond.
//!
//! If the tracing process died in between, the kernel would let the thread run on with our registers. So a short-lived
//! child process traces, in a session of its own with all signals blocked: Ctrl-C, a closed terminal or a `kill -9` of
//! us leave it alone, and it restores the thread and ends. What remains is a SIGKILL aimed at that child itself (or at a
//! whole control group) within that millisecond; nothing in user space can undo that.
mod call;

use std::{
    fs::File,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, sockopt,
    },
};
use transship_engine::guest::GuestError;

use super::memory::mappings;
pub(super) use call::Faults;

/// How long the thread may take to stop. It stops at once, unless it waits for a broken disk or is frozen.
const STOP_WAIT: Duration = Duration::from_secs(5);
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

/// A userfaultfd of process `pid`, made in its thread `thread`. In the process nothing of it remains.
pub(super) fn userfaultfd_of(pid: i32, thread: i32, faults: Faults) -> Result<OwnedFd, InjectError> {
    let error = |why: String| GuestError(format!("could not have QEMU (process {pid}) make a userfaultfd: {why}"));
    let failed = |why: String| InjectError::Failed(error(why));
    let target = Target { pid, thread, syscall_at: syscall_instruction(pid).map_err(failed)?, faults };
    let (ours, childs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|e| failed(e.to_string()))?;
    sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(CHILD_WAIT)).map_err(|e| failed(e.to_string()))?;
    let child = start_child(target, &childs).map_err(|e| failed(e.to_string()))?;
    drop(childs);
    let result = receive(&ours);
    reap(child, matches!(result, Err(Received::Silence)));
    result.map_err(|received| match received {
        // A program may always see its own faults: if not, something else is wrong.
        Received::Failure(Failure { step: Step::Userfaultfd, errno: libc::EPERM }) if faults == Faults::All => {
            InjectError::NotPermitted
        }
        Received::Failure(failure) => failed(failure.explain(pid)),
        Received::Silence => {
            failed(format!("its thread {thread} did not go on within {} s; is QEMU frozen?", CHILD_WAIT.as_secs()))
        }
        Received::Nothing => failed("the process that was to trace it was killed".to_owned()),
    })
}

/// An address of a `syscall` instruction in the process: in the vDSO, or in some library.
fn syscall_instruction(pid: i32) -> Result<u64, String> {
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(|e| format!("its memory can't be read: {e}"))?;
    let mut executable = mappings(pid).map_err(|e| e.to_string())?;
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

/// What the child reports, besides the descriptor.
enum Received {
    Failure(Failure),
    /// Nothing within the limit: the child still tries to restore the thread.
    Silence,
    /// The child ended without a word.
    Nothing,
}

fn receive(from: &OwnedFd) -> Result<OwnedFd, Received> {
    let mut bytes = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(Received::Silence),
            Err(_) => return Err(Received::Nothing),
            Ok(message) => break message.bytes,
        }
    };
    let fd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    match (received, fd) {
        (8, Some(fd)) => Ok(fd),
        (8, None) => Err(Received::Failure(Failure::from_bytes(bytes))),
        _ => Err(Received::Nothing),
    }
}

/// Waits for the child's end, so that it leaves no zombie. One that still repairs is left to it.
fn reap(child: libc::pid_t, still_at_work: bool) {
    let flags = if still_at_work { libc::WNOHANG } else { 0 };
    // SAFETY: waitpid accepts any process id and a null status.
    while unsafe { libc::waitpid(child, std::ptr::null_mut(), flags) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Where to inject.
#[derive(Clone, Copy)]
struct Target {
    pid: libc::pid_t,
    thread: libc::pid_t,
    syscall_at: u64,
    faults: Faults,
}

/// Which step failed, and with which errno.
#[derive(Debug, Clone, Copy)]
struct Failure {
    step: Step,
    errno: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Step {
    Seize = 1,
    Stop = 2,
    Registers = 3,
    Mode = 4,
    Userfaultfd = 5,
    Take = 6,
    Gone = 7,
}

impl Failure {
    fn new(step: Step) -> Self {
        // SAFETY: errno is a thread-local integer that is always there.
        Self { step, errno: unsafe { *libc::__errno_location() } }
    }

    fn to_bytes(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&(self.step as i32).to_ne_bytes());
        bytes[4..].copy_from_slice(&self.errno.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; 8]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        let step = i32::from_ne_bytes([a, b, c, d]);
        let steps = [Step::Seize, Step::Stop, Step::Registers, Step::Mode, Step::Userfaultfd, Step::Take];
        let step = steps.into_iter().find(|known| *known as i32 == step).unwrap_or(Step::Gone);
        Self { step, errno: i32::from_ne_bytes([e, f, g, h]) }
    }

    fn explain(self, pid: i32) -> String {
        let system = io::Error::from_raw_os_error(self.errno);
        match self.step {
            Step::Seize => {
                format!("it can't be traced: {system}; run as root or as QEMU's user, with no debugger attached to it")
            }
            Step::Stop => "its thread does not stop; it waits for a disk, or is frozen".to_owned(),
            Step::Registers => format!("its registers can't be read: {system}"),
            Step::Mode => "it is not a 64-bit x86 program".to_owned(),
            Step::Userfaultfd => format!(
                "the system call failed there: {system}; is userfaultfd forbidden by a seccomp filter, or missing in the kernel \
                 (CONFIG_USERFAULTFD)?"
            ),
            Step::Take => format!("its descriptor can't be taken: {system}"),
            Step::Gone => format!("process {pid} ended meanwhile"),
        }
    }
}

/// Forks the child that traces. Returns its process id.
fn start_child(target: Target, result: &OwnedFd) -> io::Result<libc::pid_t> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are writable; sigfillset initialises `all` before it is used. The mask is put back below.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    // SAFETY: the child runs only `child_main`, which allocates nothing, takes no lock, calls async-signal-safe
    // functions only and never returns; so it does not matter what other threads did at the moment of the fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        child_main(target, result.as_raw_fd());
    }
    let error = io::Error::last_os_error();
    // SAFETY: `before` was filled by the first pthread_sigmask, which can't fail with valid arguments.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    if child < 0 { Err(error) } else { Ok(child) }
}

// From here on: the child. No allocation, no lock, no panic, no destructor that matters.

fn child_main(target: Target, result: RawFd) -> ! {
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

fn report(result: RawFd, outcome: Result<RawFd, Failure>) {
    let (mut bytes, fd) = match outcome {
        Ok(fd) => ([0; 8], Some(fd)),
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
        // SAFETY: `control` is aligned for cmsghdr and has room for one with an int (24 of 32 bytes), so the first header
        // and its data lie inside it.
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
fn inject(target: Target) -> Result<RawFd, Failure> {
    let tracee = Tracee::stop(target.thread)?;
    let saved = tracee.registers()?;
    if saved.cs != 0x33 {
        return Err(Failure::new(Step::Mode));
    }
    let mask = tracee.block_signals()?;
    // From here on the thread is not its own until `restore`.
    let fd = borrow(&tracee, &saved, target);
    tracee.restore(&saved, mask)?;
    fd
}

fn borrow(tracee: &Tracee, saved: &libc::user_regs_struct, target: Target) -> Result<RawFd, Failure> {
    let (number, arguments) = target.faults.call();
    let theirs = tracee.call(saved, target.syscall_at, number, arguments)?;
    if theirs < 0 {
        return Err(Failure { step: Step::Userfaultfd, errno: -theirs as i32 });
    }
    // SAFETY: system calls on integers; a failure is -1, which is reported after the target has closed its copy.
    let ours = unsafe {
        let handle = libc::syscall(libc::SYS_pidfd_open, target.pid, 0) as i32;
        libc::syscall(libc::SYS_pidfd_getfd, handle, theirs as i32, 0) as i32
    };
    let taken = if ours < 0 { Err(Failure::new(Step::Take)) } else { Ok(ours) };
    tracee.call(saved, target.syscall_at, libc::SYS_close, [theirs as u64, 0, 0])?;
    taken
}

/// Why a traced thread stopped.
enum Stop {
    /// PTRACE_INTERRUPT, or a job-control stop of the whole process: at the border between kernel and user code.
    Event,
    /// Before or after a system call.
    Syscall,
    /// This signal is about to be delivered.
    Signal(libc::c_int),
}

/// A thread that we trace. When this process ends, the kernel lets it go.
struct Tracee(libc::pid_t);

impl Tracee {
    /// Seizes and stops a thread, without a signal that it could notice.
    fn stop(thread: libc::pid_t) -> Result<Self, Failure> {
        let tracee = Self(thread);
        tracee.ptrace(libc::PTRACE_SEIZE, 0, libc::PTRACE_O_TRACESYSGOOD as usize, Step::Seize)?;
        tracee.ptrace(libc::PTRACE_INTERRUPT, 0, 0, Step::Seize)?;
        loop {
            match tracee.wait(Some(STOP_WAIT))? {
                Stop::Event => return Ok(tracee),
                // A signal that was on its way: it is delivered first.
                Stop::Signal(signal) => tracee.ptrace(libc::PTRACE_CONT, 0, signal as usize, Step::Gone)?,
                Stop::Syscall => tracee.ptrace(libc::PTRACE_CONT, 0, 0, Step::Gone)?,
            };
        }
    }

    fn registers(&self) -> Result<libc::user_regs_struct, Failure> {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::uninit();
        self.ptrace(libc::PTRACE_GETREGS, 0, registers.as_mut_ptr() as usize, Step::Registers)?;
        // SAFETY: PTRACE_GETREGS succeeded, so it has filled the whole struct.
        Ok(unsafe { registers.assume_init() })
    }

    fn set_registers(&self, registers: &libc::user_regs_struct) -> Result<(), Failure> {
        self.ptrace(libc::PTRACE_SETREGS, 0, std::ptr::from_ref(registers) as usize, Step::Gone)
    }

    /// Blocks all signals, so that no handler runs on our registers; they stay pending. Returns the mask before: not the
    /// one that a call like ppoll has set for its duration, but the thread's own, and such a call, when it is restarted,
    /// sets its own again.
    fn block_signals(&self) -> Result<u64, Failure> {
        let (mut before, all) = (0u64, u64::MAX);
        self.ptrace(PTRACE_GETSIGMASK, 8, &raw mut before as usize, Step::Registers)?;
        self.ptrace(PTRACE_SETSIGMASK, 8, &raw const all as usize, Step::Registers)?;
        Ok(before)
    }

    /// Runs one system call and returns its result. The thread then stands right behind the call.
    fn call(
        &self,
        saved: &libc::user_regs_struct,
        syscall_at: u64,
        number: i64,
        arguments: [u64; 3],
    ) -> Result<i64, Failure> {
        let mut registers = *saved;
        registers.rip = syscall_at;
        registers.rax = number as u64;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        // Not in a system call, as far as the kernel is concerned: nothing may be restarted now.
        registers.orig_rax = u64::MAX;
        self.set_registers(&registers)?;
        self.run_to_syscall_stop()?; // before
        self.run_to_syscall_stop()?; // after
        Ok(self.registers()?.rax as i64)
    }

    fn run_to_syscall_stop(&self) -> Result<(), Failure> {
        let mut signal = 0;
        loop {
            self.ptrace(libc::PTRACE_SYSCALL, 0, signal, Step::Gone)?;
            // Without a limit: whoever stops the process now (SIGSTOP, a freezer), it must be restored when it goes on.
            signal = match self.wait(None)? {
                Stop::Syscall => return Ok(()),
                Stop::Event => 0,
                // Only SIGSTOP gets through the mask. Passed on, it stops the others; this thread stops with them later.
                Stop::Signal(signal) => signal as usize,
            };
        }
    }

    /// Puts everything back and lets the thread go. Only where signals are about to be handled does the kernel look
    /// whether an interrupted system call must be restarted, so the thread is brought there first; it runs no
    /// instruction on the way.
    fn restore(&self, saved: &libc::user_regs_struct, mask: u64) -> Result<(), Failure> {
        self.ptrace(libc::PTRACE_INTERRUPT, 0, 0, Step::Gone)?;
        let mut signal = 0;
        loop {
            self.ptrace(libc::PTRACE_CONT, 0, signal, Step::Gone)?;
            signal = match self.wait(None)? {
                Stop::Event => break,
                Stop::Signal(signal) => signal as usize,
                Stop::Syscall => 0,
            };
        }
        self.set_registers(saved)?;
        self.ptrace(PTRACE_SETSIGMASK, 8, &raw const mask as usize, Step::Gone)?;
        self.ptrace(libc::PTRACE_DETACH, 0, 0, Step::Gone)
    }

    /// Waits until the thread stops.
    fn wait(&self, limit: Option<Duration>) -> Result<Stop, Failure> {
        let mut status = 0;
        loop {
            let flags = libc::__WALL | if limit.is_some() { libc::WNOHANG } else { 0 };
            // SAFETY: `status` is a writable int.
            let stopped = unsafe { libc::waitpid(self.0, &mut status, flags) };
            match (stopped, limit) {
                (0, Some(limit)) if child_signal_within(limit) => {}
                (0, _) => return Err(Failure { step: Step::Stop, errno: libc::ETIMEDOUT }),
                (id, _) if id == self.0 => break,
                _ => return Err(Failure::new(Step::Gone)),
            }
        }
        if !libc::WIFSTOPPED(status) {
            return Err(Failure { step: Step::Gone, errno: libc::ESRCH });
        }
        Ok(match (libc::WSTOPSIG(status), status >> 16) {
            (_, libc::PTRACE_EVENT_STOP) => Stop::Event,
            (signal, _) if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
            (signal, _) => Stop::Signal(signal),
        })
    }

    fn ptrace(&self, request: libc::c_uint, address: usize, data: usize, step: Step) -> Result<(), Failure> {
        // SAFETY: for the requests used here `data` is a number, or points to a live value of the type and size that the
        // request reads or writes; the callers above pass no other.
        match unsafe { libc::ptrace(request, self.0, address, data) } {
            -1 => Err(Failure::new(step)),
            _ => Ok(()),
        }
    }
}

/// A stop of the traced thread raises SIGCHLD here, which is blocked and so waits to be taken.
fn child_signal_within(limit: Duration) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    let time = libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // SAFETY: sigemptyset initialises the set before it is used; no information about the signal is asked for.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &time) == libc::SIGCHLD
    }
}

const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;

#[cfg(test)]
mod tests;
