//! What all threads of a session use, and what travels between them: ranges and counts, and encoded packets.
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use transship_memory::{
    GuestMemory, PageCount, PageNumber, PageRange, WINDOW_PAGES, WindowBuffer, WindowPages, WindowRead,
};

use super::{dispatcher::Chosen, sent::Sent};
use crate::{Error, Progress, pacer::Pacer, page_map::PageMap};

/// What all channels and encoders of a session use.
pub(crate) struct Shared {
    pub(crate) memory: GuestMemory,
    /// By region: pages that the destination was sent content for. All others read as zero there, once the first round
    /// is over.
    pub(crate) content: Vec<PageMap>,
    pub(crate) pacer: Option<Arc<Pacer>>,
    /// Channels and encoders detect zero pages.
    pub(crate) look_for_zeros: bool,
    pub(crate) progress: Arc<Progress>,
    pub(crate) failure: FirstFailure,
    pub(crate) peer: String,
    pub(crate) at_once: PagesAtOnce,
    /// By region: pages that may go another way, too. Whoever sends one takes it out. Not set: there is no other way.
    pub(crate) unsent: OnceLock<Arc<Vec<PageMap>>>,
    /// By region: whether the destination reads it itself. Not set: it reads nothing.
    pub(crate) lent: OnceLock<Vec<bool>>,
}

/// How many pages that are not encoded go into the link at once, so that what is urgent does not wait behind more.
pub(crate) struct PagesAtOnce(AtomicU64);

impl Default for PagesAtOnce {
    /// A window.
    fn default() -> Self {
        Self(AtomicU64::new(WINDOW_PAGES.get()))
    }
}

impl PagesAtOnce {
    /// Relaxed: it says nothing about other memory.
    pub(crate) fn set(&self, pages: PageCount) {
        self.0.store(pages.clamp(PageCount::ONE, WINDOW_PAGES).get(), Relaxed);
    }

    /// Whether windows go in parts.
    pub(crate) fn is_limited(&self) -> bool {
        self.0.load(Relaxed) < WINDOW_PAGES.get()
    }

    /// The pages of a window, as many at a time as it says now.
    pub(crate) fn parts(&self, pages: WindowPages) -> impl Iterator<Item = WindowPages> {
        pages.parts(PageCount::new(self.0.load(Relaxed)))
    }
}

/// Whether the session goes on, and why it does not. When it ends, all connections are shut down, upon which channels
/// fail that have nothing to do with the reason: only the first one has.
#[derive(Default)]
pub(crate) struct FirstFailure {
    over: AtomicBool,
    first: Mutex<Option<Error>>,
}

/// It is over; why, [`FirstFailure`] knows.
#[derive(Debug)]
pub(crate) struct SessionOver;

impl FirstFailure {
    /// Whether a channel has failed, or the main thread ends the session: no thread need go on.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// A channel has failed.
    pub(crate) fn of_channel(&self, error: Error) -> SessionOver {
        let mut first = self.first();
        if !self.over.swap(true, Relaxed) {
            *first = Some(error);
        }
        SessionOver
    }

    /// The main thread ends the session. To be called before connections are shut down.
    pub(crate) fn end(&self) {
        let _first = self.first();
        self.over.store(true, Relaxed);
    }

    /// The error of the first channel that failed, if a channel failed first.
    pub(crate) fn take(&self) -> Option<Error> {
        self.first().take()
    }

    /// Its lock decides which thread was first; a thread that finds the session over without the lock only stops.
    fn first(&self) -> MutexGuard<'_, Option<Error>> {
        self.first.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A piece of a round.
pub(crate) enum Batch {
    /// Windows with something to send.
    Pages(Vec<Window>),
    /// Pages that the destination holds content for, and that became a hole.
    Hole { region: usize, range: PageRange },
}

/// Pages of one window to examine and to send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) round: u32,
    pub(crate) region: usize,
    pub(crate) first: PageNumber,
    pub(crate) wanted: u128,
    /// Those that read as zero; none if this was not checked yet.
    pub(crate) zero: Option<u128>,
    pub(crate) chosen: Chosen,
}

impl Window {
    pub(crate) fn new(round: u32, region: usize, pages: WindowPages) -> Self {
        let WindowPages { first, mask: wanted } = pages;
        Self { round, region, first, wanted, zero: None, chosen: Chosen::default() }
    }

    /// Pages of it.
    pub(crate) fn pages(&self, mask: u128) -> WindowPages {
        self.first.masked(mask)
    }
}

/// The pages of a window that are not zero, as a channel sends them.
pub(crate) enum Body<'a> {
    Encoded(&'a Encoded),
    Plain(WindowRead<'a>),
    /// The destination reads them itself, and looks for zero pages if it is to.
    Lent {
        look: bool,
    },
    /// They are in this slot, which the destination empties.
    Slot(u8),
}

/// The pages of a window that are not zero, encoded.
pub(crate) struct Encoded {
    pub(crate) method: u8,
    pub(crate) bytes: Vec<u8>,
}

/// The pages of a window that must be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    /// Pages that hold something.
    pub(crate) present: u128,
    /// Zero pages that the destination was sent content for.
    pub(crate) zero: u128,
}

impl Shared {
    /// Of a session in which nothing is bounded. Zero pages are detected.
    pub(crate) fn new(memory: GuestMemory, content: Vec<PageMap>, peer: String, progress: &Arc<Progress>) -> Self {
        Self {
            memory,
            content,
            pacer: None,
            look_for_zeros: true,
            progress: Arc::clone(progress),
            failure: FirstFailure::default(),
            peer,
            at_once: PagesAtOnce::default(),
            unsent: OnceLock::new(),
            lent: OnceLock::new(),
        }
    }

    /// Reads the pages of a window that are not known to be zero. If nobody has looked for these yet, and channels and
    /// encoders are to, it is done now.
    pub(crate) fn read<'a>(
        &'a self,
        window: &mut Window,
        buffer: &'a mut WindowBuffer,
    ) -> Result<WindowRead<'a>, Error> {
        let look = window.zero.is_none() && self.look_for_zeros;
        self.read_and(look, window, buffer)
    }

    /// The pages of a window that are not known to be zero, as a channel sends them if they are not encoded. Of lent
    /// memory the destination finds the zero pages when it copies the others. Where there are hardly any others it is
    /// quicker to look at them here, in the mapping.
    pub(crate) fn body<'a>(&'a self, window: &mut Window, buffer: &'a mut WindowBuffer) -> Result<Body<'a>, Error> {
        if !self.lent.get().is_some_and(|lent| lent[window.region]) {
            return self.read(window, buffer).map(Body::Plain);
        }
        let look = window.zero.is_none() && self.look_for_zeros;
        if !look || !self.seems_zero(window)? {
            return Ok(Body::Lent { look });
        }
        self.read(window, buffer)?;
        Ok(Body::Lent { look: false })
    }

    /// By two of its pages. Neither they nor the window's beginning are a power of two apart, as pages that are alike
    /// may be.
    fn seems_zero(&self, window: &Window) -> Result<bool, Error> {
        const SAMPLE: u128 = 1 << 37 | 1 << 90;
        let all = window.pages(window.wanted);
        let sample = match all.mask & SAMPLE {
            0 => all.lowest(PageCount::ONE),
            some => all.with(some),
        };
        let region = &self.memory.regions()[window.region];
        Ok(region.zero_mask(sample)? == sample.mask)
    }

    /// The zero pages of a window.
    pub(crate) fn zero_mask(&self, window: &Window, buffer: &mut WindowBuffer) -> Result<u128, Error> {
        let mut window = *window;
        Ok(self.read_and(true, &mut window, buffer)?.zero_mask())
    }

    fn read_and<'a>(
        &'a self,
        look: bool,
        window: &mut Window,
        buffer: &'a mut WindowBuffer,
    ) -> Result<WindowRead<'a>, Error> {
        let known = window.zero.unwrap_or(0);
        let wanted = window.pages(window.wanted & !known);
        let read = self.memory.regions()[window.region].read_window(wanted, look, buffer)?;
        window.zero = Some(known | read.zero_mask());
        Ok(read)
    }

    /// Sees to it that each page of the window goes one way only: calls `send` with what has gone no other way, as much
    /// at a time as may go at once. What is not yet sent meanwhile may still go the other way.
    pub(crate) fn each_claimed(
        &self,
        window: Window,
        mut send: impl FnMut(Window) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.unsent.get().is_none() {
            return send(window);
        }
        self.at_once.parts(window.pages(window.wanted)).try_for_each(|part| {
            let wanted = self.claim(window.region, part).mask;
            let part = Window { wanted, zero: window.zero.map(|zero| zero & wanted), ..window };
            if wanted == 0 { Ok(()) } else { send(part) }
        })
    }

    /// Of these pages, those that have gone no other way. From now on they are taken for sent.
    pub(crate) fn claim(&self, region: usize, pages: WindowPages) -> WindowPages {
        let Some(unsent) = self.unsent.get() else { return pages };
        let claimed = unsent[region].claim(pages);
        self.dealt_with(pages.count() - claimed.count());
        claimed
    }

    /// Counts the pages of a window, whose zero pages are known by now.
    pub(crate) fn settle(&self, window: &Window, sent: &mut Sent) -> Settled {
        let found = window.zero.unwrap_or(0);
        let content = &self.content[window.region];
        let had = content.window(window.first);
        // Pages for which the destination holds no content read as zero there already.
        let (present, zero) = (window.wanted & !found, found & had);
        sent.normal += PageCount::new(u64::from(present.count_ones()));
        sent.zero += PageCount::new(u64::from(found.count_ones()));
        sent.zero_sent += PageCount::new(u64::from(zero.count_ones()));
        sent.resent += PageCount::new(u64::from((present & had).count_ones()));
        content.insert(window.pages(present));
        content.remove(window.pages(zero));
        let progress = &self.progress;
        progress.normal_pages.fetch_add(present.count_ones().into(), Relaxed);
        progress.zero_pages.fetch_add(found.count_ones().into(), Relaxed);
        self.dealt_with(PageCount::new(window.wanted.count_ones().into()));
        Settled { present, zero }
    }

    /// The destination has put so many pages into place. The others of those that it was lent were zero.
    pub(crate) fn found(&self, pages: PageCount, sent: &mut Sent) {
        let zero = sent.normal - pages;
        sent.normal = pages;
        sent.zero += zero;
        sent.zero_sent += zero;
        sent.lent -= zero;
        sent.lent += sent.handed;
        sent.bytes += sent.lent.bytes();
        let progress = &self.progress;
        progress.normal_pages.fetch_sub(zero.get(), Relaxed);
        progress.zero_pages.fetch_add(zero.get(), Relaxed);
        progress.wire_bytes.fetch_sub(zero.bytes(), Relaxed);
    }

    /// Removes this number of pages from the rest of the round.
    pub(crate) fn dealt_with(&self, pages: PageCount) {
        let bytes = pages.bytes();
        let left = &self.progress.round_left;
        let _ = left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(bytes)));
    }

    /// The main thread ends the session. To be called before connections are shut down.
    pub(crate) fn end(&self) {
        self.failure.end();
        if let Some(pacer) = &self.pacer {
            pacer.end();
        }
    }

    /// Waits until this number of bytes may be sent, and counts them.
    pub(crate) fn book(&self, bytes: usize, sent: &mut Sent) {
        if let Some(pacer) = &self.pacer {
            pacer.wait(bytes);
        }
        sent.bytes += bytes as u64;
        self.progress.wire_bytes.fetch_add(bytes as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Shared {
        /// Of a session without a peer.
        pub(crate) fn with_nobody(memory: GuestMemory) -> Self {
            Self::new(memory, Vec::new(), "nobody".into(), &Progress::new())
        }
    }

    #[test]
    fn pages_of_a_window_go_few_at_a_time_and_each_once() {
        for mask in [0, 1, 0b1011_0111, 1 << 127 | 1 << 64 | 1, u128::MAX] {
            let at_once = PagesAtOnce::default();
            for most in [1, 3, 127, u64::MAX] {
                at_once.set(PageCount::new(most));
                let parts: Vec<_> = at_once.parts(WindowPages::new(256, mask)).collect();
                assert!(parts.iter().all(|part| (1..=most).contains(&part.count().get())), "{mask:x}: {parts:?}");
                assert_eq!(parts.iter().map(|part| part.mask).reduce(|all, part| all | part).unwrap_or(0), mask);
                assert_eq!(parts.iter().map(|part| part.count().get()).sum::<u64>(), u64::from(mask.count_ones()));
            }
        }
    }

    /// A page that goes another way while a window is on its way does not go with the window.
    #[test]
    fn what_goes_another_way_is_left_out_to_the_last_moment() {
        let shared = Shared::with_nobody(GuestMemory::new(Vec::new()));
        let mut window = Window::new(0, 1, WindowPages::new(128, 0b1111_1111));
        window.zero = Some(0b1000_0001);
        let sent = |meanwhile: &dyn Fn()| {
            let mut sent = Vec::new();
            let send = |part: Window| {
                sent.push((part.wanted, part.zero));
                meanwhile();
                Ok(())
            };
            shared.each_claimed(window, send).unwrap();
            sent
        };
        assert_eq!(sent(&|| {}), [(0b1111_1111, Some(0b1000_0001))], "there is no other way");

        shared.at_once.set(PageCount::new(3));
        let unsent = Arc::new(vec![PageMap::new(PageCount::new(256)), PageMap::new(PageCount::new(256))]);
        unsent[1].insert(WindowPages::new(128, 0b1111_1011));
        assert!(shared.unsent.set(Arc::clone(&unsent)).is_ok());
        shared.progress.round_left.store(8 << 12, Relaxed);
        let goes_elsewhere = || {
            unsent[1].claim(WindowPages::new(128, 0b0011_0000));
        };
        let parts = [(0b0000_0011, Some(1)), (0b0000_1000, Some(0)), (0b1100_0000, Some(0b1000_0000))];
        assert_eq!(sent(&goes_elsewhere), parts);
        assert_eq!(shared.progress.round_left.load(Relaxed), 5 << 12, "three pages have gone another way");
        assert!(sent(&|| {}).is_empty(), "all are taken for sent");
    }
}
