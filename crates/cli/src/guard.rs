//! A guest must not stand still for ever because the process that stopped it was killed, nor lack a device that was
//! unplugged.
//!
//! While the guest is stopped or lacks something, and is not given up, a second process waits on a pipe for the end of
//! this one. When the pipe ends, it does what the last word on it says: the guest is put back as it was, and let run
//! again if it ran when it was stopped; or, if it was given up, nothing. That word is written before the destination is
//! told to go: from then on nobody here resumes the guest. The engine says when
//! ([`transship_guest::Guard`]).
use std::{
    io::{self, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use transship_guest::{Duty, Guard, GuestError};

/// A word to the second process. Before the first one the guest was not stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Word {
    /// The guest is stopped, or about to be, and is to run again.
    RunAgain = b'r',
    /// The guest stands, or runs, and is to be left so.
    LeaveIt = b'l',
    /// The guest is as it was, or given up: nothing is to be done.
    End = b'd',
}

impl Word {
    pub(crate) fn read(byte: u8) -> Option<Self> {
        [Self::RunAgain, Self::LeaveIt, Self::End].into_iter().find(|word| *word as u8 == byte)
    }
}

/// This program, also when its file was replaced or removed since it was started.
const OURSELVES: &str = "/proc/self/exe";

/// The second process, while there is one.
pub(crate) struct GuardProcess {
    program: Box<Path>,
    /// The guest's address, for the second process.
    vm: String,
    process: Option<Child>,
    /// One that was told to end.
    ending: Option<Child>,
}

impl GuardProcess {
    /// `vm`: the guest's address. Nothing is started before something of the guest is to be changed.
    pub(crate) fn of(vm: &str) -> Self {
        Self::by(Path::new(OURSELVES), vm)
    }

    fn by(program: &Path, vm: &str) -> Self {
        Self { program: program.into(), vm: vm.to_owned(), process: None, ending: None }
    }
}

impl Guard for GuardProcess {
    fn begin(&mut self, will: &str) -> Result<(), GuestError> {
        let process = Command::new(&*self.program)
            .arg0("transship")
            .args(["guard", "--vm", &self.vm, "--will", will])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // A Ctrl-C in the terminal, and a kill of our group, are not for it.
            .process_group(0)
            .spawn()
            .map_err(GuestError::system("start the process that guards the guest"))?;
        self.process = Some(process);
        Ok(())
    }

    fn instruct(&mut self, duty: Duty) -> Result<(), GuestError> {
        let word = match duty {
            Duty::RunAgain => Word::RunAgain,
            Duty::LeaveIt => Word::LeaveIt,
        };
        let told = match self.process.as_mut().and_then(|process| process.stdin.as_mut()) {
            Some(pipe) => pipe.write_all(&[word as u8]),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        told.map_err(GuestError::system("instruct the process that guards the guest"))
    }

    /// Once the word is written the second process can't act, whenever it gets to read it.
    fn end(&mut self) -> Result<(), GuestError> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        let told = process.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(&[Word::End as u8]));
        if told.is_err() {
            // It does not listen: it must not act either.
            let killed = process.kill();
            killed.map_err(GuestError::system("end the process that guards the guest"))?;
        }
        self.ending = Some(process);
        Ok(())
    }
}

impl Drop for GuardProcess {
    fn drop(&mut self) {
        if let Some(mut process) = self.ending.take() {
            // Not earlier: the guest's downtime need not wait for it.
            let _ = process.wait();
        }
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
        time::{Duration, Instant},
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
        (GuardProcess::by(&program, "qemu:/the vm"), folder)
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
        for word in [Word::RunAgain, Word::LeaveIt, Word::End] {
            assert_eq!(Word::read(word as u8), Some(word));
        }
        assert_eq!(Word::read(b'x'), None);
    }

    #[test]
    fn the_second_process_hears_every_word_and_is_waited_for() {
        let _alone = alone();
        // It takes its time, and is waited for all the same.
        let (mut guard, folder) =
            guard("echo \"$1|$2|$3|$4|$5\" >said; cat >words; sleep 0.3; cat words >heard; mv heard done");
        guard.begin("the will").unwrap();
        for duty in [Duty::RunAgain, Duty::LeaveIt, Duty::RunAgain] {
            guard.instruct(duty).unwrap();
        }
        guard.end().unwrap();
        guard.end().unwrap();
        assert!(guard.instruct(Duty::RunAgain).is_err(), "there is nobody any more");
        drop(guard);
        assert_eq!(
            fs::read_to_string(folder.path().join("said")).unwrap(),
            "guard|--vm|qemu:/the vm|--will|the will\n"
        );
        assert_eq!(fs::read_to_string(folder.path().join("done")).unwrap(), "rlrd");
    }

    #[test]
    fn who_does_not_listen_is_ended() {
        let _alone = alone();
        let (mut guard, folder) = guard("exec <&-; echo >deaf; exec sleep 1000");
        guard.begin("").unwrap();
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
    fn without_a_second_process_nothing_may_be_changed() {
        let mut guard = GuardProcess::by(Path::new("/nowhere/at all"), "qemu:/vm");
        let error = guard.begin("").unwrap_err().to_string();
        assert!(error.contains("can't start the process"), "{error}");
        assert!(guard.instruct(Duty::RunAgain).is_err());
        guard.end().unwrap();
    }
}
