//! What the threads of a supply line know of it: the one that serves those who wait, and the one that sends the rest.
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use transship_memory::PageSet;

use super::room::Room;
use crate::{Error, page_map::PageMap};

/// What is known of a line.
pub(super) struct Standing {
    /// By region: pages that nobody has sent on this line.
    pub(super) unsent: Arc<Vec<PageMap>>,
    /// For what goes beside pages that are waited for.
    pub(super) room: Room,
    told: Mutex<Told>,
    changed: Condvar,
}

/// What has become known.
#[derive(Default)]
pub(super) struct Told {
    /// The guest was started.
    pub(super) runs: bool,
    /// All pages are there.
    pub(super) is_complete: bool,
    /// It is broken, for this reason, which somebody may have taken.
    pub(super) broken: Option<Option<Error>>,
    /// Pages sent because somebody waited.
    pub(super) sent: u64,
    /// What the destination is to hear when the line ends.
    pub(super) last_word: Option<String>,
}

impl Standing {
    /// Of a line whose destination lacks these pages, by region.
    pub(super) fn new(lacks: &[PageSet]) -> Self {
        let unsent = lacks.iter().map(PageMap::of).collect();
        Self { unsent: Arc::new(unsent), room: Room::default(), told: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told());
        self.changed.notify_all();
    }

    /// An error if it is broken: the reason, for whoever asks first.
    pub(super) fn check(&self) -> Result<(), Error> {
        let mut told = self.told();
        if told.is_complete {
            return Ok(()); // whoever has all pages hangs up
        }
        match &mut told.broken {
            None => Ok(()),
            Some(why) => Err(why.take().unwrap_or_else(|| Error::Io {
                what: "use the supply line".into(),
                source: std::io::ErrorKind::BrokenPipe.into(),
            })),
        }
    }

    /// Waits until the destination says that it has all.
    pub(super) fn await_the_end(&self) -> Result<(), Error> {
        let goes_on = |told: &mut Told| !told.is_complete && told.broken.is_none();
        drop(self.changed.wait_while(self.told(), goes_on).unwrap_or_else(PoisonError::into_inner));
        self.check()
    }
}
