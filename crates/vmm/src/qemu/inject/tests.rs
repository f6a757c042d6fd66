//! Injects into real processes, in every state that a thread of QEMU may be in, and requires that they never notice.
//!
//! The processes are this test program itself, started again for [`child`] alone with what to do in the environment.
#![allow(clippy::unwrap_used)]
mod filters;
mod memory;
mod rseq;
mod signals;
mod silence;

use std::{
    collections::BTreeSet,
    env, fs,
    io::{BufRead, BufReader, Write},
    os::{fd::AsRawFd, unix::process::CommandExt},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use super::{Faults, InjectError, userfaultfd_of};

const WORK: &str = "TRANSSHIP_INJECT_CHILD";
/// Generous: the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// A child at work, in its thread `thread`.
struct Work {
    process: Child,
    thread: i32,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Work {
    fn start(what: &str) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "qemu::inject::tests::child", "--nocapture", "--test-threads=2"])
            .env(WORK, what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut work = Self { process, thread: 0, input, output };
        work.thread = work.expect("thread ").parse().unwrap();
        work
    }

    /// The rest of the next line that begins so.
    fn expect(&mut self, prefix: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the child ended without saying {prefix:?}");
            // The harness has printed "test … " in front of the first one.
            if let Some((_, rest)) = line.split_once(prefix) {
                return rest.trim().to_owned();
            }
        }
    }

    fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/task/{}/{file}", self.pid(), self.thread)).unwrap()
    }

    /// Waits until the thread sleeps in this system call.
    fn wait_in(&self, number: i64) {
        let begin = Instant::now();
        while self.proc("syscall").split(' ').next() != Some(&number.to_string()) {
            assert!(begin.elapsed() < PATIENCE, "never in system call {number}: {}", self.proc("syscall"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn descriptors(&self) -> BTreeSet<String> {
        let list = fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        list.map(|entry| fs::read_link(entry.unwrap().path()).unwrap().display().to_string()).collect()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill takes any numbers; the process is our child and not yet waited for, so its id is its own.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Takes a userfaultfd several times and checks that it is one, and of that process.
    fn inject(&self, times: usize) {
        let before = self.descriptors();
        for _ in 0..times {
            let uffd = userfaultfd_of(self.pid(), self.thread, Faults::Users).unwrap();
            let name = fs::read_link(format!("/proc/self/fd/{}", uffd.as_raw_fd())).unwrap();
            assert_eq!(name.to_str(), Some("anon_inode:[userfaultfd]"));
        }
        assert_eq!(self.descriptors(), before);
        assert!(self.proc("status").contains("TracerPid:\t0\n"));
    }

    /// Tells the child to end; it must have seen nothing unusual.
    fn finish(mut self) {
        self.input.write_all(b"end\n").unwrap();
        self.expect("done");
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the child processes run: one way to be busy or to sleep, checked by themselves. Not a test by itself.
#[test]
fn child() {
    let Ok(what) = env::var(WORK) else { return };
    // SAFETY: gettid has no arguments and can't fail.
    println!("thread {}", unsafe { libc::gettid() });
    match what.as_str() {
        "read" => assert_eq!(read_byte(), b'e'),
        "poll" => assert_eq!((wait_for_input(), read_byte()), (1, b'e')),
        "ppoll" => ppoll_with_mask(),
        "futex" => futex_until_input(),
        "nanosleep" => nanosleep_until_input(),
        "busy" => busy_until_input(),
        "signals" => signals::count_signals(),
        "sigsys" => signals::answer_sigsys(),
        "inject" => inject_for_ever(),
        "nobody" => wait_without_rights(),
        "memory" => memory::hold_pages(),
        "vfork" => silence::wait_for_a_copy(),
        "silence" => silence::meet_silence(),
        "rseq" => rseq::wait_in_a_sequence(),
        other => filters::wait_filtered(other.parse().expect("work")),
    }
    println!("done");
}

fn read_byte() -> u8 {
    let mut byte = 0u8;
    // SAFETY: one byte is writable. A raw read, since std's would hide an EINTR.
    assert_eq!(unsafe { libc::read(0, (&raw mut byte).cast(), 1) }, 1, "{}", std::io::Error::last_os_error());
    byte
}

fn wait_for_input() -> i32 {
    let mut fd = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, as its count says.
    unsafe { libc::poll(&mut fd, 1, 600_000) }
}

/// Blocks SIGUSR1 except within ppoll, as event loops do; afterwards it must be blocked still.
fn ppoll_with_mask() {
    let mut fd = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
    // SAFETY: all pointers are to live locals of the right types; sigemptyset initialises the sets.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        let mut user1 = none;
        libc::sigaddset(&mut user1, libc::SIGUSR1);
        libc::pthread_sigmask(libc::SIG_BLOCK, &user1, std::ptr::null_mut());
        assert_eq!(libc::ppoll(&mut fd, 1, std::ptr::null(), &none), 1);
        let mut now = none;
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut now);
        assert_eq!(libc::sigismember(&now, libc::SIGUSR1), 1);
        assert_eq!(libc::sigismember(&now, libc::SIGUSR2), 0);
    }
}

fn futex_until_input() {
    static WORD: AtomicU32 = AtomicU32::new(0);
    std::thread::spawn(|| {
        read_byte();
        WORD.store(1, Ordering::SeqCst);
        // SAFETY: a wake on a static.
        unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    });
    // SAFETY: a wait on a static, without a timeout.
    let result = unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), libc::FUTEX_WAIT, 0, 0usize) };
    let error = std::io::Error::last_os_error().raw_os_error();
    // EAGAIN: the call was continued only after the input, when the word had changed already.
    assert!(result == 0 || error == Some(libc::EAGAIN), "{error:?}");
    assert_eq!(WORD.load(Ordering::SeqCst), 1);
}

/// One long sleep, which the kernel can continue only by its restart block. Ends the process itself, on input.
fn nanosleep_until_input() {
    std::thread::spawn(|| {
        read_byte();
        println!("done");
        std::process::exit(0);
    });
    let time = libc::timespec { tv_sec: 3600, tv_nsec: 0 };
    // SAFETY: a live timespec, and no remainder wanted.
    let result = unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &time, std::ptr::null_mut()) };
    panic!("the sleep ended with {result}");
}

/// Computes the same sum again and again, in integer and floating point registers.
fn busy_until_input() {
    static END: AtomicU32 = AtomicU32::new(0);
    std::thread::spawn(|| {
        read_byte();
        END.store(1, Ordering::Relaxed);
    });
    let sums = || {
        let mut whole = std::hint::black_box(1u64);
        let mut part = std::hint::black_box(1f64);
        for i in 0..100_000u64 {
            whole = whole.wrapping_mul(6364136223846793005).wrapping_add(i);
            part = (part + i as f64).sqrt();
        }
        (whole, part.to_bits())
    };
    let expected = sums();
    while END.load(Ordering::Relaxed) == 0 {
        assert_eq!(sums(), expected);
    }
}

/// A process that injects into the one that it reads about, until it is killed.
fn inject_for_ever() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (pid, thread) = line.trim().split_once(' ').unwrap();
    println!("ready");
    loop {
        // Refused while the helper of a killed one still finishes its work.
        drop(userfaultfd_of(pid.parse().unwrap(), thread.parse().unwrap(), Faults::Users));
    }
}

/// As an ordinary user, with /dev/userfaultfd opened before, until there is input.
fn wait_without_rights() {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").unwrap();
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: setresuid takes numbers only.
    assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
    println!("device {}", device.as_raw_fd());
    assert_eq!(read_byte(), b'e');
}

#[test]
fn a_thread_that_sleeps_in_any_system_call_sleeps_on() {
    for (what, number) in [
        ("read", libc::SYS_read),
        ("poll", libc::SYS_poll),
        ("ppoll", libc::SYS_ppoll),
        ("futex", libc::SYS_futex),
        ("nanosleep", libc::SYS_clock_nanosleep),
    ] {
        let work = Work::start(what);
        work.wait_in(number);
        work.inject(10);
        // The kernel names a continued sleep restart_syscall: it's the same sleep.
        let now: i64 = work.proc("syscall").split(' ').next().unwrap().parse().unwrap_or(-1);
        assert!([number, libc::SYS_restart_syscall, -1].contains(&now), "{what}: {now}");
        work.finish();
    }
}

#[test]
fn a_process_without_rights_makes_one_for_all_faults_by_its_device() {
    if !rustix::process::geteuid().is_root() {
        transship_lab::lacks("root, to give its rights away");
        return;
    }
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    let mut work = Work::start("nobody");
    let device: i32 = work.expect("device ").parse().unwrap();
    work.wait_in(libc::SYS_read);
    let (pid, thread) = (work.pid(), work.thread);
    match userfaultfd_of(pid, thread, Faults::All) {
        Err(InjectError::NotPermitted) => assert_eq!(allowed.trim(), "0"),
        other => assert!(other.is_ok() && allowed.trim() == "1", "{other:?}"),
    }
    let before = work.descriptors();
    let uffd = userfaultfd_of(pid, thread, Faults::AllByDevice(device)).unwrap();
    let name = fs::read_link(format!("/proc/self/fd/{}", uffd.as_raw_fd())).unwrap();
    assert_eq!(name.to_str(), Some("anon_inode:[userfaultfd]"));
    let flags = rustix::fs::fcntl_getfl(&uffd).unwrap();
    assert!(flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
    assert_eq!(work.descriptors(), before);
    // Any other descriptor is refused by whatever it is.
    let error = userfaultfd_of(pid, thread, Faults::AllByDevice(0)).unwrap_err().to_string();
    assert!(error.contains("the system call failed there"), "{error}");
    work.finish();
}

#[test]
fn a_busy_thread_keeps_its_registers() {
    let work = Work::start("busy");
    work.inject(100);
    work.finish();
}

#[test]
fn another_thread_may_be_meant() {
    // The first thread of the child waits for the others, in the test harness.
    let mut work = Work::start("busy");
    work.thread = work.pid();
    work.inject(10);
    work.finish();
}

#[test]
fn killing_us_at_any_moment_leaves_nothing_behind() {
    let work = Work::start("busy");
    let before = work.descriptors();
    for delay_us in (0..40).map(|i| i * 353) {
        let mut injector = Work::start("inject");
        writeln!(injector.input, "{} {}", work.pid(), work.thread).unwrap();
        injector.expect("ready");
        std::thread::sleep(Duration::from_micros(delay_us));
        // Its whole group, as a shell or a terminal would.
        // SAFETY: kill takes any numbers; the group is that of our child, which is not yet waited for.
        assert_eq!(unsafe { libc::kill(-injector.pid(), libc::SIGKILL) }, 0);
        drop(injector);
    }
    let begin = Instant::now();
    while !work.proc("status").contains("TracerPid:\t0\n") || work.descriptors() != before {
        assert!(begin.elapsed() < PATIENCE, "{:?}", work.descriptors());
        std::thread::sleep(Duration::from_millis(5));
    }
    work.finish();
}

#[test]
fn a_tracer_that_is_there_already_is_reported() {
    let mut work = Work::start("read");
    work.wait_in(libc::SYS_read);
    // This thread is the debugger.
    // SAFETY: PTRACE_SEIZE takes numbers only; the child is ours.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, work.thread, 0, 0) }, 0);
    let error = userfaultfd_of(work.pid(), work.thread, Faults::Users).unwrap_err().to_string();
    // A thread that is traced is gone only when its tracer has seen it end.
    work.process.kill().unwrap();
    // SAFETY: waitpid accepts any process id and a null status.
    assert_eq!(unsafe { libc::waitpid(work.thread, std::ptr::null_mut(), libc::__WALL) }, work.thread);
    assert!(error.contains("can't trace it"), "{error}");
}

#[test]
fn a_process_that_is_gone_is_an_error() {
    let error = userfaultfd_of(i32::MAX, i32::MAX, Faults::Users).unwrap_err().to_string();
    assert!(error.contains("can't make QEMU"), "{error}");
}
