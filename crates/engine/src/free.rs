//! Pages that the guest does not need are left out of the first round, and of no other. docs/free-pages.md has the
//! rule, and why it holds.
//!
//! ```text
//!   scan ──► ask ──► first round ──► end ──► scan ──► …
//!            wait    what comes      void from
//!            a bit   meanwhile, too  here on
//! ```
//!
//! A guest that has named all its free pages gets its memory back at once; the work that remains with the source of
//! hints can then be done while the round is sent.
use std::time::{Duration, Instant};

use transship_memory::{PageCount, PageSet, WindowPages};

use crate::{
    Error, Progress,
    guest::{GuestError, Hint, Hints, RegionPages, SourceGuest},
};

/// How long the guest may take to send its first hint.
const FIRST_HINT: Duration = Duration::from_millis(500);
/// The longest wait for hints. The guest is short of memory meanwhile, and the rest may come while the round is sent.
const ALL_HINTS: Duration = Duration::from_secs(5);
/// The period over which hints are compared with the pages that could have been sent.
const SLICE: Duration = Duration::from_millis(100);
/// The assumed rate, in bytes a second, of a link of unknown speed.
const ASSUMED_SPEED: u64 = 1 << 30;
/// After so many slices in a row without a hint, a save does not wait for more.
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
    fn lasts(self, pages: PageCount, silent: u32) -> bool {
        match self {
            Self::Sending(speed) => pages.bytes() as f64 >= speed.unwrap_or(ASSUMED_SPEED) as f64 * SLICE.as_secs_f64(),
            Self::Writing => silent < SILENT_SLICES,
        }
    }
}

/// The hints of a guest, for one round.
pub(crate) struct FreePages {
    /// None: there is no source of hints, or none any more.
    hints: Option<Box<dyn Hints>>,
    /// Hints were requested from the guest.
    asked: bool,
    /// No more will come, and the guest may use all its memory.
    over: bool,
    /// By region: the pages that the guest has named.
    named: Vec<PageSet>,
    /// By region: the pages that `trim` has removed.
    trimmed: Vec<PageSet>,
    /// Pages that are written past the tracker.
    unseen: Vec<RegionPages>,
}

impl FreePages {
    /// Nothing is requested yet. An error of the source of hints is never an error of the move, which goes on without
    /// hints.
    pub(crate) fn of(guest: &mut dyn SourceGuest) -> Self {
        let none: Vec<_> = guest.memory().regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let mut hints = guest.hints();
        let unseen = hints.as_mut().map(|hints| hints.writes_to()).unwrap_or_default();
        Self { hints, asked: false, over: false, named: none.clone(), trimmed: none, unseen }
    }

    /// Of a guest that names nothing.
    pub(crate) fn none() -> Self {
        Self { hints: None, asked: false, over: false, named: Vec::new(), trimmed: Vec::new(), unseen: Vec::new() }
    }

    /// Requests hints, and waits for them as `patience` says. All memory must have been scanned. Returns the named
    /// pages, by region.
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
                return Err(Error::CANCELLED);
            }
            let pages = self.listen(Instant::now() + SLICE);
            silent = if pages > PageCount::ZERO { 0 } else { silent + 1 };
            let begun = pages > PageCount::ZERO || begin.elapsed() > FIRST_HINT;
            if begun && !patience.lasts(pages, silent) {
                break;
            }
        }
        Ok(&self.named)
    }

    /// Removes pages that the guest has named meanwhile from some windows of the round. Does not wait.
    pub(crate) fn trim(&mut self, region: usize, windows: &mut Vec<WindowPages>) {
        if self.hints.is_none() {
            return;
        }
        self.listen(Instant::now());
        let (named, trimmed) = (&self.named[region], &mut self.trimmed[region]);
        windows.retain_mut(|wanted| {
            let free = wanted.mask & named.window(wanted.first);
            wanted.with(free).runs().for_each(|run| trimmed.insert(run));
            *wanted = wanted.without(free);
            !wanted.is_empty()
        });
    }

    /// Ends the hints, before the next scan, and gives the guest its memory back. Returns, by region, the trimmed pages
    /// and the pages that are written past the tracker.
    pub(crate) fn end(&mut self) -> (&[PageSet], &[RegionPages]) {
        if let Some(hints) = self.hints.take() {
            self.unseen.extend(Ending { hints: Some(hints), over: self.over }.settle());
        }
        (&self.trimmed, &self.unseen)
    }

    /// The work that remains once no more hints will come and the guest knows that it may use its memory. None while
    /// hints may still come, and after they broke off.
    pub(crate) fn take_ending(&mut self) -> Option<Ending> {
        let is_known = self.over || !self.asked;
        is_known.then(|| Ending { hints: self.hints.take(), over: true })
    }

    /// Reads hints until `deadline`, including those that have arrived by then. Returns the number of pages.
    fn listen(&mut self, deadline: Instant) -> PageCount {
        let mut count = PageCount::ZERO;
        while let Some(hints) = self.hints.as_mut().filter(|_| !self.over) {
            match hints.next(deadline) {
                Ok(Some(Hint::Free(RegionPages { region, pages }))) => {
                    // Pages named twice count twice; that only makes us wait longer.
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

    /// The named pages stay valid: they were free at a moment after the scan.
    fn give_up(&mut self, error: &GuestError) {
        warn(error);
        self.hints = None;
    }
}

/// The end of hints, which may have to wait for the guest.
pub(crate) struct Ending {
    /// None: there was no source of hints.
    hints: Option<Box<dyn Hints>>,
    /// The guest was told that it may use its memory.
    over: bool,
}

impl Ending {
    /// Waits until the guest has its memory back; after this it can be asked for other things. Returns the pages that
    /// are written past the tracker.
    pub(crate) fn settle(self) -> Vec<RegionPages> {
        let Some(mut hints) = self.hints else { return Vec::new() };
        let ended = if self.over { Ok(()) } else { hints.stop().and_then(|()| hints.done()) };
        let ended = ended.and_then(|()| hints.taken_back());
        if let Err(error) = ended {
            warn(&error);
        }
        // It may have started to write elsewhere since the first request.
        hints.writes_to()
    }
}

fn warn(error: &GuestError) {
    tracing::warn!("{error}; going on without its hints");
}
