//! Processes under a seccomp filter that answers `userfaultfd` in every way there is.
use std::{
    collections::BTreeSet,
    fs,
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::{AtomicI32, Ordering},
};

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::{
    super::{Errand, child::Target, syscall_instruction, visit},
    Faults, InjectError, PATIENCE, Work, read_byte, userfaultfd_of,
};

/// What a filter answers, and what then becomes of the process that made the call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Answer {
    Kill,
    KillThread,
    Trap,
    TrapHandled,
    Errno,
}

const ANSWERS: [Answer; 5] = [Answer::Kill, Answer::KillThread, Answer::Trap, Answer::TrapHandled, Answer::Errno];

impl Answer {
    fn action(self) -> SeccompAction {
        match self {
            Self::Kill => SeccompAction::KillProcess,
            Self::KillThread => SeccompAction::KillThread,
            Self::Trap | Self::TrapHandled => SeccompAction::Trap,
            Self::Errno => SeccompAction::Errno(libc::EXDEV as u32),
        }
    }

    /// What [`call_in_a_fork`] says.
    fn end(self) -> String {
        match self {
            Self::Kill | Self::KillThread | Self::Trap => format!("signal {}", libc::SIGSYS),
            // A call that is trapped leaves its own number where the result would be.
            Self::TrapHandled => "result 323, 1 trapped".to_owned(),
            Self::Errno => format!("result -{}, 0 trapped", libc::EXDEV),
        }
    }
}

impl std::str::FromStr for Answer {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        ANSWERS.into_iter().find(|answer| format!("{answer:?}") == name).ok_or_else(|| name.to_owned())
    }
}

/// Sleeps under a filter until there is input, and says what the filter answers then.
pub(super) fn wait_filtered(answer: Answer) {
    if matches!(answer, Answer::TrapHandled) {
        // SAFETY: the handler only adds to an atomic.
        unsafe { libc::signal(libc::SIGSYS, count_trap as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
    keep_a_userfaultfd_at_its_own_number();
    let calls = [(libc::SYS_userfaultfd, vec![])].into();
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, answer.action(), TargetArch::x86_64).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    println!("filtered");
    assert_eq!(read_byte(), b'e');
    println!("ended by {}", call_in_a_fork());
}

static TRAPS: AtomicI32 = AtomicI32::new(0);

extern "C" fn count_trap(_: libc::c_int) {
    TRAPS.fetch_add(1, Ordering::SeqCst);
}

/// So that a call's number, taken for a descriptor, names one that it must not touch.
fn keep_a_userfaultfd_at_its_own_number() {
    const USER_MODE_ONLY: i32 = 1;
    // SAFETY: system calls on numbers; the new descriptor is nobody else's.
    unsafe {
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) as i32;
        assert_eq!(libc::dup2(fd, libc::SYS_userfaultfd as i32), libc::SYS_userfaultfd as i32);
        libc::close(fd);
    }
}

/// Makes the call in a copy of this process, which inherits filter and handler, and says how that ended.
fn call_in_a_fork() -> String {
    let (read, write) = rustix::pipe::pipe().unwrap();
    // SAFETY: the copy makes system calls only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the call either fails, or is answered by the filter; `_exit` ends the copy.
        unsafe {
            let result = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            let result = if result < 0 { -*libc::__errno_location() } else { result as i32 };
            let said = [result, TRAPS.load(Ordering::SeqCst)];
            libc::write(write.as_raw_fd(), said.as_ptr().cast(), size_of_val(&said));
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: `status` is a writable int.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    if libc::WIFSIGNALED(status) {
        return format!("signal {}", libc::WTERMSIG(status));
    }
    let mut said = [0; 8];
    assert_eq!(rustix::io::read(&read, &mut said).unwrap(), 8);
    let [a, b, c, d, e, f, g, h] = said;
    format!("result {}, {} trapped", i32::from_ne_bytes([a, b, c, d]), i32::from_ne_bytes([e, f, g, h]))
}

/// All that a visit must leave as it was: descriptors with their numbers, signals, and the filter.
fn traces(work: &Work) -> (BTreeSet<String>, Vec<String>) {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", work.pid())).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        format!("{} {}", path.display(), fs::read_link(&path).unwrap().display())
    });
    let status = work.proc("status");
    let kept = ["SigPnd", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "Seccomp", "TracerPid"];
    let kept = status.lines().filter(|line| kept.iter().any(|name| line.starts_with(name))).map(str::to_owned);
    (descriptors.collect(), kept.collect())
}

/// Does something to a process under such a filter, which must leave no traces, and the filter in force.
fn under_filter(answer: Answer, act: impl FnOnce(&Work)) {
    let mut work = Work::start(&format!("{answer:?}"));
    work.expect("filtered");
    work.wait_in(libc::SYS_read);
    let before = traces(&work);
    assert!(before.1.contains(&"Seccomp:\t2".to_owned()), "{before:?}");
    act(&work);
    assert_eq!(traces(&work), before, "{answer:?}");
    use std::io::Write;
    work.input.write_all(b"end\n").unwrap();
    assert_eq!(work.expect("ended by "), answer.end(), "{answer:?}");
    work.expect("done");
    assert!(work.process.wait().unwrap().success());
}

/// Without the right to suspend a filter, which an ordinary user lacks.
fn without_the_right<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let act = || {
        // Of this thread only.
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, sets).unwrap();
        act()
    };
    std::thread::scope(|scope| scope.spawn(act).join().unwrap())
}

fn take(work: &Work) -> Result<OwnedFd, InjectError> {
    userfaultfd_of(work.pid(), work.thread, Faults::Users)
}

#[test]
fn a_filter_is_suspended_for_the_call_alone() {
    if !rustix::process::geteuid().is_root() {
        transship_lab::lacks("root, to suspend a filter");
        return;
    }
    for answer in ANSWERS {
        under_filter(answer, |work| {
            for _ in 0..3 {
                let uffd = take(work).unwrap();
                let name = fs::read_link(format!("/proc/self/fd/{}", uffd.as_raw_fd())).unwrap();
                assert_eq!(name.to_str(), Some("anon_inode:[userfaultfd]"));
            }
        });
    }
}

#[test]
fn a_filter_that_may_not_be_suspended_is_not_tried() {
    for answer in ANSWERS {
        under_filter(answer, |work| {
            let error = without_the_right(|| take(work)).unwrap_err().to_string();
            assert!(error.contains("seccomp filter") && error.contains("run transship as root"), "{error}");
        });
    }
}

/// If what is known of a filter were wrong, it would cost no more than its answer has to.
#[test]
fn a_trap_that_is_met_all_the_same_goes_unseen() {
    for answer in [Answer::Trap, Answer::TrapHandled, Answer::Errno] {
        under_filter(answer, |work| {
            let error = without_the_right(|| {
                let syscall_at = syscall_instruction(work.pid()).unwrap();
                let (pid, thread) = (work.pid(), work.thread);
                let errand = Errand::Make(Faults::Users);
                visit(Target { pid, thread, syscall_at, errand, filter_lets_pass: true }, PATIENCE)
            });
            let error = error.unwrap_err().to_string();
            let expected =
                if matches!(answer, Answer::Errno) { "Invalid cross-device link" } else { "was trapped there" };
            assert!(error.contains(expected), "{error}");
        });
    }
}
