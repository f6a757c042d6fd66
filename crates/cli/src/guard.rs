//! A guest must not stand still for ever because the process that stopped it was killed, nor lack a device that was
//! unplugged.
//!
//! While the guest is stopped or lacks something, and is not given up, a second process waits on a pipe for the end of
//! this one. When the pipe ends, it does what the last word on it says: the guest is put back as it was, and let run
//! again if it ran when it was stopped; or, if it was given up, nothing. That word is written before the destination is
//! told to go: from then on nobody here resumes the guest. The engine says when
//! ([`transship_guest::Guard`]).
use std::{
    env,
    io::{self, Write},
    os::unix::process::CommandExt,
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

/// The second process, while there is one.
pub(crate) struct GuardProcess {
    /// The guest's address, for the second process.
    vm: String,
    process: Option<Child>,
    /// One that was told to end.
    ending: Option<Child>,
}

impl GuardProcess {
    /// `vm`: the guest's address. Nothing is started before something of the guest is to be changed.
    pub(crate) fn of(vm: &str) -> Self {
        Self { vm: vm.to_owned(), process: None, ending: None }
    }
}

impl Guard for GuardProcess {
    fn begin(&mut self, will: &str) -> Result<(), GuestError> {
        let start = || {
            Command::new(env::current_exe()?)
                .args(["guard", "--vm", &self.vm, "--will", will])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                // A Ctrl-C in the terminal, and a kill of our group, are not for it.
                .process_group(0)
                .spawn()
        };
        let process = start().map_err(GuestError::system("start the process that guards the guest"))?;
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
