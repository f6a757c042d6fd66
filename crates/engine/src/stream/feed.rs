//! The records of a stream on their way to where they belong. Pages that follow each other are brought together.
use std::sync::atomic::Ordering::Relaxed;

use transship_codec::inflate_page;
use transship_memory::{PAGE_BYTES, PageCount, PageNumber, PageRange};
use transship_wire::qemu::{Block, Command, Page, PageContent, Record, xbzrle};

use super::{
    store::{Counts, PageWriter, Store},
    whence::Whence,
};
use crate::{Error, Progress, Rule};

/// Pages with content that are brought together at most: 1 MiB.
const ROOM_PAGES: usize = 256;
/// More than the early sections of all virtio-mem devices take: a bit for each 2 MiB of memory, mostly.
pub(crate) const MAX_EARLY_BYTES: usize = 64 << 20;
/// Runs at most, for zero pages take no room.
const MOST_RUNS: usize = 1024;

/// Takes records one after the other.
pub(crate) struct Feed<'a> {
    store: &'a dyn Store,
    writer: Box<dyn PageWriter>,
    progress: &'a Progress,
    whence: &'a Whence,
    /// What was not handed over yet, in the order in which it came.
    runs: Vec<Run>,
    /// Pages of the writer's room that are taken.
    taken: usize,
    /// A list of blocks that is not complete.
    listing: Vec<Block>,
    /// An early section goes on.
    in_early: bool,
    early_bytes: usize,
    /// So far.
    pub(crate) counts: Counts,
}

/// Pages of one kind that follow each other.
struct Run {
    block: usize,
    pages: PageRange,
    /// Where in the room their content is; none: they are zero.
    at: Option<usize>,
}

/// What the caller has to look after.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Nothing.
    On,
    /// The main stream's half of a multifd barrier, where these are by rounds.
    Flush,
    /// A part of the memory ends; the same where barriers are by sections.
    EndOfBody,
    /// The last part of the memory begins.
    Last,
    Command(Command),
    /// The memory is complete.
    Tail,
}

impl<'a> Feed<'a> {
    /// `writer`: of the store.
    pub(crate) fn new(
        whence: &'a Whence,
        store: &'a dyn Store,
        writer: Box<dyn PageWriter>,
        progress: &'a Progress,
    ) -> Self {
        Self {
            store,
            writer,
            progress,
            whence,
            runs: Vec::new(),
            taken: 0,
            listing: Vec::new(),
            in_early: false,
            early_bytes: 0,
            counts: Counts::default(),
        }
    }

    /// Takes a record and its bytes; `position`: where it begins.
    ///
    /// # Errors
    /// Those of the store; a page that can't be decoded.
    pub(crate) fn take(&mut self, record: Record<'_>, bytes: &[u8], position: u64) -> Result<Flow, Error> {
        if let Record::Page(page) = record {
            self.page(&page, position)?;
            return Ok(Flow::On);
        }
        self.flush()?;
        let was_early = std::mem::take(&mut self.in_early);
        Ok(match record {
            Record::Tail => {
                self.finish()?;
                Flow::Tail
            }
            Record::Early(_) => self.early(bytes)?,
            Record::Raw(_) if was_early => self.early(bytes)?,
            Record::Footer { .. } if was_early => {
                self.store.early(bytes)?;
                Flow::On
            }
            Record::Block(block) => {
                self.listing.push(block);
                Flow::On
            }
            Record::MultifdFlush => Flow::Flush,
            Record::EndOfBody => {
                let blocks = std::mem::take(&mut self.listing);
                if !blocks.is_empty() {
                    self.store.list(&blocks)?;
                }
                Flow::EndOfBody
            }
            Record::Command(Command::SwitchoverStart) => {
                self.store.switchover();
                Flow::On
            }
            Record::Command(command) => Flow::Command(command),
            Record::End { .. } => {
                self.store.last();
                Flow::Last
            }
            _ => Flow::On,
        })
    }

    /// A piece of an early section, behind which there is more.
    fn early(&mut self, bytes: &[u8]) -> Result<Flow, Error> {
        self.in_early = true;
        self.early_bytes = self.early_bytes.saturating_add(bytes.len());
        if self.early_bytes > MAX_EARLY_BYTES {
            return Err(self.whence.broke(Rule::Bounds, "its early device sections are larger than any machine's"));
        }
        self.store.early(bytes)?;
        Ok(Flow::On)
    }

    fn page(&mut self, page: &Page<'_>, position: u64) -> Result<(), Error> {
        let mut inflated = [0; PAGE_BYTES];
        let content = match page.content {
            PageContent::Fill(0) => None,
            PageContent::Fill(byte) => {
                inflated.fill(byte);
                Some(&inflated)
            }
            PageContent::Normal(bytes) => Some(bytes),
            PageContent::Compressed(bytes) => {
                inflate_page(bytes, &mut inflated).map_err(|why| {
                    self.whence.broke(Rule::Encoding, format_args!("page at offset {position:#x}: {why}"))
                })?;
                Some(&inflated)
            }
            PageContent::Xbzrle(delta) => {
                // The page that it refers to may be on its way.
                self.flush()?;
                xbzrle::decode(delta, position, &mut inflated).map_err(|error| self.whence.bad(error))?;
                self.count(PageCount::ONE, PageCount::ZERO);
                return self.writer.patch(page.block, page.offset, delta);
            }
        };
        let number = PageNumber::at(page.offset);
        match content.filter(|bytes| **bytes != [0; PAGE_BYTES]) {
            Some(bytes) => {
                if self.taken == ROOM_PAGES {
                    self.flush()?;
                }
                let room = self.writer.room(ROOM_PAGES)?;
                room[self.taken * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(bytes);
                self.continue_run(page.block, number, Some(self.taken));
                self.taken += 1;
                self.count(PageCount::ONE, PageCount::ZERO);
            }
            None => {
                if self.runs.len() == MOST_RUNS {
                    self.flush()?;
                }
                self.continue_run(page.block, number, None);
                self.count(PageCount::ZERO, PageCount::ONE);
            }
        }
        Ok(())
    }

    /// Makes the page part of the last run, or of a new one. `at`: its place in the room, behind all others.
    fn continue_run(&mut self, block: usize, page: PageNumber, at: Option<usize>) {
        if let Some(Run { block: last, pages, at: content }) = self.runs.last_mut()
            && *last == block
            && pages.end() == page
            && content.is_some() == at.is_some()
        {
            pages.count += PageCount::ONE;
        } else {
            self.runs.push(Run { block, pages: page.run(PageCount::ONE), at });
        }
    }

    fn count(&mut self, normal: PageCount, zero: PageCount) {
        self.counts.normal += normal;
        self.counts.zero += zero;
        self.progress.normal_pages.fetch_add(normal.get(), Relaxed);
        self.progress.zero_pages.fetch_add(zero.get(), Relaxed);
    }

    /// Hands over what is on its way.
    fn flush(&mut self) -> Result<(), Error> {
        self.taken = 0;
        for Run { block, pages, at } in self.runs.drain(..) {
            match at {
                Some(at) => self.writer.store(at, block, pages)?,
                None => self.writer.clear(block, pages)?,
            }
        }
        Ok(())
    }

    /// Returns when everything that came is in place, and others may bring the same pages.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.writer.finish()
    }
}
