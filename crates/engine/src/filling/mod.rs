//! Pages that are put into a guest that runs already: what is the same wherever they come from.
//!
//! ```text
//!   VMM touches a page ──► userfaultfd ──► a thread that serves ──┬─ was put before, or is none of ours: zeros
//!                                                                 └─ else it is fetched: from a file, from the source
//!   whoever brings it ─────────────────────────────────────────────► into place, once; who waits is woken
//! ```
//!
//! Each page is put once in the life of the guest (`transship_memory::Claims`): one that has been there and is missing
//! was given back, and is zero, also where the process that had put it is dead. A page that can't be brought is left
//! missing, and who waits for it goes on waiting: nobody ever sees zeros in its place.
pub(crate) mod stand_in;
mod stored;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::{Claims, Error as MemoryError, Fault, Missing, PageCount, PageRange, PageSet};

use crate::{Error, cpu};
pub(crate) use stored::{Region, UNIT_PAGES, spans};

/// How often a thread that serves checks whether everything is over.
const TICK: Duration = Duration::from_millis(50);
/// Long runs that are left to the kernel at once: each of them takes a mapping of the process, which may have 65530.
const RELEASES: usize = 1024;
/// Memory in larger pages can't be brought while somebody waits.
const LARGEST_PAGES: PageCount = PageCount::new(1024);

/// What the thread that leads hears.
pub(crate) enum Event {
    /// All pages are in place.
    Complete,
    /// A page can't be brought. Threads that serve others go on with those that can.
    Failed(Error),
    /// There is no VMM any more.
    Gone,
}

/// Pages on their way. All threads use it at once.
pub(crate) struct Filling {
    missing: Missing,
    claims: Claims,
    regions: Vec<Region>,
    /// The threads are to end.
    ended: AtomicBool,
    events: Sender<Event>,
    incoming: Receiver<Event>,
    faults: AtomicU64,
    /// CPU time of threads that have ended.
    cpu_nanos: AtomicU64,
}

impl Filling {
    /// `stored`: by region of `missing`, which [`check_units`] has let pass, the pages that are brought; `claims`: of
    /// these regions. Pages that are there already are left as they are.
    pub(crate) fn new(stored: Vec<PageSet>, missing: Missing, claims: Claims) -> Self {
        let region = |(index, stored): (usize, PageSet)| {
            let (pages, unit) = (stored.pages(), missing.unit_pages(index));
            Region { index, stored, pages, unit }
        };
        let regions = stored.into_iter().enumerate().map(region).collect();
        // A failure of each thread, and one word that it is complete.
        let (events, incoming) = bounded(1024);
        Self {
            missing,
            claims,
            regions,
            ended: AtomicBool::new(false),
            events,
            incoming,
            faults: AtomicU64::new(0),
            cpu_nanos: AtomicU64::new(0),
        }
    }

    /// What happens.
    pub(crate) fn events(&self) -> &Receiver<Event> {
        &self.incoming
    }

    /// The userfaultfd and where it is in use.
    pub(crate) fn missing(&self) -> &Missing {
        &self.missing
    }

    /// Which pages were put.
    pub(crate) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// All regions.
    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// How often somebody had to wait.
    pub(crate) fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    /// CPU seconds of all threads, once they have ended.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        self.cpu_nanos.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// To be called at the end of a thread that fills.
    pub(crate) fn count_cpu(&self) {
        self.cpu_nanos.fetch_add((cpu::thread_seconds() * 1e9) as u64, Ordering::Relaxed);
    }

    /// Leaves long runs that are not brought to the kernel, which has zeros of its own.
    ///
    /// # Errors
    /// The process is gone, or can't have so many mappings.
    pub(crate) fn release_holes(&self) -> Result<(), Error> {
        let all = self.regions.iter().enumerate();
        let mut holes: Vec<(usize, PageRange)> =
            all.flat_map(|(index, region)| region.holes().map(move |hole| (index, hole))).collect();
        holes.sort_unstable_by_key(|(_, hole)| std::cmp::Reverse(hole.count));
        holes.truncate(RELEASES);
        holes.into_iter().try_for_each(|(region, hole)| Ok(self.missing.release(region, hole)?))
    }

    /// All is in place: the kernel does the rest.
    ///
    /// # Errors
    /// The process is gone, or the kernel refuses.
    pub(crate) fn release_all(&self) -> Result<(), MemoryError> {
        let mut regions = self.regions.iter().enumerate();
        regions.try_for_each(|(index, region)| self.missing.release(index, PageRange::all(region.pages)))
    }

    /// For a process that takes over: waiting faults are reported again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn wake_all(&self) -> Result<(), MemoryError> {
        let mut regions = self.regions.iter().enumerate();
        regions.try_for_each(|(index, region)| self.missing.wake(index, PageRange::all(region.pages)))
    }

    /// Has all threads end soon.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Whether the threads are to end.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// The life of a thread that serves those who wait. `fetch`: sees to it that a page comes, which is brought and was
    /// not put before.
    pub(crate) fn serve(&self, mut fetch: impl FnMut(Fault) -> Result<(), Error>) {
        while !self.has_ended() {
            let served = match self.missing.next_fault(TICK) {
                Ok(Some(fault)) => self.serve_one(fault, &mut fetch),
                Ok(None) => Ok(()),
                Err(error) => {
                    self.tell(error.into());
                    break;
                }
            };
            if let Err(error) = served {
                self.tell(error);
            }
        }
        self.count_cpu();
    }

    fn serve_one(&self, fault: Fault, fetch: &mut impl FnMut(Fault) -> Result<(), Error>) -> Result<(), Error> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let region = &self.regions[fault.region];
        let page = region.clip(fault.page, region.unit);
        // It was there and is not any more: the guest has given it back since. Or it is none that is brought.
        if self.claims.is_done(fault.region, fault.page) || region.stored_in(page) == PageCount::ZERO {
            self.missing.fill_zero(fault.region, page)?;
            return Ok(());
        }
        fetch(fault)
    }

    /// Tells the thread that leads. If its queue is already full, one more makes no difference.
    pub(crate) fn tell(&self, error: Error) {
        let event = match error {
            Error::Memory(MemoryError::Gone { .. }) => Event::Gone,
            error => Event::Failed(error),
        };
        let _ = self.events.try_send(event);
    }

    /// Tells the thread that leads that all pages are in place.
    pub(crate) fn tell_complete(&self) {
        let _ = self.events.try_send(Event::Complete);
    }
}

/// However a block ends, the threads do too.
pub(crate) struct EndOnDrop<'a>(pub(crate) &'a Filling);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// # Errors
/// Memory in pages so large that nobody should wait for one.
pub(crate) fn check_units(missing: &Missing, regions: usize) -> Result<(), Error> {
    match (0..regions).map(|region| missing.unit_pages(region)).max() {
        Some(pages) if pages > LARGEST_PAGES => Err(Error::unfit(format!(
            "pages of {} MiB of guest memory are too large to be brought one by one while the guest waits; leave out \
             --lazy",
            pages.bytes() >> 20
        ))),
        _ => Ok(()),
    }
}
