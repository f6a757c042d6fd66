//! A guest that is to be moved or saved, in the hands of a process that keeps no right that it does not need.
//!
//! ```text
//!   start the guard and the steward ─► attach · acquire what tracking takes ─► [open the file] ─► confine ─► threads ─► work
//! ```
//!
//! What still takes a right afterwards, the steward does: it connects, looks for processes that write guest memory,
//! knows which threads of the VMM may wait, and runs the commands of the user.
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use transship_engine::{Error, FilePlace, FileUri, Progress, Uri, UserCommand, when_opened};
use transship_guest::{SourceGuest, Watch};
use transship_memory::PageCount;
use transship_vmm::{AttachOptions, VmAddress, attach_source};

use crate::{
    control::{ControlSocket, Listening},
    failure::Failure,
    flags::folder_of,
    guard::GuardProcess,
    journal::{self, Journal},
    output,
    progress::Display,
    sandbox::{Errands, Left, Role, Sandbox, Steward, charged},
    signals::{Held, Side, Watcher},
};

/// More than what every VMM has beside the guest's main memory, such as that of its display.
const MUCH: PageCount = PageCount::within(64 << 20);

/// What is wanted of a guest.
pub(crate) struct Wanted<'a> {
    pub(crate) vm: &'a VmAddress,
    /// As the user wrote it.
    pub(crate) vm_text: &'a str,
    pub(crate) attach: &'a AttachOptions,
    /// The rights of the guard.
    pub(crate) guard: &'a Sandbox,
    /// How its memory is to be watched; none: not at all.
    pub(crate) watch: Option<Watch>,
    /// Where it goes, if that is to be called.
    pub(crate) to: Option<&'a Uri>,
    /// The socket that steers it.
    pub(crate) control: Option<&'a Path>,
    /// By their phases.
    pub(crate) commands: Vec<(&'static str, UserCommand)>,
    /// It may be handed over before its pages.
    pub(crate) keeps_journal: bool,
}

/// An attached guest, and who acts should this process die.
pub(crate) struct Taken {
    // In this order they are let go of: who was told to act does so when the guest is let go of. Whoever takes this
    // apart names the guest last.
    pub(crate) guest: Box<dyn SourceGuest>,
    pub(crate) guard: GuardProcess,
    /// If one is kept.
    pub(crate) journal: Option<Journal>,
}

impl Taken {
    /// What a process that reads the guest's memory is left with, and nothing else: where much of it is private, the
    /// VMM's number to read it by, which takes a quarter of the time of a descriptor of its memory.
    pub(crate) fn left_to_read(&self) -> Left<'static> {
        let memory = self.guest.memory();
        let private: PageCount =
            memory.regions().iter().filter(|region| region.is_private()).map(|region| region.pages()).sum();
        match self.guest.process() {
            Some(process) if private >= MUCH => Left::MemoryOf(process),
            _ => Left::Nothing,
        }
    }
}

impl Wanted<'_> {
    /// All that takes rights, but for giving them up. The steward is to be dropped after all that it serves.
    pub(crate) fn take(self, sandbox: &Sandbox, steward: &mut Option<Steward>) -> Result<Taken, Error> {
        // They come to be while the VMM is asked.
        let idle = sandbox.idle_steward()?;
        let guard = GuardProcess::start(self.vm_text, self.guard)?;
        let mut guest = attach_source(self.vm, self.attach.clone())?;
        // One that stands still is watched only if it goes.
        if let Some(watch) = self.watch
            && (self.to.is_some() || guest.is_running()?)
        {
            guest.acquire(watch)?;
        }
        // A guest by the hand-off protocol is called again when its connection breaks.
        let again = match self.vm {
            VmAddress::Handoff(path) => Some(Uri::Unix(path.clone())),
            VmAddress::Qemu(_) | VmAddress::Libvirt(_) => None,
        };
        let connect = self.to.cloned().into_iter().chain(again).collect();
        let (socket, lookout, threads) = (self.control, guest.lookout(), guest.threads());
        let hold = guest.processors();
        let commands = self.commands;
        let journal = if self.keeps_journal { journal_of(guest.as_ref()) } else { None };
        let empty = journal.as_ref().and_then(Journal::path);
        let errands =
            Errands { connect, socket, journal: empty, lookout, threads, hold, commands, ..Errands::default() };
        *steward = charged(idle, &errands)?;
        if let Some(steward) = steward {
            guest.look_by(steward.lookout());
            guest.know_threads_by(steward.threads());
            guest.hold_by(steward.hold());
        }
        Ok(Taken { guest, guard, journal })
    }
}

/// Of a VMM whose process is known. If it can't be kept the move goes on without one.
fn journal_of(guest: &dyn SourceGuest) -> Option<Journal> {
    Journal::begin(guest.process()?).inspect_err(|why| output::complain(&journal::cant_keep(why))).ok()
}

/// Threads beside the one that works; they are started when there is no right left that they could have.
pub(crate) struct Threads {
    _display: Display,
    _signals: Watcher,
    _control: Option<ControlSocket>,
}

/// What they need.
pub(crate) struct Waiting {
    pub(crate) signals: Held,
    pub(crate) side: Side,
    pub(crate) control: Option<Listening>,
    pub(crate) progress: Arc<Progress>,
}

impl Waiting {
    fn start(self) -> Result<Threads, Error> {
        let failed = |source| Error::Io { what: "start a thread".into(), source };
        let signals = self.signals.cancelling(&self.progress, self.side).map_err(|failure| match failure {
            Failure::Failed(why) => failed(std::io::Error::other(why)),
            _ => failed(std::io::ErrorKind::Other.into()),
        })?;
        let control = self.control.map(|control| ControlSocket::start(control, &self.progress)).transpose();
        let display = Display::start(&self.progress).map_err(failed)?;
        Ok(Threads { _display: display, _signals: signals, _control: control.map_err(failed)? })
    }

    /// Gives up the rights of this process first.
    pub(crate) fn confined(self, sandbox: &Sandbox, role: Role, left: Left<'_>) -> Result<Threads, Error> {
        sandbox.confine(role, left)?;
        self.start()
    }
}

/// Where a file is completed that is open.
pub(crate) enum Place {
    /// Where it is: it has a name already, or none.
    There,
    Folder(PathBuf),
    /// And it is an image.
    FolderOfImages(PathBuf),
}

impl Place {
    /// Of a file that is made, or a folder if it is an image.
    pub(crate) fn of(to: &FileUri, is_image: bool) -> Self {
        match &to.place {
            FilePlace::Path(path) if is_image => Self::FolderOfImages(folder_of(path)),
            FilePlace::Path(path) => Self::Folder(folder_of(path)),
            FilePlace::Fd(_) | FilePlace::FdSet(..) => Self::There,
        }
    }

    fn left(&self) -> Left<'_> {
        match self {
            Self::There => Left::Nothing,
            Self::Folder(path) => Left::Folder(path),
            Self::FolderOfImages(path) => Left::FolderOfImages(path),
        }
    }
}

/// The same, for as long as it lives, when all of a snapshot is open.
pub(crate) struct WhenOpened(Arc<Mutex<Option<Threads>>>);

impl WhenOpened {
    /// `place`: where it is completed.
    pub(crate) fn confine(waiting: Waiting, sandbox: &Sandbox, role: Role, place: Place) -> Self {
        let threads = Arc::new(Mutex::new(None));
        let (sandbox, started) = (sandbox.clone(), Arc::clone(&threads));
        when_opened(move || {
            let running = waiting.confined(&sandbox, role, place.left())?;
            *started.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
            Ok(())
        });
        Self(threads)
    }
}

impl Drop for WhenOpened {
    fn drop(&mut self) {
        // It may not have come to that.
        when_opened(|| Ok(()));
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
