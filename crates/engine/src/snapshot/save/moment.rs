//! The memory of one moment, saved while the guest runs on: whoever writes to a page that is not saved yet waits until
//! the page is copied.
//!
//! ```text
//!   writers          in the order of memory:  claim 128 pages · copy · let go · give to the disk
//!   faults           where somebody waits:    claim  16 pages · copy · let go ─┐
//!                                                                              │ bounded
//!   writers          before anything else:              give to the disk ◄─────┘
//! ```
//!
//! Protecting takes time that grows with the memory. So it is done while the guest still runs, and until the moment
//! whoever writes is let pass; where somebody did, and where there was a hole before, is protected once more when the
//! guest stands still.
//!
//! A page has one owner at any time: the protection, then whoever has claimed it and lets it go, then the copy. Nobody
//! reads it from guest memory again, so it is saved once, as it was. A write waits for a copy, and for the disk only
//! when the memory for copies is full. What was a hole in that moment is zero in the snapshot, whatever is written
//! there later: it needs no protection.
use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use transship_memory::{
    Error as MemoryError, Fault, Freeing, PAGE_BYTES, PageBuffer, PageBuffers, PageCount, PageNumber, PageRange,
    PageSet, Protection, Region, WindowBuffer, WindowPages,
};

use super::{
    appended::Appender,
    unsaved::{FAULT_PAGES, Unsaved},
    writer::{Pages, Written},
};
use crate::{
    Error, cpu,
    guest::{GuestError, SourceGuest},
    snapshot::{
        file::{queues::Queues, target::Target},
        mapped::layout::Spot,
    },
};

/// How long a wait may last before the thread checks whether everything is over.
pub(crate) const TICK: Duration = Duration::from_millis(20);
/// Bytes of copies that wait for the disk on behalf of faults.
const COPIES_BYTES_MAX: u64 = 16 << 20;
/// How long a writer of the guest may have to wait for the disk. The guest is worth more than its snapshot.
const STALL_MAX: Duration = Duration::from_secs(20);

/// The memory of a guest in one moment, from some time before it until all is saved. Once dropped, no write waits.
pub(crate) struct Moment<'a> {
    pages: &'a Pages,
    protection: Protection,
    freeing: Freeing,
    regions: Vec<Unsaved>,
    /// Held while a write is let through, and while the moment is made.
    stage: Mutex<Stage>,
    /// The next chunk that no writer has taken, and those that are done with; both count through all regions.
    next: AtomicU64,
    done: AtomicU64,
    /// Nothing is left to be claimed; or all was given up.
    over: AtomicBool,
    given_up: AtomicBool,
    /// Pages that were saved because somebody waited.
    faulted: AtomicU64,
    /// Whether the kernel took requests by io_uring.
    uring: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The guest runs, and whoever writes is let pass.
    Before,
    /// A write waits for a copy.
    After,
}

/// Pages that were copied, on their way to the disk.
pub(crate) struct Copied {
    region: usize,
    first: PageNumber,
    buffer: PageBuffer,
}

/// What one thread does with copies.
pub(crate) enum Outlet {
    /// Each page has its place in a file.
    Placed(Queues),
    /// They follow one another.
    Appended(Appender),
}

impl Outlet {
    pub(crate) fn is_uring(&self) -> bool {
        matches!(self, Self::Placed(queues) if queues.is_uring())
    }

    fn write(&mut self, places: &[Spot], copies: Copies) -> Result<(), MomentFailure> {
        let written = copies.into_iter().try_for_each(|Copied { region, first, buffer }| match self {
            Self::Placed(queues) => {
                let Spot { file, offset } = places[region];
                queues.of(file).write_buffer(buffer, offset + first.offset())
            }
            Self::Appended(appender) => appender.append(region, first, buffer),
        });
        written.map_err(MomentFailure::File)
    }

    fn finish(&mut self) -> Result<(), MomentFailure> {
        let finished = match self {
            Self::Placed(queues) => queues.finish(),
            Self::Appended(appender) => appender.finish(),
        };
        finished.map_err(MomentFailure::File)
    }
}

/// Why it could not go on.
pub(crate) enum MomentFailure {
    /// Before anything was tried.
    Begin(Error),
    /// The file takes no more.
    File(MemoryError),
    /// The guest's memory or process.
    Guest(MemoryError),
    /// Content was gone before it was saved.
    GivenBack { region: String, page: PageNumber },
    /// The disk did nothing while the guest waited.
    Stalled,
}

impl MomentFailure {
    pub(crate) fn into_error(self, target: &Target) -> Error {
        match self {
            Self::Begin(error) => error,
            Self::File(error) => target.failed_pages(error),
            Self::Guest(error) => error.into(),
            Self::GivenBack { region, page } => Error::Guest(GuestError::vmm(format!(
                "the guest gave page {page} of region {region:?} back before it was saved, which removes content from \
                 the snapshot; turn off what makes it give memory back (a balloon, free page reporting), or use \
                 --live"
            ))),
            Self::Stalled => Error::file(format!(
                "the file accepts no more data: a write of the guest has waited for it for {} s. The snapshot was \
                 given up, and the guest runs on",
                STALL_MAX.as_secs()
            )),
        }
    }
}

impl<'a> Moment<'a> {
    /// Looks at the memory of a guest that still runs. Nobody waits yet.
    ///
    /// # Errors
    /// The system's; a region of huge pages that are too large to be copied.
    pub(crate) fn expected(guest: &dyn SourceGuest, protection: Protection, pages: &'a Pages) -> Result<Self, Error> {
        let regions = pages.memory.regions().iter().enumerate();
        let regions = regions.map(|(index, memory)| Unsaved::of(memory, protection.unit_pages(index)));
        let regions = regions.collect::<Result<_, _>>()?;
        let number = || AtomicU64::new(0);
        let (next, done, faulted) = (number(), number(), number());
        let flag = || AtomicBool::new(false);
        let (over, given_up, uring) = (flag(), flag(), flag());
        let (freeing, stage) = (guest.freeing(), Mutex::new(Stage::Before));
        Ok(Self { pages, protection, freeing, regions, stage, next, done, over, given_up, faulted, uring })
    }

    /// Protects what is there. From now on somebody has to [`Moment::serve`].
    ///
    /// # Errors
    /// The kernel's; then it has to be given up.
    pub(crate) fn protect_beforehand(&self) -> Result<(), Error> {
        for (index, region) in self.regions.iter().enumerate() {
            region.beforehand().into_iter().try_for_each(|range| self.protection.protect(index, range))?;
        }
        Ok(())
    }

    /// This is the moment: the guest stands still, and the VMM has written what it had to. From now on who writes
    /// waits.
    ///
    /// # Errors
    /// The system's; then it has to be given up.
    pub(crate) fn come(&self) -> Result<(), Error> {
        let mut stage = self.stage();
        for (index, (region, memory)) in self.regions.iter().zip(self.pages.memory.regions()).enumerate() {
            region.stop(memory)?.into_iter().try_for_each(|range| self.protection.protect(index, range))?;
        }
        *stage = Stage::After;
        match self.is_given_up() {
            true => Err(Error::Guest(GuestError::Bug("the thread that serves the guest's writes has failed".into()))),
            false => Ok(()),
        }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages that were no holes.
    pub(crate) fn data_pages(&self) -> PageCount {
        self.regions.iter().filter_map(Unsaved::data).map(PageSet::count).sum()
    }

    /// Pages that were saved because somebody waited.
    pub(crate) fn faulted_pages(&self) -> PageCount {
        PageCount::new(self.faulted.load(Relaxed))
    }

    pub(crate) fn is_uring(&self) -> bool {
        self.uring.load(Relaxed)
    }

    /// Room for copies between the one thread and the others.
    pub(crate) fn copies(&self) -> (Sender<Copies>, Receiver<Copies>) {
        let largest = self.regions.iter().map(|region| region.unit).max().unwrap_or(PageCount::ONE).max(FAULT_PAGES);
        bounded((COPIES_BYTES_MAX / largest.bytes()).max(2) as usize)
    }

    /// Gives it up: whatever the threads are at, nobody waits from now on, and they end as soon as they can.
    pub(crate) fn give_up(&self) {
        self.over.store(true, Relaxed);
        if !self.given_up.swap(true, Relaxed) {
            self.let_all_go();
        }
    }

    fn let_all_go(&self) {
        for (index, memory) in self.pages.memory.regions().iter().enumerate() {
            // If this fails the process is gone, or dropping the protection does it.
            let _ = self.protection.allow(index, PageRange::all(memory.pages()));
        }
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Relaxed)
    }

    /// The life of the thread that serves those who wait.
    ///
    /// # Errors
    /// See [`MomentFailure`]; it is given up then.
    pub(crate) fn serve(&self, copies: &Sender<Copies>) -> Result<Written, MomentFailure> {
        // Whatever the others are at, they must not find somebody waiting whom nobody serves.
        self.serve_all(copies).inspect_err(|_| self.give_up())
    }

    fn serve_all(&self, copies: &Sender<Copies>) -> Result<Written, MomentFailure> {
        let begin = cpu::thread_seconds();
        let mut hand = Hand::default();
        let mut faults: Vec<Fault> = Vec::new();
        // Relaxed: the kernel reports the writes that wait, and the end is signalled by threads that are joined.
        while !self.over.load(Relaxed) {
            faults.clear();
            self.protection.next_faults(TICK, &mut faults).map_err(MomentFailure::Guest)?;
            let stage = self.stage();
            if *stage == Stage::Before {
                faults.iter().try_for_each(|fault| self.pass(fault))?;
                continue;
            }
            drop(stage);
            for fault in &faults {
                let copied = self.save_first(*fault, &mut hand)?;
                if !copied.is_empty() && !self.hand_over(copied, copies)? {
                    break;
                }
            }
        }
        // What is left protected are holes between data.
        self.let_all_go();
        Ok(Written { cpu_seconds: cpu::thread_seconds() - begin, ..hand.written })
    }

    /// Lets somebody through before the moment.
    fn pass(&self, fault: &Fault) -> Result<(), MomentFailure> {
        let region = &self.regions[fault.region];
        self.let_go(fault.region, region.pass(region.unit_of(fault.page)))
    }

    /// Copies what somebody waits for, and lets him go.
    fn save_first(&self, fault: Fault, hand: &mut Hand) -> Result<Copies, MomentFailure> {
        let region = &self.regions[fault.region];
        let unit = region.unit_of(fault.page);
        let claimed = region.left.claim(region.around(unit));
        let own = 1 << (unit - claimed.first.get());
        if claimed.mask & own == 0 {
            // Somebody else saves it now, and lets it go. A hole that was protected along with its surroundings has
            // nothing to be saved.
            if !region.has_data(unit) {
                self.let_go(fault.region, region.pages_of(PageRange::new(unit, 1)))?;
            }
        }
        let copied = self.save(fault.region, claimed, hand)?;
        self.faulted.fetch_add(claimed.count().get() * region.unit.get(), Relaxed);
        Ok(copied)
    }

    /// False: it is over, nobody wants it.
    fn hand_over(&self, mut copied: Copies, copies: &Sender<Copies>) -> Result<bool, MomentFailure> {
        let begin = Instant::now();
        loop {
            match copies.send_timeout(copied, TICK) {
                Ok(()) => return Ok(true),
                Err(SendTimeoutError::Disconnected(_)) => return Ok(false),
                Err(SendTimeoutError::Timeout(_)) if self.is_given_up() => return Ok(false),
                Err(SendTimeoutError::Timeout(_)) if begin.elapsed() > STALL_MAX => return Err(MomentFailure::Stalled),
                Err(SendTimeoutError::Timeout(back)) => copied = back,
            }
        }
    }

    /// The life of a thread that writes. Returns when the kernel has all that it took.
    ///
    /// # Errors
    /// See [`MomentFailure`]; it has to be given up then.
    pub(crate) fn write(&self, outlet: &mut Outlet, copies: &Receiver<Copies>) -> Result<Written, MomentFailure> {
        let begin = cpu::thread_seconds();
        let mut hand = Hand::default();
        self.uring.store(outlet.is_uring(), Relaxed);
        let places = &self.pages.places;
        while !self.is_given_up() {
            // Copies first: while they wait for the disk, there may be no room for the next.
            while let Ok(copied) = copies.try_recv() {
                self.pages.pace.note(bytes(&copied));
                outlet.write(places, copied)?;
            }
            let Some((region, units)) = self.next_chunk() else { break };
            let claimed = self.regions[region].left.claim(units);
            let copied = self.save(region, claimed, &mut hand)?;
            self.chunk_done();
            // The guest waits for none of these.
            self.pages.pace.wait(bytes(&copied));
            outlet.write(places, copied)?;
        }
        // Until the thread that serves faults has ended; it does when all chunks are done with.
        for copied in copies {
            if !self.is_given_up() {
                outlet.write(places, copied)?;
            }
        }
        outlet.finish()?;
        Ok(Written { cpu_seconds: cpu::thread_seconds() - begin, ..hand.written })
    }

    /// Region, first unit, units.
    fn next_chunk(&self) -> Option<(usize, WindowPages)> {
        let mut number = self.next.fetch_add(1, Relaxed);
        for (index, region) in self.regions.iter().enumerate() {
            match number.checked_sub(region.chunks()) {
                Some(rest) => number = rest,
                None => {
                    return Some((index, region.chunk(number)));
                }
            }
        }
        None
    }

    /// When nothing is left to be claimed, nobody can come to wait any more.
    fn chunk_done(&self) {
        let all: u64 = self.regions.iter().map(Unsaved::chunks).sum();
        if self.done.fetch_add(1, Relaxed) + 1 == all {
            self.over.store(true, Relaxed);
        }
    }

    /// Copies the pages of units that the caller has claimed, and lets them go.
    fn save(&self, region: usize, claimed: WindowPages, hand: &mut Hand) -> Result<Copies, MomentFailure> {
        let mut copied = Copies::new();
        for units in claimed.runs() {
            let pages = self.regions[region].pages_of(units);
            self.copy(region, pages, hand, &mut copied)?;
            self.let_go(region, pages)?;
        }
        Ok(copied)
    }

    fn copy(
        &self,
        region: usize,
        pages: PageRange,
        Hand { written, buffer, copies }: &mut Hand,
        to: &mut Copies,
    ) -> Result<(), MomentFailure> {
        let memory = &self.pages.memory.regions()[region];
        // Units are claimed only once the moment is there.
        let Some(data) = self.regions[region].data() else { return Ok(()) };
        for window in pages.windows() {
            let wanted = window.with(window.mask & data.window(window.first));
            wanted.runs().try_for_each(|run| self.check_there(memory, run))?;
            let read = memory.read_window(wanted, true, buffer).map_err(MomentFailure::Guest)?;
            let (zero, present) = (read.zero_mask(), read.present());
            self.pages.note(region, present, zero);
            written.normal += present.count();
            written.zero += PageCount::new(zero.count_ones().into());
            for run in present.runs() {
                let mut buffer = copies.take(run.count.index());
                read.copy_to(WindowPages::within(run, present.first), buffer.bytes_mut());
                to.push(Copied { region, first: run.first, buffer });
            }
        }
        Ok(())
    }

    /// A hole that is punched gets past the protection. Reading it would make a page of zeros, so it is asked before.
    fn check_there(&self, memory: &Region, pages: PageRange) -> Result<(), MomentFailure> {
        if self.freeing == Freeing::Never || memory.is_data(pages).map_err(MomentFailure::Guest)? {
            return Ok(());
        }
        Err(MomentFailure::GivenBack { region: memory.name().to_owned(), page: pages.first })
    }

    fn let_go(&self, region: usize, pages: PageRange) -> Result<(), MomentFailure> {
        self.protection.allow(region, pages).map_err(MomentFailure::Guest)
    }
}

/// What a thread that copies pages works with.
#[derive(Default)]
struct Hand {
    written: Written,
    buffer: WindowBuffer,
    /// For copies.
    copies: PageBuffers,
}

pub(crate) type Copies = Vec<Copied>;

fn bytes(copies: &Copies) -> u64 {
    copies.iter().map(|copied| (copied.buffer.pages() * PAGE_BYTES) as u64).sum()
}
