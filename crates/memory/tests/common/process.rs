//! Processes as VMMs are: with memory that is written and touched, and whose faults may be ours.

use std::{
    io::{BufRead, BufReader, Write},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    process::{Child, Command, Stdio},
    ptr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mm::{Advice, MapFlags, ProtFlags},
    process::{Pid, PidfdFlags, PidfdGetfdFlags},
};
use transship_memory::{Access, Area, Error, Flaw, GuestMemory, PageNumber};

use crate::common::{PAGE, file, map};

/// Memory as a VMM has it: a shared mapping, written through atomics. Never unmapped unless a test says so.
pub(crate) struct Guest {
    pub(crate) base: *mut u8,
    pub(crate) bytes: u64,
    /// What shared memory is in.
    file: Option<OwnedFd>,
}

// SAFETY: an address of memory that stays mapped; it is used through atomics only.
unsafe impl Sync for Guest {}

impl Guest {
    pub(crate) fn map(file: impl AsFd, bytes: u64) -> Self {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel picks.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes as usize, prot, MapFlags::SHARED, &file, 0) };
        Self { base: base.unwrap().cast(), bytes, file: Some(rustix::io::fcntl_dupfd_cloexec(file, 0).unwrap()) }
    }

    /// Memory that no other process has, with transparent huge pages where `huge` says so; as a VMM has it that was
    /// told nothing about memory.
    pub(crate) fn private(bytes: u64, huge: bool) -> Self {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let room = bytes as usize + (2 << 20);
        // SAFETY: a new mapping at a place that the kernel picks.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), room, prot, MapFlags::PRIVATE) }.unwrap();
        let base = base.cast::<u8>();
        let base = base.wrapping_add(base.align_offset(2 << 20));
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: within the new mapping; no advice of these changes what it holds.
        unsafe { rustix::mm::madvise(base.cast(), bytes as usize, advice) }.unwrap();
        Self { base, bytes, file: None }
    }

    /// The same over a file, whose content shows where nothing was written.
    pub(crate) fn private_over(file: impl AsFd, bytes: u64) -> Self {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel picks.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes as usize, prot, MapFlags::PRIVATE, file, 0) };
        Self { base: base.unwrap().cast(), bytes, file: None }
    }

    /// The same memory, up to this size.
    pub(crate) fn prefix(&self, bytes: u64) -> Self {
        Self { base: self.base, bytes, file: None }
    }

    /// Gives the pages back, as a balloon does.
    pub(crate) fn give_back(&self, first: u64, count: u64) {
        assert!(first + count <= self.pages());
        let at = self.base.wrapping_add((first * PAGE) as usize);
        // SAFETY: pages of the mapping, of which there are no references but those to atomics, for which any bytes are
        // good.
        unsafe { rustix::mm::madvise(at.cast(), (count * PAGE) as usize, Advice::LinuxDontNeed) }.unwrap();
    }

    /// The word at the start of the page.
    pub(crate) fn word(&self, page: u64) -> &AtomicU64 {
        assert!(page < self.bytes / PAGE);
        // SAFETY: in the mapping, aligned, and only ever used as an atomic.
        unsafe { &*self.base.add((page * PAGE) as usize).cast::<AtomicU64>() }
    }

    pub(crate) fn write(&self, page: u64, value: u64) {
        self.word(page).store(value, Ordering::Relaxed);
    }

    /// Of shared memory: as whoever tracks it has it.
    pub(crate) fn memory(&self) -> GuestMemory {
        let file = self.file.as_ref().expect("shared memory");
        GuestMemory::new(vec![map(file, self.bytes, Access::Read)])
    }

    pub(crate) fn area(&self) -> Area {
        Area { region: 0, first_page: PageNumber::FIRST, address: self.base.addr() as u64, bytes: self.bytes }
    }

    pub(crate) fn read(&self, page: u64) -> u64 {
        self.word(page).load(Ordering::Relaxed)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.bytes / PAGE
    }

    /// The address of the page.
    pub(crate) fn at(&self, page: u64) -> *mut u8 {
        assert!(page < self.pages());
        self.base.wrapping_add((page * PAGE) as usize)
    }
}

/// Whose faults are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    /// Those of programs; anybody may.
    User,
    /// The kernel's on behalf of programs as well.
    Kernel,
}

pub(crate) fn userfaultfd(faults: Faults) -> std::io::Result<OwnedFd> {
    const USER_MODE_ONLY: libc::c_int = 1;
    let mode = if faults == Faults::User { USER_MODE_ONLY } else { 0 };
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, mode | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Makes what has a guest's memory for itself, once nothing else has it. A test beside this one may be starting a
/// child, which holds what was dropped here until it has become its program.
pub(crate) fn once_free<T>(make: impl Fn() -> Result<T, Error>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match make() {
            Err(error) if error.flaw() == Some(Flaw::Taken) && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1));
            }
            made => return made.unwrap(),
        }
    }
}

/// Tells threads to end; also when the test fails, which would wait for them otherwise.
pub(crate) struct Stop(pub(crate) AtomicBool);

impl Stop {
    pub(crate) fn on_drop(&self) -> impl Drop + '_ {
        struct Guard<'a>(&'a AtomicBool);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        Guard(&self.0)
    }
}

/// Set in a process that is a test's VMM: the same program, told to run nothing but [`child`].
pub(crate) const CHILD: &str = "TRANSSHIP_TRACKED_CHILD";
pub(crate) const CHILD_PAGES: u64 = 1024;

/// Says where its memory is and its userfaultfd, then writes the page that each line of its input names. Where it is
/// one of the tests, it does nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let guest = Guest::map(file(CHILD_PAGES * PAGE), CHILD_PAGES * PAGE);
    let uffd = userfaultfd(Faults::User).unwrap();
    println!("\nchild {} {:?}", guest.area().address, uffd.as_raw_fd());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.parse() {
            Ok(page) => guest.write(page, 1),
            Err(_) => drop(rustix::io::write(&uffd, b"")),
        }
        println!("\nchild done");
    }
}

pub(crate) struct Tracked {
    pub(crate) child: Child,
    answers: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Tracked {
    pub(crate) fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "common::process::child", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, answers }
    }

    /// Where its memory is, and its userfaultfd, ours from now on as well. To be called once, first.
    pub(crate) fn attach(&mut self) -> (Pid, Area, OwnedFd) {
        let answer = self.answer();
        let (address, fd) = (answer[0].parse().unwrap(), answer[1].parse().unwrap());
        let pid = Pid::from_child(&self.child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let uffd = rustix::process::pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty()).unwrap();
        (pid, Area { region: 0, first_page: PageNumber::FIRST, address, bytes: CHILD_PAGES * PAGE }, uffd)
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Has it write the page, and does not wait until that is done.
    pub(crate) fn begin_to_write(&mut self, page: u64) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{page}").unwrap();
    }

    /// The next line that is the child's own, among those of the test program around it.
    pub(crate) fn answer(&mut self) -> Vec<String> {
        let line = self.answers.find_map(|line| line.unwrap().strip_prefix("child ").map(str::to_owned));
        line.expect("an answer of the child").split(' ').map(str::to_owned).collect()
    }

    pub(crate) fn write(&mut self, page: u64) {
        self.begin_to_write(page);
        assert_eq!(self.answer(), ["done"]);
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
