//! Signals and stops that come before, in the middle and after.
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use super::{Faults, PATIENCE, Work, read_byte, userfaultfd_of, wait_for_input};

static SIGNALS: AtomicU32 = AtomicU32::new(0);
const SIGNALS_SENT: u32 = 500;

/// Counts queued signals; none may get lost.
pub(super) fn count_signals() {
    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::SeqCst);
    }
    // SAFETY: the handler only adds to an atomic.
    unsafe { libc::signal(libc::SIGRTMIN(), count as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    println!("ready");
    let begin = Instant::now();
    while SIGNALS.load(Ordering::SeqCst) < SIGNALS_SENT {
        assert!(begin.elapsed() < PATIENCE, "only {} signals", SIGNALS.load(Ordering::SeqCst));
        std::hint::spin_loop();
    }
}

/// Says so for every SIGSYS that it gets.
pub(super) fn answer_sigsys() {
    extern "C" fn answer(_: libc::c_int) {
        // SAFETY: writes a constant.
        unsafe { libc::write(1, c"got it\n".as_ptr().cast(), 7) };
    }
    // SAFETY: the handler does nothing but a write.
    unsafe { libc::signal(libc::SIGSYS, answer as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    println!("ready");
    while wait_for_input() != 1 {}
    assert_eq!(read_byte(), b'e');
}

#[test]
fn signals_that_come_meanwhile_are_delivered_once() {
    let mut work = Work::start("signals");
    work.expect("ready");
    let (pid, thread) = (work.pid(), work.thread);
    let injector =
        std::thread::spawn(move || (0..100).for_each(|_| drop(userfaultfd_of(pid, thread, Faults::Users).unwrap())));
    for _ in 0..SIGNALS_SENT {
        // SAFETY: plain numbers; the child is ours and not yet waited for. Directed at the thread, where it must be
        // seen.
        assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, libc::SIGRTMIN()) }, 0);
        std::thread::sleep(Duration::from_micros(200));
    }
    work.expect("done");
    // The process may have ended while the injector was still at it.
    let _ = injector.join();
}

/// The kernel sends it for our calls under a filter, and then it must vanish; but not if it comes from somebody else.
#[test]
fn sigsys_from_somebody_else_is_delivered() {
    let mut work = Work::start("sigsys");
    work.expect("ready");
    let (pid, thread) = (work.pid(), work.thread);
    let end = Arc::new(AtomicBool::new(false));
    let injector = std::thread::spawn({
        let end = end.clone();
        move || {
            while !end.load(Ordering::SeqCst) {
                drop(userfaultfd_of(pid, thread, Faults::Users).unwrap());
            }
        }
    });
    for _ in 0..200 {
        // SAFETY: plain numbers; the child is ours and not yet waited for.
        assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, libc::SIGSYS) }, 0);
        work.expect("got it");
    }
    end.store(true, Ordering::SeqCst);
    injector.join().unwrap();
    work.finish();
}

#[test]
fn a_stopped_process_stays_stopped_and_goes_on_when_told() {
    let work = Work::start("poll");
    work.wait_in(libc::SYS_poll);
    work.signal(libc::SIGSTOP);
    let begin = Instant::now();
    while !work.proc("status").contains("State:\tT") {
        assert!(begin.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    work.inject(3);
    let begin = Instant::now();
    while !work.proc("status").contains("State:\tT (stopped)") {
        assert!(begin.elapsed() < PATIENCE, "{}", work.proc("status"));
        std::thread::sleep(Duration::from_millis(5));
    }
    work.signal(libc::SIGCONT);
    work.finish();
}

#[test]
fn stops_that_come_in_the_middle_are_survived() {
    let work = Work::start("busy");
    let (pid, thread) = (work.pid(), work.thread);
    let injector =
        std::thread::spawn(move || (0..100).for_each(|_| drop(userfaultfd_of(pid, thread, Faults::Users).unwrap())));
    while !injector.is_finished() {
        work.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(1));
        work.signal(libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(1));
    }
    injector.join().unwrap();
    work.inject(1);
    work.finish();
}
