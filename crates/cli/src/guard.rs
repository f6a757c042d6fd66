//! A guest must not stand still for ever because the process that stopped it was killed, nor lack a device that was
//! unplugged.
//!
//! While the guest is stopped or lacks something, and is not given up, a second process waits on a pipe for the end of
//! this one. When the pipe ends, it does what the last word on it says: the guest is put back as it was, and let run
//! again if it ran when it was stopped; or, if it was given up, nothing. That word is written before the destination is
//! told to go: from then on nobody here resumes the guest.
use std::{
    env,
    io::{self, Read, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use transship_balloon::Client;
use transship_guest::{Found, GuestError, Hints, SourceGuest, StateFormat};
use transship_memory::{Freeing, GuestMemory, Protection, Tracker};
use transship_wire::GuestDescription;

use crate::output;

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

/// A source with a guard beside it while it is not as it was.
pub(crate) struct Guarded {
    guest: Box<dyn SourceGuest>,
    vm: String,
    /// It has a balloon, which is to be unplugged.
    has_balloon: bool,
    /// Which says what memory is free.
    balloon: Option<Client>,
    /// The balloon was unplugged, or may have been.
    lacks: bool,
    guard: Option<Child>,
    /// A guard that was told to end.
    ending: Option<Child>,
}

impl Guarded {
    /// `vm`: the guest's address, for the second process. `balloon`: the socket of its balloon; one that can't be asked
    /// is no reason to fail.
    pub(crate) fn new(guest: Box<dyn SourceGuest>, vm: &str, balloon: Option<&Path>) -> Self {
        let connect = |socket| {
            let connected = Client::connect(socket, &guest.memory());
            connected.inspect_err(|error| output::say(&format!("{error}; going on without its hints"))).ok()
        };
        let (has_balloon, balloon) = (balloon.is_some(), balloon.and_then(connect));
        Self { guest, vm: vm.to_owned(), has_balloon, balloon, lacks: false, guard: None, ending: None }
    }

    /// Starts the second process, unless it is there.
    fn arm(&mut self) -> Result<(), GuestError> {
        if self.guard.is_some() {
            return Ok(());
        }
        let will = self.guest.last_will()?;
        let start = || {
            Command::new(env::current_exe()?)
                .args(["guard", "--vm", &self.vm, "--will", &will])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                // A Ctrl-C in the terminal, and a kill of our group, are not for it.
                .process_group(0)
                .spawn()
        };
        let guard = start().map_err(|e| GuestError(format!("can't start the process that guards the guest: {e}")))?;
        self.guard = Some(guard);
        Ok(())
    }

    /// Tells it what is to become of the guest. One that is not there need not know.
    fn tell(&mut self, word: Word) -> Result<(), GuestError> {
        let Some(pipe) = self.guard.as_mut().and_then(|guard| guard.stdin.as_mut()) else { return Ok(()) };
        let told = pipe.write_all(&[word as u8]);
        told.map_err(|e| GuestError(format!("the process that guards the guest does not listen: {e}")))
    }

    /// Once the word is written the guard can't act, whenever it gets to read it.
    fn disarm(&mut self) -> io::Result<()> {
        let Some(mut guard) = self.guard.take() else { return Ok(()) };
        let told = guard.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(&[Word::End as u8]));
        if told.is_err() {
            // It does not listen: it must not act either.
            guard.kill()?;
        }
        self.ending = Some(guard);
        Ok(())
    }
}

/// What is to become of a guest that we have stopped, should we die.
fn on(found: Found) -> Word {
    match found {
        Found::Running => Word::RunAgain,
        Found::Standing => Word::LeaveIt,
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(mut guard) = self.ending.take() {
            // Not earlier: the guest's downtime need not wait for it.
            let _ = guard.wait();
        }
    }
}

impl SourceGuest for Guarded {
    fn description(&self) -> GuestDescription {
        self.guest.description()
    }

    fn memory(&self) -> GuestMemory {
        self.guest.memory()
    }

    fn freeing(&self) -> Freeing {
        self.guest.freeing()
    }

    fn hints(&mut self) -> Option<Box<dyn Hints>> {
        self.balloon.take().map(|balloon| Box::new(balloon) as Box<dyn Hints>)
    }

    fn unplug(&mut self, until: Instant) -> Result<bool, GuestError> {
        if self.has_balloon {
            self.arm()?;
            self.lacks = true;
        }
        self.guest.unplug(until)
    }

    fn plug_back(&mut self) {
        if std::mem::take(&mut self.lacks) {
            self.guest.plug_back();
            // If this fails the guard plugs in what is there already, which QEMU refuses.
            let _ = self.disarm();
        }
    }

    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        self.guest.track()
    }

    fn is_running(&mut self) -> Result<bool, GuestError> {
        self.guest.is_running()
    }

    fn stop(&mut self) -> Result<Found, GuestError> {
        self.arm()?;
        // A guest that stands is not to be let run. Somebody may pause it, or let it run, right after we have asked:
        // the second word is right.
        let runs = self.guest.is_running()?;
        self.tell(on(Found::by(runs)))?;
        let found = self.guest.stop()?;
        self.tell(on(found))?;
        Ok(found)
    }

    fn protect(&mut self) -> Result<Protection, GuestError> {
        self.guest.protect()
    }

    fn check_protected(&mut self) -> Result<(), GuestError> {
        self.guest.check_protected()
    }

    fn state_format(&self) -> StateFormat {
        self.guest.state_format()
    }

    fn uuid(&mut self) -> Result<[u8; 16], GuestError> {
        self.guest.uuid()
    }

    fn check_for_stock(&mut self) -> Result<(), GuestError> {
        self.guest.check_for_stock()
    }

    fn state_estimate(&self) -> Duration {
        self.guest.state_estimate()
    }

    fn keep_stopped(&mut self) {
        self.guest.keep_stopped();
    }

    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
        self.guest.save_state()
    }

    fn state_saved(&mut self) -> Result<(), GuestError> {
        self.guest.state_saved()
    }

    fn give_up(&mut self) -> Result<(), GuestError> {
        self.disarm()
            .map_err(|e| GuestError(format!("the process that guards the guest can't be told to end: {e}")))?;
        self.guest.give_up()
    }

    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        self.guest.resume(run)?;
        // If this fails the guard lets a guest run that runs already.
        let _ = if self.lacks { self.tell(Word::LeaveIt).map_err(io::Error::other) } else { self.disarm() };
        Ok(())
    }

    fn resume_hint(&self) -> String {
        self.guest.resume_hint()
    }

    fn last_will(&mut self) -> Result<String, GuestError> {
        self.guest.last_will()
    }
}
