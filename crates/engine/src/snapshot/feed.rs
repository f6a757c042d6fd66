//! The records of a stream on their way to where they belong. Pages that follow each other are brought together.
use std::sync::atomic::Ordering::Relaxed;

use transship_codec::inflate_page;
use transship_memory::{PAGE_BYTES, PageRange};
use transship_wire::qemu::{Block, Command, Page, PageContent, Record, xbzrle};

use super::{
    open::MAX_EARLY_BYTES,
    origin::Whence,
    store::{Counts, Store},
};
use crate::{Error, Progress};

const PAGE: u64 = PAGE_BYTES as u64;
/// Pages that are brought together at most: 1 MiB.
const RUN_PAGES: u64 = 256;

/// Takes records one after the other.
pub(crate) struct Feed<'a> {
    store: &'a dyn Store,
    progress: &'a Progress,
    whence: &'a Whence,
    run: Run,
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
    /// Of pages with content.
    bytes: Vec<u8>,
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
    pub(crate) fn new(whence: &'a Whence, store: &'a dyn Store, progress: &'a Progress) -> Self {
        let run = Run { block: 0, pages: PageRange::new(0, 0), bytes: Vec::new() };
        Self {
            store,
            progress,
            whence,
            run,
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
            Record::Tail => Flow::Tail,
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
            return Err(self.whence.broke("its early device sections are larger than any machine's"));
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
                inflate_page(bytes, &mut inflated)
                    .map_err(|why| self.whence.broke(format_args!("page at offset {position:#x}: {why}")))?;
                Some(&inflated)
            }
            PageContent::Xbzrle(delta) => {
                // The page that it refers to may be on its way.
                self.flush()?;
                xbzrle::decode(delta, position, &mut inflated).map_err(|error| self.whence.bad(error))?;
                self.count(1, 0);
                return self.store.patch(page.block, page.offset, delta);
            }
        };
        let number = page.offset / PAGE;
        match content.filter(|bytes| **bytes != [0; PAGE_BYTES]) {
            Some(bytes) => {
                self.continue_run(page.block, number, true)?;
                self.run.bytes.extend_from_slice(bytes);
                self.count(1, 0);
            }
            None => {
                self.continue_run(page.block, number, false)?;
                self.count(0, 1);
            }
        }
        Ok(())
    }

    /// Makes the page part of the run that is on its way, or of a new one.
    fn continue_run(&mut self, block: usize, page: u64, content: bool) -> Result<(), Error> {
        let Run { block: current, pages, bytes } = &self.run;
        let same = *current == block && pages.end() == page && bytes.is_empty() != content;
        if !same || pages.count == 0 || (content && pages.count >= RUN_PAGES) {
            self.flush()?;
            self.run.block = block;
            self.run.pages = PageRange::new(page, 0);
        }
        self.run.pages.count += 1;
        Ok(())
    }

    fn count(&mut self, normal: u64, zero: u64) {
        self.counts.normal += normal;
        self.counts.zero += zero;
        self.progress.normal_pages.fetch_add(normal, Relaxed);
        self.progress.zero_pages.fetch_add(zero, Relaxed);
    }

    /// Hands over the run that is on its way.
    fn flush(&mut self) -> Result<(), Error> {
        let Run { block, pages, bytes } = &mut self.run;
        if pages.count > 0 {
            match bytes.is_empty() {
                true => self.store.clear(*block, *pages)?,
                false => self.store.write(*block, pages.first * PAGE, bytes)?,
            }
        }
        *pages = PageRange::new(0, 0);
        bytes.clear();
        Ok(())
    }
}
