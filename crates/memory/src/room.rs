//! Room for pages that are brought when a guest runs already. Where there is none for a page, that guest is lost.

use rustix::io::Errno;

use crate::{Error, Flaw, GuestMemory, PAGE, PageCount, PageRange, PageSet, region::Held, shared::Shared};

impl GuestMemory {
    /// Whether there is room for these pages, by region, all of which are holes. A hugetlbfs sets them aside: nobody
    /// else gets them from now on, until the file is gone. A tmpfs only says how much it has left. Of memory that a
    /// process has for itself nothing is known.
    ///
    /// # Errors
    /// There is none, and what would help. What was set aside by then stays so.
    pub fn set_aside<'a>(&self, pages: impl IntoIterator<Item = &'a PageSet>) -> Result<(), Error> {
        // By file system: what its regions need together.
        let mut needs: Vec<(u64, u64)> = Vec::new();
        for (region, pages) in self.regions().iter().zip(pages) {
            let Held::Shared(shared) = &region.held else { continue };
            if shared.is_hugetlb() {
                shared.reserve_all(pages)?;
                continue;
            }
            let Some((device, room)) = shared.room()? else { continue };
            let at = needs.iter().position(|need| need.0 == device).unwrap_or_else(|| {
                needs.push((device, 0));
                needs.len() - 1
            });
            needs[at].1 += pages.bytes();
            if needs[at].1 > room {
                return Err(Error::unusable(
                    shared.name(),
                    Flaw::NoRoom,
                    format!(
                        "{:.1} MB are to be brought when they are touched, and the file system of its memory has only \
                         {:.1} MB left: make it larger, as by mount -o remount,size=, and try again",
                        needs[at].1 as f64 / 1e6,
                        room as f64 / 1e6
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl Shared {
    /// As [`Shared::reserve`], for the huge pages that these pages are in.
    fn reserve_all(&self, pages: &PageSet) -> Result<(), Error> {
        let unit = self.unit_pages();
        let mut run = PageRange::all(PageCount::ZERO);
        for range in pages.ranges() {
            let (first, end) = (range.first.unit(unit), range.end().next_unit(unit));
            if first > run.end() {
                self.reserve_run(run)?;
                run = first.run(PageCount::ZERO);
            }
            run.count = end - run.first;
        }
        self.reserve_run(run)
    }

    fn reserve_run(&self, run: PageRange) -> Result<(), Error> {
        if run.count.is_zero() { Ok(()) } else { self.reserve(run) }
    }

    /// The file system of memory of the system's, and how many bytes it has left. None: it has no limit.
    fn room(&self) -> Result<Option<(u64, u64)>, Error> {
        if !self.is_of_memory() {
            return Ok(None);
        }
        let failed = |source| self.failed("ask for the room of the file system", source);
        let system = rustix::fs::fstatvfs(self.file()).map_err(failed)?;
        let device = rustix::fs::fstat(self.file()).map_err(failed)?.st_dev;
        // One without a limit says that it has nothing at all.
        Ok((system.f_blocks > 0).then(|| (device, system.f_bavail.saturating_mul(system.f_frsize))))
    }
}

/// What helps where a hugetlbfs has no page; goes into a message behind what it is of.
pub(crate) fn cure_of_pool(page_bytes: u64) -> String {
    format!(
        " (the pool has no huge page of {} KiB left: enlarge it, as by /proc/sys/vm/nr_hugepages, or end the processes \
         that use it, and try again with a new waiting VM)",
        page_bytes >> 10
    )
}

/// What helps where there is no page for a thread that waits for one.
pub(crate) fn cure_of_missing(why: Errno, page_bytes: u64) -> String {
    match why {
        Errno::NOMEM | Errno::NOSPC if page_bytes > PAGE => cure_of_pool(page_bytes),
        Errno::NOMEM | Errno::NOSPC => " (no memory is left, or the file system of the memory's file is full: make it \
             larger, as by mount -o remount,size=, and try again with a new waiting VM)"
            .to_owned(),
        _ => String::new(),
    }
}
