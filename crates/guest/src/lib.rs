//! What the engine knows of a guest. Adapters implement these traits; the engine never asks which VMM it is.
#![forbid(unsafe_code)]
use std::{
    io::Read,
    time::{Duration, Instant},
};

use transship_memory::{Freeing, GuestMemory, Missing, PageRange, Protection, Tracker};
use transship_wire::GuestDescription;

/// An adapter's failure: what happened, to what, and what the user can do, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GuestError(pub String);

/// What a guest's device state is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateFormat {
    /// Bytes that only the VMM knows.
    Opaque,
    /// QEMU's migration stream, made with the capability `x-ignore-shared`.
    Qemu {
        /// Names of the RAM blocks of the regions, in the order of the description.
        blocks: Vec<String>,
        /// All other RAM blocks (ROMs, video memory), where they are known.
        others: Vec<DeviceBlock>,
    },
}

/// Memory of a guest's that is part of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBlock {
    /// Its name in QEMU's stream.
    pub name: String,
    /// Its length at most: some can grow.
    pub max_bytes: u64,
}

/// Pages of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Number of the region in the guest's memory.
    pub region: usize,
    /// Its pages.
    pub pages: PageRange,
}

/// What a guest did in the moment in which it was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It ran.
    Running,
    /// It stood still already, and is to be left so wherever it comes to.
    Standing,
}

impl Found {
    /// Of a guest that runs, or does not.
    pub fn by(runs: bool) -> Self {
        if runs { Self::Running } else { Self::Standing }
    }

    /// It is to run again.
    pub fn ran(self) -> bool {
        self == Self::Running
    }
}

/// What a guest says about its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// It can do without what these pages held when hints were asked for.
    Free(Place),
    /// It has named all that it can do without.
    NamedAll,
}

/// Somebody who asks a running guest which of its memory it can do without. docs/free-pages.md says when a hint may be
/// believed. When this is dropped, whatever the reason, the guest has back whatever it has set aside.
pub trait Hints: Send {
    /// Asks for hints. Writes to guest memory must be tracked already, **all of it**, since before this call: what a
    /// hint says is that the page was free at some moment after it. Hints of earlier calls are void.
    ///
    /// # Errors
    /// There are none to be had.
    fn start(&mut self) -> Result<(), GuestError>;
    /// What the guest says next; nothing if it says nothing until `deadline`. One that has passed does not wait.
    ///
    /// # Errors
    /// There will be no more hints. Those that came are as good as before.
    fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, GuestError>;
    /// No more hints: to be called before the next scan.
    ///
    /// # Errors
    /// There will be none anyway.
    fn stop(&mut self) -> Result<(), GuestError>;
    /// Lets the guest use again what it has set aside. Does not wait until it does.
    ///
    /// # Errors
    /// It can do so already.
    fn done(&mut self) -> Result<(), GuestError>;
    /// Waits, after `done`, until the guest has what it had set aside, as far as that can be told, and a few seconds at
    /// most.
    ///
    /// # Errors
    /// It can't be told.
    fn taken_back(&mut self) -> Result<(), GuestError>;
    /// Memory that whoever gives the hints writes to by itself, past the tracker.
    fn writes_to(&mut self) -> Vec<Place>;
}

/// A guest that is to be moved away. Created attached (memory mapped, every refusal already made), but with nothing
/// changed in the VMM. Dropping it leaves nothing of ours there.
pub trait SourceGuest: Send {
    /// What the destination must match.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for reading, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// Whether the guest, or the VMM on its behalf, may give memory back while it runs. If in doubt, it may.
    fn freeing(&self) -> Freeing {
        Freeing::Possible
    }
    /// Who can be asked which of its memory the guest can do without, if there is anybody. Asked at most once.
    fn hints(&mut self) -> Option<Box<dyn Hints>> {
        None
    }
    /// Whether the guest runs with something that its device state can't be saved with, and which `unplug` is for.
    fn must_unplug(&self) -> bool {
        false
    }
    /// Unplugs what the guest runs with and its device state can't be saved with, while it runs. True when it is gone;
    /// false if the guest has not let go of it by `until`: to be called again. Whether or not this succeeds,
    /// `plug_back` follows if the guest stays.
    ///
    /// # Errors
    /// The guest, or the VMM, does not let go of it.
    fn unplug(&mut self, _until: Instant) -> Result<bool, GuestError> {
        Ok(true)
    }
    /// The guest stays: plugs in again what was unplugged, as far as that is possible, and warns where it is not.
    fn plug_back(&mut self) {}
    /// Begins to track writes. Called at most once before `stop`.
    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError>;
    /// Waits until all is in guest memory that somebody was writing there past the tracker when this was called, such
    /// as a disk that reads into it by itself: the page was noted as written when its transfer began, and what comes
    /// later is not. To be called after each scan of a guest that runs, before the pages that it found are read. True:
    /// there is somebody who may do so.
    ///
    /// # Errors
    /// It can't be known.
    fn drain(&mut self) -> Result<bool, GuestError> {
        Ok(false)
    }
    /// Whether the vCPUs run now.
    fn is_running(&mut self) -> Result<bool, GuestError>;
    /// Stops the vCPUs and waits until all writes to guest memory have ended (block jobs flushed included). Returns
    /// what the guest did right before: somebody else may have paused it, or let it run, since it was asked last.
    ///
    /// # Errors
    /// It does not stop, or can't be given away as it is. `resume` then leaves it as it was.
    fn stop(&mut self) -> Result<Found, GuestError>;
    /// Tracks nothing, but can have writes wait: for a snapshot of one moment. Instead of `track`, called at most once
    /// before `stop`.
    ///
    /// As long as the protection is there, memory that is given back may lose its protection and its content: either
    /// that does not happen, or `check_protected` notices.
    ///
    /// The VMM itself writes to guest memory when it lets the guest run on, and then waits as the guest does: whoever
    /// calls `resume` has a thread that lets writes through.
    ///
    /// # Errors
    /// Not possible with this guest; the text says why and what is.
    fn protect(&mut self) -> Result<Protection, GuestError> {
        Err(GuestError("this VMM can't make writes wait, which a background snapshot needs; use --live".into()))
    }
    /// Asked when all that was protected is saved: that no memory was given back since `protect`. (The caller sees
    /// holes that are left.)
    ///
    /// # Errors
    /// Something has, or it can't be told: what was saved is not that moment's memory.
    fn check_protected(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// What `save_state` yields.
    fn state_format(&self) -> StateFormat {
        StateFormat::Opaque
    }
    /// The guest's UUID as its VMM knows it; all zero if it has none. A destination that is no transship may compare it
    /// with its own.
    ///
    /// # Errors
    /// The VMM does not say.
    fn uuid(&mut self) -> Result<[u8; 16], GuestError> {
        Ok([0; 16])
    }
    /// Called before anything of the guest is given to a destination that is a stock VMM of its kind.
    ///
    /// # Errors
    /// Such a destination would not take it from us; the text says why, and what is possible.
    fn check_for_stock(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// How long saving, sending and loading the device state is thought to take; for the forecast before the first one.
    fn state_estimate(&self) -> Duration;
    /// The guest will neither go nor run on after `save_state`: `resume(false)` will follow, and leaves it as whole as
    /// `stop` did. Called before `save_state`, if at all.
    fn keep_stopped(&mut self) {}
    /// The device state of the stopped guest, as a stream to be read to its end. Afterwards `state_saved` must be
    /// asked.
    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError>;
    /// Whether the VMM calls the state that was read complete.
    fn state_saved(&mut self) -> Result<(), GuestError>;
    /// Called right before the destination is told to go: whatever happens now, nothing of this side may let the guest
    /// run.
    ///
    /// # Errors
    /// It can't be made sure; the guest is then not given up.
    fn give_up(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// Takes back whatever `stop` and `save_state` did. With `run` the guest is as `stop` found it, as if nothing had
    /// been: it runs here again if it ran. Otherwise it is left stopped, but whole.
    fn resume(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person resumes this guest by hand, for messages: a command line.
    fn resume_hint(&self) -> String;
    /// What somebody else must know to undo `unplug`, `stop` and `save_state` should we die. Asked before them; for the
    /// adapter to read, and not secret.
    ///
    /// # Errors
    /// The VMM does not say.
    fn last_will(&mut self) -> Result<String, GuestError> {
        Ok(String::new())
    }
}

/// What is to become of a guest should whoever holds it die now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
    /// It is stopped, or about to be: it is to run again, with all its devices.
    RunAgain,
    /// It stands, or runs, and is to be left so; it is to have all its devices.
    LeaveIt,
}

/// Somebody who outlives this process, and puts a guest back as it was should the process die while it is not. Whoever
/// stops a guest, or unplugs something, says so here first.
pub trait Guard: Send {
    /// Something of the guest is about to be changed; it is to be left as it runs or stands. `will`: what
    /// [`SourceGuest::last_will`] has said.
    ///
    /// # Errors
    /// There is nobody: nothing may be changed.
    fn begin(&mut self, will: &str) -> Result<(), GuestError>;
    /// What is to be done from now on.
    ///
    /// # Errors
    /// It is not heard: what was said before holds.
    fn instruct(&mut self, duty: Duty) -> Result<(), GuestError>;
    /// The guest is as it was, or is about to be given up: once this has returned nobody acts.
    ///
    /// # Errors
    /// It can't be made sure.
    fn end(&mut self) -> Result<(), GuestError>;
}

/// A guest that waits for its memory and state. Nothing may run in it before `start`.
pub trait DestinationGuest: Send {
    /// What it waits for.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for writing, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// What `load_state` takes.
    fn state_format(&self) -> StateFormat {
        StateFormat::Opaque
    }
    /// Has everybody who touches a page that is not there wait for us. All memory must be holes. Called at most once,
    /// before `load_state`.
    ///
    /// Loading the state touches pages, and so do `start` and `stop`: whoever calls them has a thread that brings
    /// pages. Nobody may touch memory through the regions any more, not even to read: a page that is there, if only
    /// with zeros, is not waited for.
    ///
    /// # Errors
    /// Not possible with this guest; the text says why and what is.
    fn missing(&mut self) -> Result<Missing, GuestError> {
        Err(GuestError("this VMM can't wait for pages, which a lazy restore needs; leave out --lazy".into()))
    }
    /// Stops a guest that was started, because its memory can't be brought any more; a VMM that hangs on a page is
    /// frozen with it. Returns what a person finds, and how to end it: the rest of a sentence. Until this has returned,
    /// the pages that are missing must stay so.
    ///
    /// # Errors
    /// It does not stop.
    fn stop(&mut self) -> Result<String, GuestError> {
        Err(GuestError("this VMM can't be told to stop its guest".into()))
    }
    /// What somebody else must know to undo, should we die, what `load_state` changes beside the guest. Asked before
    /// it; for the adapter to read, and not secret.
    ///
    /// # Errors
    /// The VMM does not say.
    fn last_will(&mut self) -> Result<String, GuestError> {
        Ok(String::new())
    }
    /// Loads the device state, to the end of `state`, and waits until the VMM says that it has loaded it all.
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError>;
    /// Lets the vCPUs run (`run`), or leaves the guest loaded and stopped.
    fn start(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person starts this guest by hand, for messages: a command line.
    fn start_hint(&self) -> String;
}
