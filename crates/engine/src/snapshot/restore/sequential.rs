//! Restoring from a plain stream: pages go into place as they come, and what is not guest memory goes on to the VMM, in
//! one pass.
use std::sync::atomic::Ordering;

use transship_codec::inflate_page;
use transship_memory::{GuestMemory, PAGE_BYTES, PageRange, Region, WINDOW_PAGES};
use transship_wire::qemu::{Command, GlobalState, Name, Page, PageContent, Record, RunState, xbzrle};

use super::restoring::Restore;
use crate::{
    Error, Phase, Progress, RoundReport, fail_point,
    guest::StateFormat,
    page_map::PageMap,
    snapshot::{
        Format,
        open::{LEFT_OUT, Stream, needs_source},
    },
    stream::{
        fit::{Fit, check_sizes, fit},
        opaque,
        pieces::{PieceReader, Pieces},
        recompose::Recomposer,
        records::Records,
        tail::check_tail,
        whence::{damaged, wrong},
    },
};

/// Restores from a stream that has been read up to its pages.
pub(super) fn restore(restore: &mut Restore<'_>, stream: Stream) -> Result<(), Error> {
    let name = stream.origin.name.clone();
    if let Some(why) = &stream.refusal {
        return Err(wrong(&name, why));
    }
    if stream.configuration.ignore_shared {
        return Err(wrong(&name, LEFT_OUT));
    }
    let (guest, format) = (restore.guest.description(), restore.guest.state_format());
    let fit = fit(&name, &stream.configuration, &stream.blocks, &guest, &format)?;
    let devices: Vec<_> = fit.devices.iter().map(|&index| &stream.blocks[index]).collect();
    check_sizes(&name, &devices)?;
    restore.guest.memory().clear_all()?;
    restore.report.setup_ms = restore.elapsed_ms();
    restore.progress.set_phase(Phase::Reading);
    let origin = stream.origin.clone();
    let mut reader = PieceReader::new(Passing::new(stream, &fit, restore.guest.memory(), restore.progress));
    let loaded = match format {
        StateFormat::Qemu { .. } => restore.guest.load_state(&mut reader),
        StateFormat::Opaque => {
            reader.pieces.all_pages()?;
            let (tail, base) = reader.pieces.tail.take().unwrap_or_default();
            let state = opaque::find(&name, &tail, base)?;
            restore.guest.load_state(&mut &tail[state.bytes])
        }
    };
    let passing = &reader.pieces;
    let (pages, total) = (passing.placing.pages, restore.guest.memory().bytes() / PAGE_BYTES as u64);
    restore.report.pages.normal = pages;
    restore.report.pages.zero = passing.placing.zero;
    restore.report.pages.hole = total.saturating_sub(passing.placing.content_pages());
    restore.report.file = Some(origin.report(Format::Stream, pages));
    restore.report.bytes.wire = pages * PAGE_BYTES as u64;
    restore.report.rounds.push(RoundReport {
        number: 1,
        scanned: total,
        zero: passing.placing.zero,
        bytes: restore.report.bytes.wire,
        ms: restore.elapsed_ms() - restore.report.setup_ms,
        ..RoundReport::default()
    });
    let ran = passing.ran;
    reader.failure().map_or(Ok(()), Err)?;
    loaded?;
    fail_point::reach("restore.loaded")?;
    restore.start(ran)
}

/// The stream as the VMM reads it. While it is read, guest memory fills.
struct Passing<'a> {
    /// None once it has come to the device sections.
    records: Option<Records>,
    placing: Placing<'a>,
    /// The device sections and where they begin, until they are passed on.
    tail: Option<(Vec<u8>, u64)>,
    ran: bool,
}

impl<'a> Passing<'a> {
    fn new(stream: Stream, fit: &Fit, memory: GuestMemory, progress: &'a Progress) -> Self {
        let placing = Placing::new(&stream, fit, memory, progress);
        let records = Some(stream.records);
        Self { records, placing, tail: None, ran: true }
    }

    /// Reads on until the device sections are there.
    fn all_pages(&mut self) -> Result<(), Error> {
        while self.tail.is_none() {
            self.advance()?;
        }
        Ok(())
    }

    fn take_tail(&mut self) -> Result<(), Error> {
        let Some(records) = self.records.take() else { return Ok(()) };
        let (name, base) = (&self.placing.name, records.reader().position());
        let mut tail = records.tail()?;
        check_tail(name, &tail, base)?;
        if let Some(mut state) = GlobalState::find(&tail, base).map_err(|error| damaged(name, error))? {
            self.ran = state.runs();
            state.patch(&mut tail, RunState::Paused);
        }
        self.placing.recomposer.finish();
        self.tail = Some((tail, base));
        Ok(())
    }
}

impl Pieces for Passing<'_> {
    fn advance(&mut self) -> Result<Vec<u8>, Error> {
        loop {
            let Some(records) = &mut self.records else {
                return Ok(self.tail.take().map(|(tail, _)| tail).unwrap_or_default());
            };
            if self.placing.progress.is_cancelled() {
                return Err(Error::RestoreCancelled);
            }
            let position = records.reader().position();
            if records.step(|record, bytes| self.placing.take(record, bytes, position))? == Ended::Yes {
                self.take_tail()?;
            }
            let piece = self.placing.recomposer.take();
            if !piece.is_empty() {
                return Ok(piece);
            }
        }
    }
}

#[derive(PartialEq, Eq)]
enum Ended {
    Yes,
    No,
}

/// Where records go: guest memory into place, everything else on.
struct Placing<'a> {
    name: String,
    recomposer: Recomposer,
    /// By block: its name, and the region that it is.
    blocks: Vec<(Name, Option<usize>)>,
    memory: GuestMemory,
    /// By region: pages that content was written to. All others read as zero.
    content: Vec<PageMap>,
    progress: &'a Progress,
    pages: u64,
    zero: u64,
    /// An early section goes on.
    in_early: bool,
}

impl<'a> Placing<'a> {
    fn new(stream: &Stream, fit: &Fit, memory: GuestMemory, progress: &'a Progress) -> Self {
        let mut blocks: Vec<_> = stream.blocks.iter().map(|block| (block.name.clone(), None)).collect();
        fit.regions.iter().enumerate().for_each(|(region, &block)| blocks[block].1 = Some(region));
        let devices = fit.devices.iter().map(|&index| &stream.blocks[index]);
        let content = memory.regions().iter().map(|region| PageMap::new(region.pages())).collect();
        Self {
            name: stream.origin.name.clone(),
            recomposer: Recomposer::new(&stream.configuration, devices),
            blocks,
            memory,
            content,
            progress,
            pages: 0,
            zero: 0,
            in_early: false,
        }
    }

    /// Pages that read as something else than zero, as far as it is known.
    fn content_pages(&self) -> u64 {
        let pages = |(map, region): (&PageMap, &Region)| map.to_set(region.pages()).count();
        self.content.iter().zip(self.memory.regions()).map(pages).sum()
    }

    /// `position`: where the record begins.
    fn take(&mut self, record: Record<'_>, bytes: &[u8], position: u64) -> Result<Ended, Error> {
        let was_early = std::mem::take(&mut self.in_early);
        match record {
            Record::Tail => return Ok(Ended::Yes),
            Record::Early(_) => self.early(bytes),
            Record::Raw(_) if was_early => self.early(bytes),
            Record::Footer { .. } if was_early => self.recomposer.early(bytes),
            Record::Page(page) => self.page(&page, position)?,
            // All memory of the guest was in the first list: these are the devices'.
            Record::RamStart { total, .. } => self.recomposer.start_again(total),
            Record::Block(block) => {
                self.recomposer.block(&block);
                self.blocks.push((block.name, None));
            }
            Record::Command(Command::SwitchoverStart) => self.recomposer.switchover(),
            Record::End { .. } => self.recomposer.last(),
            Record::Command(command) => needs_source(&command).map_or(Ok(()), |why| Err(wrong(&self.name, why)))?,
            Record::MultifdFlush => {
                let what = "its pages went over multifd channels of their own and are not in it";
                return Err(wrong(&self.name, what));
            }
            _ => {}
        }
        Ok(Ended::No)
    }

    /// A piece of an early section, behind which there is more.
    fn early(&mut self, bytes: &[u8]) {
        self.in_early = true;
        self.recomposer.early(bytes);
    }

    fn page(&mut self, page: &Page<'_>, position: u64) -> Result<(), Error> {
        let mut made = [0; PAGE_BYTES];
        let (name, region) = &self.blocks[page.block];
        let bytes = match (page.content, *region) {
            (PageContent::Fill(0), _) => None,
            (PageContent::Fill(byte), _) => {
                made.fill(byte);
                Some(&made)
            }
            (PageContent::Normal(bytes), _) => Some(bytes),
            (PageContent::Compressed(bytes), _) => {
                let damaged = |why| wrong(&self.name, format_args!("page at offset {position:#x}: {why}"));
                inflate_page(bytes, &mut made).map_err(damaged)?;
                Some(&made)
            }
            (PageContent::Xbzrle(delta), region) => {
                let number = page.offset / PAGE_BYTES as u64;
                if let Some(region) = region.filter(|&region| self.content[region].contains(number)) {
                    self.memory.regions()[region].copy_to(PageRange::new(number, 1), &mut made)?;
                }
                xbzrle::decode(delta, position, &mut made).map_err(|error| damaged(&self.name, error))?;
                if region.is_none() {
                    // The VMM has the page that this refers to.
                    self.recomposer.xbzrle_page(name, page.offset, delta);
                    return Ok(());
                }
                Some(&made)
            }
        };
        let bytes = bytes.filter(|bytes| **bytes != [0; PAGE_BYTES]);
        match (*region, bytes) {
            (Some(region), Some(bytes)) => {
                self.pages += 1;
                self.progress.normal_pages.fetch_add(1, Ordering::Relaxed);
                self.progress.wire_bytes.fetch_add(PAGE_BYTES as u64, Ordering::Relaxed);
                self.write(region, page.offset / PAGE_BYTES as u64, bytes)?;
            }
            (Some(region), None) => {
                self.zero += 1;
                self.clear(region, page.offset / PAGE_BYTES as u64)?;
            }
            (None, Some(bytes)) => self.recomposer.page(name, page.offset, bytes),
            (None, None) => self.recomposer.zero_page(name, page.offset),
        }
        Ok(())
    }

    fn write(&self, region: usize, page: u64, bytes: &[u8; PAGE_BYTES]) -> Result<(), Error> {
        let (window, bit) = (page / WINDOW_PAGES * WINDOW_PAGES, 1 << (page % WINDOW_PAGES));
        self.memory.regions()[region].write_pages(window, bit, bytes)?;
        self.content[region].insert(window, bit);
        Ok(())
    }

    /// A page that came with content before may come again as zero.
    fn clear(&self, region: usize, page: u64) -> Result<(), Error> {
        let (window, bit) = (page / WINDOW_PAGES * WINDOW_PAGES, 1 << (page % WINDOW_PAGES));
        if self.content[region].window(window) & bit != 0 {
            self.memory.regions()[region].clear(PageRange::new(page, 1))?;
            self.content[region].remove(window, bit);
        }
        Ok(())
    }
}
