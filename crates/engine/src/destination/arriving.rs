//! Where pages go: into the guest's memory, once, after all checks.
use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use transship_memory::{GuestMemory, PageCount, PageRange, Region, WindowBuffer, WindowPages};

use super::{arrival::Arrival, borrowing::Borrowed};
use crate::{Error, Progress, intake::Intake};

/// Lent pages that are read before they are written into place: they stay in a core's cache meanwhile.
const PAGES_PER_COPY: PageCount = PageCount::new(64);

/// The destination's memory, and what is known about it. Shared by all channel threads.
pub(super) struct ArrivingMemory {
    intake: Intake,
    /// The newest round that channels may bring pages of. Stored by the main thread before it tells the source, which a
    /// channel's packets of that round can only follow: Release and Acquire pair over that.
    released: AtomicU32,
    pub(super) progress: Arc<Progress>,
    /// The guest may run already: pages are put in its way.
    arrival: Option<Arc<Arrival>>,
    /// What is read here and does not come.
    pub(super) lent: Option<Borrowed>,
}

impl ArrivingMemory {
    pub(super) fn new(intake: Intake, progress: Arc<Progress>) -> Self {
        Self { intake, released: AtomicU32::new(0), progress, arrival: None, lent: None }
    }

    /// For pages that come after the guest.
    pub(super) fn arriving(arrival: &Arc<Arrival>, progress: Arc<Progress>) -> Self {
        let none = Intake::of_zeros(GuestMemory::new(Vec::new()));
        Self { arrival: Some(Arc::clone(arrival)), ..Self::new(none, progress) }
    }

    pub(super) fn intake(&self) -> &Intake {
        &self.intake
    }

    pub(super) fn release_round(&self, round: u32) {
        self.released.store(round, Ordering::Release);
    }

    pub(super) fn is_released(&self, round: u32) -> bool {
        round <= self.released.load(Ordering::Acquire)
    }

    /// # Errors
    /// There is no such region, or it does not have all of these pages.
    pub(super) fn check(&self, region: u16, pages: PageRange) -> Result<(), String> {
        let (number, memory) = (usize::from(region), self.intake.memory());
        let (has, count) = match &self.arrival {
            Some(arrival) => {
                let regions = arrival.filling.regions();
                (regions.get(number).map(|region| region.pages), regions.len())
            }
            None => (memory.get(number).map(Region::pages), memory.regions().len()),
        };
        let Some(has) = has else {
            return Err(format!("sent a packet for region {region}, but there are {count}"));
        };
        let (first, end) = (pages.first, pages.end());
        if end > PageRange::all(has).end() {
            let name = memory.get(number).map_or_else(|| region.to_string(), |found| format!("{:?}", found.name()));
            return Err(format!("sent a packet for pages {first}..{end} of region {name}, which has only {has}"));
        }
        Ok(())
    }

    /// Writes pages of a window into place. The caller has checked the region.
    pub(super) fn write(&self, region: u16, present: WindowPages, bytes: &[u8]) -> Result<(), Error> {
        if let Some(arrival) = &self.arrival {
            return arrival.push(region.into(), present, Some(bytes));
        }
        self.intake.write(region.into(), present, bytes)
    }

    /// Whether [`ArrivingMemory::receive`] is faster than [`ArrivingMemory::write`].
    pub(super) fn receives(&self, region: u16, present: WindowPages) -> bool {
        self.arrival.is_none() && self.intake.receives(region.into(), present)
    }

    /// As [`ArrivingMemory::write`], with what comes next from a socket. Not where pages are put in a guest's way.
    pub(super) fn receive(&self, region: u16, present: WindowPages, from: BorrowedFd<'_>) -> io::Result<()> {
        self.intake.receive(region.into(), present, from)
    }

    /// Whether a region was lent.
    pub(super) fn is_lent(&self, region: u16) -> bool {
        self.lent.as_ref().is_some_and(|lent| lent.memory.has(region.into()))
    }

    /// Copies pages of a window that were lent into place, but for those that are zero if they are looked for: which
    /// these are. The caller has checked the region.
    ///
    /// # Errors
    /// [`Intake::copy_lent`].
    pub(super) fn copy_lent(
        &self,
        region: u16,
        wanted: WindowPages,
        look: bool,
        buffer: &mut WindowBuffer,
    ) -> io::Result<u128> {
        let lent = &self.lent.as_ref().ok_or(io::ErrorKind::NotFound)?.memory;
        let (mut zero, mut left) = (0, wanted);
        while !left.is_empty() {
            let piece = left.lowest(PAGES_PER_COPY);
            zero |= self.intake.copy_lent((lent, region.into()), piece, look, buffer)?;
            left = left.without(piece.mask);
        }
        let progress = &self.progress;
        let (found, kept) = (wanted.with(zero).count(), wanted.without(zero));
        progress.normal_pages.fetch_add(kept.count().get(), Ordering::Relaxed);
        progress.zero_pages.fetch_add(found.get(), Ordering::Relaxed);
        progress.wire_bytes.fetch_add(kept.bytes(), Ordering::Relaxed);
        Ok(zero)
    }

    /// Whether a channel has this slot.
    pub(super) fn has_slot(&self, slot: u8) -> bool {
        let slots = self.lent.as_ref().and_then(|lent| lent.slots.as_ref());
        slots.is_some_and(|(_, each)| slot < *each)
    }

    /// Writes pages of a window that are in a slot of a channel into place. The caller has checked the region and the
    /// slot.
    ///
    /// # Errors
    /// [`LentSlots::write_window`](transship_memory::LentSlots::write_window).
    pub(super) fn write_slot(&self, region: u16, present: WindowPages, (channel, slot): (usize, u8)) -> io::Result<()> {
        let slots = self.lent.as_ref().and_then(|lent| lent.slots.as_ref());
        let (slots, each) = slots.ok_or(io::ErrorKind::NotFound)?;
        self.intake.write_slot(region.into(), present, (slots, channel * usize::from(*each) + usize::from(slot)))?;
        self.progress.wire_bytes.fetch_add(present.bytes(), Ordering::Relaxed);
        Ok(())
    }

    /// Makes pages read as zero; those that never had content do already.
    pub(super) fn clear_window(&self, region: u16, zero: WindowPages) -> Result<(), Error> {
        if let Some(arrival) = &self.arrival {
            return arrival.push(region.into(), zero, None);
        }
        self.intake.clear_window(region.into(), zero)
    }

    /// Makes a range read as zero.
    pub(super) fn clear_range(&self, region: u16, range: PageRange) -> Result<(), Error> {
        if let Some(arrival) = &self.arrival {
            return range.windows().try_for_each(|window| arrival.push(region.into(), window, None));
        }
        self.intake.clear_range(region.into(), range)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use transship_memory::{Access, ByteRange, Keep, PAGE_BYTES, PageCount, PageNumber};

    use super::*;

    const PAGES: u64 = 300;

    /// Two regions; zeros can be holes in the first one only.
    fn arriving() -> ArrivingMemory {
        let region = |name| {
            let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, PAGES * PAGE_BYTES as u64).unwrap();
            Region::map(name, file, ByteRange::sized(0, PAGES * PAGE_BYTES as u64), Access::ReadWrite).unwrap()
        };
        let memory = GuestMemory::new(vec![region("a"), region("b").keeping(Keep::All)]);
        ArrivingMemory::new(Intake::of_zeros(memory), Progress::new())
    }

    fn fill(arriving: &ArrivingMemory, region: u16, first: u64, pages: u128) {
        arriving
            .write(region, WindowPages::new(first, pages), &vec![7; pages.count_ones() as usize * PAGE_BYTES])
            .unwrap();
    }

    /// The pages of a window that hold something.
    fn held(arriving: &ArrivingMemory, region: u16, first: u64) -> u128 {
        let all = u128::MAX >> (128 - (PAGES - first).min(128));
        all & !arriving.intake.memory().regions()[usize::from(region)].zero_mask(WindowPages::new(first, all)).unwrap()
    }

    #[test]
    fn pages_of_a_round_are_taken_once_it_is_released() {
        let arriving = arriving();
        let released = || (0..4).filter(|round| arriving.is_released(*round)).collect::<Vec<_>>();
        assert_eq!(released(), [0]);
        arriving.release_round(2);
        assert_eq!(released(), [0, 1, 2]);
    }

    #[test]
    fn pages_that_a_region_does_not_have_are_refused() {
        let arriving = arriving();
        assert!(
            arriving.check(1, PageRange::new(256, PAGES - 256)).is_ok()
                && arriving.check(0, PageRange::all(PageCount::ONE)).is_ok()
        );
        let refused = |region, end| arriving.check(region, PageRange::new(256, end - 256)).err().unwrap();
        assert_eq!(refused(1, PAGES + 1), "sent a packet for pages 256..301 of region \"b\", which has only 300");
        assert_eq!(refused(2, PAGES), "sent a packet for region 2, but there are 2");
    }

    #[test]
    fn of_a_window_those_pages_are_cleared_that_are_named() {
        const ENDS: u128 = 1 | 1 << 127;
        for region in 0..2 {
            let arriving = arriving();
            fill(&arriving, region, 0, u128::MAX);
            fill(&arriving, region, 128, ENDS | 0xff0);
            arriving.clear_window(region, WindowPages::new(128, ENDS | 0x3c)).unwrap();
            assert_eq!((held(&arriving, region, 0), held(&arriving, region, 128)), (u128::MAX, 0xfc0), "{region}");
            arriving.clear_window(region, WindowPages::new(0, u128::MAX)).unwrap();
            assert_eq!((held(&arriving, region, 0), held(&arriving, region, 128)), (0, 0xfc0), "{region}");
            assert_eq!(arriving.intake.written()[usize::from(region)].window(PageNumber::new(128)), 0xfc0);
            assert_eq!(held(&arriving, 1 - region, 0), 0);
        }
    }

    #[test]
    fn a_range_is_cleared_over_windows_and_no_further() {
        for region in 0..2 {
            let arriving = arriving();
            for first in [0, 128] {
                fill(&arriving, region, first, u128::MAX);
            }
            fill(&arriving, region, 256, (1 << 44) - 1);
            arriving.clear_range(region, PageRange::new(127, 130)).unwrap();
            let left = [0, 128, 256].map(|first| held(&arriving, region, first));
            assert_eq!(left, [u128::MAX >> 1, 0, (1 << 44) - 2], "{region}");
            assert_eq!(
                [0, 128, 256]
                    .map(|first| arriving.intake.written()[usize::from(region)].window(PageNumber::new(first))),
                left,
                "{region}"
            );
        }
    }

    /// Most of a guest may be holes, of which the source says so in each round.
    #[test]
    fn where_no_content_is_nothing_is_cleared() {
        for region in 0..2 {
            let arriving = arriving();
            let memory = &arriving.intake.memory().regions()[usize::from(region)];
            memory.write_pages(WindowPages::new(0, 0b11), &vec![7; 2 * PAGE_BYTES]).unwrap();
            arriving.clear_range(region, PageRange::new(0, PAGES)).unwrap();
            arriving.clear_window(region, WindowPages::new(0, u128::MAX)).unwrap();
            assert_eq!(held(&arriving, region, 0), 0b11, "what nobody has sent was looked at");
        }
    }
}
