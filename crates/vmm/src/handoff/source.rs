//! A guest that hands itself over, as a source.
use std::{
    io::{self, Read},
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde_json::Value;
use transship_guest::{Found, GuestError, SourceGuest, Watch};
use transship_memory::{Access, Area, GuestMemory, Protection, Region, SyncTracker, Tracker, UffdTracker};
use transship_wire::GuestDescription;

use super::{
    client::{Connection, LONG, by_hand},
    map_regions,
    message::{PROTECT, StateBytes},
};
use crate::Tracking;

/// How long a thread of the guest may be held at a page that it wants to write. Which threads do something else than
/// run the guest the protocol does not say.
const HOLD: Duration = Duration::from_millis(2);

/// Attached to a guest process. Dropping it closes the connection and changes nothing: a guest that was stopped stays
/// stopped, and the next connection may resume it.
pub struct HandoffSource {
    connection: Connection,
    description: GuestDescription,
    memory: GuestMemory,
    areas: Vec<Area>,
    /// Whether its VMM offers to let writes wait.
    protects: bool,
    pagemap: OwnedFd,
    tracking: Tracking,
    /// A userfaultfd that nobody uses yet, and what it is for.
    acquired: Option<(OwnedFd, Tracking)>,
    saving: Option<Saving>,
    /// What the guest did when it was stopped last.
    found: Found,
}

/// A save-state whose answer was not read yet.
#[derive(Debug)]
struct Saving {
    id: u64,
    ours: UnixStream,
    read: Arc<AtomicU64>,
}

impl HandoffSource {
    /// Attaches to the guest process that listens at `path`.
    ///
    /// # Errors
    /// Nobody listens; it waits for a guest itself; anything in its description that is wrong; no right to watch it.
    pub fn attach(path: &Path) -> Result<Self, GuestError> {
        let mut connection = Connection::open(path)?;
        let checked = connection.describe()?;
        if checked.waiting {
            return Err(connection.unfit("it waits for a guest and has none to give; it can only receive one"));
        }
        connection.check_maps(&checked)?;
        let pagemap = connection.open_pagemap()?;
        let (description, areas) = (checked.guest(), checked.areas());
        let protects = checked.offers.iter().any(|call| call == PROTECT);
        let memory = map_regions(&connection, checked, Access::Read)?;
        Ok(Self {
            connection,
            description,
            memory,
            areas,
            protects,
            pagemap,
            tracking: Tracking::Auto,
            acquired: None,
            saving: None,
            found: Found::Standing,
        })
    }

    /// How its writes are tracked.
    #[must_use]
    pub fn with_tracking(mut self, tracking: Tracking) -> Self {
        self.tracking = tracking;
        self
    }

    /// Ends a save-state that nobody wants any more, so that the guest is free to answer again.
    fn forget_saving(&mut self) {
        if let Some(saving) = self.saving.take() {
            // The guest may block on what we don't read. Its answer is dropped with the next one that is waited for.
            let _ = saving.ours.shutdown(Shutdown::Both);
        }
    }

    /// A userfaultfd for which the kernel waits, too. `why`: what needs it, and what does not.
    fn waiting(&mut self, why: &str) -> Result<OwnedFd, GuestError> {
        if !self.protects {
            let what = format!("its VMM does not offer {PROTECT:?} (docs/handoff.md), which {why}");
            return Err(self.connection.unfit(what));
        }
        self.connection.userfaultfd(PROTECT)
    }

    /// A userfaultfd for a tracker, and for which.
    fn tracking_faults(&mut self) -> Result<(OwnedFd, Tracking), GuestError> {
        let tracking = self.tracking.of(&self.memory)?;
        let uffd = match tracking {
            Tracking::Sync => {
                self.waiting("synchronous tracking needs; leave out --tracker sync, on Linux 6.7 or newer")
            }
            _ => self.connection.userfaultfd("track"),
        };
        Ok((uffd?, tracking))
    }

    fn protecting_faults(&mut self) -> Result<OwnedFd, GuestError> {
        self.waiting("--background needs; use --live or --paused")
    }

    /// The same guest process on a connection that works, if there is one.
    fn reconnect(&mut self) -> Result<Connection, GuestError> {
        self.connection.close();
        let mut connection = Connection::open(self.connection.path())?;
        if connection.pid() != self.connection.pid() || connection.describe()?.guest() != self.description {
            return Err(connection.error("another guest listens there now"));
        }
        Ok(connection)
    }
}

impl SourceGuest for HandoffSource {
    fn description(&self) -> GuestDescription {
        self.description.clone()
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn acquire(&mut self, watch: Watch) -> Result<(), GuestError> {
        self.acquired = Some(match watch {
            Watch::Track => self.tracking_faults()?,
            Watch::Protect => (self.protecting_faults()?, Tracking::Sync),
        });
        Ok(())
    }

    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        let pagemap = self.pagemap.try_clone().map_err(|e| self.connection.error(e))?;
        let (areas, pages) = (self.areas.clone(), self.memory.regions().iter().map(Region::pages).collect::<Vec<_>>());
        let (uffd, tracking) = self.acquired.take().map_or_else(|| self.tracking_faults(), Ok)?;
        if tracking == Tracking::Sync {
            let tracker = SyncTracker::new(uffd, pagemap, areas, &pages, &[], Box::new(HOLD));
            return Ok(Box::new(tracker.map_err(|e| self.connection.error(e))?));
        }
        let tracker = UffdTracker::new(uffd, pagemap, areas, pages).map_err(|e| self.connection.error(e))?;
        Ok(Box::new(tracker.with_memory(&self.memory)))
    }

    fn protect(&mut self) -> Result<Protection, GuestError> {
        let acquired = self.acquired.take().map(|(uffd, _)| uffd);
        let uffd = acquired.map_or_else(|| self.protecting_faults(), Ok)?;
        let pages: Vec<_> = self.memory.regions().iter().map(Region::pages).collect();
        Protection::new(uffd, self.areas.clone(), &pages).map_err(|e| self.connection.error(e))
    }

    fn is_running(&mut self) -> Result<bool, GuestError> {
        Ok(self.connection.describe()?.running)
    }

    fn stop(&mut self) -> Result<Found, GuestError> {
        self.found = Found::by(self.is_running()?);
        self.connection.call::<Value>("stop", LONG)?;
        Ok(self.found)
    }

    fn state_estimate(&self) -> Duration {
        Duration::from_millis(20)
    }

    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
        self.forget_saving();
        let pair = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_read_timeout(Some(LONG))?;
            Ok((ours.try_clone()?, ours, theirs))
        });
        let (ours, stream, theirs) = pair.map_err(|e| self.connection.error(e))?;
        let id = self.connection.request("save-state", &[theirs.as_fd()])?;
        let read = Arc::new(AtomicU64::new(0));
        self.saving = Some(Saving { id, ours, read: read.clone() });
        Ok(Box::new(StateReader { stream, read }))
    }

    fn state_saved(&mut self) -> Result<(), GuestError> {
        let Some(saving) = self.saving.take() else {
            return Err(self.connection.error("its device state was not asked for"));
        };
        let told: StateBytes = self.connection.answer("save-state", saving.id, LONG)?;
        // Pairs with nothing: the reader's thread was joined or is this one before the engine asks.
        let read = saving.read.load(Ordering::Relaxed);
        if told.bytes != read {
            let what = format!("it announced {} bytes of device state, but {read} came", told.bytes);
            return Err(self.connection.error(what));
        }
        Ok(())
    }

    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        self.forget_saving();
        if !run || !self.found.ran() {
            return Ok(());
        }
        match self.connection.call::<Value>("resume", LONG) {
            Ok(_) => Ok(()),
            // Of all calls this one must not fail for a connection that broke.
            Err(e) if self.connection.is_broken() => {
                self.connection = self.reconnect().map_err(|again| GuestError::vmm(format!("{e}; {again}")))?;
                self.connection.call::<Value>("resume", LONG).map(drop)
            }
            Err(e) => Err(e),
        }
    }

    fn resume_hint(&self) -> String {
        by_hand("resume", self.connection.path())
    }
}

/// The device state as it comes, counted.
struct StateReader {
    stream: UnixStream,
    read: Arc<AtomicU64>,
}

impl Read for StateReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.stream.read(into) {
            Ok(n) => {
                self.read.fetch_add(n as u64, Ordering::Relaxed);
                Ok(n)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("the guest wrote no device state for {LONG:?}")))
            }
            Err(e) => Err(e),
        }
    }
}
