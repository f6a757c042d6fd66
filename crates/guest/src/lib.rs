//! The engine's view of a guest. Adapters implement these traits; the engine never asks which VMM it is.
#![forbid(unsafe_code)]
use std::{
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use transship_memory::{Freeing, GuestMemory, LetWait, Missing, PageRange, PageSet, Protection, Tracker};
use transship_wire::{GuestDescription, libvirt::Definition};

/// An adapter's failure, by who can act on it. Each is one line: what happened, to what, and what the user can do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The user: the guest, its VMM or the call is not as it must be. The text names the cure.
    #[error("{0}")]
    Unfit(String),
    /// The VMM or the guest: it refused, answered something else than it should, or did not answer.
    #[error("{0}")]
    Vmm(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The system refused something.
    #[error("can't {what}: {source}{}{cure}", if cure.is_empty() { "" } else { "; " })]
    System {
        /// What was tried, to what.
        what: String,
        /// The system's reason.
        source: std::io::Error,
        /// What the user can do; empty if the reason says enough.
        cure: &'static str,
    },
    /// Guest memory could not be read, written, tracked or guarded.
    #[error(transparent)]
    Memory(#[from] transship_memory::Error),
    /// We: something is not as our own code promises.
    #[error("{0}; this is a bug")]
    Bug(String),
}

impl GuestError {
    /// The VMM, or its guest, did not do what it was asked for.
    pub fn vmm(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Vmm(what.into())
    }

    /// For `map_err`: the system refused `what`.
    pub fn system<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into(), cure: "" }
    }
}

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

/// Memory of a guest that is part of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBlock {
    /// Its name in QEMU's stream.
    pub name: String,
    /// Its maximum length, because some can grow.
    pub max_bytes: u64,
}

/// A file that is a disk of a guest, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DiskFile {
    /// Its name, as the VMM knows it.
    pub name: String,
    /// The device that it is on, and its number there; of a block device its own number, and 0.
    pub device: u64,
    /// See `device`.
    pub inode: u64,
}

impl DiskFile {
    /// The file at a path of this process, if it is there.
    pub fn at(name: &str, path: &Path) -> Option<Self> {
        let (device, inode) = Self::id(&std::fs::metadata(path).ok()?);
        Some(Self { name: name.to_owned(), device, inode })
    }

    /// Whether this is what the system says of it.
    pub fn has(&self, meta: &std::fs::Metadata) -> bool {
        Self::id(meta) == (self.device, self.inode)
    }

    fn id(meta: &std::fs::Metadata) -> (u64, u64) {
        match meta.file_type().is_block_device() {
            true => (meta.rdev(), 0),
            false => (meta.dev(), meta.ino()),
        }
    }

    /// Whether both are the same file, whatever they are called.
    pub fn is(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// A disk of which a snapshot is taken: the guest writes to another file from then on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DiskSnapshot {
    /// Its name, as the one that keeps the guest knows it, such as `vda`.
    pub disk: String,
    /// What stays as it was when the guest stood still.
    pub kept: PathBuf,
    /// Where the guest writes to: what is not in there is read from `kept`.
    pub overlay: PathBuf,
}

/// Why the disks of a guest that nobody keeps are left to others.
pub const NO_DISK_SNAPSHOT: &str = "only libvirt takes a snapshot of its guest's disks; name the guest by --vm \
                                    libvirt:DOMAIN, or have --at-stop CMD do it";

/// Pages of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPages {
    /// Number of the region in the guest's memory.
    pub region: usize,
    /// Its pages.
    pub pages: PageRange,
}

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

/// A guest's statement about its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// It does not need the contents that these pages had when hints were requested.
    Free(RegionPages),
    /// It has named all pages that it does not need.
    NamedAll,
}

/// Asks a running guest which of its memory it does not need. docs/free-pages.md says when a hint may be relied on.
/// When this is dropped, for whatever reason, the guest gets back all memory that it has set aside.
pub trait Hints: Send {
    /// Requests hints. Writes to **all** guest memory must have been tracked since before this call: a hint means that
    /// the page was free at some moment after it. Hints of earlier calls are void.
    ///
    /// # Errors
    /// No hints are available.
    fn start(&mut self) -> Result<(), GuestError>;
    /// The next hint of the guest; none if none comes until `deadline`. With a deadline in the past it does not wait.
    ///
    /// # Errors
    /// There will be no more hints. Those that came stay valid.
    fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, GuestError>;
    /// Ends the hints; to be called before the next scan.
    ///
    /// # Errors
    /// There will be no more hints anyway.
    fn stop(&mut self) -> Result<(), GuestError>;
    /// Gives the guest back the memory that it has set aside. Does not wait until the guest has it.
    ///
    /// # Errors
    /// The guest has it already.
    fn done(&mut self) -> Result<(), GuestError>;
    /// Waits, after `done`, until the guest has back what it had set aside, as far as that is known, for a few seconds
    /// at most.
    ///
    /// # Errors
    /// It is unknown.
    fn taken_back(&mut self) -> Result<(), GuestError>;
    /// Memory to which the source of the hints itself writes, past the tracker.
    fn writes_to(&mut self) -> Vec<RegionPages>;
}

/// A guest that is to be moved away. When it is created, it is attached (memory mapped, all checks passed), but nothing
/// has changed in the VMM. Dropping it leaves nothing of ours there.
pub trait SourceGuest: Send {
    /// The description that the destination must match.
    fn description(&self) -> GuestDescription;
    /// The regions, mapped for reading, in the order of the description.
    fn memory(&self) -> GuestMemory;
    /// Whether the guest, or the VMM on its behalf, may give memory back while it runs. If in doubt, it may.
    fn freeing(&self) -> Freeing {
        Freeing::Possible
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
    /// The estimated time to save, send and load the device state; for the forecast before the first measurement.
    fn state_estimate(&self) -> Duration;
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
}

/// Asks another process who writes guest memory past the tracker now: each of them in words.
pub type AskOthers = Box<dyn FnMut() -> io::Result<Vec<String>> + Send>;

/// How a guest's memory is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// [`SourceGuest::track`]
    Track,
    /// [`SourceGuest::protect`]
    Protect,
}

/// What another process must know to put a guest back as it was.
#[derive(Debug, Default)]
pub struct LastWill {
    /// Not secret.
    pub text: String,
    /// What it must have open for that.
    pub files: Vec<OwnedFd>,
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
    fn begin(&mut self, will: LastWill) -> Result<(), GuestError>;
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
    /// Called before it; the adapter itself will read it, and it is not secret.
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
    /// Loads the device state, to the end of `state`, and waits until the VMM reports that it has loaded all of it.
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError>;
    /// Puts back what was set in the VMM to load the state. Called when the guest is loaded and whoever gives it has
    /// been told: nobody waits for this side then. Without this call, `start` does it when the guest runs.
    fn tidy(&mut self) {}
    /// Lets the vCPUs run (`run`), or leaves the guest loaded and stopped.
    fn start(&mut self, run: bool) -> Result<(), GuestError>;
    /// How a person starts this guest by hand, for messages: a command line.
    fn start_hint(&self) -> String;
}
