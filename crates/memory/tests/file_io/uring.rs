//! Who may use io_uring.
use std::thread;

use transship_memory::{FileIo, FileQueue};

use super::{
    files::{NEW, disk, open, open_direct, pair, queue, ways},
    places::there_and_back,
};

/// On this machine with its own disk; elsewhere direct I/O may be for nobody.
#[test]
fn auto_asks_io_uring_for_direct_io_alone() {
    let dir = disk();
    let (from, _) = pair(4);
    let buffered = open(&dir.path().join("buffered"), NEW).unwrap();
    assert!(!queue(&from, buffered, FileIo::Auto).is_uring());
    let Some(direct) = open_direct(&dir.path().join("direct")) else { return };
    assert!(!queue(&from, &direct, FileIo::Plain).is_uring());
    let has_uring = ways().contains(&FileIo::Uring);
    assert_eq!(queue(&from, &direct, FileIo::Auto).is_uring(), has_uring);
    if has_uring {
        assert!(queue(&from, &direct, FileIo::Uring).is_uring());
    }
}

/// Has the kernel refuse io_uring to this thread, as container engines do.
fn forbid_uring() {
    let statement = |code: u32, k: u32, jf: u8| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let filter = [
        // The number of the system call is first in what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 1),
        statement(libc::BPF_RET | libc::BPF_K, refused, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program and its filter are there during the call, and the kernel keeps a copy.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn where_io_uring_is_forbidden_plain_is_taken_and_a_wish_refused() {
    let run = || {
        forbid_uring();
        let dir = disk();
        let path = dir.path().join("file");
        let Some(file) = open_direct(&path) else { return };
        let (from, to) = pair(1024);
        assert!(!queue(&from, &file, FileIo::Auto).is_uring());
        there_and_back(&path, &file, FileIo::Auto, (&from, &to));
        let refused = FileQueue::new(from, file, 8, FileIo::Uring).err().unwrap();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        let refused = refused.to_string();
        assert!(refused.contains("kernel.io_uring_disabled or a seccomp filter forbids it"), "{refused}");
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap());
}
