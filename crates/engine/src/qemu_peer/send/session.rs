//! The connections to a QEMU that waits, and what goes over them up to the devices' state.
//!
//! ```text
//!   header, configuration, a return path, ping ─► pong     it speaks to us, has all channels, and is of the same machine
//!   START: the guest's own blocks, ping        ─► pong     it has them
//!   PART: a round, its barrier, ping           ─► pong     all of the round is in place; again and again
//! ```
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use transship_memory::{GuestMemory, PAGE_BYTES, PageRange, PageSet};
use transship_wire::qemu::{Block, Command, Configuration, Name};

use super::{
    QemuSendOptions,
    channels::{Channels, Queue},
    line::Line,
    packets::{Batch, Sent, Shared},
    plan::{Barriers, Plan, Zeros},
};
use crate::{
    Error, Progress, Uri, ZeroPages,
    pacer::Pacer,
    page_map::{PageMap, runs},
    scan::Pending,
    snapshot::RegionBlock,
    transport::STALL_TIMEOUT,
};

const PAGE: u64 = PAGE_BYTES as u64;

/// The connections, and what the destination holds by now.
pub(crate) struct Session {
    pub(crate) line: Line,
    channels: Option<Channels>,
    pub(crate) plan: Plan,
    shared: Arc<Shared>,
    /// No round was sent yet.
    first: bool,
    copy: Vec<u8>,
}

impl Session {
    /// Connects, and has the destination agree to the machine and to the guest's blocks. It refuses here whatever it can refuse without having
    /// seen a page.
    pub(crate) fn open(
        to: &Uri,
        plan: Plan,
        uuid: [u8; 16],
        memory: GuestMemory,
        regions: &[RegionBlock],
        options: &QemuSendOptions,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let pacer = options.bandwidth.map(Pacer::new).map(Arc::new);
        let mut line = Line::open(to, pacer.clone(), progress)?;
        // Until it has the first bytes of a connection a destination does nothing else at all; and an old one takes the first connection for
        // the main one.
        line.writer.header().configuration(&Configuration::new(plan.machine.clone())).command(&Command::OpenReturnPath);
        line.ping();
        line.flush()?;
        let shared = Arc::new(Shared {
            names: regions.iter().map(|region| region.name.clone()).collect(),
            content: memory.regions().iter().map(|region| PageMap::new(region.pages())).collect(),
            memory,
            pacer,
            look_for_zeros: options.zero_pages != ZeroPages::Off,
            compress: options.compress,
            progress: Arc::clone(progress),
            failed: AtomicBool::new(false),
            numbers: AtomicU64::new(0),
            peer: to.to_string(),
        });
        let channels = match options.channels {
            0 => None,
            count => Some(Channels::connect(to, count, uuid, &shared)?),
        };
        let mut session = Self { line, channels, plan, shared, first: true, copy: Vec::new() };
        let begin = match options.channels {
            0 => "begin (does it wait with `multifd` off?)".to_owned(),
            count => format!("begin (does it wait with `multifd` on and `multifd-channels` {count}?)"),
        };
        session.line.await_pong(&begin, STALL_TIMEOUT)?;
        session.start(regions.iter().map(|region| (&region.name, region.bytes)))?;
        session.settle("take the guest's memory blocks", STALL_TIMEOUT)?;
        Ok(session)
    }

    /// By region, the pages that the destination was sent content for.
    pub(crate) fn content(&self) -> &[PageMap] {
        &self.shared.content
    }

    /// A list of blocks. There may be more than one.
    pub(crate) fn start<'a>(&mut self, blocks: impl Iterator<Item = (&'a Name, u64)> + Clone) -> Result<(), Error> {
        let writer = &mut self.line.writer;
        writer.ram_start(blocks.clone().map(|(_, bytes)| bytes).sum());
        for (name, bytes) in blocks {
            writer.block(&Block { name: name.clone(), used_bytes: bytes, gpa: None, mapped: None });
        }
        self.end_of_memory()
    }

    /// The end of a section, with the main stream's half of a barrier in it. The channels have sent theirs.
    fn end_section(&mut self) {
        if self.plan.barriers == Barriers::ByRounds {
            self.line.writer.multifd_flush();
        }
        self.line.writer.end_of_section();
    }

    /// The end of a section of memory, with a barrier on all channels.
    pub(crate) fn end_of_memory(&mut self) -> Result<(), Error> {
        let bytes = self.channels.as_mut().map_or(Ok(0), Channels::barrier)?;
        self.line.sent += bytes;
        self.end_section();
        Ok(())
    }

    /// Waits until the destination has all that was written so far, and still has all channels.
    pub(crate) fn settle(&mut self, doing: &str, patience: Duration) -> Result<(), Error> {
        self.line.ping();
        self.line.await_pong(doing, patience)?;
        self.channels.as_ref().map_or(Ok(()), Channels::check_open)
    }

    /// Sends a round. What is there afterwards is in place only after [`Session::settle`].
    pub(crate) fn send_round(&mut self, pending: &[Pending]) -> Result<Sent, Error> {
        let before = self.line.sent;
        self.line.writer.part();
        let mut sent = match self.channels.take() {
            None => self.send_plain(pending)?,
            Some(mut channels) => {
                let feed = |queue: &Queue, line: &mut Line| {
                    Feed { shared: &self.shared, zeros: self.plan.zeros, first: self.first }.all(pending, queue, line)
                };
                let sent = channels.run_round(&mut self.line, feed);
                self.channels = Some(channels);
                sent?
            }
        };
        self.end_section();
        self.line.flush()?;
        self.first = false;
        sent.bytes += self.line.sent - before;
        Ok(sent)
    }

    /// All pages on the main stream.
    fn send_plain(&mut self, pending: &[Pending]) -> Result<Sent, Error> {
        let shared = Arc::clone(&self.shared);
        let mut sent = Sent::default();
        for (region, pending) in pending.iter().enumerate() {
            let name = &shared.names[region];
            tell_holes(&shared, region, pending, self.first, &mut self.line)?;
            for (first, wanted) in pending.batches().flatten() {
                let found = shared.look(region, first, wanted)?;
                let (present, zero) = shared.settle(region, (first, wanted), found, &mut sent);
                tell_zeros(name, first, if self.first { found } else { zero }, &mut self.line)?;
                self.copy.clear();
                shared.memory.regions()[region].copy_out(first, present, &mut self.copy)?;
                let pages = runs(first, present).flat_map(|run| run.first..run.end());
                for (page, bytes) in pages.zip(self.copy.as_chunks().0) {
                    self.line.writer.page(name, page * PAGE, bytes);
                }
                self.line.flush_pieces()?;
            }
        }
        Ok(sent)
    }

    /// Ends all connections. A destination that does not have the end of the stream will never run the guest.
    pub(crate) fn hang_up(&self) {
        self.line.hang_up();
        self.channels.iter().for_each(Channels::hang_up);
    }
}

/// Cuts a round into pieces and hands them over, in memory order.
struct Feed<'a> {
    shared: &'a Shared,
    zeros: Zeros,
    first: bool,
}

impl Feed<'_> {
    fn all(&self, pending: &[Pending], queue: &Queue, line: &mut Line) -> Result<(), Error> {
        for (region, pending) in pending.iter().enumerate() {
            match self.zeros {
                Zeros::OnMain => tell_holes(self.shared, region, pending, self.first, line)?,
                Zeros::InPackets => {
                    for range in pending.gone.ranges() {
                        queue.hand_over(Batch::Hole { region, range }, line)?;
                    }
                }
            }
            for windows in pending.batches() {
                let zero = match self.zeros {
                    Zeros::OnMain => Some(self.tell_zeros(region, &windows, line)?),
                    Zeros::InPackets => None,
                };
                queue.hand_over(Batch::Pages { region, windows, zero }, line)?;
            }
        }
        Ok(())
    }

    /// Looks for the zero pages of windows, and tells them. A channel gets the rest, so that each page is in one place only until the barrier.
    fn tell_zeros(&self, region: usize, windows: &[(u64, u128)], line: &mut Line) -> Result<Vec<u128>, Error> {
        let look = |&(first, wanted): &(u64, u128)| {
            let found = self.shared.look(region, first, wanted)?;
            let had = self.shared.content[region].window(first);
            tell_zeros(&self.shared.names[region], first, if self.first { found } else { found & had }, line)?;
            Ok(found)
        };
        windows.iter().map(look).collect()
    }
}

/// Tells what has become a hole, and in the first round all that is one: whatever the destination's memory holds, it is zero there afterwards.
fn tell_holes(shared: &Shared, region: usize, pending: &Pending, first: bool, line: &mut Line) -> Result<(), Error> {
    let mut zero = pending.gone.clone();
    if first {
        zero = PageSet::full(zero.pages());
        zero.subtract(&pending.send);
    }
    for range in zero.ranges() {
        shared.content[region].take(range).for_each(drop);
        tell_range(&shared.names[region], range, line)?;
    }
    Ok(())
}

fn tell_zeros(name: &Name, first: u64, zero: u128, line: &mut Line) -> Result<(), Error> {
    runs(first, zero).try_for_each(|run| tell_range(name, run, line))
}

fn tell_range(name: &Name, range: PageRange, line: &mut Line) -> Result<(), Error> {
    for page in range.first..range.end() {
        line.writer.zero_page(name, page * PAGE);
        line.flush_pieces()?;
    }
    Ok(())
}
