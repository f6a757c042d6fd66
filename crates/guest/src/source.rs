//! A guest that is to be moved away, or saved.
use std::{
    io::{self, Read},
    path::Path,
    time::{Duration, Instant},
};

use transship_memory::{Freeing, GuestMemory, LetWait, Protection, Tracker};
use transship_wire::{GuestDescription, libvirt::Definition};

use crate::{DiskFile, DiskSnapshot, GuestError, Hints, LastWill, NO_DISK_SNAPSHOT, StateFormat};

/// The state of a guest at the moment when it was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// It ran.
    Running,
    /// It was stopped already, and must stay stopped wherever it ends up.
    Standing,
}

impl Found {
    /// The state of a guest that runs, or does not.
    pub fn by(runs: bool) -> Self {
        if runs { Self::Running } else { Self::Standing }
    }

    /// It must run again.
    pub fn ran(self) -> bool {
        self == Self::Running
    }
}

/// A guest that is to be moved away. When it is created, it is attached (memory mapped, all checks passed), but nothing
/// has changed in the VMM. Dropping it leaves nothing of ours there.
pub trait SourceGuest: Send {
    /// The description that the destination must match.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for reading, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// The VMM's process, if it is known.
    fn process(&self) -> Option<i32> {
        None
    }
    /// Whether the guest, or the VMM on its behalf, may give memory back while it runs. If in doubt, it may.
    fn freeing(&self) -> Freeing {
        Freeing::Possible
    }
    /// Whether memory was given back since `track`, or since this was asked last: of a guest whose `freeing` is
    /// [`Freeing::Announced`]. What comes with its stop may be missed.
    ///
    /// # Errors
    /// The VMM does not say.
    fn gave_back(&mut self) -> Result<bool, GuestError> {
        Ok(true)
    }
    /// The source of hints about memory that the guest does not need, if there is one. Called at most once.
    fn hints(&mut self) -> Option<Box<dyn Hints>> {
        None
    }
    /// Whether the guest runs with something that its device state can't be saved with, and which `unplug` is for.
    fn must_unplug(&self) -> bool {
        false
    }
    /// Unplugs, while the guest runs, the devices with which its device state can't be saved. Returns true when they
    /// are gone; false if the guest has not released them by `until`, and then this must be called again. Whether or
    /// not this succeeds, `plug_back` follows if the guest stays.
    ///
    /// # Errors
    /// The guest, or the VMM, does not release them.
    fn unplug(&mut self, _until: Instant) -> Result<bool, GuestError> {
        Ok(true)
    }
    /// The guest stays: plugs the unplugged devices in again as far as possible, and warns where it is not.
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
    /// The files of all disks of the guest that have a name here; none if this VMM never says.
    ///
    /// # Errors
    /// The VMM does not say.
    fn disks(&mut self) -> Result<Option<Vec<DiskFile>>, GuestError> {
        Ok(None)
    }
    /// Plans a snapshot of all disks that the guest writes to, which `snapshot_disks` takes. `folder`: where the files
    /// are to be that the guest writes to from then on; none: each beside its disk. Called before `prepare_stop`, at
    /// most once. Changes nothing in the VMM; files that were made for it and are not used are gone when the guest is
    /// dropped.
    ///
    /// # Errors
    /// A disk can't be had in that way; the text says which, and what is possible.
    fn plan_disks(&mut self, _folder: Option<&Path>) -> Result<Vec<DiskSnapshot>, GuestError> {
        Err(GuestError::Unfit(NO_DISK_SNAPSHOT.into()))
    }
    /// Takes the snapshot that was planned, of all disks at once. Called while the guest stands still. On failure the
    /// guest has its disks as before, or the text says what it has.
    ///
    /// # Errors
    /// The VMM, or who keeps it, refuses.
    fn snapshot_disks(&mut self) -> Result<(), GuestError> {
        Err(GuestError::Bug("no snapshot of disks was planned".into()))
    }
    /// Does beforehand, while the guest runs, what `stop` and `save_state` need and what would take time then. Called
    /// shortly before `stop`; whatever it changes in the VMM, `resume` or `tidy` undoes.
    ///
    /// # Errors
    /// The guest can't be given away, or saved, as it is now.
    fn prepare_stop(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// The domain that the guest is to libvirt, as it is defined now; none if libvirt does not know it.
    ///
    /// # Errors
    /// libvirt does not say.
    fn definition(&mut self) -> Result<Option<Definition>, GuestError> {
        Ok(None)
    }
    /// Whether the vCPUs run now.
    fn is_running(&mut self) -> Result<bool, GuestError>;
    /// Stops the vCPUs and waits until all writes to guest memory have ended (including flushed block jobs). Returns
    /// the guest's state right before: another program may have paused or resumed it since the last call of
    /// `is_running`.
    ///
    /// # Errors
    /// It does not stop, or can't be given away in its state. `resume` then leaves it as it was.
    fn stop(&mut self) -> Result<Found, GuestError>;
    /// As `stop`, but leaves out what takes long and can wait: whether the guest is still what it was when it was
    /// attached. Whoever stops it so asks [`SourceGuest::check_unchanged`] before the guest is given up.
    ///
    /// # Errors
    /// As `stop`.
    fn stop_at_once(&mut self) -> Result<Found, GuestError> {
        self.stop()
    }
    /// What `stop` would have looked at and `stop_at_once` has not.
    ///
    /// # Errors
    /// The guest has changed: what was sent of it is not the guest.
    fn check_unchanged(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// Tracks nothing, but can make writes wait: for a snapshot of one moment. Called instead of `track`, at most once,
    /// before `stop`.
    ///
    /// While the protection exists, memory that is given back may lose its protection and its content. Either that does
    /// not happen, or `check_protected` reports it.
    ///
    /// The VMM itself writes to guest memory when it resumes the guest, and then waits as the guest does. So a caller
    /// of `resume` must have a thread that lets writes through.
    ///
    /// # Errors
    /// Not possible with this guest; the text says why and what is.
    fn protect(&mut self) -> Result<Protection, GuestError> {
        Err(GuestError::Unfit("this VMM can't make writes wait, which a background snapshot needs; use --live".into()))
    }
    /// Called when all protected pages are saved: checks that no memory was given back since `protect`. (The caller
    /// sees the remaining holes.)
    ///
    /// # Errors
    /// Some was, or it is unknown: the saved pages are not the memory of that moment.
    fn check_protected(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// The kind of state that `save_state` yields.
    fn state_format(&self) -> StateFormat {
        StateFormat::Opaque
    }
    /// The guest's UUID as its VMM knows it; all zero if it has none. A destination other than transship may compare it
    /// with its own.
    ///
    /// # Errors
    /// The VMM does not say.
    fn uuid(&mut self) -> Result<[u8; 16], GuestError> {
        Ok([0; 16])
    }
    /// Called before anything of the guest is sent to a destination that is a stock VMM of the same kind.
    ///
    /// # Errors
    /// Such a destination would not accept it from us; the text says why, and what is possible.
    fn check_for_stock(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// The device state goes to another of these adapters, which loads it at once: it is to be had quickly, and need
    /// not be fit to be kept, or for anybody else. Called before `prepare_stop`, if at all.
    fn hurry_state(&mut self) {}
    /// The estimated time to save, send and load the device state; for the forecast before the first measurement.
    fn state_estimate(&self) -> Duration;
    /// Called first where the guest is saved and does not go.
    ///
    /// # Errors
    /// It would not go on as it was; the text says why, and what is possible.
    fn check_going_on(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// Whether other processes than the VMM that write to guest memory may end when the device state is saved: what
    /// they have written has to be found before, while the guest is stopped.
    fn state_ends_writers(&self) -> bool {
        false
    }
    /// The guest is saved and does not go: it keeps what it would have to let go of for whoever takes it, such as its
    /// disks. Called before `save_state`, if at all.
    fn stays_here(&mut self) {}
    /// The guest will neither go nor run on after `save_state`: `resume(false)` will follow, and leaves it as whole as
    /// `stop` did. Called before `save_state`, if at all.
    fn keep_stopped(&mut self) {}
    /// The device state of the stopped guest, as a stream to be read to its end. Afterwards `state_saved` must be
    /// asked.
    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError>;
    /// Whether the VMM reports the state that was read as complete.
    fn state_saved(&mut self) -> Result<(), GuestError>;
    /// Does beforehand what can be done of [`SourceGuest::give_up`], while the destination loads. `resume` undoes it,
    /// and so does a guard.
    ///
    /// # Errors
    /// As `give_up`.
    fn prepare_to_give_up(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// Called right before the destination is told to go: whatever happens from now on, nothing on this side may let
    /// the guest run.
    ///
    /// # Errors
    /// That can't be guaranteed; the guest is then not given up.
    fn give_up(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    /// Puts back what was set in the VMM to save its state. Called when the guest was given up, or runs again: then
    /// nobody waits for it. What the VMM refuses is tried again when the guest is dropped.
    fn tidy(&mut self) {}
    /// Undoes whatever `stop` and `save_state` did. With `run` the guest is as `stop` found it, as if nothing had
    /// happened: it runs here again if it ran. Otherwise it is left stopped, but whole.
    fn resume(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person resumes this guest by hand, for messages: a command line.
    fn resume_hint(&self) -> String;
    /// The information that another process needs to undo `unplug`, `stop` and `save_state` if this one dies. Called
    /// before them; the adapter itself will read it, and it is not secret.
    ///
    /// # Errors
    /// The VMM does not say.
    fn last_will(&mut self) -> Result<LastWill, GuestError> {
        Ok(LastWill::default())
    }
    /// Does now, of what `track` or `protect` do, all that takes a right of this process's. Afterwards, and once
    /// `look_by` was called where there is a `lookout`, the process may give up its rights: what is open is enough. To
    /// be called before `track` and `protect`, if at all.
    ///
    /// # Errors
    /// As theirs.
    fn acquire(&mut self, _watch: Watch) -> Result<(), GuestError> {
        Ok(())
    }
    /// What a process that may look at all others must be told to look, in this one's place, for those that write guest
    /// memory past the tracker; the adapter itself will read it. None: nobody looks.
    fn lookout(&self) -> Option<String> {
        None
    }
    /// From now on that process is asked.
    fn look_by(&mut self, _ask: AskOthers) {}
    /// What a process that may trace the VMM must be told to know, in this one's place, which of its threads may be
    /// held where they write; the adapter itself will read it. None: no thread is, or that takes no right. To be asked
    /// after `acquire`.
    fn threads(&self) -> Option<String> {
        None
    }
    /// From now on that process is asked, through `other`.
    fn know_threads_by(&mut self, _other: Box<dyn LetWait>) {}
    /// What a process that may trace the VMM must be told to hold the guest's processors, in this one's place, for a
    /// moment within `stop`; the adapter itself will read it. None: nobody need hold them.
    fn processors(&self) -> Option<String> {
        None
    }
    /// From now on that process is asked.
    fn hold_by(&mut self, _ask: AskToHold) {}
}

/// Asks another process who writes guest memory past the tracker now: each of them in words.
pub type AskOthers = Box<dyn FnMut() -> io::Result<Vec<String>> + Send>;

/// Asks another process to hold the guest's processors, or to let them go.
pub type AskToHold = Box<dyn FnMut(Hold) -> io::Result<()> + Send>;

/// What becomes of processors that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Hold {
    /// They stand still when this has been done.
    Begin,
    /// They go on.
    End,
    /// They go on when the VMM waits for them, or after a moment. It is about to be told to stop them.
    EndWhenAwaited,
}

/// How a guest's memory is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// [`SourceGuest::track`]
    Track,
    /// [`SourceGuest::protect`]
    Protect,
}
