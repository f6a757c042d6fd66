//! A thread of another process, stopped and made to run system calls. Runs in the child: what is said there holds here.
use std::{mem::MaybeUninit, time::Duration};

use super::failure::{Failure, Step};

/// How long the thread may take to stop. It stops at once, unless it waits for a broken disk or is frozen.
const STOP_WAIT: Duration = Duration::from_secs(5);
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;

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
pub(super) struct Tracee(libc::pid_t);

impl Tracee {
    /// Seizes and stops a thread, without a signal that it could notice.
    pub(super) fn stop(thread: libc::pid_t) -> Result<Self, Failure> {
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

    pub(super) fn registers(&self) -> Result<libc::user_regs_struct, Failure> {
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
    pub(super) fn block_signals(&self) -> Result<u64, Failure> {
        let (mut before, all) = (0u64, u64::MAX);
        self.ptrace(PTRACE_GETSIGMASK, 8, &raw mut before as usize, Step::Registers)?;
        self.ptrace(PTRACE_SETSIGMASK, 8, &raw const all as usize, Step::Registers)?;
        Ok(before)
    }

    /// Runs one system call and returns its result. The thread then stands right behind the call.
    pub(super) fn call(
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
    pub(super) fn restore(&self, saved: &libc::user_regs_struct, mask: u64) -> Result<(), Failure> {
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
