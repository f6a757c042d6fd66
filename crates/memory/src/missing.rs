//! Memory whose pages are brought when they are touched. For guests that run before their memory is there.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    thread,
    time::Duration,
};

use rustix::io::Errno;

use crate::{
    Area, Claims, Error, Fault, PAGE_BYTES, PageCount, PageNumber, PageRange,
    fault::{Faults, Stretch},
    room, uffd,
};

/// userfaultfd for missing pages of a process whose memory files are holes from end to end. All threads may use it at
/// once.
///
/// Missing is what the *file* does not have. If a page came into it another way (written through our mapping), threads
/// that touch it from then on find it; threads that already wait must be woken, by [`Missing::wake`] or a `fill`. Such
/// a page may be seen half written; filled pages appear whole.
///
/// When the last holder of the userfaultfd closes it, the kernel answers faults on holes with zeros. So this may be
/// dropped only when all pages have been brought, or nothing runs, or another process holds the userfaultfd.
pub struct Missing {
    faults: Faults,
}

impl Missing {
    /// `uffd` was created by the process, with kernel faults, and not yet used. Registers all areas.
    ///
    /// # Errors
    /// As [`crate::UffdTracker::new`].
    pub fn new(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[PageCount]) -> Result<Self, Error> {
        let need = "Linux 4.11 or newer is needed, and a userfaultfd that was not used before";
        let what = ("wait for pages of shared memory", need);
        let faults = Faults::new(uffd, uffd::MISSING, what, areas, region_pages)?;
        Ok(Self { faults })
    }

    /// Goes on with the userfaultfd of another [`Missing`], perhaps of a process that has died. A fault that was
    /// reported there and not answered is not reported again, so pages that were in work then must be filled without a
    /// fault.
    ///
    /// # Errors
    /// Areas that don't fit the regions, or that this userfaultfd was not registered for; the process is gone.
    pub fn taken_over(uffd: OwnedFd, areas: Vec<Area>, region_pages: &[PageCount]) -> Result<Self, Error> {
        Ok(Self { faults: Faults::taken_over(uffd, areas, region_pages)? })
    }

    /// Pages of the region that come and go together: 1, or those of a huge page. Ranges consist of whole ones.
    pub fn unit_pages(&self, region: usize) -> PageCount {
        self.faults.unit_pages(region)
    }

    /// Places pages that are still missing, and wakes the threads that wait for them. Pages that are there already are
    /// left as they are, and threads that wait for them are woken, too; released ones are left to the kernel. Returns
    /// the number of placed pages.
    ///
    /// # Errors
    /// The process is gone, no memory is left, bytes that are not whole pages; pages that the region does not have;
    /// parts of huge pages.
    pub fn fill(&self, region: usize, first: PageNumber, bytes: &[u8]) -> Result<PageCount, Error> {
        let pages = whole_pages(region, first, bytes)?;
        self.put(region, pages, |stretch, done, len| {
            let before = (stretch.first_page - first).bytes() + done;
            let part = &bytes[before as usize..][..len as usize];
            // SAFETY: a slice, which nobody writes while it is lent.
            unsafe { uffd::copy(self.fd(), stretch.addresses.skip(done).take(len), part.as_ptr()) }
        })
    }

    /// As [`Missing::fill`], but each page once in the life of the guest, by all who share the claims: what was put
    /// before and is missing was given back, and stays missing. Pages that another thread is placing are left to it; it
    /// wakes the threads that wait for them.
    ///
    /// # Errors
    /// As [`Missing::fill`]. Pages that were not put then may be tried again.
    pub fn fill_once(
        &self,
        claims: &Claims,
        region: usize,
        first: PageNumber,
        bytes: &[u8],
    ) -> Result<PageCount, Error> {
        let pages = whole_pages(region, first, bytes)?;
        // Pages that can't be placed must not be claimed.
        self.faults.stretches(region, pages)?;
        let runs = claims.take_whole(region, pages, self.unit_pages(region));
        let put = runs.iter().try_fold(PageCount::ZERO, |put, run| {
            let part = &bytes[(run.first - first).buffer_bytes()..][..run.bytes() as usize];
            Ok(put + self.put_noted(claims, region, *run, part)?)
        });
        if put.is_err() {
            runs.iter().for_each(|run| claims.give_up(region, *run));
        }
        put
    }

    /// As [`Missing::fill_once`], with zeros that take no memory: the pages stay missing, and count as put, so that a
    /// thread that touches one gets zeros from whoever serves the faults ([`Missing::fill_zero`]). Returns how many
    /// were not put before.
    ///
    /// # Errors
    /// Pages that the region does not have; parts of huge pages; the kernel refuses.
    pub fn leave_zero(&self, claims: &Claims, region: usize, pages: PageRange) -> Result<PageCount, Error> {
        self.faults.stretches(region, pages)?;
        let runs = claims.take_whole(region, pages, self.unit_pages(region));
        for run in &runs {
            claims.finish(region, *run);
            // Whoever waits asks again, and finds that it is done.
            self.wake(region, *run)?;
        }
        Ok(runs.iter().map(|run| run.count).sum())
    }

    /// Puts pages that the caller has claimed. No thread is woken before they are known to be there: if a fault is
    /// reported for a page that is claimed and not done, it is left to us; and by then the guest may have freed the
    /// page again.
    fn put_noted(&self, claims: &Claims, region: usize, run: PageRange, bytes: &[u8]) -> Result<PageCount, Error> {
        let put = self.put(region, run, |stretch, done, len| {
            let page = stretch.first_page + PageCount::within(done);
            let part = &bytes[(page - run.first).buffer_bytes()..][..len as usize];
            let (put, result) = claims.noted(region, page, |call| {
                // SAFETY: a slice, which nobody writes while it is lent; and a structure that is ours for this call.
                unsafe { uffd::copy_noted(self.fd(), call, stretch.addresses.skip(done).take(len), part.as_ptr()) }
            });
            if put == 0 {
                return (0, result);
            }
            (put, uffd::wake(self.fd(), stretch.addresses.skip(done).take(put)).and(result))
        })?;
        if put < run.count {
            // What came by other means, or was left to the kernel, is not to be put any more either.
            claims.finish(region, run);
            self.wake(region, run)?;
        }
        Ok(put)
    }

    /// As [`Missing::fill`], with zeros. They take memory as any page does; to leave holes, [`Missing::release`] them.
    ///
    /// # Errors
    /// As [`Missing::fill`].
    pub fn fill_zero(&self, region: usize, pages: PageRange) -> Result<PageCount, Error> {
        let mut zeros = Vec::new();
        self.put(region, pages, |stretch, done, len| {
            if stretch.unit == PAGE_BYTES as u64 {
                return uffd::zero(self.fd(), stretch.addresses.skip(done).take(len));
            }
            // The kernel has no zeros for huge pages. Ours are never written, so that they are all the same small piece
            // of memory.
            if zeros.len() as u64 != stretch.unit {
                zeros = vec![0_u8; stretch.unit as usize];
            }
            // SAFETY: a vector, which nobody writes while it is lent.
            unsafe { uffd::copy(self.fd(), stretch.addresses.skip(done).take(stretch.unit), zeros.as_ptr()) }
        })
    }

    /// The next fault that waits for a page; none after `wait`. Each is reported once, to one caller; several may wait
    /// for the same page.
    ///
    /// # Errors
    /// The process is gone (which is only noticed after `wait`).
    pub fn next_fault(&self, wait: Duration) -> Result<Option<Fault>, Error> {
        self.faults.next(wait)
    }

    /// Appends the faults that wait, at most 64; waits up to `wait` for the first. No other caller gets the same
    /// faults.
    ///
    /// # Errors
    /// As [`Missing::next_fault`].
    pub fn next_faults(&self, wait: Duration, out: &mut Vec<Fault>) -> Result<(), Error> {
        self.faults.next_few(wait, usize::MAX, out)
    }

    /// Wakes the threads that wait for these pages. A thread that finds the page still missing waits again, and is
    /// reported again.
    ///
    /// # Errors
    /// Pages that the region does not have; the kernel refuses.
    pub fn wake(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        self.faults.stretches(region, pages)?.iter().try_for_each(|stretch| self.wake_stretch(stretch))
    }

    /// All pages are there or are to be zero: from now on the kernel serves these pages by itself, and waiting threads
    /// go on. What a thread still fills there is left out. Best in few large ranges: each that is apart takes one of
    /// the mappings that the process may have.
    ///
    /// # Errors
    /// The process is gone, or has too many mappings; pages that the region does not have; parts of huge pages.
    pub fn release(&self, region: usize, pages: PageRange) -> Result<(), Error> {
        for stretch in self.faults.stretches(region, pages)? {
            if let Err(source) = uffd::unregister(self.fd(), stretch.addresses) {
                // One number for a process that is gone and for one that can't have more mappings.
                self.faults.check_alive()?;
                return Err(Error::system(format!("leave pages of region number {region} to the kernel"), source));
            }
        }
        Ok(())
    }

    /// Where everything is in the process: with [`Missing::fd`] all that somebody needs to go on with
    /// [`Missing::taken_over`].
    pub fn areas(&self) -> Vec<Area> {
        self.faults.areas()
    }

    /// For polling together with other descriptors, and for a second holder.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.faults.fd()
    }

    /// Puts pages by calls of the kernel for so many bytes from a place in a stretch: bytes that were put, and why not
    /// more.
    fn put(
        &self,
        region: usize,
        pages: PageRange,
        mut call: impl FnMut(&Stretch, u64, u64) -> (u64, io::Result<()>),
    ) -> Result<PageCount, Error> {
        let mut put = 0;
        for stretch in self.faults.stretches(region, pages)? {
            let (mut done, mut step, mut met) = (0, stretch.addresses.len(), false);
            let result = loop {
                let len = step.min(stretch.addresses.len() - done);
                if len == 0 {
                    break Ok(());
                }
                let (bytes, result) = call(&stretch, done, len);
                (put, done) = (put + bytes, done + bytes);
                match result.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
                    Ok(()) if bytes > 0 => step = step.saturating_mul(2),
                    // It is there: brought by another thread of ours, or by other means.
                    Err(Errno::EXIST) => (done, met) = (done + stretch.unit, true),
                    // Something in it is released, or the process has it in two mappings: which, smaller steps show.
                    Err(Errno::NOENT) if len > stretch.unit => step = (len / stretch.unit).div_ceil(2) * stretch.unit,
                    Err(Errno::NOENT) => done += stretch.unit,
                    // A part was put, which says the why of the rest next time; or the process changes its mappings.
                    Err(Errno::AGAIN) if bytes > 0 => {}
                    Err(Errno::AGAIN) => thread::yield_now(),
                    Err(Errno::INTR) => {}
                    Ok(()) => break Err(no_page(&stretch, Errno::IO)),
                    Err(source) => break Err(no_page(&stretch, source)),
                }
            };
            if met {
                self.wake_stretch(&stretch)?;
            }
            result?;
        }
        Ok(PageCount::within(put))
    }

    fn wake_stretch(&self, stretch: &Stretch) -> Result<(), Error> {
        uffd::wake(self.fd(), stretch.addresses).map_err(|source| {
            Error::system(format!("wake the threads that wait in region number {}", stretch.region), source)
        })
    }
}

/// The pages that the bytes are.
fn whole_pages(region: usize, first: PageNumber, bytes: &[u8]) -> Result<PageRange, Error> {
    let count = bytes.len() / PAGE_BYTES;
    if !bytes.len().is_multiple_of(PAGE_BYTES) {
        let (pages, expected) = (u32::try_from(count).unwrap_or(u32::MAX), count * PAGE_BYTES);
        return Err(Error::WrongLength { region: format!("number {region}"), pages, expected, given: bytes.len() });
    }
    Ok(first.run(PageCount::new(count as u64)))
}

/// Why a page can't be put.
fn no_page(stretch: &Stretch, source: Errno) -> Error {
    let region = stretch.region;
    match source {
        Errno::SRCH => Error::Gone { region, source: source.into() },
        _ => {
            let cure = room::cure_of_missing(source, stretch.unit);
            Error::system(format!("place pages of region number {region}{cure}"), source)
        }
    }
}
