//! A command of the user's that runs while the guest stands still, before it is given up or runs on: to move its
//! network, to fence its storage, to take a snapshot of its disks.
//!
//! ```text
//!   stop ─► last round, device state ─► the command: "stopped" ─► the guest is given up, or its file completed
//!                                          │ it fails, takes too long, or something else fails after it
//!                                          ╰► the command: "back" ─► the guest runs on here
//! ```
use std::{
    io,
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    Error, Misfit, Progress, Report,
    commands::{Started, UserCommand},
    control::TICK,
    fail_point,
};

/// What runs at the stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AtStopCommand {
    /// The phase that it is told is `stopped` or `back`.
    pub command: UserCommand,
    /// It is killed if it takes longer.
    pub timeout: Duration,
}

/// The command of one stop, if there is one.
pub(crate) struct AtStop {
    command: Option<AtStopCommand>,
    /// It has begun, so that there may be something to be taken back.
    has_begun: bool,
}

impl AtStop {
    pub(crate) fn new(command: &Option<AtStopCommand>) -> Self {
        Self { command: command.clone(), has_begun: false }
    }

    /// The guest stands still, and all else is done.
    ///
    /// # Errors
    /// It failed: the guest must run on here. Then `back` must be called.
    pub(crate) fn stopped(&mut self, progress: &Progress, report: &mut Report) -> Result<(), Error> {
        let Some(command) = &self.command else { return Ok(()) };
        self.has_begun = true;
        let begin = Instant::now();
        let result = command.run("stopped", Some(progress));
        report.at_stop_ms = Some(begin.elapsed().as_secs_f64() * 1e3);
        result?;
        fail_point::reach("at-stop.done")
    }

    /// The guest is about to run on here after all.
    pub(crate) fn back(&mut self) {
        if let Some(command) = self.command.as_ref().filter(|_| std::mem::take(&mut self.has_begun)) {
            // Whatever it was to take back, the guest is better off running.
            if let Err(error) = command.run("back", None) {
                tracing::warn!("{error}");
            }
        }
    }
}

impl AtStopCommand {
    /// `progress`: who may cancel it.
    fn run(&self, phase: &'static str, progress: Option<&Progress>) -> Result<(), Error> {
        let failed = |source| Error::Io { what: format!("run the command of --at-stop ({phase})"), source };
        let mut started = self.command.start(phase).map_err(failed)?;
        let status = match self.wait(started.as_mut(), progress).map_err(failed)? {
            Wait::Ended(status) => status,
            Wait::Cancelled => return Err(Error::CANCELLED),
            Wait::TooLong => {
                let what = format!("did not end within {} ms, and was killed", self.timeout.as_millis());
                return Err(failed_command(Misfit::CommandTime, phase, &what));
            }
        };
        match (status.code(), status.signal()) {
            (Some(0), _) => Ok(()),
            (Some(code), _) => Err(failed_command(Misfit::Command, phase, &format!("failed with exit code {code}"))),
            (None, signal) => Err(failed_command(
                Misfit::Command,
                phase,
                &format!("was ended by signal {}", signal.unwrap_or_default()),
            )),
        }
    }

    fn wait(&self, started: &mut dyn Started, progress: Option<&Progress>) -> io::Result<Wait> {
        let begin = Instant::now();
        loop {
            let tick = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
            match poll(&mut [PollFd::from_borrowed_fd(started.ended(), PollFlags::IN)], Some(&tick)) {
                Err(rustix::io::Errno::INTR) | Ok(_) => {}
                Err(error) => return started.end().and(Err(error.into())),
            }
            if let Some(status) = started.status()? {
                return Ok(Wait::Ended(status));
            }
            if progress.is_some_and(Progress::is_cancelled) {
                return started.end().map(|()| Wait::Cancelled);
            }
            if begin.elapsed() >= self.timeout {
                return started.end().map(|()| Wait::TooLong);
            }
        }
    }
}

enum Wait {
    Ended(ExitStatus),
    Cancelled,
    TooLong,
}

fn failed_command(kind: Misfit, phase: &str, what: &str) -> Error {
    kind.unfit(format!("the command of --at-stop ({phase}) {what}; the guest runs on here. See what it said"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;

    fn command(shell: &str, timeout: Duration) -> AtStopCommand {
        let environment = vec![("WHERE".into(), "here".into())];
        AtStopCommand { command: UserCommand { shell: shell.into(), environment }, timeout }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn it_learns_the_phase_and_what_it_was_given() {
        let folder = tempfile::tempdir().unwrap();
        let said = folder.path().join("said");
        let shell = format!("echo $TRANSSHIP_PHASE $WHERE >> {}", said.display());
        let (progress, mut report) = (Progress::new(), Report::default());
        let mut at_stop = AtStop::new(&Some(command(&shell, LONG)));
        at_stop.back();
        assert!(!said.exists(), "there is nothing to take back");
        at_stop.stopped(&progress, &mut report).unwrap();
        assert!(report.at_stop_ms.is_some());
        at_stop.back();
        at_stop.back();
        assert_eq!(fs::read_to_string(&said).unwrap(), "stopped here\nback here\n");
    }

    #[test]
    fn a_failure_says_what_it_was() {
        for (shell, why) in [("exit 3", "exit code 3"), ("kill -9 $$", "signal 9"), ("/no/such/thing", "exit code 127")]
        {
            let (progress, mut report) = (Progress::new(), Report::default());
            let error = AtStop::new(&Some(command(shell, LONG))).stopped(&progress, &mut report).unwrap_err();
            assert!(
                matches!(&error, Error::Unfit { what: Misfit::Command, text } if text.contains(why)),
                "{shell}: {error}"
            );
        }
    }

    /// What the command has started is gone, too.
    #[test]
    fn one_that_takes_too_long_is_ended_with_all_that_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let said = folder.path().join("said");
        let shell = format!("sleep 600 & echo $! > {}; wait", said.display());
        let error = command(&shell, Duration::from_millis(500)).run("stopped", None).unwrap_err();
        assert!(matches!(error, Error::Unfit { what: Misfit::CommandTime, .. }), "{error}");
        let pid = fs::read_to_string(&said).unwrap();
        // It is nobody's child now: gone, or a zombie until somebody looks. The signal takes it a moment.
        let deadline = Instant::now() + LONG;
        loop {
            match fs::read_to_string(format!("/proc/{}/stat", pid.trim())) {
                Ok(stat) if !stat.contains(") Z ") => assert!(Instant::now() < deadline, "{stat}"),
                _ => break,
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn cancelling_ends_it() {
        let progress = Progress::new();
        progress.cancel();
        let result = command("sleep 600", LONG).run("stopped", Some(&progress));
        assert!(matches!(result, Err(Error::Cancelled(_))), "{result:?}");
    }
}
