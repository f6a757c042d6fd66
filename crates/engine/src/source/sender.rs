//! One data connection of a source, and the thread that scans and sends on it.
//!
//! A page is read by one thread only, which looks whether it is zero and writes it to the socket straight from guest memory while it
//! is in that core's cache.
use std::{
    io::{self, Write},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use crossbeam_channel::Receiver;
use transship_memory::{GuestMemory, PAGE_BYTES, PageRange, Region};
use transship_wire::{PACKET_BYTES, Packet};

use super::channels::{Batch, measured};
use crate::{
    Error, Progress,
    pacer::Pacer,
    page_map::{PageMap, runs},
    transport::{Connection, STALL_TIMEOUT},
};

/// What all channels of a session use.
pub(crate) struct Shared {
    pub(crate) memory: GuestMemory,
    /// By region: pages that the destination holds content for. All others read as zero there.
    pub(crate) content: Vec<PageMap>,
    pub(crate) pacer: Option<Pacer>,
    pub(crate) look_for_zeros: bool,
    pub(crate) progress: Arc<Progress>,
    /// A channel has failed: the others need not go on.
    pub(crate) failed: AtomicBool,
    pub(crate) peer: String,
}

/// What a channel did in a round.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    pub(crate) normal: u64,
    /// Pages found to be zero, and those of them that had to be told: the destination held other content. Holes are told too.
    pub(crate) zero: u64,
    pub(crate) zero_sent: u64,
    pub(crate) resent: u64,
    pub(crate) bytes: u64,
    pub(crate) cpu_seconds: f64,
}

/// One data connection.
pub(crate) struct PageSender {
    connection: Connection,
    number: u8,
    shared: Arc<Shared>,
}

impl PageSender {
    pub(crate) fn new(connection: Connection, number: u8, shared: Arc<Shared>) -> Self {
        Self { connection, number, shared }
    }

    /// Sends batches until there are no more, then `RoundEnd`.
    pub(crate) fn run(&mut self, round: u32, populate: bool, batches: &Receiver<Batch>) -> Result<Sent, Error> {
        let (result, cpu_seconds) = measured(|| self.send_all(round, populate, batches));
        if result.is_err() {
            self.shared.failed.store(true, Relaxed);
        }
        result.map(|sent| Sent { cpu_seconds, ..sent })
    }

    fn send_all(&mut self, round: u32, populate: bool, batches: &Receiver<Batch>) -> Result<Sent, Error> {
        let shared = Arc::clone(&self.shared);
        let mut sent = Sent::default();
        let mut packets = 0;
        for batch in batches {
            if shared.failed.load(Relaxed) {
                break; // the main thread ends the session
            }
            match batch {
                Batch::Hole { region, range } => self.send_hole(round, region, range, &mut sent, &mut packets)?,
                Batch::Pages { region, windows, zero } => {
                    let memory = &shared.memory.regions()[region];
                    for (index, (first, wanted)) in windows.into_iter().enumerate() {
                        let zero = match &zero {
                            Some(masks) => masks[index],
                            None if shared.look_for_zeros => {
                                if populate {
                                    self::populate(memory, &[(first, wanted)]);
                                }
                                memory.zero_mask(first, wanted)?
                            }
                            None => 0,
                        };
                        let window = Window { round, region, first, wanted, zero };
                        self.send_window(memory, &window, &mut sent, &mut packets)?;
                    }
                }
            }
        }
        self.write(&Packet::RoundEnd { round, packets }.encode(), &mut sent)?;
        Ok(sent)
    }

    fn send_hole(
        &mut self,
        round: u32,
        region: usize,
        range: PageRange,
        sent: &mut Sent,
        packets: &mut u64,
    ) -> Result<(), Error> {
        self.shared.content[region].take(range).for_each(drop);
        let packet = Packet::Hole { round, region: region as u16, first: range.first, count: range.count };
        sent.zero_sent += range.count;
        *packets += 1;
        self.write(&packet.encode(), sent)
    }

    fn send_window(
        &mut self,
        memory: &Region,
        window: &Window,
        sent: &mut Sent,
        packets: &mut u64,
    ) -> Result<(), Error> {
        let shared = &self.shared;
        let content = &shared.content[window.region];
        let had = content.window(window.first);
        let present = window.wanted & !window.zero;
        // What the destination holds no content for reads as zero there already.
        let zero = window.zero & had;
        sent.normal += u64::from(present.count_ones());
        sent.zero += u64::from(window.zero.count_ones());
        sent.zero_sent += u64::from(zero.count_ones());
        sent.resent += u64::from((present & had).count_ones());
        shared.progress.normal_pages.fetch_add(present.count_ones().into(), Relaxed);
        shared.progress.zero_pages.fetch_add(window.zero.count_ones().into(), Relaxed);
        let looked_at = u64::from(window.wanted.count_ones()) * PAGE_BYTES as u64;
        let _ = shared.progress.round_left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(looked_at)));
        if present | zero == 0 {
            return Ok(());
        }
        content.insert(window.first, present);
        content.remove(window.first, zero);
        let packet =
            Packet::Pages { round: window.round, region: window.region as u16, first: window.first, present, zero };
        let bytes = PACKET_BYTES + packet.payload_bytes();
        self.book(bytes, sent);
        *packets += 1;
        memory
            .send_window(self.connection.as_fd(), &packet.encode(), window.first, present)
            .map_err(|source| self.failed(source))
    }

    fn write(&mut self, bytes: &[u8], sent: &mut Sent) -> Result<(), Error> {
        self.book(bytes.len(), sent);
        self.connection.write_all(bytes).map_err(|source| self.failed(source))
    }

    /// Waits until so many bytes may go, and counts them.
    fn book(&self, bytes: usize, sent: &mut Sent) {
        if let Some(pacer) = &self.shared.pacer {
            pacer.wait(bytes);
        }
        sent.bytes += bytes as u64;
        self.shared.progress.wire_bytes.fetch_add(bytes as u64, Relaxed);
    }

    fn failed(&self, source: io::Error) -> Error {
        let Self { number, shared, .. } = self;
        match source.kind() {
            io::ErrorKind::WouldBlock => Error::Protocol {
                peer: shared.peer.clone(),
                what: format!("has taken nothing from data channel {number} for {} s", STALL_TIMEOUT.as_secs()),
            },
            _ => Error::Io { what: format!("send pages to {} on data channel {number}", shared.peer), source },
        }
    }
}

/// Pages of one window to look at.
struct Window {
    round: u32,
    region: usize,
    first: u64,
    wanted: u128,
    zero: u128,
}

/// Maps the wanted pages in bulk, run by run: single page faults would cost more than the scan.
pub(crate) fn populate(memory: &Region, windows: &[(u64, u128)]) {
    let mut joined: Option<PageRange> = None;
    for run in windows.iter().flat_map(|(first, wanted)| runs(*first, *wanted)) {
        match &mut joined {
            Some(range) if range.end() == run.first => range.count += run.count,
            _ => {
                if let Some(range) = joined.replace(run) {
                    memory.populate_read(range);
                }
            }
        }
    }
    if let Some(range) = joined {
        memory.populate_read(range);
    }
}
