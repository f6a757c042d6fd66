//! Threads of another process that wait for us, at addresses of its own; here they get names: region and page.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::OFlags,
    io::Errno,
};

use crate::{
    Area, ByteRange, Error, Flaw, PAGE, PAGE_BYTES, PageCount, PageNumber, PageRange,
    area::{self, refused, untrackable},
    mapping::Reserved,
    uffd::{self, MESSAGE_BYTES, Use},
};

/// A thread of the process waits to write this page (or, with [`crate::Missing`], to touch it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// Index of the region.
    pub region: usize,
    /// Number of the page; of a huge page, its first.
    pub page: PageNumber,
}

/// Messages that are read at once.
const MESSAGES: usize = 64;

/// A userfaultfd whose faults are ours to answer, and where it is in use.
pub(crate) struct Faults {
    uffd: OwnedFd,
    areas: Vec<Watched>,
    region_pages: Vec<PageCount>,
}

struct Watched {
    area: Area,
    /// Bytes that the kernel handles as one: of a page, or of a huge page.
    unit: u64,
}

/// A part of an area, as the kernel is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) region: usize,
    pub(crate) first_page: PageNumber,
    pub(crate) addresses: ByteRange,
    pub(crate) unit: u64,
}

impl Faults {
    /// Negotiates, and registers all areas. `need` is what a kernel that can't would have to be.
    pub(crate) fn new(
        uffd: OwnedFd,
        wanted: Use,
        (what, need): (&'static str, &'static str),
        areas: Vec<Area>,
        region_pages: &[PageCount],
    ) -> Result<Self, Error> {
        area::check(&areas, region_pages)?;
        uffd::negotiate(uffd.as_fd(), wanted).map_err(|source| match source.raw_os_error() {
            Some(libc::EINVAL) => Error::Kernel { what, need },
            _ => Error::system("negotiate with userfaultfd", source),
        })?;
        for area in &areas {
            uffd::register(uffd.as_fd(), wanted, area.addresses()).map_err(|source| refused(area, source))?;
        }
        Self::known(uffd, areas, region_pages)
    }

    /// Goes on with one that somebody else has registered.
    pub(crate) fn taken_over(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[PageCount]) -> Result<Self, Error> {
        area::check(&areas, region_pages)?;
        Self::known(uffd, areas, region_pages)
    }

    fn known(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[PageCount]) -> Result<Self, Error> {
        // Several threads may find the same fault, and all but one must not block in reading it. Polling needs it too.
        let flags = rustix::fs::fcntl_getfl(&uffd)
            .map_err(|source| Error::system("read the flags of a userfaultfd", source))?;
        rustix::fs::fcntl_setfl(&uffd, flags | OFlags::NONBLOCK)
            .map_err(|source| Error::system("make a userfaultfd non-blocking", source))?;
        let probe = Probe::new()?;
        let watched = |area: Area| {
            let unit = probe.unit_of(uffd.as_fd(), &area).map_err(|source| not_ours(&area, source))?;
            Ok(Watched { area, unit })
        };
        let areas = areas.into_iter().map(watched).collect::<Result<_, Error>>()?;
        Ok(Self { uffd, areas, region_pages: region_pages.to_vec() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    pub(crate) fn areas(&self) -> Vec<Area> {
        self.areas.iter().map(|watched| watched.area).collect()
    }

    /// Pages of the region.
    pub(crate) fn pages(&self, region: usize) -> PageCount {
        self.region_pages.get(region).copied().unwrap_or_default()
    }

    /// Pages that the kernel handles as one: the most in any area of the region.
    pub(crate) fn unit_pages(&self, region: usize) -> PageCount {
        let units = self.areas.iter().filter(|watched| watched.area.region == region).map(|watched| watched.unit);
        PageCount::within(units.max().unwrap_or(0).max(PAGE))
    }

    /// Where the pages are: in one area or more, and perhaps in several at once.
    ///
    /// # Errors
    /// Pages that the region does not have, or parts of huge pages.
    pub(crate) fn stretches(&self, region: usize, pages: PageRange) -> Result<Vec<Stretch>, Error> {
        let Some(&all) = self.region_pages.get(region) else {
            return Err(untrackable(region, Flaw::NoRegion, "there is no such region"));
        };
        if !pages.fits(all) {
            let region = format!("number {region}");
            return Err(Error::OutOfRange { region, first: pages.first, end: pages.end(), pages: all });
        }
        let mut stretches = Vec::new();
        for Watched { area, unit } in self.areas.iter().filter(|watched| watched.area.region == region) {
            let (first, end) = (pages.first.max(area.first_page), pages.end().min(area.range().end()));
            if first >= end {
                continue;
            }
            let start = area.address + (first - area.first_page).bytes();
            let addresses = ByteRange::sized(start, (end - first).bytes());
            if !start.is_multiple_of(*unit) || !addresses.len().is_multiple_of(*unit) {
                let why = format!(
                    "pages {first}..{end} are not whole huge pages, of {} pages each",
                    PageCount::within(*unit)
                );
                return Err(Error::unusable(&format!("number {region}"), Flaw::PartOfHugePage, why));
            }
            stretches.push(Stretch { region, first_page: first, addresses, unit: *unit });
        }
        Ok(stretches)
    }

    /// The next fault; none after `wait`.
    pub(crate) fn next(&self, wait: Duration) -> Result<Option<Fault>, Error> {
        let mut one = Vec::with_capacity(1);
        self.next_few(wait, 1, &mut one)?;
        Ok(one.pop())
    }

    /// Appends faults that there are, `most` at most; waits up to `wait` for the first.
    pub(crate) fn next_few(&self, wait: Duration, most: usize, out: &mut Vec<Fault>) -> Result<(), Error> {
        let add = |fault, _| out.push(fault);
        if self.each(wait, most, add)? == 0 { self.check_alive() } else { Ok(()) }
    }

    /// Gives `add` the faults that there are, `most` at most, each with the thread that waits, where the use asks for
    /// it; waits up to `wait` for the first. How many.
    pub(crate) fn each(&self, wait: Duration, most: usize, mut add: impl FnMut(Fault, u32)) -> Result<usize, Error> {
        let deadline = Instant::now().checked_add(wait);
        let mut room = [[0; MESSAGE_BYTES]; MESSAGES];
        let room = &mut room[..most.clamp(1, MESSAGES)];
        loop {
            match rustix::io::read(&self.uffd, room.as_flattened_mut()) {
                Ok(0) => return Err(Error::system("read faults", io::Error::from(io::ErrorKind::UnexpectedEof))),
                Ok(bytes) => {
                    let mut count = 0;
                    for (address, thread) in room[..bytes / MESSAGE_BYTES].iter().filter_map(uffd::fault_address) {
                        add(self.fault_at(address)?, thread);
                        count += 1;
                    }
                    if count > 0 {
                        return Ok(count);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left == Some(Duration::ZERO) {
                        return Ok(0);
                    }
                    self.poll(left.unwrap_or(Duration::MAX))?;
                }
                Err(source) => return Err(Error::system("read faults", source)),
            }
        }
    }

    /// Waits until there is a fault to be read, or for `wait`, or for less.
    fn poll(&self, wait: Duration) -> Result<(), Error> {
        const LONGEST: Duration = Duration::from_secs(3600);
        let wait = Timespec::try_from(wait.min(LONGEST)).expect("an hour");
        let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&wait)) {
            Ok(0) | Err(Errno::INTR) => Ok(()),
            Ok(_) if fds[0].revents().contains(PollFlags::IN) => Ok(()),
            // Somebody else who holds it has made it block.
            Ok(_) => Err(Error::system("wait for faults", Errno::BADF)),
            Err(source) => Err(Error::system("wait for faults", source)),
        }
    }

    fn fault_at(&self, address: u64) -> Result<Fault, Error> {
        let inside = |watched: &&Watched| watched.area.addresses().contains(address);
        let Some(Watched { area, unit }) = self.areas.iter().find(inside) else {
            let why = format!("a thread waits at address {address:#x} of the process, which is in no registered area");
            return Err(Error::system("read faults", io::Error::new(io::ErrorKind::InvalidData, why)));
        };
        Ok(Fault { region: area.region, page: area.pages_at(ByteRange::sized(address / unit * unit, *unit)).first })
    }

    /// # Errors
    /// The process has ended: then nothing would ever come. Nothing else tells.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        let Some(Watched { area, .. }) = self.areas.first() else { return Ok(()) };
        match Probe::new()?.try_copy(self.fd(), area.addresses().take(PAGE)) {
            Some(libc::ESRCH) => Err(Error::Gone { region: area.region, source: Errno::SRCH.into() }),
            _ => Ok(()),
        }
    }
}

/// Why an area can't be taken over.
fn not_ours(area: &Area, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ESRCH) => Error::Gone { region: area.region, source },
        _ => untrackable(area.region, Flaw::NotOurs, format!("this userfaultfd is not in use for it ({source})")),
    }
}

/// Copies from memory that can't be read: it never puts a page, but fails in a way that says something.
struct Probe {
    nothing: Reserved,
}

impl Probe {
    const SMALLEST: u64 = PAGE_BYTES as u64;
    const LARGEST: u64 = 1 << 30;

    fn new() -> Result<Self, Error> {
        let nothing =
            Reserved::new(Self::LARGEST as usize).map_err(|source| Error::system("reserve addresses", source))?;
        Ok(Self { nothing })
    }

    /// What the kernel says to a copy to these addresses.
    fn try_copy(&self, uffd: BorrowedFd<'_>, to: ByteRange) -> Option<i32> {
        assert!(to.len() <= Self::LARGEST, "as much as is reserved");
        // SAFETY: the addresses are reserved, so nobody reads or writes there.
        let (_, result) = unsafe { uffd::copy(uffd, to, self.nothing.start()) };
        result.err().and_then(|error| error.raw_os_error())
    }

    /// Bytes that the kernel handles as one in this area. What is too short for that, or not at a multiple of it, it
    /// finds invalid; and it does so before anything else, once it has found the memory in use.
    fn unit_of(&self, uffd: BorrowedFd<'_>, area: &Area) -> io::Result<u64> {
        // Parts may have been released, and are not in use any more. A huge page begins somewhere.
        const STEP: usize = 2 << 20;
        let mut invalid = false;
        let ByteRange { start, end } = area.addresses();
        for start in (start..end).step_by(STEP) {
            let mut unit = Self::SMALLEST;
            while unit <= Self::LARGEST {
                match self.try_copy(uffd, ByteRange::sized(start, unit)) {
                    Some(libc::EINVAL) => (invalid, unit) = (true, unit * 2),
                    Some(libc::ENOENT) => break,
                    Some(libc::EAGAIN) => thread::yield_now(),
                    // Nothing to be read, a page that is there, or no room for one.
                    Some(libc::EFAULT | libc::EEXIST | libc::ENOMEM | libc::ENOSPC) => return Ok(unit),
                    Some(other) => return Err(io::Error::from_raw_os_error(other)),
                    None => return Err(io::ErrorKind::InvalidData.into()),
                }
            }
        }
        // All is released, so nothing will be asked; or it is no userfaultfd that was registered.
        if invalid { Err(Errno::INVAL.into()) } else { Ok(Self::SMALLEST) }
    }
}
