//! A mapped-ram file, or an image: every page has its place, and many threads write at once.
use std::sync::Arc;

use transship_memory::{ByteRange, Freeing, GuestMemory, PAGE_BYTES};
use transship_wire::qemu::{Geometry, bitmap_bytes};

use super::{
    output::Output,
    writer::{Writers, Written},
};
use crate::{
    Error, FileReport, Progress, fail_point,
    guest::DiskFile,
    page_map::PageMap,
    scan::Pending,
    snapshot::{
        Format, SaveOptions,
        file::target::Target,
        image::add_memory_file,
        mapped::layout::{Around, Layout, Spot},
    },
    stream::{
        regions::RegionBlock,
        state::{DeviceBlock, DeviceState},
    },
};

/// Bytes of a device that are written at once.
const PIECE: usize = 256 * 1024;

/// The file and the threads that write its pages.
pub(crate) struct MappedFile {
    pub(crate) layout: Layout,
    pub(crate) writers: Writers,
    /// Of an image: those of the guest.
    pub(crate) disks: Option<Vec<DiskFile>>,
}

impl MappedFile {
    /// Places for all regions, in a file that is as long as that takes. `stands_still`: the guest does until all is
    /// saved.
    pub(crate) fn begin(
        memory: &GuestMemory,
        freeing: Freeing,
        regions: &[RegionBlock],
        options: &SaveOptions,
        stands_still: bool,
        target: &Target,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let layout = match options.format {
            Format::Raw => image(regions, target)?,
            _ => Layout::new(target.offset(), regions),
        };
        target.expect(layout.bytes_for(memory.bytes()));
        target.set_length(layout.end())?;
        // While a guest stands still, all wait for the disk. One that runs wants the cores.
        let copies = target.is_direct() && stands_still;
        let how = (options.io, copies);
        let writers = Writers::start(memory, freeing, layout.pages(), options.channels, how, target, progress)?;
        Ok(Self { layout, writers, disks: None })
    }
}

/// A file for each region.
fn image(regions: &[RegionBlock], target: &Target) -> Result<Layout, Error> {
    let mut layout = Layout::of_image();
    for region in regions {
        layout.push_left_out(&region.name, region.bytes, add_memory_file(target, region.bytes)?);
    }
    Ok(layout)
}

impl Output for MappedFile {
    fn content(&self) -> &[PageMap] {
        &self.writers.pages.content
    }

    fn needs(&self, page_bytes: u64) -> u64 {
        let page_bytes = page_bytes + self.writers.pages.stored().bytes();
        self.layout.bytes_for(page_bytes.min(self.writers.pages.memory.bytes()))
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
        file.pages_stored = pages.stored().get();
        target.expect(self.layout.bytes_for(file.pages_stored * PAGE_BYTES as u64) + state.bytes());
        for ((content, memory), at) in pages.content.iter().zip(pages.memory.regions()).zip(self.layout.bitmaps()) {
            let Some(at) = at else { continue };
            target.write_at(&content.to_bitmap(memory.pages()), at)?;
        }
        for (block, place) in state.blocks.iter().zip(devices) {
            write_device(block, place, target)?;
        }
        let (head, rest) = pieces.split_first().ok_or_else(|| Error::file("an empty snapshot"))?;
        rest.iter().try_for_each(|piece| target.write_at(&piece.bytes, piece.position))?;
        fail_point::reach("save.tail")?;
        for (region, range) in pages.stale() {
            if progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
            let Spot { file: number, offset } = pages.places[region];
            target.punch(number, ByteRange::sized(offset + range.first.offset(), range.bytes()))?;
            file.pages_freed += range.count.get();
        }
        if self.layout.is_image() {
            return target.complete_image(
                &head.bytes,
                &self.layout.left_out(),
                &state.configuration,
                self.disks.as_deref(),
                progress,
            );
        }
        target.complete(&head.bytes, progress)
    }

    fn is_uring(&self) -> bool {
        self.writers.is_uring()
    }
}

/// Writes its pages and its bitmap to their places.
fn write_device(block: &DeviceBlock, place: Geometry, target: &Target) -> Result<(), Error> {
    let mut bitmap = vec![0; bitmap_bytes(block.bytes) as usize];
    // Pages that follow each other are one write.
    let mut run: (u64, Vec<u8>) = (0, Vec::new());
    for (&number, page) in &block.pages {
        bitmap[(number.get() / 8) as usize] |= 1 << (number.get() % 8);
        let at = place.pages_offset + number.offset();
        if run.0 + run.1.len() as u64 != at || run.1.len() >= PIECE {
            target.write_at(&run.1, run.0)?;
            run = (at, Vec::new());
        }
        run.1.extend(page.iter());
    }
    target.write_at(&run.1, run.0)?;
    target.write_at(&bitmap, place.bitmap_offset)
}
