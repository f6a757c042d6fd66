//! Which pages were put into place, in memory that outlives the process that puts them: so that each is put once in
//! the life of a guest.
//!
//! A page that was put and is missing was given back by the guest. Nobody may put it again: a guest that clears what
//! it frees relies on zeros there.
//!
//! ```text
//!   page:   free ──► claimed, by one thread of all ──► UFFDIO_COPY, which wakes nobody ──► done ──► who waits is woken
//!                                                       │
//!   slot:   region, first page, the call's structure ───┴─► the kernel writes how much it has put
//! ```
//!
//! The process may be killed at any moment, also between the copy and the word that it is done. Until somebody goes on,
//! the guest may write the page, free it and have it taken away. That it is missing then says nothing. So the structure
//! of each call lies in the shared memory, too. A thread that is killed does not leave the kernel before the call is
//! over: the copy ends early, and what was put is noted in any case. Whoever takes over finds in the slots what was
//! put, and no other claimed page was.
use std::{
    mem::offset_of,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicI64, AtomicU64, Ordering, fence},
    thread,
};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::{
    Error, Flaw, PAGE_BYTES, PageCount, PageNumber, PageRange, PageSet, WINDOW_PAGES, WindowPages, mapping::Mapping,
    uffd::CopyCall,
};

/// Calls at once: more than there are threads.
const SLOTS: usize = 320;
const SLOTS_BYTES: usize = SLOTS * size_of::<Slot>();
const WORD_PAGES: u64 = u64::BITS as u64;
const WORD_BYTES: usize = size_of::<u64>();

/// Shared by the threads of a process, and with the process that goes on when that has died.
pub struct Claims {
    file: OwnedFd,
    mapping: Mapping,
    regions: Vec<Bits>,
}

/// Where the bits of a region are: as many words of claims, and then of what is done.
struct Bits {
    offset: usize,
    words: usize,
    pages: PageCount,
}

/// A call that puts pages. All is zero in one that is not in use.
#[repr(C)]
struct Slot {
    taken: AtomicU64,
    region: AtomicU64,
    first: AtomicU64,
    call: CopyCall,
}

const _: () = assert!(size_of::<Slot>() == 64 && SLOTS_BYTES.is_multiple_of(PAGE_BYTES));

impl Claims {
    /// Of regions with so many pages, none of which was put.
    ///
    /// # Errors
    /// No memory is left for two bits a page.
    pub fn new(region_pages: &[PageCount]) -> Result<Self, Error> {
        let failed = |source| Error::system("record the pages that are brought", source);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("transship-claims", flags).map_err(failed)?;
        let (regions, bytes) = layout(region_pages);
        // All of it now, and for good: memory that can't be had later would be a signal.
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        Self::map(file, regions, bytes)
    }

    /// Goes on with those of a process that has died: with all its threads, which is so when a pipe or socket that it
    /// alone held is closed.
    ///
    /// # Errors
    /// They are not of such regions.
    pub fn taken_over(file: OwnedFd, region_pages: &[PageCount]) -> Result<Self, Error> {
        let (regions, bytes) = layout(region_pages);
        let found = rustix::fs::fstat(&file)
            .map_err(|source| Error::system("read the record of the pages that were brought", source))?
            .st_size;
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if u64::try_from(found).ok() != Some(bytes as u64) || !sealed {
            let why = format!("the record of its pages has {found} bytes, not {bytes}; it belongs to another guest");
            return Err(Error::unusable("all", Flaw::NotOurs, why));
        }
        let claims = Self::map(file, regions, bytes)?;
        claims.settle();
        Ok(claims)
    }

    fn map(file: OwnedFd, regions: Vec<Bits>, bytes: usize) -> Result<Self, Error> {
        let mapping = Mapping::new(file.as_fd(), 0, bytes, true)
            .map_err(|source| Error::system("map the record of the pages that are brought", source))?;
        let claims = Self { file, mapping, regions };
        // What the kernel notes for a thread that is being killed must not have to come from swap first. Where so
        // little may not be locked it hardly ever would.
        if let Some(start) = claims.mapping.at(0, SLOTS_BYTES) {
            // SAFETY: a part of the mapping, whose contents are not touched.
            let _ = unsafe { rustix::mm::mlock(start.cast(), SLOTS_BYTES) };
        }
        Ok(claims)
    }

    /// For whoever is to take over.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether the page was put. If it is missing the guest has given it back.
    ///
    /// # Panics
    /// The region does not have it.
    pub fn is_done(&self, region: usize, page: PageNumber) -> bool {
        // Whoever has found that somebody waits sees what was done before he was woken.
        fence(Ordering::SeqCst);
        let (word, bit) = (page.get() / WORD_PAGES, page.get() % WORD_PAGES);
        self.done(region)[word as usize].load(Ordering::Acquire) >> bit & 1 == 1
    }

    /// Whether the page was put or is being put.
    ///
    /// # Panics
    /// The region does not have it.
    pub fn is_claimed(&self, region: usize, page: PageNumber) -> bool {
        let window = page.window();
        self.window(region, window) >> (page - window).get() & 1 == 1
    }

    /// Which of 128 pages from `first`, a multiple of 128, were put or are being put.
    ///
    /// # Panics
    /// The region does not have them.
    pub fn window(&self, region: usize, first: PageNumber) -> u128 {
        let at = (first.get() / WORD_PAGES) as usize;
        let [low, high] = [at, at + 1].map(|word| u128::from(self.claimed(region)[word].load(Ordering::Acquire)));
        low | high << WORD_PAGES
    }

    /// These pages are nobody's to put: they count as done, so that one that is missing is zero.
    ///
    /// # Panics
    /// The region does not have them.
    pub fn exclude(&self, region: usize, pages: PageRange) {
        self.take(region, pages);
        self.finish(region, pages);
    }

    /// The pages that are to be put still.
    ///
    /// # Panics
    /// There is no such region.
    pub fn not_done(&self, region: usize) -> PageSet {
        let all = PageRange::all(self.regions[region].pages);
        let mut left = PageSet::full(all.count);
        for (number, word) in self.done(region).iter().enumerate() {
            let first = number as u64 * WORD_PAGES;
            let done = u128::from(word.load(Ordering::Acquire));
            let runs = WindowPages::new(first, done).runs().filter(|run| run.end() <= all.end());
            runs.for_each(|run| left.remove(run));
        }
        left
    }

    /// Whether no page of any region is to be put any more.
    pub fn are_all_done(&self) -> bool {
        (0..self.regions.len()).all(|region| self.not_done(region).is_empty())
    }

    /// Claims pages: those that nobody had, which the caller puts now, in ascending runs.
    pub(crate) fn take(&self, region: usize, pages: PageRange) -> Vec<PageRange> {
        let mut taken: Vec<PageRange> = Vec::new();
        for (word, mask) in words(pages) {
            let mut new = mask & !self.claimed(region)[word].fetch_or(mask, Ordering::AcqRel);
            while new != 0 {
                let (skip, first) = (new.trailing_zeros(), word as u64 * WORD_PAGES);
                let count = (new >> skip).trailing_ones();
                new &= !(low_bits(count) << skip);
                add(&mut taken, PageRange::new(first + u64::from(skip), count.into()));
            }
        }
        taken
    }

    /// As [`Claims::take`], of pages that come and go together, `unit` of them. They are several words, and two threads
    /// may want them at once: whoever has the first page has all of them.
    pub(crate) fn take_whole(&self, region: usize, pages: PageRange, unit: PageCount) -> Vec<PageRange> {
        if unit <= PageCount::ONE {
            return self.take(region, pages);
        }
        let mut taken = Vec::new();
        for whole in pages.parts(unit) {
            if !self.take(region, whole.first.run(PageCount::ONE)).is_empty() {
                self.take(region, whole);
                add(&mut taken, whole);
            }
        }
        taken
    }

    /// The pages were put, by whoever had claimed them. To be followed by waking who waits there: others leave waiters
    /// to him.
    pub(crate) fn finish(&self, region: usize, pages: PageRange) {
        for (word, mask) in words(pages) {
            self.done(region)[word].fetch_or(mask, Ordering::AcqRel);
        }
        fence(Ordering::SeqCst);
    }

    /// Whoever had claimed these pages can't put them; but for those that are done anybody may try again. The first is
    /// the last to be given up: see [`Claims::take_whole`].
    pub(crate) fn give_up(&self, region: usize, pages: PageRange) {
        for (word, mask) in words(pages).collect::<Vec<_>>().into_iter().rev() {
            let done = self.done(region)[word].load(Ordering::Acquire);
            self.claimed(region)[word].fetch_and(done | !mask, Ordering::AcqRel);
        }
    }

    /// Calls the kernel to put pages from `first` on, by the structure that it gets and fills in. Pages that were put
    /// are done afterwards. How many bytes, and what the call has said.
    pub(crate) fn noted<T>(&self, region: usize, first: PageNumber, call: impl FnOnce(*mut CopyCall) -> T) -> (u64, T) {
        let (index, slot) = self.slot();
        slot.region.store(region as u64, Ordering::Relaxed);
        slot.first.store(first.get(), Ordering::Relaxed);
        let offset = index * size_of::<Slot>() + offset_of!(Slot, call);
        let note = self.mapping.at(offset, size_of::<CopyCall>()).expect("slots are in the mapping");
        // Behind this the kernel may write.
        fence(Ordering::SeqCst);
        let result = call(note.cast());
        let pages = slot.pages();
        self.finish(region, first.run(pages));
        slot.call.copied.store(0, Ordering::Release);
        slot.taken.store(0, Ordering::Release);
        (pages.bytes(), result)
    }

    /// One that is ours until `taken` is 0 again.
    fn slot(&self) -> (usize, &Slot) {
        loop {
            let free = |slot: &&Slot| slot.taken.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if let Some((index, slot)) = self.slots().iter().enumerate().find(|(_, slot)| free(slot)) {
                return (index, slot);
            }
            thread::yield_now();
        }
    }

    /// The process that had these claims is dead: what it has put is done, and what it has not is free again.
    fn settle(&self) {
        for slot in self.slots() {
            let (region, first) = (slot.region.load(Ordering::Acquire) as usize, slot.first.load(Ordering::Acquire));
            let pages = PageNumber::new(first).run(slot.pages());
            if self.regions.get(region).is_some_and(|bits| pages.fits(bits.pages)) {
                self.finish(region, pages);
            }
            slot.call.copied.store(0, Ordering::Release);
            slot.taken.store(0, Ordering::Release);
        }
        for region in 0..self.regions.len() {
            for (claimed, done) in self.claimed(region).iter().zip(self.done(region)) {
                claimed.store(done.load(Ordering::Acquire), Ordering::Release);
            }
        }
    }

    fn claimed(&self, region: usize) -> &[AtomicU64] {
        let Bits { offset, words, .. } = self.regions[region];
        self.words(offset, words)
    }

    fn done(&self, region: usize) -> &[AtomicU64] {
        let Bits { offset, words, .. } = self.regions[region];
        self.words(offset + words * WORD_BYTES, words)
    }

    fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let start = self.mapping.at(offset, count * WORD_BYTES).expect("the bits of all regions are in the mapping");
        // SAFETY: mapped as long as we live, in a file that can't shrink, at a multiple of 8; it is no guest's memory,
        // and everybody uses atomics.
        unsafe { std::slice::from_raw_parts(start.cast(), count) }
    }

    fn slots(&self) -> &[Slot] {
        let start = self.mapping.at(0, SLOTS_BYTES).expect("slots are in the mapping");
        // SAFETY: as above. All fields are atomics; the kernel writes one of them as one word, in a call for the
        // thread that has taken the slot.
        unsafe { std::slice::from_raw_parts(start.cast(), SLOTS) }
    }
}

impl Slot {
    /// What the kernel has put: a number below 0 is an error.
    fn pages(&self) -> PageCount {
        let copied: &AtomicI64 = &self.call.copied;
        PageCount::within(u64::try_from(copied.load(Ordering::Acquire)).unwrap_or(0))
    }
}

/// Where the bits are, and bytes in all.
fn layout(region_pages: &[PageCount]) -> (Vec<Bits>, usize) {
    let mut offset = SLOTS_BYTES;
    let bits = |&pages: &PageCount| {
        // Whole windows, of two words.
        let bits = Bits { offset, words: pages.div_ceil(WINDOW_PAGES) as usize * 2, pages };
        offset += 2 * bits.words * WORD_BYTES;
        bits
    };
    let regions = region_pages.iter().map(bits).collect();
    (regions, offset.next_multiple_of(PAGE_BYTES))
}

/// The words that have bits of these pages, and which. For no pages there may be a word, and none of its bits.
fn words(pages: PageRange) -> impl Iterator<Item = (usize, u64)> {
    let last = pages.end().get().div_ceil(WORD_PAGES);
    (pages.first.get() / WORD_PAGES..last).map(move |word| {
        let base = PageNumber::new(word * WORD_PAGES);
        let below = |page: PageNumber| low_bits(page.since(base).get().min(WORD_PAGES) as u32);
        (word as usize, below(pages.end()) & !below(pages.first))
    })
}

/// Adds a run, which is behind all others.
fn add(runs: &mut Vec<PageRange>, run: PageRange) {
    match runs.last_mut() {
        Some(last) if last.end() == run.first => last.count += run.count,
        _ => runs.push(run),
    }
}

fn low_bits(count: u32) -> u64 {
    1_u64.checked_shl(count).map_or(u64::MAX, |bit| bit - 1)
}

#[cfg(test)]
mod tests;
