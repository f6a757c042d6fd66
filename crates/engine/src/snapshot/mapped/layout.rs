//! Where everything is in a mapped-ram file.
//!
//! ```text
//!   header, configuration, list of blocks …                 room is kept: what it will say is known last
//!   region 0:   bitmap      pages                           ─┐ known before the guest stands still
//!   region 1:   entry, bitmap   pages                       ─┘
//!   device blocks: entry, bitmap, pages each                ─┐ known when it does
//!   end of the list, device sections, their description     ─┘
//! ```
//!
//! All pages begin at multiples of 1 MiB, so that direct I/O reaches them on any device.
//!
//! In an image guest memory is left out of this file: each region is a file of its own, where a page's place is its
//! number.
use transship_wire::qemu::{Block, Command, Configuration, Geometry, Mapped, Name, Piece, StreamWriter, bitmap_bytes};

use crate::{
    Error,
    stream::{regions::RegionBlock, state::DeviceState},
};

/// Room for everything before the first region's bitmap: the header, a configuration with the longest name, an entry of
/// the list. They come to less than a kilobyte.
const HEAD_ROOM: u64 = 4096;

/// Where the first page of a block is: number of the file, and offset there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) file: usize,
    pub(crate) offset: u64,
}

/// The places of the regions.
pub(crate) struct Layout {
    start: u64,
    /// Where the next entry begins, once there is one that has pages behind it.
    next: Option<u64>,
    regions: Vec<Block>,
    spots: Vec<Spot>,
    /// Guest memory is in files of its own.
    is_image: bool,
}

/// Everything that is no page, and the places of the devices' pages.
pub(crate) struct Around {
    /// In the order of the file; the first is its start.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) devices: Vec<Geometry>,
}

impl Layout {
    /// A file whose snapshot begins at `start`.
    pub(crate) fn new(start: u64, regions: &[RegionBlock]) -> Self {
        let mut layout = Self { start, next: None, regions: Vec::new(), spots: Vec::new(), is_image: false };
        for region in regions {
            layout.push(&region.name, region.bytes);
        }
        layout
    }

    /// The first file of an image.
    pub(crate) fn of_image() -> Self {
        Self { is_image: true, ..Self::new(0, &[]) }
    }

    pub(crate) fn is_image(&self) -> bool {
        self.is_image
    }

    /// One more whose pages are all of another file.
    pub(crate) fn push_left_out(&mut self, name: &Name, bytes: u64, file: usize) {
        let block = Block { name: name.clone(), used_bytes: bytes, gpa: Some(0), mapped: Some(Mapped::Ignored) };
        self.next = self.next.map(|next| next + block.entry_bytes());
        self.regions.push(block);
        self.spots.push(Spot { file, offset: 0 });
    }

    /// A place for one more, behind the others. Returns where its first page is.
    pub(crate) fn push(&mut self, name: &Name, bytes: u64) -> u64 {
        let nowhere = Mapped::At(Geometry { bitmap_offset: 0, pages_offset: 0 });
        let gpa = self.is_image.then_some(0);
        let mut block = Block { name: name.clone(), used_bytes: bytes, gpa, mapped: Some(nowhere) };
        let header_end = self.next.map_or(self.start + HEAD_ROOM, |next| next + block.entry_bytes());
        let place = Geometry::stock(header_end, bytes);
        block.mapped = Some(Mapped::At(place));
        self.next = Some(place.pages(bytes).end);
        self.regions.push(block);
        self.spots.push(Spot { file: 0, offset: place.pages_offset });
        place.pages_offset
    }

    fn geometries(&self) -> impl Iterator<Item = (Geometry, u64)> + '_ {
        self.regions.iter().filter_map(|block| Some((block.geometry()?, block.used_bytes)))
    }

    /// By region: where the first page is.
    pub(crate) fn pages(&self) -> Vec<Spot> {
        self.spots.clone()
    }

    /// By region: where the bitmap is; those that are files of their own have none.
    pub(crate) fn bitmaps(&self) -> Vec<Option<u64>> {
        self.regions.iter().map(|block| Some(block.geometry()?.bitmap_offset)).collect()
    }

    /// The blocks that are files of their own, and the numbers of these.
    pub(crate) fn left_out(&self) -> Vec<(Name, usize)> {
        let blocks = self.regions.iter().zip(&self.spots);
        let left_out = blocks.filter(|(block, _)| block.mapped == Some(Mapped::Ignored));
        left_out.map(|(block, spot)| (block.name.clone(), spot.file)).collect()
    }

    /// Where the last region's pages end.
    pub(crate) fn end(&self) -> u64 {
        self.geometries().last().map_or(self.start, |(geometry, bytes)| geometry.pages(bytes).end)
    }

    /// What the file needs at most for pages of so many bytes, without the devices.
    pub(crate) fn bytes_for(&self, page_bytes: u64) -> u64 {
        HEAD_ROOM + self.regions.iter().map(|block| bitmap_bytes(block.used_bytes)).sum::<u64>() + page_bytes
    }

    /// The stream around the pages, which is known once the device state is.
    pub(crate) fn around(&self, state: &DeviceState) -> Result<Around, Error> {
        let mut writer = StreamWriter::new(self.start, state.ram_section);
        let ignore_shared = self.is_image;
        let configuration = Configuration { ignore_shared, mapped_ram: true, ..state.configuration.clone() };
        let regions: u64 = self.regions.iter().map(|block| block.used_bytes).sum();
        writer.header().configuration(&configuration);
        writer.ram_start(regions + state.blocks.iter().map(|block| block.bytes).sum::<u64>());
        for block in &self.regions {
            let end = writer.position() + block.entry_bytes();
            if block.geometry().is_some_and(|geometry| end > geometry.bitmap_offset) {
                return Err(Error::file(format!(
                    "the start of the snapshot takes {end} bytes, more than the room for it"
                )));
            }
            writer.block(block);
        }
        let gpa = self.is_image.then_some(0);
        let placed = state.blocks.iter().map(|block| writer.mapped_block(&block.name, block.bytes, gpa));
        let devices = placed.collect::<Vec<_>>().iter().filter_map(Block::geometry).collect();
        writer.end_of_section().raw(&state.early).part().end_of_section();
        if state.switchover_start {
            writer.command(&Command::SwitchoverStart);
        }
        writer.end().end_of_section().raw(&state.tail);
        Ok(Around { pieces: writer.take(), devices })
    }
}
