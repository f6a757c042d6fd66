//! The device state of a mapped-ram file, as the stream that the waiting VMM loads.
use transship_memory::{PAGE_BYTES, PageCount, PageNumber, PageRange, PageSet, WINDOW_PAGES};
use transship_wire::qemu::{Block, RunState};

use crate::{
    Error,
    snapshot::open::Snapshot,
    stream::{fit::check_sizes, pieces::Pieces, recompose::Recomposer},
};

/// The stream, made while it is read.
pub(crate) struct DeviceStream<'a> {
    snapshot: &'a Snapshot,
    /// The blocks that are not guest memory, the next one last.
    blocks: Vec<&'a Block>,
    /// The one whose pages are on their way: which of them are in the file, and the first page that is not done.
    current: Option<(&'a Block, PageSet, PageNumber)>,
    recomposer: Option<Recomposer>,
    tail: Option<Vec<u8>>,
}

impl<'a> DeviceStream<'a> {
    /// `blocks`: those of the snapshot that are not guest memory.
    ///
    /// # Errors
    /// They are larger than any device's.
    pub(crate) fn new(snapshot: &'a Snapshot, mut blocks: Vec<&'a Block>) -> Result<Self, Error> {
        check_sizes(&snapshot.origin.name, &blocks)?;
        let mut recomposer = Recomposer::new(&snapshot.configuration, blocks.iter().copied());
        recomposer.early(&snapshot.early);
        if snapshot.switchover {
            recomposer.switchover();
        }
        recomposer.last();
        let tail = Some(paused(snapshot)?);
        blocks.reverse();
        let recomposer = Some(recomposer);
        Ok(Self { snapshot, blocks, current: None, recomposer, tail })
    }
}

impl Pieces for DeviceStream<'_> {
    fn advance(&mut self) -> Result<Vec<u8>, Error> {
        loop {
            let Some(recomposer) = &mut self.recomposer else { return Ok(self.tail.take().unwrap_or_default()) };
            match &mut self.current {
                Some((block, stored, first)) if *first < PageRange::all(PageCount::new(block.pages())).end() => {
                    pages(self.snapshot, recomposer, block, stored, *first)?;
                    *first += WINDOW_PAGES;
                    return Ok(recomposer.take());
                }
                _ => match self.blocks.pop() {
                    Some(block) => self.current = Some((block, self.snapshot.stored(block)?, PageNumber::FIRST)),
                    None => {
                        recomposer.finish();
                        let piece = recomposer.take();
                        self.recomposer = None;
                        return Ok(piece);
                    }
                },
            }
        }
    }
}

/// The pages of a block from `first` on, as many as a window has.
fn pages(
    snapshot: &Snapshot,
    to: &mut Recomposer,
    block: &Block,
    stored: &PageSet,
    first: PageNumber,
) -> Result<(), Error> {
    let Some(geometry) = block.geometry() else { return Ok(()) };
    let present = stored.window(first);
    let count = WINDOW_PAGES.min(PageRange::all(PageCount::new(block.pages())).end() - first);
    for page in first.run(count).iter().filter(|page| present >> (*page - first).get() & 1 == 0) {
        to.zero_page(&block.name, page.offset());
    }
    let mut bytes = Vec::new();
    for run in first.masked(present).runs() {
        bytes.resize(run.bytes() as usize, 0);
        let offset = run.first.offset();
        let what = format!("pages of {:?}", &*block.name);
        snapshot.read_exact(&what, &mut bytes, geometry.pages_offset + offset)?;
        let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
        for (page, at) in pages.iter().zip((offset..).step_by(PAGE_BYTES)) {
            to.page(&block.name, at, page);
        }
    }
    Ok(())
}

/// The device sections with the run state that keeps the guest from running before its time.
fn paused(snapshot: &Snapshot) -> Result<Vec<u8>, Error> {
    let mut tail = snapshot.tail.clone();
    if let Some(mut state) = snapshot.global_state()? {
        state.patch(&mut tail, RunState::Paused);
    }
    Ok(tail)
}
