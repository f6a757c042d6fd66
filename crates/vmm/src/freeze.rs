//! The last resort for a guest whose memory can't be brought any more: its process is stopped by the kernel.
//!
//! A VMM is asked first. But it may itself wait for a page that does not come (its main loop reads guest memory too),
//! or for a vCPU that does, and then it answers nobody. Its process must stand still before the userfaultfd is closed:
//! from then on the kernel serves missing pages with zeros.
//!
//! A process that has given up the right to stop another one has somebody else do it ([`freeze_by`]).
use std::{
    fs,
    os::fd::OwnedFd,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use transship_guest::GuestError;

/// How long the kernel may take to stop all threads. They stop when they are back from the kernel, or sleep there for
/// good.
const STOP_WAIT: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

type Other = Box<dyn Fn(i32) -> Result<bool, String> + Send + Sync>;

/// Set once, before anything is to be frozen by it.
static OTHER: OnceLock<Other> = OnceLock::new();

/// From now on `other` freezes processes in the place of this one, which may not do so by itself any more: it is told
/// which, and says what [`Freezer::freeze`] does. If there was one before, that one stays.
pub fn freeze_by(other: impl Fn(i32) -> Result<bool, String> + Send + Sync + 'static) {
    let _ = OTHER.set(Box::new(other));
}

/// A process that can be frozen later, and will not be mistaken for another one by then.
#[derive(Debug)]
pub struct Freezer {
    pid: i32,
    /// None: somebody else has it.
    process: Option<OwnedFd>,
}

impl Freezer {
    /// The process must be known to live, by a connection to it that is open.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of(pid: i32) -> Result<Self, GuestError> {
        if OTHER.get().is_some() {
            return Ok(Self { pid, process: None });
        }
        Ok(Self { pid, process: Some(watch(pid)?) })
    }

    /// `asked`: what came of asking the VMM to stop its guest. Where that failed, all of the process is stopped.
    /// Returns what a person finds then.
    pub(crate) fn unless_stopped(&self, asked: Result<(), GuestError>) -> Result<String, GuestError> {
        let pid = self.pid;
        let Err(why) = asked else {
            return Ok(format!(
                "its guest is stopped and will never get the rest of its memory; end the process: kill {pid}"
            ));
        };
        match self.freeze() {
            Ok(true) => Ok(format!(
                "it did not stop its guest ({why}), so the whole process was frozen (SIGSTOP); end the process: kill \
                 -9 {pid}"
            )),
            Ok(false) => Ok("its process has ended".to_owned()),
            Err(e) => {
                Err(GuestError::vmm(format!("{why}; and can't freeze process {pid}: {e}; end it: kill -9 {pid}")))
            }
        }
    }

    /// Returns when none of its threads runs any more. False: there is no process any more.
    ///
    /// # Errors
    /// It goes on, or may not be stopped from here.
    pub fn freeze(&self) -> Result<bool, String> {
        if let Some(other) = OTHER.get() {
            return other(self.pid);
        }
        let process = self.process.as_ref().ok_or("nobody is left who could")?;
        match pidfd_send_signal(process, Signal::STOP) {
            Err(Errno::SRCH) => return Ok(false),
            other => other.map_err(|e| e.to_string())?,
        }
        let deadline = Instant::now() + STOP_WAIT;
        while let Some(thread) = awake_thread(self.pid) {
            if Instant::now() > deadline {
                return Err(format!("its thread {thread} goes on"));
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(true)
    }
}

/// A handle of a process, which is never one of another that has its number later.
///
/// # Errors
/// There is no such process.
pub(crate) fn watch(pid: i32) -> Result<OwnedFd, GuestError> {
    let process = Pid::from_raw(pid).ok_or(Errno::SRCH).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
    process.map_err(GuestError::system(format!("watch process {pid}")))
}

/// A thread that may still run the program: neither stopped (T), nor in a sleep that no SIGSTOP ends (D; behind it the
/// stop waits), nor dead.
fn awake_thread(pid: i32) -> Option<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    threads.map(|thread| thread.path()).find_map(|thread| {
        let stat = fs::read_to_string(thread.join("stat")).ok()?;
        // The name before may hold anything, brackets too.
        let state = stat.rsplit_once(") ")?.1.chars().next()?;
        let id = thread.file_name()?.to_string_lossy().into_owned();
        (!"TtDZXx".contains(state)).then_some(id)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::{Child, Command};

    use super::*;

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn only_who_does_not_stop_is_frozen() {
        let sleeper = Sleeper(Command::new("sleep").arg("600").spawn().unwrap());
        let pid = sleeper.0.id() as i32;
        let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().rsplit_once(") ").unwrap().1.to_owned();
        let freezer = Freezer::of(pid).unwrap();
        assert!(freezer.unless_stopped(Ok(())).unwrap().contains(&format!("kill {pid}")));
        assert!(!state().starts_with('T'), "{}", state());
        // While it is being loaded it may wait for the disk, where a stop waits, too.
        let deadline = Instant::now() + STOP_WAIT;
        while !state().starts_with('S') && Instant::now() < deadline {
            thread::sleep(LOOK_AGAIN);
        }
        let found = freezer.unless_stopped(Err(GuestError::vmm("no answer"))).unwrap();
        assert!(found.contains("no answer") && found.contains(&format!("kill -9 {pid}")), "{found}");
        assert!(state().starts_with('T'), "{}", state());
        drop(sleeper);
        let found = freezer.unless_stopped(Err(GuestError::vmm("no answer"))).unwrap();
        assert!(found.contains("has ended"), "{found}");
    }
}
