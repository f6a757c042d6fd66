//! A guest must not stand still for ever because the process that stopped it was killed, nor lack a device that was
//! unplugged.
//!
//! A second process waits at a socket for the end of this one, from before this one gives up its rights. While the
//! guest is stopped or lacks something, and is not given up, that process knows what to do when the socket ends: the
//! last word on it says it. The guest is put back as it was, and let run again if it ran when it was stopped; or, if it
//! was given up, nothing. That word is written before the destination is told to go: from then on nobody here resumes
//! the guest. The engine says when ([`transship_guest::Guard`]).
use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use transship_guest::{Duty, Guard, GuestError, LastWill};
use transship_lines::LineSocket;

use crate::sandbox::{OURSELVES, Sandbox};

/// How long the second process may take to hear a word: it may not be there yet.
const WORD_WAIT: Duration = Duration::from_secs(10);

/// What the second process hears.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Word {
    /// Something of the guest is about to be changed, which this text and the descriptors beside it undo. The guest
    /// stands, or runs, and is to be left so.
    Begin(String),
    /// The guest is stopped, or about to be, and is to run again.
    RunAgain,
    /// The guest stands, or runs, and is to be left so.
    LeaveIt,
    /// The guest is as it was, or given up: nothing is to be done.
    End,
}

/// The second process.
pub(crate) struct GuardProcess {
    process: Child,
    line: LineSocket,
    /// It is to act if we die.
    is_armed: bool,
}

impl GuardProcess {
    /// Starts it. `vm`: the guest's address.
    ///
    /// # Errors
    /// It can't be started.
    pub(crate) fn start(vm: &str, sandbox: &Sandbox) -> Result<Self, GuestError> {
        Self::by(Path::new(OURSELVES), vm, sandbox)
    }

    fn by(program: &Path, vm: &str, sandbox: &Sandbox) -> Result<Self, GuestError> {
        let started = UnixStream::pair().and_then(|(ours, theirs)| {
            let process = Command::new(program)
                .arg0("transship")
                .args(["guard", "--vm", vm])
                .args(sandbox.arguments())
                .stdin(Stdio::from(OwnedFd::from(theirs)))
                .stdout(Stdio::null())
                // A Ctrl-C in the terminal, and a kill of our group, are not for it.
                .process_group(0)
                .spawn()?;
            Ok(Self { process, line: LineSocket::new(ours), is_armed: false })
        });
        started.map_err(GuestError::system("start the process that guards the guest"))
    }

    fn say(&self, word: &Word, files: &[OwnedFd]) -> io::Result<()> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.line.send(&serde_json::to_vec(word)?, &files, Instant::now() + WORD_WAIT).map_err(io::Error::other)
    }
}

impl Guard for GuardProcess {
    fn begin(&mut self, LastWill { text, files }: LastWill) -> Result<(), GuestError> {
        let told = self.say(&Word::Begin(text), &files);
        told.map_err(GuestError::system("instruct the process that guards the guest"))?;
        self.is_armed = true;
        Ok(())
    }

    fn instruct(&mut self, duty: Duty) -> Result<(), GuestError> {
        let word = match duty {
            Duty::RunAgain => Word::RunAgain,
            Duty::LeaveIt => Word::LeaveIt,
        };
        let told = if self.is_armed { self.say(&word, &[]) } else { Err(io::ErrorKind::BrokenPipe.into()) };
        told.map_err(GuestError::system("instruct the process that guards the guest"))
    }

    /// Once the word is written the second process can't act, whenever it gets to read it.
    fn end(&mut self) -> Result<(), GuestError> {
        if !std::mem::take(&mut self.is_armed) || self.say(&Word::End, &[]).is_ok() {
            return Ok(());
        }
        // It does not listen: it must not act either.
        match self.process.try_wait() {
            Ok(Some(_)) => Ok(()),
            _ => self.process.kill().map_err(GuestError::system("end the process that guards the guest")),
        }
    }
}

impl Drop for GuardProcess {
    fn drop(&mut self) {
        let _ = self.line.stream().shutdown(std::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        sync::{Mutex, MutexGuard, PoisonError},
        thread,
    };

    use tempfile::TempDir;

    use super::*;

    /// One test at a time: a child that is forked has all descriptors until it is another program, and a script that
    /// somebody has open for writing can't be started.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guard whose second process is this script, in a folder of its own.
    fn guard(script: &str) -> (GuardProcess, TempDir) {
        let folder = TempDir::new().unwrap();
        let program = folder.path().join("second");
        fs::write(&program, format!("#!/bin/sh\ncd {}\n{script}\n", folder.path().display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        (GuardProcess::by(&program, "qemu:/the vm", &Sandbox::Off).unwrap(), folder)
    }

    fn will() -> LastWill {
        LastWill { text: "the will".into(), files: Vec::new() }
    }

    fn wait_for(folder: &TempDir, name: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !folder.path().join(name).exists() {
            assert!(Instant::now() < deadline, "{name} does not come");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for word in [Word::Begin("the \"will\"\n".into()), Word::RunAgain, Word::LeaveIt, Word::End] {
            assert_eq!(serde_json::from_slice::<Word>(&serde_json::to_vec(&word).unwrap()).unwrap(), word);
        }
        assert!(serde_json::from_str::<Word>("\"anything\"").is_err());
    }

    #[test]
    fn the_second_process_hears_every_word_and_is_waited_for() {
        let _alone = alone();
        // It takes its time, and is waited for all the same.
        let (mut guard, folder) =
            guard("echo \"$1|$2|$3|$4\" >said; cat >words; sleep 0.3; cat words >heard; mv heard done");
        assert!(guard.instruct(Duty::RunAgain).is_err(), "nothing has begun");
        guard.begin(will()).unwrap();
        for duty in [Duty::RunAgain, Duty::LeaveIt, Duty::RunAgain] {
            guard.instruct(duty).unwrap();
        }
        guard.end().unwrap();
        guard.end().unwrap();
        assert!(guard.instruct(Duty::RunAgain).is_err(), "it is over");
        drop(guard);
        let said = fs::read_to_string(folder.path().join("said")).unwrap();
        assert_eq!(said, "guard|--vm|qemu:/the vm|--no-sandbox\n");
        assert_eq!(
            fs::read_to_string(folder.path().join("done")).unwrap().split('\n').collect::<Vec<_>>(),
            ["{\"begin\":\"the will\"}", "\"run-again\"", "\"leave-it\"", "\"run-again\"", "\"end\"", ""]
        );
    }

    #[test]
    fn who_does_not_listen_is_ended() {
        let _alone = alone();
        let (mut guard, folder) = guard("read word; exec <&-; echo >deaf; exec sleep 1000");
        guard.begin(will()).unwrap();
        wait_for(&folder, "deaf");
        // Other tests fork, too.
        let error = (0..1000).find_map(|_| {
            thread::sleep(Duration::from_millis(10));
            guard.instruct(Duty::LeaveIt).err()
        });
        let error = error.expect("nobody listens").to_string();
        assert!(error.contains("can't instruct"), "{error}");
        guard.end().unwrap();
        // Dropping waits for it.
    }

    #[test]
    fn one_that_has_died_is_no_reason_to_fail() {
        let _alone = alone();
        let (mut guard, folder) = guard("echo >there; read word; exit 3");
        wait_for(&folder, "there");
        guard.begin(will()).unwrap();
        while guard.instruct(Duty::LeaveIt).is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
        guard.end().unwrap();
    }

    #[test]
    fn without_a_second_process_nothing_may_be_changed() {
        let refused = GuardProcess::by(Path::new("/nowhere/at all"), "qemu:/vm", &Sandbox::Off);
        assert!(refused.err().unwrap().to_string().contains("can't start the process"));
    }
}
