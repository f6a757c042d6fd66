//! A guest must not stand still for ever because the process that stopped it was killed, nor lack a device that was unplugged.
//!
//! While the guest is stopped or lacks something, and is not given up, a second process waits on a pipe for the end of this one. When the pipe ends without a word,
//! it puts the guest back as it was, and lets it run again if it ran. The word is written before the destination is told to go: from then on
//! nobody here resumes the guest.
use std::{
    env,
    io::{self, Read, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use transship_balloon::Client;
use transship_engine::guest::{GuestError, Hints, SourceGuest, StateFormat};
use transship_memory::{Freeing, GuestMemory, Protection, Tracker};
use transship_wire::GuestDescription;

use crate::output;

/// The word.
pub(crate) const DISARM: u8 = b'd';

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
    /// `vm`: the guest's address, for the second process. `balloon`: the socket of its balloon; one that can't be asked is no reason to fail.
    pub(crate) fn new(guest: Box<dyn SourceGuest>, vm: &str, balloon: Option<&Path>) -> Self {
        let connect = |socket| {
            let connected = Client::connect(socket, &guest.memory());
            connected.inspect_err(|error| output::say(&format!("{error}; going on without its hints"))).ok()
        };
        let (has_balloon, balloon) = (balloon.is_some(), balloon.and_then(connect));
        Self { guest, vm: vm.to_owned(), has_balloon, balloon, lacks: false, guard: None, ending: None }
    }

    /// `run`: it runs, and is to run again.
    fn arm(&mut self, run: bool) -> Result<(), GuestError> {
        if self.guard.is_some() {
            return Ok(());
        }
        let will = self.guest.last_will()?;
        let start = || {
            Command::new(env::current_exe()?)
                .args(["guard", "--vm", &self.vm, "--will", &will])
                .args(run.then_some("--run"))
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

    /// Once the word is written the guard can't act, whenever it gets to read it.
    fn disarm(&mut self) -> io::Result<()> {
        let Some(mut guard) = self.guard.take() else { return Ok(()) };
        let told = guard.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(&[DISARM]));
        if told.is_err() {
            // It does not listen: it must not act either.
            guard.kill()?;
        }
        self.ending = Some(guard);
        Ok(())
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
            let run = self.guest.is_running()?;
            self.arm(run)?;
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

    fn stop(&mut self) -> Result<(), GuestError> {
        // A guest that stood before is not to be let run.
        let run = self.guest.is_running()?;
        self.arm(run)?;
        self.guest.stop()
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
        if !self.lacks {
            // If this fails the guard lets a guest run that runs already.
            let _ = self.disarm();
        }
        Ok(())
    }

    fn resume_hint(&self) -> String {
        self.guest.resume_hint()
    }

    fn last_will(&mut self) -> Result<String, GuestError> {
        self.guest.last_will()
    }
}
