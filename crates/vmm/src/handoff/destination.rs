//! A guest process that waits for a guest.
use std::{
    io::{self, Read},
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    time::Duration,
};

use rustix::net::{SendFlags, send};
use serde_json::Value;
use transship_guest::{DestinationGuest, GuestError};
use transship_memory::{Access, Area, GuestMemory, Missing, PageSet, Region};
use transship_wire::GuestDescription;

use super::{
    client::{Connection, LONG, SHORT, by_hand},
    map_regions,
    message::{CheckedDescription, MISSING, StateBytes},
};
use crate::freeze::Freezer;

/// How long it may take to stop a guest that lacks pages: it does at once, or hangs on one of them.
const STOP_WAIT: Duration = Duration::from_secs(10);

const CHUNK_BYTES: usize = 256 << 10;

/// Attached to a guest process that waits. Dropping it closes the connection: what was loaded stays, and nothing runs.
pub struct HandoffDestination {
    connection: Connection,
    description: GuestDescription,
    memory: GuestMemory,
    /// What missing pages take of rights, if it was had beforehand.
    prepared: Option<Result<Prepared, GuestError>>,
    /// Once pages may be missing.
    freezer: Option<Freezer>,
}

/// Looked at, while there was the right to.
struct Prepared {
    areas: Vec<Area>,
    freezer: Freezer,
}

impl HandoffDestination {
    /// Attaches to the guest process that listens at `path`.
    ///
    /// # Errors
    /// Nobody listens; it does not wait for a guest; anything in its description that is wrong.
    pub fn attach(path: &Path) -> Result<Self, GuestError> {
        let mut connection = Connection::open(path)?;
        let checked = connection.describe()?;
        if !checked.waiting {
            let now = if checked.running { "runs a guest already" } else { "holds a guest already" };
            return Err(connection.unfit(format!("it {now}; start one that waits (transship guest --incoming)")));
        }
        let description = checked.guest();
        let memory = map_regions(&connection, checked, Access::ReadWrite)?;
        Ok(Self { connection, description, memory, prepared: None, freezer: None })
    }

    /// What it says of itself now, which is what it said at first, and that its threads can wait for pages.
    fn described_for_missing(&mut self) -> Result<CheckedDescription, GuestError> {
        let checked = self.connection.describe()?;
        if checked.guest() != self.description {
            return Err(self.connection.error("it describes a different guest than before"));
        }
        if !checked.offers.iter().any(|call| call == MISSING) {
            return Err(self.connection.unfit(format!(
                "its VMM does not offer {MISSING:?} (docs/handoff.md), which --lazy needs; leave out --lazy"
            )));
        }
        Ok(checked)
    }

    fn prepare(&mut self) -> Result<Prepared, GuestError> {
        let checked = self.described_for_missing()?;
        self.connection.check_maps(&checked)?;
        Ok(Prepared { areas: checked.areas(), freezer: Freezer::of(self.connection.pid())? })
    }

    /// Passes the state on to the guest; returns how much it was.
    fn pass_on(&self, state: &mut dyn Read, to: &UnixStream) -> Result<u64, Broken> {
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut bytes = 0;
        loop {
            let n = match state.read(&mut chunk) {
                Ok(0) => return Ok(bytes),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Broken::Source(e)),
            };
            send_all(to, &chunk[..n]).map_err(Broken::Guest)?;
            bytes += n as u64;
        }
    }
}

/// Which side ended the device state early.
enum Broken {
    Source(io::Error),
    Guest(io::Error),
}

impl DestinationGuest for HandoffDestination {
    fn description(&self) -> GuestDescription {
        self.description.clone()
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn process(&self) -> Option<i32> {
        Some(self.connection.pid())
    }

    fn prepare_to_miss(&mut self) {
        let prepared = self.connection.look_without_paths().and_then(|()| self.prepare());
        self.prepared = Some(prepared);
    }

    fn may_miss(&mut self) -> Result<(), GuestError> {
        self.memory.check_can_be_empty()?;
        match self.prepared.take() {
            None => self.described_for_missing().map(drop),
            Some(Err(why)) => Err(why),
            prepared => {
                self.prepared = prepared;
                Ok(())
            }
        }
    }

    fn missing(&mut self, lacks: &[PageSet]) -> Result<Missing, GuestError> {
        let Prepared { areas, freezer } = self.prepared.take().unwrap_or_else(|| self.prepare())?;
        self.freezer = Some(freezer);
        let uffd = self.connection.userfaultfd(MISSING)?;
        let pages: Vec<_> = self.memory.regions().iter().map(Region::pages).collect();
        let missing = Missing::new(uffd, areas, &pages).map_err(|e| self.connection.error(e))?;
        // Asked only now that nobody can fill a hole past us any more.
        crate::check_holes(&self.memory, lacks)?;
        Ok(missing)
    }

    fn stop(&mut self) -> Result<String, GuestError> {
        let asked = self.connection.call::<Value>("stop", STOP_WAIT).map(drop);
        match &self.freezer {
            Some(freezer) => freezer.unless_stopped(asked),
            None => Freezer::of(self.connection.pid())?.unless_stopped(asked),
        }
    }

    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        let pair = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_write_timeout(Some(LONG))?;
            Ok((ours, theirs))
        });
        let (ours, theirs) = pair.map_err(|e| self.connection.error(e))?;
        let id = self.connection.request("load-state", &[theirs.as_fd()])?;
        drop(theirs);
        let passed = self.pass_on(state, &ours);
        drop(ours);
        let answer = self.connection.answer::<StateBytes>("load-state", id, LONG);
        match passed {
            Ok(bytes) => {
                let loaded = answer?.bytes;
                if loaded == bytes { Ok(()) } else { Err(self.partly(loaded, bytes)) }
            }
            Err(Broken::Source(e)) => Err(self.connection.error(format!("the device state ended early: {e}"))),
            // Its own answer says best why it took no more.
            Err(Broken::Guest(e)) => Err(answer
                .err()
                .unwrap_or_else(|| self.connection.error(format!("it stopped reading its device state: {e}")))),
        }
    }

    fn check_alive(&mut self) -> Result<(), GuestError> {
        self.connection.check_alive()
    }

    fn start(&mut self, run: bool) -> Result<(), GuestError> {
        if run { self.connection.call::<Value>("start", SHORT).map(drop) } else { Ok(()) }
    }

    fn start_hint(&self) -> String {
        by_hand("start", self.connection.path())
    }
}

impl HandoffDestination {
    fn partly(&self, loaded: u64, bytes: u64) -> GuestError {
        self.connection.error(format!("it loaded {loaded} bytes of device state, but {bytes} were sent"))
    }
}

/// Like `write_all`, without a signal when the other end is gone.
fn send_all(to: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(to, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, format!("it read nothing for {LONG:?}")));
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
