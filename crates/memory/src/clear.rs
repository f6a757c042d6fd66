//! Making memory read as zero: by giving it back to the system, or in place where it must stay.
//!
//! A page that is punched out of a hugetlbfs goes back to the pool and its reservation with it, so that the pool gives
//! it to somebody else, and whoever touches that memory later dies of SIGBUS. So nothing is punched out of a hugetlbfs,
//! be it preallocated or only reserved: a page of zeros costs nobody anything there, as no other could have it. (Where
//! memory is neither, it is not given back to the pool either.)

use std::thread;

use rustix::{fs::FallocateFlags, io::Errno};

use crate::{
    Error, Flaw, PageCount, PageRange, PageSet, Region, WindowPages, private::Private, region::Held, shared::Shared,
};

/// What is to become of memory that holds only zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Keep {
    /// It may go back to the system, except that a hugetlbfs keeps its pages.
    #[default]
    Nothing,
    /// All memory was allocated beforehand, and stays so.
    All,
    /// As `All`, and pages may only come from certain NUMA nodes.
    AllOnTheirNodes,
}

/// As many pages as are looked at by one thread.
const PART_PAGES: PageCount = PageCount::new(4096);
/// Looking for what is not zero is bound by memory: more threads gain little.
const MOST_THREADS: usize = 8;

impl Region {
    /// Makes the pages read as zero: they become holes where [`Region::gives_back`] says so, and else zeros are written
    /// to them, for which holes of a file become pages.
    ///
    /// # Errors
    /// OutOfRange, a region mapped for reading, no memory left for pages that are holes and must be none, the system's
    /// own.
    pub fn clear(&self, range: PageRange) -> Result<(), Error> {
        self.check_writable()?;
        self.check(range)?;
        match &self.held {
            _ if range.count.is_zero() => Ok(()),
            Held::Shared(shared) if shared.gives_back() => shared.punch(range),
            Held::Shared(shared) => shared.write_zeros(range),
            // The usual case, for each window that changes: nothing of the size of the region is made for it.
            Held::Private(private) if private.below.is_none() => {
                let mut there = Vec::new();
                private.each_there(range, |run| there.push(run)).map_err(|source| self.unknown(source))?;
                there.into_iter().try_for_each(|run| self.write_zeros(run))
            }
            Held::Private(_) => {
                let mut wanted = PageSet::empty(self.pages());
                wanted.insert(range);
                self.data_among(&wanted)?.ranges().try_for_each(|run| self.write_zeros(run))
            }
        }
    }

    /// Readies memory for pages that come: makes what must be there. Returns the pages that may hold something; all
    /// others read as zero. What is old must be gone when all have come: [`Region::clear_set`]. Not before, as most of
    /// it is overwritten.
    ///
    /// # Errors
    /// A region mapped for reading; memory that is to be there is not, and can't be had; the system's own.
    pub fn ready(&self) -> Result<PageSet, Error> {
        self.check_writable()?;
        // Asked first: pages that are made now are zero.
        let held = self.data()?;
        if let Held::Shared(shared) = &self.held
            && shared.keep != Keep::Nothing
        {
            let mut missing = PageSet::full(self.pages());
            missing.subtract(&held);
            missing.ranges().try_for_each(|range| shared.allocate(range))?;
        }
        Ok(held)
    }

    /// As [`Region::clear`], of pages that may be zero already: where zeros can't be holes, only what is not zero is
    /// written.
    ///
    /// # Errors
    /// As [`Region::clear`].
    pub fn clear_window(&self, pages: WindowPages) -> Result<(), Error> {
        // The usual case, for each packet: private memory would be asked for nothing by a call.
        if pages.is_empty() {
            return Ok(());
        }
        if self.gives_back() {
            return pages.runs().try_for_each(|run| self.clear(run));
        }
        self.check_writable()?;
        pages.runs().for_each(|run| self.populate_read(run));
        let dirty = pages.without(self.zero_mask(pages)?);
        dirty.runs().try_for_each(|run| self.write_zeros(run))
    }

    /// As [`Region::clear_window`], by several threads where there is much to do.
    ///
    /// # Errors
    /// As [`Region::clear`].
    pub fn clear_set(&self, set: &PageSet) -> Result<(), Error> {
        if self.gives_back() {
            return set.ranges().try_for_each(|range| self.clear(range));
        }
        let parts = set.count().div_ceil(PART_PAGES) as usize;
        let most = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let threads = parts.min(most).max(1);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|n| scope.spawn(move || self.clear_some(set, n, threads))).collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Gives all memory back: all pages are holes. A hugetlbfs keeps as many pages for this region as it had. What a
    /// process has for itself only that process can give back: of private memory this empties no more than the file
    /// below it, if that has no name.
    ///
    /// # Errors
    /// A region mapped for reading; memory that was allocated beforehand and would be lost; the system's own.
    pub fn empty(&self) -> Result<(), Error> {
        self.check_writable()?;
        self.check_can_be_empty()?;
        match &self.held {
            Held::Shared(shared) => shared.empty(),
            Held::Private(Private { below: Some(below), .. }) if !below.is_hugetlb() && below.is_nameless()? => {
                // Whoever writes to a page of such a mapping leaves one of zeros in the file.
                below.punch(PageRange::all(self.pages()))
            }
            Held::Private(_) => Ok(()),
        }
    }

    /// The pages that a thread can touch without a fault for a missing page: those of the file, and those that the
    /// process of private memory has.
    ///
    /// # Errors
    /// The system's own.
    pub fn not_missing(&self) -> Result<PageSet, Error> {
        match &self.held {
            Held::Shared(shared) => shared.data(),
            Held::Private(private) => {
                let mut there = self.data_below(private)?;
                private.add_mapped(&mut there).map_err(|source| self.unknown(source))?;
                Ok(there)
            }
        }
    }

    /// # Errors
    /// What was promised to the region would be lost, or what a file holds would show.
    pub(crate) fn check_can_be_empty(&self) -> Result<(), Error> {
        let why = match &self.held {
            Held::Private(Private { keep: Keep::Nothing, below, .. }) => {
                return below.as_ref().map_or(Ok(()), |below| self.check_shows_nothing(below));
            }
            Held::Private(_) => "nothing would reserve memory for it",
            Held::Shared(shared) => match shared.keep {
                Keep::Nothing => return Ok(()),
                Keep::All if shared.is_hugetlb() => return Ok(()),
                Keep::All => "its file system would not reserve memory for it",
                Keep::AllOnTheirNodes => "it is bound to NUMA nodes, which would not reserve memory for it",
            },
        };
        Err(Error::unusable(
            self.name(),
            Flaw::MustStay,
            format!(
                "it was allocated beforehand, and would have to be given back so that its pages can be brought when \
                 they are touched; but {why}; leave out --lazy, or start the VM without preallocation (prealloc=off)"
            ),
        ))
    }

    /// # Errors
    /// The file below private memory would show in place of pages that are missing.
    fn check_shows_nothing(&self, below: &Shared) -> Result<(), Error> {
        let cure = "leave out --lazy, or give the VM memory without a file";
        if !below.is_hugetlb() && !below.is_of_memory() {
            let why =
                format!("it is a private mapping of a file on a disk, in which the kernel waits for no page; {cure}");
            return Err(Error::unusable(self.name(), Flaw::Below, why));
        }
        if !below.is_nameless()? && !below.data()?.is_empty() {
            let why = format!(
                "it is a private mapping of a file that holds something, which would show in place of pages that are \
                 missing; {cure}"
            );
            return Err(Error::unusable(self.name(), Flaw::Below, why));
        }
        Ok(())
    }

    /// Every `of`-th part, from the `n`-th on.
    fn clear_some(&self, set: &PageSet, n: usize, of: usize) -> Result<(), Error> {
        let is_ours = |window: &WindowPages| (window.first.get() / PART_PAGES.get()) as usize % of == n;
        set.windows().filter(is_ours).try_for_each(|window| self.clear_window(window))
    }

    /// The range was checked, and that the region can be written.
    fn write_zeros(&self, range: PageRange) -> Result<(), Error> {
        match &self.held {
            Held::Shared(shared) => shared.write_zeros(range),
            Held::Private(private) => private.write_zeros(range).map_err(|source| self.failed("write zeros", source)),
        }
    }
}

impl Shared {
    pub(crate) fn gives_back(&self) -> bool {
        self.keep == Keep::Nothing && !self.is_hugetlb()
    }

    /// Gives all memory back. That it can be was checked.
    fn empty(&self) -> Result<(), Error> {
        let all = PageRange::all(self.pages());
        if !self.is_hugetlb() {
            return self.punch(all);
        }
        let mut held = self.data()?;
        if self.keep != Keep::Nothing {
            // Also what somebody has punched before.
            held.insert(all);
        }
        // One by one: nobody can have more than one of them meanwhile.
        for range in held.ranges() {
            for page in range.parts(self.unit_pages()) {
                self.punch(page)?;
                self.reserve(page)?;
            }
        }
        Ok(())
    }

    /// Makes holes of all of the file's pages that have a part in the range, which was checked.
    fn punch(&self, range: PageRange) -> Result<(), Error> {
        let (offset, bytes) = self.whole(range);
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(self.file(), how, offset, bytes) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP) => return self.write_zeros(range),
                Err(source) => return Err(self.failed("punch a hole", source)),
            }
        }
    }

    /// Zeros through the mapping. The range was checked, and that the mapping is writable.
    fn write_zeros(&self, range: PageRange) -> Result<(), Error> {
        self.make(range)?;
        let (start, len) = self.raw(range);
        // SAFETY: raw() gives len bytes of the mapping, which is writable, and its pages are there; raw access, no
        // reference.
        unsafe { start.write_bytes(0, len) }
        Ok(())
    }
}
