//! Finds the pages that were written since the last scan, on kernels that take no note of them: a thread that writes to
//! a page for the first time since the scan waits until a thread of ours has let it go.
//!
//! ```text
//!   scan      look for pages that are not protected: those were written · protect them
//!   a write   of a protected page: waits ─► the thread takes the protection away ─► goes on; the next ones go through
//! ```
//!
//! Whoever writes page after page is let go of more of them at once ([`crate::streaks`]): these count as written.
//!
//! What was written is what is not protected, so nothing has to be noted: neither by the thread, nor of pages that have
//! lost their protection in another way (given back, and taken again). Between the look and the protection a page may
//! be written: it is among those that were found, and is read after the scan.
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use rustix::io::Errno;

use crate::{
    Area, Error, Fault, Flaw, LetWait, PageCount, PageRange, PageSet, Tracker, Waits,
    area::{of_region, untrackable},
    fault::Faults,
    pagemap::{By, Look},
    streaks::Streaks,
    sweep::{look_over, sweep},
    tracker::check_still_there,
    uffd::{self, Writes},
};

/// How long the thread waits for a writer before it checks whether it is to end.
const TICK: Duration = Duration::from_millis(20);
/// How often it checks whether those that are held may go.
const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// Writers that are taken up at once.
const FEW: usize = 64;

/// userfaultfd write protection in synchronous mode: Linux 5.14 for private memory, 5.19 for shared memory. It sees
/// what [`crate::UffdTracker`] sees, except on a hugetlbfs: pages there that are given back and taken again are not
/// found for certain. Dropping it ends the protection; whoever waits goes on.
pub struct SyncTracker {
    service: Arc<Service>,
    thread: Option<JoinHandle<()>>,
    pagemap: OwnedFd,
    by: By,
    areas: Vec<Area>,
    regions: Vec<Tracked>,
}

struct Tracked {
    pages: PageCount,
    look: Look,
    /// Whether a scan would find everything that was written since the last report.
    armed: bool,
}

/// What the scans and the thread share.
struct Service {
    faults: Faults,
    waits: Arc<Waits>,
    is_over: AtomicBool,
    /// Why the thread has ended, and that it has.
    failed: Mutex<Option<Error>>,
}

impl SyncTracker {
    /// Whether the kernel can do this at all.
    pub fn is_possible() -> bool {
        uffd::is_known(uffd::WAIT).unwrap_or(true)
    }

    /// `uffd` was created by the tracked process (with kernel faults, else a write by KVM or a system call of the
    /// process fails) and not yet used; the rest as for [`crate::UffdTracker::new`]. `private`: the regions that are
    /// private memory of the process. `threads` says who may be held, if a pace is set.
    ///
    /// # Errors
    /// As [`crate::UffdTracker::new`]; no thread can be had.
    pub fn new(
        uffd: OwnedFd,
        pagemap: OwnedFd,
        areas: Vec<Area>,
        region_pages: &[PageCount],
        private: &[usize],
        threads: Box<dyn LetWait>,
    ) -> Result<Self, Error> {
        let all_private = (0..region_pages.len()).all(|region| private.contains(&region));
        let (wanted, need) = if all_private {
            (uffd::WAIT, "Linux 5.14 or newer is needed, and a userfaultfd that was not used before")
        } else {
            (
                uffd::WAIT_SHARED,
                "Linux 5.19 or newer is needed, or private memory, and a userfaultfd that was not used before",
            )
        };
        let faults = Faults::new(uffd, wanted, ("track writes to guest memory", need), areas.clone(), region_pages)?;
        let service = Arc::new(Service {
            faults,
            waits: Arc::default(),
            is_over: AtomicBool::new(false),
            failed: Mutex::new(None),
        });
        let served = Arc::clone(&service);
        let thread = Builder::new()
            .name("writers".into())
            .spawn(move || served.serve(threads))
            .map_err(|source| Error::system("start a thread that lets writers go", source))?;
        // A page that the process does not have need not be protected: once it is there it is found.
        let look = |region| match private.contains(&region) {
            true => Look::UnprotectedAndThere,
            false => Look::Unprotected,
        };
        let regions = region_pages.iter().enumerate();
        let regions = regions.map(|(region, &pages)| Tracked { pages, look: look(region), armed: false }).collect();
        Ok(Self { service, thread: Some(thread), pagemap, by: By::Scan, areas, regions })
    }

    /// Looks for pages as a kernel without PAGEMAP_SCAN has it.
    #[must_use]
    pub fn by_entries(mut self) -> Self {
        self.by = By::Entries;
        self
    }

    /// The pages of the region that are not protected; they are protected again.
    fn written(&self, region: usize, look: Look, pages: PageCount) -> Result<PageSet, Error> {
        self.service.check()?;
        let areas = of_region(&self.areas, region);
        let mut written = PageSet::empty(pages);
        sweep(self.pagemap.as_fd(), (look, self.by), &areas, &mut written)?;
        // Exactly those, and no gap between them: a page that was protected may have been let go of since.
        written.ranges().try_for_each(|range| self.service.set(region, range, Writes::Wait))?;
        check_still_there(self.service.faults.fd(), uffd::WAIT, &areas)?;
        // Whoever served may have ended since, and have let everybody go before the pages were protected.
        self.service.check().inspect_err(|_| self.service.let_all_go())?;
        Ok(written)
    }
}

impl Tracker for SyncTracker {
    fn written_so_far(&mut self, region: usize) -> Result<Option<PageCount>, Error> {
        let Some(Tracked { pages, look, armed: true }) = self.regions.get(region) else { return Ok(None) };
        let mut written = PageSet::empty(*pages);
        let areas = of_region(&self.areas, region);
        look_over(self.pagemap.as_fd(), (*look, self.by), &areas, &mut written)?;
        Ok(Some(written.count()))
    }

    fn scan(&mut self, region: usize) -> Result<PageSet, Error> {
        let Some(tracked) = self.regions.get_mut(region) else {
            return Err(untrackable(region, Flaw::NoRegion, "the tracker does not know it"));
        };
        let (pages, look) = (tracked.pages, tracked.look);
        // Not armed until everything is done, as pages that were found and then lost to an error must be found again.
        let armed = std::mem::replace(&mut tracked.armed, false);
        let written = self.written(region, look, pages)?;
        self.regions[region].armed = true;
        Ok(if armed { written } else { PageSet::full(pages) })
    }

    fn waits(&self) -> Option<Arc<Waits>> {
        Some(Arc::clone(&self.service.waits))
    }
}

impl Drop for SyncTracker {
    fn drop(&mut self) {
        self.service.waits.set_pace(None);
        self.service.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed. Closing the userfaultfd, which follows, lets everybody go.
            let _ = thread.join();
        }
    }
}

/// A writer that waits for longer than it must.
struct Held {
    fault: Fault,
    since: Instant,
    until: Instant,
}

impl Service {
    fn serve(&self, threads: Box<dyn LetWait>) {
        // A pace and what says who may be held are others' code. What this thread has seen is of no use after a panic.
        let served = catch_unwind(AssertUnwindSafe(|| self.serve_all(threads)));
        let error = match served {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => Error::system("let writers go", io::Error::other("the thread that does so has panicked")),
        };
        // First: a scan that protects pages after they are let go of sees it, and lets them go again.
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.let_all_go();
    }

    /// When nobody would serve those who wait. What was written is found all the same: it is not protected.
    fn let_all_go(&self) {
        for area in self.faults.areas() {
            // Of no use to say: what has gone wrong before is what the user is told.
            let _ = self.set(area.region, area.range(), Writes::Pass);
        }
    }

    fn serve_all(&self, mut threads: Box<dyn LetWait>) -> Result<(), Error> {
        let (mut new, mut held): (Vec<(Fault, u32)>, Vec<Held>) = (Vec::with_capacity(FEW), Vec::new());
        let mut streaks = Streaks::default();
        // Whether the process still lives is not looked at: a dead one has no writers, and the next scan finds out.
        // Relaxed: whoever sets it waits for this thread.
        while !self.is_over.load(Relaxed) {
            new.clear();
            let wait = if held.is_empty() { TICK } else { LOOK_AGAIN };
            self.faults.each(wait, FEW, |fault, thread| new.push((fault, thread)))?;
            for &(fault, thread) in &new {
                if self.waits.may_pass(PageCount::ONE) {
                    self.let_pass(fault, &mut streaks)?;
                    continue;
                }
                let since = Instant::now();
                let most = threads.at_most(thread) * self.waits.patience();
                match most.is_zero() {
                    true => self.let_go(fault, None)?,
                    false => held.push(Held { fault, since, until: since + most }),
                }
            }
            self.let_those_go_that_may(&mut held)?;
        }
        held.iter().try_for_each(|held| self.let_go(held.fault, Some(held.since)))
    }

    fn let_those_go_that_may(&self, held: &mut Vec<Held>) -> Result<(), Error> {
        let mut failed = Ok(());
        let now = Instant::now();
        held.retain(|one| {
            let goes = failed.is_err() || now >= one.until || self.waits.may_pass(PageCount::ONE);
            if goes && failed.is_ok() {
                failed = self.let_go(one.fault, Some(one.since));
            }
            !goes
        });
        failed
    }

    /// One that is not held, and what it will write next if it goes on as before.
    fn let_pass(&self, fault: Fault, streaks: &mut Streaks) -> Result<(), Error> {
        let unit = self.faults.unit_pages(fault.region);
        let ahead = streaks.pages(fault).min(PageRange::all(self.faults.pages(fault.region)).end().since(fault.page));
        // A huge page is as much as many small ones.
        let pages =
            if unit == PageCount::ONE && ahead > PageCount::ONE && self.waits.may_pass(ahead) { ahead } else { unit };
        streaks.note(fault, pages);
        self.let_pages_go(fault, pages, None)
    }

    fn let_go(&self, fault: Fault, since: Option<Instant>) -> Result<(), Error> {
        self.let_pages_go(fault, self.faults.unit_pages(fault.region), since)
    }

    /// Harmless if a page was let go of before: then the next scan finds it once more than it must.
    fn let_pages_go(&self, fault: Fault, pages: PageCount, since: Option<Instant>) -> Result<(), Error> {
        self.waits.passed(pages, since.map(|since| since.elapsed()));
        self.set(fault.region, fault.page.run(pages), Writes::Pass)
    }

    fn set(&self, region: usize, pages: PageRange, writes: Writes) -> Result<(), Error> {
        for stretch in self.faults.stretches(region, pages)? {
            uffd::while_changing(|| uffd::write_protect(self.faults.fd(), stretch.addresses, writes))
                .map_err(|source| crate::protect::refused(&stretch, source))?;
        }
        Ok(())
    }

    /// # Errors
    /// The thread has ended: whoever writes waits for ever.
    fn check(&self) -> Result<(), Error> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(error) = failed.take() else { return Ok(()) };
        // It is told once as it was; after that, what it means.
        *failed = Some(Error::Gone { region: 0, source: Errno::SRCH.into() });
        Err(error)
    }
}
