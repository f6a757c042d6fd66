//! Goes on for a receiver that has died after it had loaded a guest, and before all pages were there.
use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use transship_memory::{Claims, GuestMemory, Missing, PageCount};
use transship_secure::Host;
use transship_wire::SessionId;

use super::{
    accept::Arrivals,
    arrival::Arrival,
    keeper::{Keeper, Lines, OverOnDrop},
};
use crate::{
    Error, Listener, Progress,
    filling::{
        EndOnDrop, Event, Filling,
        stand_in::{AreaRecord, areas_of, hold, records_of},
    },
};

/// How long a source that has given its guest away may take to say so on another line: it dials at once, and again
/// every two seconds.
pub(super) const GIVEN_WAIT: Duration = Duration::from_secs(10);

/// Whether the guest had been given to the receiver that has died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// It knew so.
    Yes,
    /// It had said that the guest may be given to it, and has not heard of it.
    Perhaps,
}

/// What was taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The guest: all pages are there, or the VMM has ended.
    Guest,
    /// Nothing: the source has not given its guest away.
    Nothing,
}

/// What a stand-in is told, beside the files: the userfaultfd, then which pages were put, then the socket that listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// By region: how many pages it has.
    pub pages: Vec<u64>,
    /// Where the VMM has the regions: number of the region, its first page there, address and length.
    pub areas: Vec<AreaRecord>,
    /// What `DestinationGuest::last_will` said.
    pub will: String,
    /// The address of the socket that listens.
    pub listen: String,
    /// The users who may connect there, if it is a unix socket and not everybody may.
    pub users: Option<Vec<u32>>,
    /// The number of the session.
    pub session: [u8; 16],
    /// Push connections of a supply line.
    pub channels: u8,
    /// Connections are encrypted, by a host that is needed to go on.
    pub is_locked: bool,
}

impl Received {
    /// What a person does with a guest whose missing pages can't be had: a sentence without its full stop.
    pub const START_ANEW: &'static str = "It can't go on: end its VMM, and start the guest anew from its disks";

    pub(super) fn of(
        memory: &GuestMemory,
        missing: &Missing,
        will: String,
        listener: &Listener,
        (session, channels): (SessionId, u8),
    ) -> Self {
        let pages = memory.regions().iter().map(|region| region.pages().get()).collect();
        Self {
            pages,
            areas: records_of(missing),
            will,
            listen: listener.uri().to_string(),
            users: listener.users().map(<[u32]>::to_vec),
            session: session.0,
            channels,
            is_locked: listener.lock().is_some(),
        }
    }

    /// What it names, in its order.
    pub(super) fn files<'a>(
        missing: &'a Missing,
        claims: &'a Claims,
        listener: &'a Listener,
    ) -> Result<[BorrowedFd<'a>; 3], Error> {
        let listening = listener.descriptor().ok_or(Error::Bug("a receiver without a socket that listens"))?;
        Ok([missing.fd(), claims.fd(), listening])
    }

    /// Takes over from a receiver that has ended, with all its threads: listens at its address, and puts what the
    /// source sends. `host`: by whom connections are encrypted. `start`: lets the guest run, if nobody else has done
    /// so; it is told whether it is to run, if only the source knows it. Meanwhile pages come, as it may need some for
    /// that. The source is told once it has.
    ///
    /// # Errors
    /// It can't be taken over, or pages can't be put. Missing pages then stay missing: this returns when the VMM has
    /// ended. `failed` is called with the reason before.
    pub fn run(
        &self,
        files: Vec<OwnedFd>,
        host: Option<Host>,
        (given, start): (Given, impl FnOnce(Option<bool>) -> bool + Send),
        failed: impl FnOnce(&Error),
    ) -> Result<Taken, Error> {
        let mut files = files.into_iter();
        let missing = self.missing(files.next())?;
        match self.rest(files, host) {
            Ok((claims, listener)) => self.fill((missing, claims), &listener, (given, start), failed),
            Err(error) => {
                failed(&error);
                hold(&missing);
                Err(error)
            }
        }
    }

    /// Holds the userfaultfd until its VMM has ended: pages that are missing stay so.
    ///
    /// # Errors
    /// It is none, or is not in use where it should be.
    pub fn hold(&self, files: Vec<OwnedFd>) -> Result<(), Error> {
        // Nobody is heard at the socket that listens any more.
        let uffd = files.into_iter().next();
        hold(&self.missing(uffd)?);
        Ok(())
    }

    fn region_pages(&self) -> Vec<PageCount> {
        self.pages.iter().copied().map(PageCount::new).collect()
    }

    fn missing(&self, uffd: Option<OwnedFd>) -> Result<Missing, Error> {
        let uffd = uffd.ok_or(Error::Bug("the stand-in got no userfaultfd"))?;
        let areas = areas_of(&self.areas);
        Ok(Missing::taken_over(uffd, areas, &self.region_pages())?)
    }

    fn rest(&self, mut files: impl Iterator<Item = OwnedFd>, host: Option<Host>) -> Result<(Claims, Listener), Error> {
        let (Some(claims), Some(socket)) = (files.next(), files.next()) else {
            return Err(Error::Bug("the stand-in got too few files"));
        };
        let uri = self.listen.parse().map_err(|_| Error::Bug("the stand-in got no address"))?;
        Ok((
            Claims::taken_over(claims, &self.region_pages())?,
            Listener::taken_over(socket, uri, host, self.users.clone())?,
        ))
    }

    fn fill(
        &self,
        (missing, claims): (Missing, Claims),
        listener: &Listener,
        (given, start): (Given, impl FnOnce(Option<bool>) -> bool + Send),
        failed: impl FnOnce(&Error),
    ) -> Result<Taken, Error> {
        let progress = Progress::new();
        progress.settle();
        let left = (0..self.pages.len()).map(|region| claims.not_done(region)).collect();
        let arrival = Arc::new(Arrival::new(Filling::new(left, missing, claims), &progress));
        // Faults that were reported to the dead process are not reported again.
        let _ = arrival.filling.wake_all();
        let lines = Lines::default();
        let mut arrivals = Arrivals::new(listener, &progress);
        let session = (SessionId(self.session), self.channels);
        let mut keeper = Keeper::new(&mut arrivals, &arrival, &lines, &progress, session);
        if arrival.filling.claims().are_all_done() {
            keeper.has_all(GIVEN_WAIT);
        }
        let event = thread::scope(|scope| {
            let (_over, _ended) = (OverOnDrop(&lines), EndOnDrop(&arrival.filling));
            scope.spawn(|| arrival.serve());
            scope.spawn(move || keeper.run());
            let run = match given {
                Given::Yes => None,
                Given::Perhaps => Some(arrival.given().recv_timeout(GIVEN_WAIT).ok()?),
            };
            arrival.is_ours();
            let arrival = &arrival;
            scope.spawn(move || {
                if start(run) {
                    arrival.runs();
                }
                arrival.start_is_over();
            });
            Some(arrival.filling.events().recv())
        });
        match event {
            None => Ok(Taken::Nothing),
            Some(Ok(Event::Failed(error))) => {
                failed(&error);
                hold(arrival.filling.missing());
                Err(error)
            }
            Some(Ok(Event::Complete | Event::Gone) | Err(_)) => {
                // Without it the same happens when the last holder ends.
                let _ = arrival.filling.release_all();
                Ok(Taken::Guest)
            }
        }
    }
}
