//! Fewer rights: what a process needs no more when its guest is attached to and its sockets listen, it gives up for
//! good.
//!
//! ```text
//!   root: listen · attach · open · map · start the steward ─► confine ─► whatever others send, on descriptors alone
//! ```
//!
//! - `identity`: another user, no capabilities, no way to any path
//! - `calls`, `filter`: the system calls that are left (seccomp); the others answer "operation not permitted"
//! - `paths`: Landlock, below what the change of the user does; but for one that reads another process's memory
//! - `steward`: another process, which keeps the rights and does a few things that were fixed before
//! - `trial`: for tests: tries what a confined process must not do
//!
//! All this is for the calling thread and those that it starts afterwards, so it comes before any other thread.
mod calls;
mod filter;
mod identity;
mod paths;
mod steward;
#[cfg(feature = "fail-points")]
mod trial;

use std::{io, path::Path};

use transship_codec::{Backend, Method, qatzip_backend};
use transship_engine::{Compress, Error, when_opened};
use transship_vmm::{VmAddress, qemu::libvirt::Purpose};

use crate::{args::SandboxArgs, checks::Checks, failure::Failure};
use calls::Calls;
use identity::{Account, Kept};
pub(crate) use steward::{Errands, Idle, OURSELVES, Steward, run as run_steward};

/// What a process does once it is confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Between two QEMUs.
    Relay,
    /// The destination of a move, or a QEMU's.
    Receive,
    /// A stock QEMU's guest goes into a file.
    ReceiveFile,
    /// A device beside a QEMU.
    Balloon,
    /// A guest from a file, all of it before it runs.
    Restore,
    /// A guest from a file or from a move, which may run before all of it is there.
    Fill,
    /// What a file holds.
    Info,
    /// A guest that leaves.
    Move,
    /// A guest into a file.
    Save,
    /// Beside one of these two, for the guest that it has stopped.
    Guard,
    /// Beside one that fills a guest which runs already, or sends what that one lacks.
    StandIn,
    /// One layout of a snapshot from another.
    Convert,
    /// How fast a guest writes.
    Watch,
    /// The same, and how fast the way to a receiver is.
    Plan,
}

/// What is left beside descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Left<'a> {
    Nothing,
    /// The memory of the process with this number, to be read. For roles that can't open anything: Landlock, which
    /// forbids it, is left out then.
    MemoryOf(i32),
    /// A folder of this process alone, in which it makes sockets.
    Room(&'a Path),
    /// A folder of the user's, in which a file is completed. The user is not changed then, as files of that name may be
    /// anybody's.
    Folder(&'a Path),
    /// The same, and the files that are made there become immutable.
    FolderOfImages(&'a Path),
}

impl Role {
    /// By no call of its own.
    fn opens_nothing(self) -> bool {
        !self.calls().iter().any(|calls| matches!(calls, Calls::Files | Calls::Rings | Calls::LocalSockets))
    }

    fn calls(self) -> &'static [Calls] {
        match self {
            Self::Relay => &[Calls::Threads, Calls::Streams],
            Self::Receive => &[Calls::Threads, Calls::Streams, Calls::Memory],
            Self::ReceiveFile => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Rings, Calls::Files],
            Self::Restore => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Rings],
            Self::Info => &[Calls::Threads, Calls::Streams, Calls::Memory],
            Self::Move => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Children],
            Self::Save => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Children, Calls::Rings, Calls::Files],
            Self::Guard => &[Calls::Threads, Calls::Streams],
            Self::StandIn => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Filling],
            Self::Fill => {
                &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Rings, Calls::Children, Calls::Filling]
            }
            Self::Convert => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Rings, Calls::Files],
            Self::Watch | Self::Plan => &[Calls::Threads, Calls::Streams, Calls::Memory],
            Self::Balloon => &[Calls::Threads, Calls::Streams, Calls::Memory, Calls::Events, Calls::LocalSockets],
        }
    }
}

/// The rights that a process keeps.
#[derive(Debug, Clone)]
pub(crate) enum Sandbox {
    /// All (`--no-sandbox`).
    Off,
    /// Those that its role needs.
    On(Account),
}

impl Sandbox {
    /// Of the flags.
    pub(crate) fn check(args: &SandboxArgs, checks: &mut Checks) -> Option<Self> {
        if args.no_sandbox {
            if args.user.is_some() {
                checks.mistake("--user: with --no-sandbox the user is not changed; leave one of them out".into());
            }
            return Some(Self::Off);
        }
        match Account::of(args.user.as_deref()) {
            Ok(account) => Some(Self::On(account)),
            Err(mistake) => {
                checks.mistake(format!("--user: {mistake}"));
                None
            }
        }
    }

    /// The same for another process, as its flags.
    pub(crate) fn arguments(&self) -> Vec<String> {
        match self {
            Self::Off => vec!["--no-sandbox".into()],
            Self::On(account) => account.name().map(|name| vec!["--user".into(), name.into()]).unwrap_or_default(),
        }
    }

    /// As without any flags.
    pub(crate) fn by_default() -> Result<Self, Failure> {
        Account::of(None).map(Self::On).map_err(Failure::Failed)
    }

    /// Of a process that encodes so. The library of a QAT device opens what it needs when it needs it.
    pub(crate) fn encoding(&self, compress: Compress) -> &Self {
        let is_device = || *qatzip_backend() == Backend::Device;
        if matches!(compress, Compress::Fixed(setting) if setting.method() == Method::Qatzip) && is_device() {
            tracing::warn!("with a QAT device this process keeps all rights");
            return &Self::Off;
        }
        self
    }

    /// Has another process make libvirt's calls for this one, if it will be confined and the guest is a domain of
    /// libvirt's: its library finds the daemon by itself, and again when that was started anew.
    ///
    /// # Errors
    /// It can't be started.
    pub(crate) fn reach_domain(&self, vm: &VmAddress, purpose: &Purpose) -> Result<(), Error> {
        match vm {
            VmAddress::Libvirt(address) if !self.is_off() => {
                let what = "start the process that makes libvirt's calls".into();
                steward::start_for_domain(address, purpose).map_err(|source| Error::Io { what, source })
            }
            _ => Ok(()),
        }
    }

    /// The steward of this process, if it will be confined and there is something to do for one.
    ///
    /// # Errors
    /// It can't be started.
    pub(crate) fn steward(&self, errands: &Errands<'_>) -> Result<Option<Steward>, Error> {
        if self.is_off() || errands.is_empty() {
            return Ok(None);
        }
        let started = Idle::start(errands.other.as_ref());
        started.and_then(|idle| idle.charge(errands)).map(Some).map_err(no_steward)
    }

    /// One that hears later what there is to do ([`charged`]): it comes to be while this process waits for its VMM.
    ///
    /// # Errors
    /// It can't be started.
    pub(crate) fn idle_steward(&self) -> Result<Option<Idle>, Error> {
        (!self.is_off()).then(|| Idle::start(None)).transpose().map_err(no_steward)
    }

    /// Gives up all rights but those of the role and what is `left`. From here on no path leads anywhere else. A room
    /// gets a new path, which is returned.
    ///
    /// # Errors
    /// The system has no filter for system calls, or the user that was asked for can't be had. What has been given up
    /// by then is not had again.
    pub(crate) fn confine(&self, role: Role, left: Left<'_>) -> Result<Option<&'static Path>, Error> {
        let account = match self {
            Self::On(account) if !self.is_off() => account,
            _ => {
                try_for_a_test(role);
                return Ok(None);
            }
        };
        let begin = std::time::Instant::now();
        let failed = |what: &str| {
            let what = format!("{what}; --no-sandbox goes on with all rights");
            move |source: io::Error| Error::Io { what, source }
        };
        debug_assert!(!matches!(left, Left::MemoryOf(_)) || role.opens_nothing(), "{role:?} needs Landlock");
        // Made while there is still the right to look for its parts.
        let filter = filter::of(role.calls(), left).map_err(failed("make the filter of system calls"))?;
        let Kept { room, reads_memory } = account.take(left).map_err(failed("give up root's rights"))?;
        if !reads_memory {
            paths::confine(room.map_or(left, Left::Room));
        }
        filter.apply().map_err(failed("set the filter of system calls"))?;
        tracing::debug!(?role, reads_memory, us = begin.elapsed().as_micros(), "confined");
        try_for_a_test(role);
        Ok(room)
    }

    /// The same when all of a snapshot is open, and before anything of it is read.
    pub(crate) fn confine_when_opened(&self, role: Role) {
        let sandbox = self.clone();
        when_opened(move || sandbox.confine(role, Left::Nothing).map(drop));
    }

    /// Nothing is given up.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self, Self::Off) || stalls_for_a_test()
    }
}

/// The steward that was started already, if there is something to do for it.
///
/// # Errors
/// It is not there any more.
pub(crate) fn charged(idle: Option<Idle>, errands: &Errands<'_>) -> Result<Option<Steward>, Error> {
    let idle = idle.filter(|_| !errands.is_empty());
    idle.map(|idle| idle.charge(errands)).transpose().map_err(no_steward)
}

fn no_steward(source: io::Error) -> Error {
    Error::Io { what: "start the process that keeps the rights".into(), source }
}

/// A process that stalls at a named step makes a file there.
fn stalls_for_a_test() -> bool {
    cfg!(feature = "fail-points") && std::env::var_os("TRANSSHIP_FAIL_FILE").is_some()
}

/// What a test wants to be tried in the place of this process.
#[cfg(feature = "fail-points")]
fn try_for_a_test(role: Role) {
    trial::run_if_asked(role);
}

#[cfg(not(feature = "fail-points"))]
fn try_for_a_test(_: Role) {}
