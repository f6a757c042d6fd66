//! A thread of another process, stopped and made to run system calls. Runs in the child: what is said there holds here.
//! Only [`Tracee::hold`] may be used anywhere: it has the thread run nothing.
use std::{
    mem::MaybeUninit,
    thread::sleep,
    time::{Duration, Instant},
};

use super::failure::{InjectionFailure, Step};

/// How long the thread may take to stop. It stops at once, unless it waits for a broken disk or is frozen.
const STOP_WAIT: Duration = Duration::from_secs(5);
/// How often one is looked at that is to stop.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
const PTRACE_PEEKSIGINFO: libc::c_uint = 0x4209;
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
const PTRACE_O_SUSPEND_SECCOMP: libc::c_int = 1 << 21;

const ALL_SIGNALS: u64 = u64::MAX;
const SIGSYS: u64 = 1 << (libc::SIGSYS - 1);

/// Which of a thread's pending signals to look at.
#[repr(C)]
struct Peek {
    from: u64,
    flags: u32,
    count: i32,
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
pub(in crate::qemu) struct Tracee(libc::pid_t);

impl Tracee {
    /// Seizes and stops a thread, without a signal that it could notice.
    pub(super) fn stop(thread: libc::pid_t) -> Result<Self, InjectionFailure> {
        Self::stop_by(thread, |tracee| tracee.wait(Some(STOP_WAIT)))
    }

    /// `wait`: for its next stop.
    fn stop_by(
        thread: libc::pid_t,
        wait: impl Fn(&Self) -> Result<Stop, InjectionFailure>,
    ) -> Result<Self, InjectionFailure> {
        let tracee = Self(thread);
        tracee.ptrace(libc::PTRACE_SEIZE, 0, libc::PTRACE_O_TRACESYSGOOD as usize, Step::Seize)?;
        tracee.ptrace(libc::PTRACE_INTERRUPT, 0, 0, Step::Seize)?;
        loop {
            match wait(&tracee)? {
                Stop::Event => return Ok(tracee),
                // A signal that was on its way: it is delivered first.
                Stop::Signal(signal) => tracee.ptrace(libc::PTRACE_CONT, 0, signal as usize, Step::Gone)?,
                Stop::Syscall => tracee.ptrace(libc::PTRACE_CONT, 0, 0, Step::Gone)?,
            };
        }
    }

    /// Stops a thread until [`Tracee::let_go`], which the same thread of ours must call.
    ///
    /// # Errors
    /// It may not be traced, or does not stop; it is let go when this thread of ours ends.
    pub(super) fn hold(thread: libc::pid_t) -> Result<Self, InjectionFailure> {
        let deadline = Instant::now() + STOP_WAIT;
        Self::stop_by(thread, |tracee| {
            while Instant::now() < deadline {
                match tracee.stopped(libc::WNOHANG)? {
                    Some(stop) => return Ok(stop),
                    // Whether a signal tells of it is up to the program that we are in.
                    None => sleep(LOOK_AGAIN),
                }
            }
            Err(InjectionFailure { step: Step::Stop, errno: libc::ETIMEDOUT })
        })
    }

    /// It goes on where it was.
    pub(in crate::qemu) fn let_go(self) {
        // One that has ended goes nowhere.
        let _ = self.ptrace(libc::PTRACE_DETACH, 0, 0, Step::Gone);
    }

    pub(super) fn registers(&self) -> Result<libc::user_regs_struct, InjectionFailure> {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::uninit();
        self.ptrace(libc::PTRACE_GETREGS, 0, registers.as_mut_ptr() as usize, Step::Registers)?;
        // SAFETY: PTRACE_GETREGS succeeded, so it has filled the whole struct.
        Ok(unsafe { registers.assume_init() })
    }

    fn set_registers(&self, registers: &libc::user_regs_struct) -> Result<(), InjectionFailure> {
        self.ptrace(libc::PTRACE_SETREGS, 0, std::ptr::from_ref(registers) as usize, Step::Gone)
    }

    /// Suspends the thread's seccomp filter, if it has one, until the thread is let go.
    pub(super) fn suspend_filter(&self) -> Result<(), InjectionFailure> {
        let options = libc::PTRACE_O_TRACESYSGOOD | PTRACE_O_SUSPEND_SECCOMP;
        self.ptrace(libc::PTRACE_SETOPTIONS, 0, options as usize, Step::Filter)
    }

    /// Blocks all signals but SIGSYS, so that no handler runs on our registers; they stay pending. SIGSYS is what a
    /// filter forces on the thread: if that is blocked the kernel takes its handler away. Returns the mask before: not
    /// the one that a call like ppoll has set for its duration, but the thread's own, and such a call, when it is
    /// restarted, sets its own again.
    pub(super) fn block_signals(&self) -> Result<u64, InjectionFailure> {
        let mut before = 0u64;
        self.ptrace(PTRACE_GETSIGMASK, 8, &raw mut before as usize, Step::Registers)?;
        self.set_mask(ALL_SIGNALS & !SIGSYS, Step::Registers)?;
        Ok(before)
    }

    fn set_mask(&self, mask: u64, step: Step) -> Result<(), InjectionFailure> {
        self.ptrace(PTRACE_SETSIGMASK, 8, &raw const mask as usize, step)
    }

    /// Runs one system call and returns its result. The thread then stands right behind the call.
    pub(super) fn call(
        &self,
        saved: &libc::user_regs_struct,
        syscall_at: u64,
        number: i64,
        arguments: [u64; 3],
    ) -> Result<i64, InjectionFailure> {
        let mut registers = *saved;
        registers.rip = syscall_at;
        registers.rax = number as u64;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        // Not in a system call, as far as the kernel is concerned: nothing may be restarted now.
        registers.orig_rax = u64::MAX;
        self.set_registers(&registers)?;
        self.run_to_syscall_stop()?; // before
        self.run_to_syscall_stop()?; // after
        if self.is_trapped()? {
            // What looks like a result is the call's own number. This leads to the signal, not to another system call.
            self.run_to_syscall_stop()?;
            return Err(InjectionFailure { step: Step::Trapped, errno: libc::EPERM });
        }
        Ok(self.registers()?.rax as i64)
    }

    fn run_to_syscall_stop(&self) -> Result<(), InjectionFailure> {
        let mut signal = 0;
        loop {
            self.ptrace(libc::PTRACE_SYSCALL, 0, signal, Step::Gone)?;
            // Without a limit: whoever stops the process now (SIGSTOP, a freezer), it must be restored when it goes on.
            signal = match self.wait(None)? {
                Stop::Syscall => return Ok(()),
                Stop::Event => 0,
                Stop::Signal(signal) => self.in_the_middle(signal)?,
            };
        }
    }

    /// What to pass on of a signal that comes while the thread is not its own. SIGSTOP gets through the mask; passed
    /// on, it stops the others, and this thread stops with them later. So does SIGSYS, which is ours if the kernel
    /// forced it for our call: then nobody else may ever see it. One that somebody has sent waits with the others,
    /// since it is blocked when it is passed on.
    fn in_the_middle(&self, signal: libc::c_int) -> Result<usize, InjectionFailure> {
        if signal == libc::SIGSYS {
            let mut info = no_signal();
            self.ptrace(libc::PTRACE_GETSIGINFO, 0, &raw mut info as usize, Step::Gone)?;
            if is_forced(&info) {
                return Err(InjectionFailure { step: Step::Trapped, errno: libc::EPERM });
            }
            self.set_mask(ALL_SIGNALS, Step::Gone)?;
        }
        Ok(signal as usize)
    }

    /// Has the last call brought a SIGSYS on the thread, which is not yet delivered?
    fn is_trapped(&self) -> Result<bool, InjectionFailure> {
        let mut peek = Peek { from: 0, flags: 0, count: 1 };
        loop {
            let mut info = no_signal();
            // SAFETY: the request reads a Peek and writes as many signals as that asks for: one.
            match unsafe { libc::ptrace(PTRACE_PEEKSIGINFO, self.0, &raw const peek, &raw mut info) } {
                1 if info.si_signo == libc::SIGSYS && is_forced(&info) => return Ok(true),
                1 => peek.from += 1,
                0 => return Ok(false),
                _ => return Err(InjectionFailure::new(Step::Gone)),
            }
        }
    }

    /// Puts everything back and lets the thread go. The kernel checks whether an interrupted system call must be
    /// restarted only where signals are about to be handled, so the thread is brought there first; it runs no
    /// instruction on the way.
    pub(super) fn restore(&self, saved: &libc::user_regs_struct, mask: u64) -> Result<(), InjectionFailure> {
        self.ptrace(libc::PTRACE_INTERRUPT, 0, 0, Step::Gone)?;
        let mut signal = 0;
        loop {
            self.ptrace(libc::PTRACE_CONT, 0, signal, Step::Gone)?;
            signal = match self.wait(None)? {
                Stop::Event => break,
                Stop::Signal(signal) => self.in_the_middle(signal).unwrap_or(0),
                Stop::Syscall => 0,
            };
        }
        self.set_registers(saved)?;
        self.set_mask(mask, Step::Gone)?;
        self.ptrace(libc::PTRACE_DETACH, 0, 0, Step::Gone)
    }

    /// Waits until the thread stops.
    fn wait(&self, limit: Option<Duration>) -> Result<Stop, InjectionFailure> {
        loop {
            let flags = if limit.is_some() { libc::WNOHANG } else { 0 };
            match (self.stopped(flags)?, limit) {
                (Some(stop), _) => return Ok(stop),
                (None, Some(limit)) if child_signal_within(limit) => {}
                (None, _) => return Err(InjectionFailure { step: Step::Stop, errno: libc::ETIMEDOUT }),
            }
        }
    }

    /// Why it has stopped, if it has; without WNOHANG among the flags it is waited for.
    fn stopped(&self, flags: libc::c_int) -> Result<Option<Stop>, InjectionFailure> {
        let mut status = 0;
        // SAFETY: `status` is a writable int.
        match unsafe { libc::waitpid(self.0, &mut status, flags | libc::__WALL) } {
            0 => return Ok(None),
            id if id == self.0 => {}
            _ => return Err(InjectionFailure::new(Step::Gone)),
        }
        if !libc::WIFSTOPPED(status) {
            return Err(InjectionFailure { step: Step::Gone, errno: libc::ESRCH });
        }
        Ok(Some(match (libc::WSTOPSIG(status), status >> 16) {
            (_, libc::PTRACE_EVENT_STOP) => Stop::Event,
            (signal, _) if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
            (signal, _) => Stop::Signal(signal),
        }))
    }

    fn ptrace(&self, request: libc::c_uint, address: usize, data: usize, step: Step) -> Result<(), InjectionFailure> {
        // SAFETY: for the requests used here `data` is a number, or points to a live value of the type and size that
        // the request reads or writes; the callers above pass no other.
        match unsafe { libc::ptrace(request, self.0, address, data) } {
            -1 => Err(InjectionFailure::new(step)),
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

fn no_signal() -> libc::siginfo_t {
    // SAFETY: all-zero is a valid siginfo_t, of no signal.
    unsafe { std::mem::zeroed() }
}

/// By the kernel, for something that the thread itself did; not sent by anybody.
fn is_forced(signal: &libc::siginfo_t) -> bool {
    signal.si_code > 0
}
