//! A mapped-ram file: every page has its place, and many threads write at once.
use std::sync::Arc;

use transship_memory::{Freeing, GuestMemory, PAGE_BYTES};

use super::{
    SaveOptions,
    layout::{Around, Layout},
    output::Output,
    regions::RegionBlock,
    state::DeviceState,
    target::Target,
    writer::{Writers, Written},
};
use crate::{Error, FileReport, Progress, fail_point, page_map::PageMap, scan::Pending};

/// The file and the threads that write its pages.
pub(crate) struct MappedFile {
    pub(crate) layout: Layout,
    pub(crate) writers: Writers,
}

impl MappedFile {
    /// Places for all regions, in a file that is as long as that takes.
    pub(crate) fn begin(
        memory: &GuestMemory,
        freeing: Freeing,
        regions: &[RegionBlock],
        options: &SaveOptions,
        target: &Target,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let layout = Layout::new(target.offset(), regions);
        target.expect(layout.end() - target.offset());
        target.set_length(layout.end())?;
        let writers = Writers::start(memory, freeing, layout.pages(), options.channels, options.io, target, progress)?;
        Ok(Self { layout, writers })
    }
}

impl Output for MappedFile {
    fn content(&self) -> &[PageMap] {
        &self.writers.pages.content
    }

    fn needs(&self, pages: u64) -> u64 {
        let pages = pages + self.writers.pages.stored() * PAGE_BYTES as u64;
        self.layout.bytes_for(pages.min(self.writers.pages.memory.bytes()))
    }

    fn write(&mut self, pending: &[Pending], target: &Target) -> Result<Written, Error> {
        self.writers.write(pending, target)
    }

    fn complete(
        &mut self,
        state: &DeviceState,
        target: &mut Target,
        file: &mut FileReport,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        let pages = &self.writers.pages;
        let Around { pieces, devices } = self.layout.around(state)?;
        file.pages_stored = pages.stored();
        target.expect(self.layout.bytes_for(file.pages_stored * PAGE_BYTES as u64) + state.bytes());
        for ((content, memory), at) in pages.content.iter().zip(pages.memory.regions()).zip(self.layout.bitmaps()) {
            target.write_at(&content.to_bitmap(memory.pages()), at)?;
        }
        for (block, place) in state.blocks.iter().zip(devices) {
            block.write(place, target)?;
        }
        let (head, rest) = pieces.split_first().ok_or_else(|| Error::File("an empty snapshot".into()))?;
        rest.iter().try_for_each(|piece| target.write_at(&piece.bytes, piece.position))?;
        fail_point::reach("save.tail")?;
        for (region, range) in pages.stale() {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            target.punch(pages.places[region] + range.first * PAGE_BYTES as u64, range.bytes())?;
            file.pages_freed += range.count;
        }
        target.complete(&head.bytes, progress)
    }

    fn is_uring(&self) -> bool {
        self.writers.is_uring()
    }
}
