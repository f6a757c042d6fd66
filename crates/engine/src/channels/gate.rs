//! Where channels take what is ready, and how a round with encoders ends.
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use transship_memory::PageRange;
use transship_ring::{Parker, Results};

use super::{Encoded, MainThread, Window, meters::Meters};
use crate::{Error, control::TICK};

/// What a channel gets.
pub(crate) enum Ready {
    /// A window that an encoder has looked at, with its pages encoded if that was worth it.
    Window { window: Window, encoded: Option<Encoded> },
    /// Windows that nobody has looked at: they are to be left as they are, or all encoders were busy.
    Unseen(Vec<Window>),
    /// Pages that became a hole.
    Hole { region: usize, range: PageRange },
    /// The round is over for one channel; each takes one of these.
    RoundEnd,
}

impl Ready {
    /// How many it counts for in a round, and how many of them are windows that are to be left as they are.
    pub(crate) fn counts(&self) -> (u64, u64) {
        match self {
            Self::Window { window, .. } => (1, window.chosen.raw.into()),
            Self::Unseen(windows) => {
                (windows.len() as u64, windows.iter().filter(|window| window.chosen.raw).count() as u64)
            }
            Self::Hole { .. } => (1, 0),
            Self::RoundEnd => (0, 0),
        }
    }
}

/// Says when all that was handed over in a round has been taken, and then ends it for every channel.
///
/// The main thread stores how much it was and then loads how much was taken; a channel adds to what was taken and then
/// loads how much it was. Both are SeqCst, so at least one of the two sees that the numbers are equal; `ended` lets
/// only the first one act.
pub(crate) struct Gate {
    results: Results<Ready>,
    channels: usize,
    handed_over: AtomicU64,
    taken: AtomicU64,
    ended: AtomicBool,
    /// Windows among them that are to be left as they are, and where the main thread sleeps until enough of those were
    /// taken.
    raw_taken: AtomicU64,
    /// It is woken when so many were: it stores this and then loads `raw_taken`, a channel adds to that and then loads
    /// this.
    wake_at: AtomicU64,
    fewer: Parker,
    pub(crate) meters: Arc<Meters>,
}

impl Gate {
    pub(crate) fn new(results: Results<Ready>, channels: usize, meters: Arc<Meters>) -> Self {
        Self {
            results,
            channels,
            handed_over: AtomicU64::new(u64::MAX),
            taken: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            raw_taken: AtomicU64::new(0),
            wake_at: AtomicU64::new(0),
            fewer: Parker::new(),
            meters,
        }
    }

    pub(crate) fn next(&self) -> Option<Ready> {
        self.results.next_result()
    }

    /// Takes back what no channel has taken yet: windows that are to be left as they are, and all else.
    pub(crate) fn take_back(&self) -> (Vec<Window>, Vec<Ready>) {
        let (mut windows, mut others) = (Vec::new(), Vec::new());
        while let Some(ready) = self.results.try_next_result() {
            match ready {
                Ready::Unseen(mut some) if some.iter().all(|window| window.chosen.raw) => windows.append(&mut some),
                other => others.push(other),
            }
        }
        (windows, others)
    }

    /// Hands something to the channels past the encoders. A destination that hangs leaves no room: the user may cancel
    /// meanwhile.
    pub(crate) fn pass(&self, mut ready: Ready, main: &dyn MainThread) -> Result<(), Error> {
        loop {
            match self.results.inject_timeout(ready, TICK) {
                Ok(()) => return Ok(()),
                Err(back) => ready = back,
            }
            main.check()?;
        }
    }

    /// So many were taken and dealt with, and among them so many windows that are to be left as they are: what
    /// `Ready::counts` says.
    pub(crate) fn took(&self, (count, raw): (u64, u64)) {
        if raw > 0 {
            let taken = self.raw_taken.fetch_add(raw, SeqCst) + raw;
            if taken >= self.wake_at.load(SeqCst) {
                self.fewer.wake_one();
            }
        }
        if self.taken.fetch_add(count, SeqCst) + count == self.handed_over.load(SeqCst) {
            self.end();
        }
    }

    /// How many of the windows that are to be left as they are are on their way, of those that were given away.
    pub(crate) fn raw_on_their_way(&self, given: u64) -> u64 {
        given - self.raw_taken.load(SeqCst)
    }

    /// Waits until at most so many of them are on their way, within the time.
    pub(crate) fn wait_for_raw(&self, given: u64, most: u64, time: Duration) -> bool {
        self.wake_at.store(given.saturating_sub(most), SeqCst);
        self.fewer.wait_timeout(time, || (self.raw_on_their_way(given) <= most).then_some(())).is_some()
    }

    /// No more come than these.
    pub(crate) fn close(&self, handed_over: u64) {
        self.handed_over.store(handed_over, SeqCst);
        if self.taken.load(SeqCst) == handed_over {
            self.end();
        }
    }

    /// Ends the round. The ring has room: it was made for a marker a channel, and when nothing failed it is empty.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, SeqCst) {
            (0..self.channels).for_each(|_| self.results.inject(Ready::RoundEnd));
        }
    }
}
