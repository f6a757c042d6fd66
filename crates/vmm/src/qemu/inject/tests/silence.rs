//! A thread that does not come back in time: the child that repairs it is left to its work, and leaves no zombie.
use std::{
    io::Write,
    time::{Duration, Instant},
};

use super::{
    super::{Errand, child::Target, syscall_instruction, visit},
    Faults, PATIENCE, Work, read_byte,
};

/// Waits for a copy of this process that waits for input, in a state in which no thread can be stopped.
pub(super) fn wait_for_a_copy() {
    // SAFETY: without CLONE_VM this is a fork, for whose end the caller waits. The copy makes system calls only.
    let copy = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    if copy == 0 {
        let mut byte = 0u8;
        // SAFETY: one byte is writable; `_exit` ends the copy.
        unsafe {
            libc::read(0, (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    // SAFETY: waitpid takes a null status.
    assert_eq!(unsafe { libc::waitpid(copy, std::ptr::null_mut(), 0) }, copy);
}

/// Injects into such a process, and waits until it has no child process left.
pub(super) fn meet_silence() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (pid, thread) = line.trim().split_once(' ').unwrap();
    let (pid, thread) = (pid.parse().unwrap(), thread.parse().unwrap());
    let syscall_at = syscall_instruction(pid).unwrap();
    let errand = Errand::Make(Faults::Users);
    let target = Target { pid, thread, syscall_at, errand, filter_lets_pass: true };
    let error = visit(target, Duration::from_millis(1)).unwrap_err().to_string();
    assert!(error.contains("did not continue within"), "{error}");
    println!("silence");
    assert_eq!(read_byte(), b'g');
    let begin = Instant::now();
    // SAFETY: the information is writable. WNOWAIT: whoever should wait for the child still has to.
    while unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOWAIT) == 0
    } {
        assert!(begin.elapsed() < PATIENCE, "a zombie is left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_child_that_repairs_on_is_reaped() {
    let mut work = Work::start("vfork");
    work.wait_in(libc::SYS_clone);
    let mut injector = Work::start("silence");
    writeln!(injector.input, "{} {}", work.pid(), work.thread).unwrap();
    injector.expect("silence");
    // The thread can be stopped now, and so the child comes to its end.
    work.input.write_all(b"e").unwrap();
    injector.input.write_all(b"go\n").unwrap();
    injector.expect("done");
    work.expect("done");
}
