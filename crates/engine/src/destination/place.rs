//! Where pages go: into the guest's memory, once, after all checks.
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use transship_memory::{GuestMemory, PageRange, Region};

use crate::{
    Error, Progress,
    page_map::{PageMap, runs},
};

/// The destination's memory, and what is known about it. Shared by all channel threads.
pub(super) struct Place {
    memory: GuestMemory,
    /// By region: pages that content was written to. All others read as zero.
    content: Vec<PageMap>,
    /// The newest round that channels may bring pages of. Stored by the main thread before it tells the source, which a
    /// channel's packets of that round can only follow: Release and Acquire pair over that.
    released: AtomicU32,
    pub(super) progress: Arc<Progress>,
}

impl Place {
    pub(super) fn new(memory: GuestMemory, progress: Arc<Progress>) -> Self {
        let content = memory.regions().iter().map(|region| PageMap::new(region.pages())).collect();
        Self { memory, content, released: AtomicU32::new(0), progress }
    }

    pub(super) fn release_round(&self, round: u32) {
        self.released.store(round, Ordering::Release);
    }

    pub(super) fn is_released(&self, round: u32) -> bool {
        round <= self.released.load(Ordering::Acquire)
    }

    /// The region, and a check that it has the pages up to `end`.
    pub(super) fn region(&self, region: u16, first: u64, end: u64) -> Result<&Region, String> {
        let Some(found) = self.memory.get(region.into()) else {
            return Err(format!("sent a packet for region {region}; there are {}", self.memory.regions().len()));
        };
        if end > found.pages() {
            return Err(format!(
                "sent a packet for pages {first}..{end} of region {:?}, which has {}",
                found.name(),
                found.pages()
            ));
        }
        Ok(found)
    }

    /// Writes pages of a window into place. The caller has checked the region.
    pub(super) fn write(&self, region: u16, first: u64, present: u128, bytes: &[u8]) -> Result<(), Error> {
        self.memory.regions()[usize::from(region)].write_pages(first, present, bytes)?;
        self.content[usize::from(region)].insert(first, present);
        Ok(())
    }

    /// Makes pages of a window read as zero; those that never had content do already.
    pub(super) fn clear_window(&self, region: u16, first: u64, zero: u128) -> Result<(), Error> {
        let content = &self.content[usize::from(region)];
        let held = zero & content.window(first);
        for run in runs(first, held) {
            self.memory.regions()[usize::from(region)].clear(run)?;
        }
        content.remove(first, held);
        Ok(())
    }

    /// Makes a range read as zero.
    pub(super) fn clear_range(&self, region: u16, range: PageRange) -> Result<(), Error> {
        let memory = &self.memory.regions()[usize::from(region)];
        let mut held = self.content[usize::from(region)].take(range);
        if memory.gives_back() {
            return if held.count() > 0 { Ok(memory.clear(range)?) } else { Ok(()) };
        }
        // Zeros in holes would take memory.
        held.try_for_each(|(first, pages)| runs(first, pages).try_for_each(|run| memory.clear(run)))?;
        Ok(())
    }
}
