//! Commands of the user's: started here, or by whoever still has the right to start them.
use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use serde::{Deserialize, Serialize};

/// A command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserCommand {
    /// For `/bin/sh -c`.
    pub shell: String,
    /// Variables of its environment, beside ours; `TRANSSHIP_PHASE` is added.
    pub environment: Vec<(String, String)>,
}

/// One that was started.
pub trait Started: Send {
    /// Readable once it has ended.
    fn ended(&self) -> BorrowedFd<'_>;
    /// How it has ended; none: it has not.
    ///
    /// # Errors
    /// The system does not say.
    fn status(&mut self) -> io::Result<Option<ExitStatus>>;
    /// Kills it with all that it has started, and waits for it. It may have ended by itself.
    ///
    /// # Errors
    /// The system can't wait for it.
    fn end(&mut self) -> io::Result<()>;
}

type Starter = Box<dyn Fn(&UserCommand, &str) -> io::Result<Box<dyn Started>> + Send + Sync>;

/// Set once, before the first command.
static STARTER: OnceLock<Starter> = OnceLock::new();

/// From now on `starter` starts the commands of this process, which may not start any by itself any more; it gets the
/// phase, too. If there was one before, that one stays.
pub fn start_by(starter: impl Fn(&UserCommand, &str) -> io::Result<Box<dyn Started>> + Send + Sync + 'static) {
    let _ = STARTER.set(Box::new(starter));
}

impl UserCommand {
    pub(crate) fn start(&self, phase: &str) -> io::Result<Box<dyn Started>> {
        match STARTER.get() {
            Some(starter) => starter(self, phase),
            None => self.start_here(phase),
        }
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// The system's own.
    pub fn run(&self, phase: &str) -> io::Result<ExitStatus> {
        let mut command = self.start(phase)?;
        loop {
            let ended = command.ended().try_clone_to_owned()?;
            match poll(&mut [PollFd::new(&ended, PollFlags::IN)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if let Some(status) = command.status()? {
                return Ok(status);
            }
        }
    }

    /// As a child of this process.
    ///
    /// # Errors
    /// The system's own.
    pub fn start_here(&self, phase: &str) -> io::Result<Box<dyn Started>> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", &self.shell])
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env("TRANSSHIP_PHASE", phase)
            .stdin(Stdio::null())
            // Results are ours alone.
            .stdout(io::stderr())
            // So that what it has started ends with it, and Ctrl-C is for us.
            .process_group(0)
            .spawn()?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(ended) => Ok(Box::new(Here { child, ended })),
            Err(error) => end(&mut child).and(Err(error.into())),
        }
    }
}

struct Here {
    child: Child,
    ended: OwnedFd,
}

impl Started for Here {
    fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    fn end(&mut self) -> io::Result<()> {
        end(&mut self.child)
    }
}

fn end(child: &mut Child) -> io::Result<()> {
    // All of the group may have ended by now; nobody else has its number before we wait for the child.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    child.wait().map(drop)
}
