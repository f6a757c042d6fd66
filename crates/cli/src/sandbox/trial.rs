//! What a confined process must not do, tried in its place: for tests, which name a socket in `TRANSSHIP_TRY`, and, of
//! several processes, the role in `TRANSSHIP_TRY_AS`.
//!
//! Each attempt is a line on stderr: its name, and how it came out. The process ends after the last.
use std::{
    fs, io,
    net::{TcpListener, TcpStream},
    os::unix::{
        net::{UnixDatagram, UnixStream},
        process::CommandExt,
    },
    process::{self, Command},
    thread,
};

use nix::{
    errno::Errno,
    sys::{
        ptrace,
        uio::{RemoteIoVec, process_vm_readv},
    },
    unistd,
};
use rustix::{
    process::{Pid, Signal, getppid, kill_process},
    thread::{CapabilitySet, CapabilitySets, set_capabilities},
};

use super::Role;
use crate::output;

/// All of them in turn, if somebody asks for it of this role; then the end of this process.
pub(super) fn run_if_asked(role: Role) {
    let Some(socket) = std::env::var_os("TRANSSHIP_TRY") else { return };
    if std::env::var("TRANSSHIP_TRY_AS").is_ok_and(|wanted| wanted != format!("{role:?}")) {
        return;
    }
    // Threads that are started later are held as well.
    let attempts = thread::spawn(move || {
        for (name, attempt) in ATTEMPTS {
            let result = match attempt {
                Attempt::Alone(attempt) => attempt(),
                Attempt::With(attempt) => attempt(&socket),
            };
            output::say(&match result {
                Ok(()) => format!("trial: {name}: done"),
                Err(error) => format!("trial: {name}: {}", error.raw_os_error().unwrap_or_default()),
            });
        }
    });
    let _ = attempts.join();
    process::exit(0);
}

enum Attempt {
    Alone(fn() -> io::Result<()>),
    /// With a socket that somebody listens on.
    With(fn(&std::ffi::OsStr) -> io::Result<()>),
}

const ATTEMPTS: [(&str, Attempt); 15] = [
    ("open", Attempt::Alone(|| fs::File::open("/etc/passwd").map(drop))),
    ("open proc", Attempt::Alone(|| fs::File::open("/proc/self/mem").map(drop))),
    ("create", Attempt::Alone(|| fs::write("/tmp/transship-trial", "x"))),
    ("list", Attempt::Alone(|| fs::read_dir("/").map(drop))),
    ("connect unix", Attempt::With(|path| UnixStream::connect(path).map(drop))),
    ("connect tcp", Attempt::Alone(|| TcpStream::connect("127.0.0.1:9").map(drop))),
    ("listen tcp", Attempt::Alone(|| TcpListener::bind("127.0.0.1:0").map(drop))),
    ("ptrace", Attempt::Alone(trace_parent)),
    ("read memory", Attempt::Alone(read_parent)),
    ("signal", Attempt::Alone(|| Ok(kill_process(parent()?, Signal::CONT)?))),
    ("datagrams", Attempt::Alone(|| UnixDatagram::pair().map(drop))),
    ("fork", Attempt::Alone(|| Command::new("/bin/true").spawn()?.wait().map(drop))),
    ("root", Attempt::Alone(|| Ok(unistd::setuid(unistd::Uid::from_raw(0))?))),
    ("capability", Attempt::Alone(gain)),
    // The last: if it is done, nothing of this process is left.
    ("exec", Attempt::Alone(|| Err(Command::new("/bin/true").exec()))),
];

fn parent() -> io::Result<Pid> {
    getppid().ok_or_else(|| io::Error::from(rustix::io::Errno::SRCH))
}

fn trace_parent() -> io::Result<()> {
    let parent = unistd::Pid::from_raw(parent()?.as_raw_nonzero().get());
    // It goes on as it is until this thread ends, which lets go of it.
    Ok(ptrace::seize(parent, ptrace::Options::empty())?)
}

/// Of what is there: the address of something in this process, which need not be the parent's.
fn read_parent() -> io::Result<()> {
    let (mut byte, somewhere) = ([0], [0_u8]);
    let remote = RemoteIoVec { base: somewhere.as_ptr() as usize, len: 1 };
    let parent = unistd::Pid::from_raw(parent()?.as_raw_nonzero().get());
    match process_vm_readv(parent, &mut [io::IoSliceMut::new(&mut byte)], &[remote]) {
        // It may look, and there is nothing at that address.
        Err(Errno::EFAULT) => Ok(()),
        read => Ok(read.map(drop)?),
    }
}

fn gain() -> io::Result<()> {
    let (one, none) = (CapabilitySet::SYS_PTRACE, CapabilitySet::empty());
    Ok(set_capabilities(None, CapabilitySets { effective: one, permitted: one, inheritable: none })?)
}
