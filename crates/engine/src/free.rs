//! What the guest says it can do without: left out of the first round, and of no other. docs/free-pages.md has the
//! rule, and why it holds.
//!
//! ```text
//!   scan ──► ask ──► first round ──► end ──► scan ──► …
//!            wait    what comes      void from
//!            a bit   meanwhile, too  here on
//! ```
//!
//! A guest that has named all gets its memory back at once, and whatever else is to be done with who gives the hints
//! can be done while the round is sent.
use std::time::{Duration, Instant};

use transship_memory::{PAGE_BYTES, PageSet};

use crate::{
    Error, Progress,
    guest::{GuestError, Hint, Hints, Place, SourceGuest},
    page_map::runs,
};

/// How long the guest may take to begin.
const FIRST_HINT: Duration = Duration::from_millis(500);
/// How long hints are waited for at most. The guest is short of memory meanwhile, and the rest may come while the round
/// is sent.
const ALL_HINTS: Duration = Duration::from_secs(5);
/// So long is looked at to say whether hints come faster than pages would go.
const SLICE: Duration = Duration::from_millis(100);
/// Bytes a second that a link of which nothing is known is thought to carry.
const ASSUMED_SPEED: u64 = 1 << 30;
/// So many slices in a row without a word are the end of hints that a file waits for.
const SILENT_SLICES: u32 = 5;

/// How long the hints of a guest are worth to be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As long as they spare more bytes than would be sent meanwhile. Bytes a second, where something is known.
    Sending(Option<u64>),
    /// As long as some come: what is written to a file takes room there, and is read at each restore.
    Writing,
}

impl Patience {
    /// Whether to wait on, after a slice in which so many pages were named. `silent`: slices without any, up to now.
    fn lasts(self, pages: u64, silent: u32) -> bool {
        match self {
            Self::Sending(speed) => {
                let worth = (speed.unwrap_or(ASSUMED_SPEED) as f64 * SLICE.as_secs_f64()) as u64 / PAGE_BYTES as u64;
                pages >= worth
            }
            Self::Writing => silent < SILENT_SLICES,
        }
    }
}

/// The hints of a guest, for one round.
pub(crate) struct FreePages {
    /// None: there is nobody to ask, any more.
    hints: Option<Box<dyn Hints>>,
    /// The guest was asked for some.
    asked: bool,
    /// No more will come, and the guest may use all its memory.
    over: bool,
    /// By region: what the guest has named.
    named: Vec<PageSet>,
    /// By region: what `trim` has taken away.
    trimmed: Vec<PageSet>,
    /// What is written past the tracker.
    unseen: Vec<Place>,
}

impl FreePages {
    /// Nothing is asked yet. An error of who gives hints is never one of the move: it goes on without them.
    pub(crate) fn of(guest: &mut dyn SourceGuest) -> Self {
        let none: Vec<_> = guest.memory().regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let mut hints = guest.hints();
        let unseen = hints.as_mut().map(|hints| hints.writes_to()).unwrap_or_default();
        Self { hints, asked: false, over: false, named: none.clone(), trimmed: none, unseen }
    }

    /// Of a guest without memory.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self { hints: None, asked: false, over: false, named: Vec::new(), trimmed: Vec::new(), unseen: Vec::new() }
    }

    /// Asks the guest, and waits for what it says. All memory has been scanned. Returns what was named, by region.
    ///
    /// # Errors
    /// Cancelled.
    pub(crate) fn ask(&mut self, patience: Patience, progress: &Progress) -> Result<&[PageSet], Error> {
        let Some(hints) = &mut self.hints else { return Ok(&self.named) };
        self.asked = true;
        if let Err(error) = hints.start() {
            self.give_up(&error);
            return Ok(&self.named);
        }
        let (begin, mut silent) = (Instant::now(), 0);
        while begin.elapsed() < ALL_HINTS && self.hints.is_some() && !self.over {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let pages = self.listen(Instant::now() + SLICE);
            silent = if pages > 0 { 0 } else { silent + 1 };
            let begun = pages > 0 || begin.elapsed() > FIRST_HINT;
            if begun && !patience.lasts(pages, silent) {
                break;
            }
        }
        Ok(&self.named)
    }

    /// Takes pages that the guest has named meanwhile out of some windows of the round: first page and wanted pages.
    /// Does not wait.
    pub(crate) fn trim(&mut self, region: usize, windows: &mut Vec<(u64, u128)>) {
        if self.hints.is_none() {
            return;
        }
        self.listen(Instant::now());
        let (named, trimmed) = (&self.named[region], &mut self.trimmed[region]);
        windows.retain_mut(|(first, wanted)| {
            let free = *wanted & named.window(*first);
            runs(*first, free).for_each(|run| trimmed.insert(run));
            *wanted &= !free;
            *wanted != 0
        });
    }

    /// Ends it, before the next scan: the guest has its memory again. Returns what was trimmed, by region, and what is
    /// written past the tracker.
    pub(crate) fn end(&mut self) -> (&[PageSet], &[Place]) {
        if let Some(hints) = self.hints.take() {
            self.unseen.extend(Ending { hints: Some(hints), over: self.over }.settle());
        }
        (&self.trimmed, &self.unseen)
    }

    /// What is left to be done, where no more hints will come and the guest knows that it may use its memory. None
    /// while they may, and where they broke off.
    pub(crate) fn take_ending(&mut self) -> Option<Ending> {
        let is_known = self.over || !self.asked;
        is_known.then(|| Ending { hints: self.hints.take(), over: true })
    }

    /// Hears what comes until `deadline`, and what has come by then. Returns the number of pages.
    fn listen(&mut self, deadline: Instant) -> u64 {
        let mut count = 0;
        while let Some(hints) = self.hints.as_mut().filter(|_| !self.over) {
            match hints.next(deadline) {
                Ok(Some(Hint::Free(Place { region, pages }))) => {
                    // What is named twice counts twice; it only makes us wait.
                    count += pages.count;
                    self.named[region].insert(pages);
                }
                // Whether it still has the pages does not matter: the next scan sees what it writes there from now on.
                Ok(Some(Hint::NamedAll)) => match hints.stop().and_then(|()| hints.done()) {
                    Ok(()) => self.over = true,
                    Err(error) => self.give_up(&error),
                },
                Ok(None) => return count,
                Err(error) => self.give_up(&error),
            }
        }
        count
    }

    /// What was named stays good: it was free at a moment after the scan.
    fn give_up(&mut self, error: &GuestError) {
        warn(error);
        self.hints = None;
    }
}

/// The end of hints, which waits for the guest.
pub(crate) struct Ending {
    /// None: there was nobody to ask.
    hints: Option<Box<dyn Hints>>,
    /// The guest was told that it may use its memory.
    over: bool,
}

impl Ending {
    /// The guest has its memory again; after this it can be asked for other things. Returns what is written past the
    /// tracker.
    pub(crate) fn settle(self) -> Vec<Place> {
        let Some(mut hints) = self.hints else { return Vec::new() };
        let ended = if self.over { Ok(()) } else { hints.stop().and_then(|()| hints.done()) };
        let ended = ended.and_then(|()| hints.taken_back());
        if let Err(error) = ended {
            warn(&error);
        }
        // It may have begun to write elsewhere since it was asked first.
        hints.writes_to()
    }
}

fn warn(error: &GuestError) {
    tracing::warn!("{error}; going on without its hints");
}
