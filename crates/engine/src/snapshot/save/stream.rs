//! A plain stream: one record after the other, as a socket would get them. What is written again is appended; the last
//! one counts.
//!
//! ```text
//!   header, configuration
//!   START: the guest's own blocks                       known at once
//!   PART: pages of a round …
//!   START: blocks of devices                            known when the guest stands still
//!   END: pages of the devices
//!   device sections, their description
//! ```
//!
//! Pages that are zero, and holes, have a record too: whatever a destination's memory holds, it is zero there
//! afterwards.
use std::sync::Arc;

use transship_memory::{
    Freeing, GuestMemory, PAGE, PageCount, PageRange, PageSet, WindowBuffer, WindowPages, WindowRead,
};
use transship_secure::sealed_bytes;
use transship_wire::qemu::{Block, Command, Configuration, Name, StreamWriter};

use super::{
    appended::Appended,
    output::Output,
    writer::{Pages, Written},
};
use crate::{
    Error, FileReport, Progress, fail_point,
    page_map::PageMap,
    scan::Pending,
    snapshot::file::{appending::Appending, target::Target},
    stream::{regions::RegionBlock, state::DeviceState},
};

/// The number of the RAM section: another than that of any section that comes before the last page.
pub(crate) const RAM_SECTION: u32 = u32::from_be_bytes(*b"\0ram");
/// Bytes that are written at once.
pub(crate) const PIECE: usize = 1 << 20;
/// Of a window: from here on a page costs less where it is than as a copy.
const MANY: PageCount = PageCount::new(16);
/// Bytes of a record without its page, with the block's name left out.
const RECORD_BYTES: u64 = 9;

/// The stream as far as it is written.
pub(crate) struct StreamFile {
    pub(crate) pages: Arc<Pages>,
    regions: Vec<RegionBlock>,
    configuration: Configuration,
    out: Appender,
    /// Magic and version, which come last: without them it is no stream.
    head: Vec<u8>,
    /// Where threads append pages of one moment, if they do.
    appended: Option<Arc<Appended>>,
    /// What was read of a window.
    buffer: WindowBuffer,
    /// No round was written yet, so the holes were not recorded.
    first: bool,
}

/// Records on their way to the file.
struct Appender {
    writer: StreamWriter,
    begin: u64,
    to: Appending,
    copy: Vec<u8>,
}

impl Appender {
    /// Writes if there is enough for a piece.
    fn flush_pieces(&mut self, target: &Target) -> Result<(), Error> {
        if self.writer.buffered() < PIECE { Ok(()) } else { self.flush(target) }
    }

    fn flush(&mut self, target: &Target) -> Result<(), Error> {
        target.append(&self.writer.take_bytes(), &mut self.to)
    }

    /// Others have written up to there.
    fn go_on_at(&mut self, at: u64) {
        self.to.go_on_at(at);
        self.writer = StreamWriter::new(at, RAM_SECTION);
    }

    /// Pages of a window: few are copied behind what waits, many are written from where they are.
    fn pages(&mut self, block: &Name, read: &WindowRead<'_>, target: &Target) -> Result<(), Error> {
        let pages = read.present();
        if pages.count() >= MANY && !target.is_sealed() {
            return self.woven(block, read, target);
        }
        self.copy.clear();
        read.copy_out(pages, &mut self.copy);
        for (page, bytes) in pages.iter().zip(self.copy.as_chunks().0) {
            self.writer.page(block, page.offset(), bytes);
        }
        self.flush_pieces(target)
    }

    /// The same straight from where they were read.
    fn woven(&mut self, block: &Name, read: &WindowRead<'_>, target: &Target) -> Result<(), Error> {
        let writer = &mut self.writer;
        let cuts: Vec<usize> =
            read.present().iter().map(|page| writer.page_header(block, page.offset()).buffered()).collect();
        let bytes = writer.take_bytes();
        target.append_woven(read, (&bytes, &cuts), &mut self.to)
    }

    fn zeros(&mut self, block: &Name, range: PageRange, target: &Target) -> Result<(), Error> {
        for page in range.iter() {
            self.writer.zero_page(block, page.offset());
            self.flush_pieces(target)?;
        }
        Ok(())
    }
}

impl StreamFile {
    /// The start of the stream. The device state must be of the machine that `configuration` names.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn begin(
        memory: &GuestMemory,
        freeing: Freeing,
        regions: &[RegionBlock],
        configuration: Configuration,
        target: &Target,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let begin = target.offset();
        let mut writer = StreamWriter::new(begin, RAM_SECTION);
        let head = writer.header().take_bytes();
        let at = begin + head.len() as u64;
        let head = target.append_head(head)?;
        writer.configuration(&configuration).ram_start(regions.iter().map(|region| region.bytes).sum());
        for region in regions {
            writer.block(&unmapped(&region.name, region.bytes));
        }
        writer.end_of_section();
        Ok(Self {
            pages: Arc::new(Pages::new(memory, freeing, Vec::new(), target, progress)),
            regions: regions.to_vec(),
            configuration,
            out: Appender { writer, begin, to: Appending::at(at), copy: Vec::new() },
            head,
            appended: None,
            buffer: WindowBuffer::default(),
            first: true,
        })
    }

    /// From now on threads append pages of one moment, in any order. What they don't append is zero, which is written
    /// when the file is completed.
    ///
    /// # Errors
    /// The system's own.
    pub(crate) fn append(&mut self, target: &Target) -> Result<Arc<Appended>, Error> {
        self.out.writer.part();
        self.out.flush(target)?;
        let names = self.regions.iter().map(|region| region.name.clone()).collect();
        Ok(Arc::clone(self.appended.insert(Arc::new(Appended::new(names, self.out.to.place(), target.sealed())))))
    }

    /// The records that no thread has appended.
    fn end_appended(&mut self, target: &Target) -> Result<(), Error> {
        let Some(appended) = self.appended.take() else { return Ok(()) };
        self.out.go_on_at(appended.end());
        let pages = Arc::clone(&self.pages);
        for (region, content) in self.regions.iter().zip(&pages.content) {
            let mut zero = PageSet::full(PageCount::within(region.bytes));
            zero.subtract(&content.to_set(zero.pages()));
            for range in zero.ranges() {
                self.check_cancelled()?;
                self.out.zeros(&region.name, range, target)?;
            }
        }
        self.out.writer.end_of_section();
        self.out.flush(target)
    }

    /// One region's part of a round.
    fn write_region(
        &mut self,
        region: usize,
        pending: &Pending,
        target: &Target,
        written: &mut Written,
    ) -> Result<(), Error> {
        let name = self.regions[region].name.clone();
        let mut zero = pending.gone.clone();
        if self.first {
            zero = PageSet::full(zero.pages());
            zero.subtract(&pending.send);
        }
        for range in zero.ranges() {
            self.check_cancelled()?;
            self.pages.content[region].take(range).for_each(drop);
            self.out.zeros(&name, range, target)?;
        }
        for window in pending.batches().flatten() {
            self.check_cancelled()?;
            self.write_window(region, &name, window, target, written)?;
        }
        Ok(())
    }

    fn write_window(
        &mut self,
        region: usize,
        name: &Name,
        wanted: WindowPages,
        target: &Target,
        written: &mut Written,
    ) -> Result<(), Error> {
        let pages = Arc::clone(&self.pages);
        let holes = pages.new_holes(region, wanted);
        let read = pages.memory.regions()[region].read_window(wanted.without(holes), true, &mut self.buffer)?;
        let (present, zero) = (read.present(), read.zero_mask() | holes);
        let had = pages.content[region].window(wanted.first);
        written.normal += present.count();
        written.zero += wanted.with(zero).count();
        written.rewritten += present.with(present.mask & had).count();
        pages.note(region, present, zero);
        pages.pace.wait(present.bytes());
        // What had no content was told to be zero in the first round.
        for page in wanted.with(if self.first { zero } else { zero & had }).iter() {
            self.out.writer.zero_page(name, page.offset());
        }
        self.out.pages(name, &read, target)
    }

    fn check_cancelled(&self) -> Result<(), Error> {
        if self.pages.progress.is_cancelled() { Err(Error::CANCELLED) } else { Ok(()) }
    }

    /// What was written before the device state was known must fit it.
    fn check(&self, state: &DeviceState) -> Result<(), Error> {
        let (said, is) = (&self.configuration.machine, &state.configuration.machine);
        if said != is {
            return Err(Error::unfit(format!(
                "the VMM reports its machine as {said}, but its device state names {is}"
            )));
        }
        if !state.early.is_empty() {
            let why = "a machine with virtio-mem sends the amount of plugged memory before the first page, with which \
                       a stream begins";
            return Err(Error::unfit(format!("{why}; save it with --format mapped-ram")));
        }
        Ok(())
    }
}

impl Output for StreamFile {
    fn content(&self) -> &[PageMap] {
        &self.pages.content
    }

    fn needs(&self, page_bytes: u64) -> u64 {
        let records: u64 = self.regions.iter().map(|region| region.bytes / PAGE * RECORD_BYTES).sum();
        sealed_bytes(self.out.to.place() - self.out.begin + page_bytes + records)
    }

    fn write(&mut self, pending: &[Pending], target: &Target) -> Result<Written, Error> {
        let mut written = Written::default();
        self.out.writer.part();
        for (region, pending) in pending.iter().enumerate() {
            self.write_region(region, pending, target, &mut written)?;
        }
        self.out.writer.end_of_section();
        self.out.flush(target)?;
        self.first = false;
        Ok(written)
    }

    fn complete(
        &mut self,
        state: &DeviceState,
        target: &mut Target,
        file: &mut FileReport,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        self.check(state)?;
        self.end_appended(target)?;
        let out = &mut self.out;
        if !state.blocks.is_empty() {
            out.writer.ram_start(state.blocks.iter().map(|block| block.bytes).sum());
            for block in &state.blocks {
                out.writer.block(&unmapped(&block.name, block.bytes));
            }
            out.writer.end_of_section();
        }
        if state.switchover_start {
            out.writer.command(&Command::SwitchoverStart);
        }
        out.writer.end();
        for block in &state.blocks {
            for page in PageRange::all(PageCount::within(block.bytes)).iter() {
                match block.pages.get(&page) {
                    Some(bytes) => out.writer.page(&block.name, page.offset(), bytes),
                    None => out.writer.zero_page(&block.name, page.offset()),
                };
                out.flush_pieces(target)?;
            }
        }
        out.writer.end_of_section().raw(&state.tail);
        out.flush(target)?;
        target.give_space_back(&mut out.to)?;
        file.pages_stored = self.pages.stored().get();
        fail_point::reach("save.tail")?;
        target.complete(&self.head, progress)
    }
}

fn unmapped(name: &Name, bytes: u64) -> Block {
    Block { name: name.clone(), used_bytes: bytes, gpa: None, mapped: None }
}
