//! Finds the pages that were written since the last scan.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use crate::{
    Area, Error, Flaw, GuestMemory, PageCount, PageSet, Waits,
    area::{self, lost, refused, untrackable},
    pagemap::{self, By, Look},
    reach::Reach,
    sweep::{look_over, sweep},
    uffd,
};

/// Reports written pages. The first scan of a region reports every page that may hold something and arms the tracking;
/// each later scan reports the pages written since the scan before, and re-arms them in the same step, so no write is
/// lost. A scan may report too much (pages that were only read, neighbours of a page that was written first), never too
/// little.
///
/// Punching a hole is not a write, and neither is reading the page again afterwards. Callers that must notice these use
/// [`crate::Holes`] after the scan.
pub trait Tracker: Send {
    /// Pages of the region written since its last scan.
    ///
    /// # Errors
    /// The tracked process is gone, or the kernel refuses. Nothing may then be assumed to be clean; the next scan that
    /// succeeds reports everything again.
    fn scan(&mut self, region: usize) -> Result<PageSet, Error>;

    /// How many pages of the region the next scan would report, if it came now. They stay to be reported. None: the
    /// tracker can't look without a scan.
    ///
    /// # Errors
    /// As [`Tracker::scan`], which goes on as if this had not been asked.
    fn written_so_far(&mut self, _region: usize) -> Result<Option<PageCount>, Error> {
        Ok(None)
    }

    /// From now on processes that write, other than the first one, may end: they have written their last.
    fn let_others_end(&mut self) {}

    /// What is known of writers that wait for the tracker; none: nobody does.
    fn waits(&self) -> Option<Arc<Waits>> {
        None
    }
}

/// userfaultfd write protection in asynchronous mode, read by PAGEMAP_SCAN on the tracked process's pagemap (Linux
/// 6.7). Dropping it closes the userfaultfd, which ends the tracking; the process runs on as before.
///
/// It sees all writes of the tracked process through the areas (including those of the kernel and KVM on its behalf),
/// but no writes of other processes through their own mappings, except those of processes that were added.
pub struct UffdTracker {
    /// The first one maps everything.
    processes: Vec<Process>,
    others_may_end: bool,
    /// By region.
    regions: Vec<Tracked>,
}

/// A process that writes.
struct Process {
    uffd: OwnedFd,
    pagemap: OwnedFd,
    areas: Vec<Area>,
}

struct Tracked {
    pages: PageCount,
    look: Look,
    /// Of shared memory: what is tracked of it; none: all.
    reach: Option<Reach>,
    /// Whether a scan would find everything that was written since the last report.
    armed: bool,
}

impl Tracked {
    /// What of the areas is tracked.
    fn reached(&self, areas: &[Area]) -> Vec<Area> {
        match &self.reach {
            Some(reach) => areas.iter().flat_map(|area| area.parts(reach.pages())).collect(),
            None => areas.to_vec(),
        }
    }
}

impl UffdTracker {
    /// Whether the kernel can do this, as far as it can be asked; if it can't be, it is thought to.
    pub fn is_possible() -> bool {
        let has_scan = || {
            let pagemap = std::fs::File::open("/proc/self/pagemap");
            pagemap.is_ok_and(|pagemap| pagemap::is_known(pagemap.as_fd()))
        };
        uffd::is_known(uffd::TRACK).unwrap_or(true) && has_scan()
    }

    /// `uffd` was created by the tracked process and not yet used (no UFFDIO_API); `pagemap` is its /proc/PID/pagemap.
    /// `region_pages[i]` is the size of region i in pages. Negotiates the features, registers all areas.
    ///
    /// # Errors
    /// Areas that the regions don't have, regions that the areas don't cover, memory that the kernel can't track, a
    /// kernel that is too old.
    pub fn new(uffd: OwnedFd, pagemap: OwnedFd, areas: Vec<Area>, region_pages: Vec<PageCount>) -> Result<Self, Error> {
        area::check(&areas, &region_pages)?;
        let first = Process::begin(uffd, pagemap, areas)?;
        let tracked = |pages| Tracked { pages, look: Look::Written, reach: None, armed: false };
        let regions = region_pages.into_iter().map(tracked).collect();
        Ok(Self { processes: vec![first], others_may_end: false, regions })
    }

    /// Another process that maps regions, or parts of them, shared: what it writes is found as well. To be told before
    /// the first scan. A mapping that it makes later is not tracked. If it makes one in place of a tracked one, or
    /// takes that away, the next scan fails.
    ///
    /// # Errors
    /// Areas that the regions don't have; as [`UffdTracker::new`].
    pub fn with_other(mut self, uffd: OwnedFd, pagemap: OwnedFd, areas: Vec<Area>) -> Result<Self, Error> {
        let pages: Vec<PageCount> = self.regions.iter().map(|region| region.pages).collect();
        area::check_inside(&areas, &pages)?;
        self.processes.push(Process::begin(uffd, pagemap, areas)?);
        Ok(self)
    }

    /// The same regions, as they are held. Then memory where nothing ever was is not tracked, as nobody need know that
    /// it was not written: in private memory pages that the process does not have, in a shared file blocks of which it
    /// has nothing. That saves the page tables that the kernel would make for them. To be told before the first scan.
    #[must_use]
    pub fn with_memory(mut self, memory: &GuestMemory) -> Self {
        for (number, (tracked, region)) in self.regions.iter_mut().zip(memory.regions()).enumerate() {
            tracked.reach = Reach::of(memory, number);
            if region.is_private() {
                tracked.look = Look::WrittenAndThere;
            }
        }
        self
    }

    /// The pages of the region that were written, by whichever process; they are tracked again.
    fn written(&self, region: usize, tracked: &Tracked) -> Result<PageSet, Error> {
        let mut written = PageSet::empty(tracked.pages);
        for (number, process) in self.processes.iter().enumerate() {
            match process.add_written(region, tracked, &mut written) {
                Err(_) if number > 0 && self.others_may_end && process.has_ended() => {}
                found => found?,
            }
        }
        Ok(written)
    }
}

impl Process {
    fn begin(uffd: OwnedFd, pagemap: OwnedFd, areas: Vec<Area>) -> Result<Self, Error> {
        uffd::negotiate(uffd.as_fd(), uffd::TRACK).map_err(|source| match source.raw_os_error() {
            Some(libc::EINVAL) => Error::Kernel {
                what: "track writes to shared memory",
                need: "Linux 6.7 or newer is needed, and a userfaultfd that was not used before",
            },
            _ => Error::system("negotiate with userfaultfd", source),
        })?;
        for area in &areas {
            uffd::register(uffd.as_fd(), uffd::TRACK, area.addresses()).map_err(|source| refused(area, source))?;
        }
        Ok(Self { uffd, pagemap, areas })
    }

    fn add_written(&self, region: usize, tracked: &Tracked, written: &mut PageSet) -> Result<(), Error> {
        let areas = area::of_region(&self.areas, region);
        sweep(self.pagemap.as_fd(), (tracked.look, By::Scan), &tracked.reached(&areas), written)?;
        check_still_there(self.uffd.as_fd(), uffd::TRACK, &areas)
    }

    fn add_written_so_far(&self, region: usize, tracked: &Tracked, written: &mut PageSet) -> Result<(), Error> {
        let (areas, look) = (area::of_region(&self.areas, region), tracked.look.without_rearming());
        look_over(self.pagemap.as_fd(), (look, By::Scan), &tracked.reached(&areas), written)
    }

    /// Then its page table is gone, and even what it says of memory that is not there.
    fn has_ended(&self) -> bool {
        rustix::io::pread(&self.pagemap, [0; 8].as_mut_slice(), 0).is_ok_and(|count| count == 0)
    }
}

/// Memory that is gone has no written pages as far as the kernel can tell. Registering an area again, as it is, changes
/// nothing, and fails when the process or its mapping is gone.
pub(crate) fn check_still_there(uffd: BorrowedFd<'_>, how: uffd::Use, areas: &[Area]) -> Result<(), Error> {
    for area in areas {
        uffd::register(uffd, how, area.addresses()).map_err(|source| lost(area, source))?;
    }
    Ok(())
}

impl Tracker for UffdTracker {
    fn let_others_end(&mut self) {
        self.others_may_end = true;
    }

    fn written_so_far(&mut self, region: usize) -> Result<Option<PageCount>, Error> {
        let Some(tracked) = self.regions.get(region).filter(|tracked| tracked.armed) else { return Ok(None) };
        let beyond = tracked.reach.as_ref().map(Reach::data_beyond).transpose()?;
        let mut written = beyond.unwrap_or_else(|| PageSet::empty(tracked.pages));
        self.processes.iter().try_for_each(|process| process.add_written_so_far(region, tracked, &mut written))?;
        Ok(Some(written.count()))
    }

    fn scan(&mut self, region: usize) -> Result<PageSet, Error> {
        let Some(tracked) = self.regions.get_mut(region) else {
            return Err(untrackable(region, Flaw::NoRegion, "the tracker does not know it"));
        };
        // Not armed until everything is done: pages that a scan has found and then lost to an error must be reported
        // again.
        let armed = std::mem::replace(&mut tracked.armed, false);
        let grown = tracked.reach.as_mut().map(Reach::grow).transpose()?;
        let tracked = &self.regions[region];
        let mut written = self.written(region, tracked)?;
        if !armed {
            // The first time, pages that are in the file but that the process has not touched count, too, although
            // nothing wrote them through its mapping. Kernels have reported those as written so far, but this code does
            // not depend on that.
            written = PageSet::full(tracked.pages);
        } else if let (Some(reach), Some(grown)) = (&tracked.reach, grown) {
            // Nothing is known of them but what the file has now.
            written.subtract(&grown);
            written.union_with(&reach.data_among(&grown)?);
        }
        self.regions[region].armed = true;
        Ok(written)
    }
}
