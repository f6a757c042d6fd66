//! A guest that waits for its memory and state.
use std::{io::Read, time::Instant};

use transship_memory::{GuestMemory, Missing, PageSet};
use transship_wire::GuestDescription;

use crate::{DiskFile, GuestError, StateFormat};

/// What made a device state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateMade {
    /// The adapter of a source, which is of the same kind as the destination's.
    ByAdapter,
    /// The VMM by itself, in a migration of its own or for a file. Whoever passes it on leaves the guest's memory out.
    ByVmm,
}

/// A guest that waits for its memory and state. Nothing may run in it before `start`.
pub trait DestinationGuest: Send {
    /// The description of the guest that it waits for.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for writing, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// When the VMM answered for the first time, and so had begun to wait; none if that is not known.
    fn answered(&self) -> Option<Instant> {
        None
    }
    /// When the guest ran, once `start` has let it; none if that is not known.
    fn ran_since(&self) -> Option<Instant> {
        None
    }
    /// The kind of state that `load_state` accepts.
    fn state_format(&self) -> StateFormat {
        StateFormat::Opaque
    }
    /// The process of the VMM: somebody may have to freeze it whose pages can't be brought.
    fn process(&self) -> Option<i32> {
        None
    }
    /// Has beforehand what `missing` needs rights for, which this process is about to give up. Changes nothing in the
    /// VMM. If it is not to be had, `may_miss` and `missing` say why.
    fn prepare_to_miss(&mut self) {}
    /// After `prepare_to_miss`: for a process that has the VMM give back memory of its own in our place, what that
    /// could be; the adapter itself will read it, and it is not secret. None: nothing.
    fn own_memory(&self) -> Option<String> {
        None
    }
    /// Whether `missing` would be refused. Changes nothing in the VMM.
    ///
    /// # Errors
    /// It would; the text says why and what is possible.
    fn may_miss(&mut self) -> Result<(), GuestError> {
        Err(GuestError::Unfit("this VMM can't wait for pages; leave out --lazy".into()))
    }
    /// Makes every thread that touches a missing page wait for us. The pages of `lacks`, by region, must be holes;
    /// where the VMM has memory for itself, this makes them so. Called at most once, before `load_state`.
    ///
    /// Loading the state touches pages, and so do `start` and `stop`: their caller must have a thread that brings
    /// pages. Memory must no longer be touched through the regions, not even to read: nothing waits for a page that is
    /// there, even if it has only zeros.
    ///
    /// # Errors
    /// Not possible with this guest; the text says why and what is.
    fn missing(&mut self, _lacks: &[PageSet]) -> Result<Missing, GuestError> {
        Err(GuestError::Unfit("this VMM can't wait for pages, which a lazy restore needs; leave out --lazy".into()))
    }
    /// Stops a started guest because its memory can't be brought any more; if the VMM hangs on a page, the whole
    /// process is frozen. Returns the rest of a sentence for the user: the state of the guest, and how to end it. Until
    /// this has returned, missing pages must stay missing.
    ///
    /// # Errors
    /// It does not stop.
    fn stop(&mut self) -> Result<String, GuestError> {
        Err(GuestError::Unfit("this VMM can't be told to stop its guest".into()))
    }
    /// The information that another process needs if this one dies, to undo what `load_state` changes beside the guest.
    /// Called before it, and maybe after `expect_state`; the adapter itself will read it, and it is not secret.
    ///
    /// # Errors
    /// The VMM does not say.
    fn last_will(&mut self) -> Result<String, GuestError> {
        Ok(String::new())
    }
    /// The files of disks that the guest may write to.
    ///
    /// # Errors
    /// The VMM does not say.
    fn writable_disks(&mut self) -> Result<Vec<DiskFile>, GuestError> {
        Ok(Vec::new())
    }
    /// Of these files, one that another process on this host has open for writing, and that process, in words. One that
    /// can't be looked into from here is not known of.
    fn written_elsewhere(&mut self, _disks: &[DiskFile]) -> Option<(DiskFile, String)> {
        None
    }
    /// Does beforehand what `load_state` needs and the guest would stand still for. Called while pages come; `tidy`
    /// undoes it. A state that somebody else has made is loaded all the same, only later.
    ///
    /// # Errors
    /// The VMM refuses.
    fn expect_state(&mut self, _made: StateMade) -> Result<(), GuestError> {
        Ok(())
    }
    /// Loads the device state, to the end of `state`, and waits until the VMM reports that it has loaded all of it.
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError>;
    /// Whether the VMM is still there, as far as that shows without asking it: whoever waits for word to start the
    /// guest asks again and again.
    ///
    /// # Errors
    /// It has ended.
    fn check_alive(&mut self) -> Result<(), GuestError>;
    /// Puts back what was set in the VMM to load the state. Called when the guest is loaded and whoever gives it has
    /// been told: nobody waits for this side then. Without this call, `start` does it when the guest runs.
    fn tidy(&mut self) {}
    /// Lets the vCPUs run (`run`), or leaves the guest loaded and stopped.
    fn start(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person starts this guest by hand, for messages: a command line.
    fn start_hint(&self) -> String;
}
