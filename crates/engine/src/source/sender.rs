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
use transship_memory::{GuestMemory, PAGE_BYTES, PageRange};
use transship_ring::mpmc;
use transship_wire::{PACKET_BYTES, Packet};

use super::{
    channels::{Batch, measured},
    encoding::{Gate, Ready},
};
use crate::{
    Error, Progress,
    cpu::Laps,
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
    pub(crate) fn run(&mut self, round: u32, batches: &Receiver<Batch>) -> Result<Sent, Error> {
        let (result, cpu_seconds) = measured(|| self.send_all(round, batches));
        if result.is_err() {
            self.shared.failed.store(true, Relaxed);
        }
        result.map(|sent| Sent { cpu_seconds, ..sent })
    }

    fn send_all(&mut self, round: u32, batches: &Receiver<Batch>) -> Result<Sent, Error> {
        let shared = Arc::clone(&self.shared);
        let mut sent = Sent::default();
        let mut packets = 0;
        let mut laps = Laps::begin();
        for batch in batches {
            if shared.failed.load(Relaxed) {
                break; // the main thread ends the session
            }
            match batch {
                Batch::Hole { region, range } => self.send_hole(round, region, range, &mut sent, &mut packets)?,
                Batch::Pages { region, windows, zero } => {
                    for (index, (first, wanted)) in windows.into_iter().enumerate() {
                        let zero = zero.as_ref().map(|masks| masks[index]);
                        let window =
                            Window { round, region, first, wanted, zero, encoding: 0, sample: false, raw: false };
                        self.send_window(window, None, &mut sent, &mut packets)?;
                    }
                }
            }
            shared.progress.cpu.channels.add(laps.next());
        }
        self.write(&Packet::RoundEnd { round, packets }.encode(), &mut sent)?;
        Ok(sent)
    }

    /// As `run`, with what comes from the encoders.
    pub(crate) fn run_encoded(&mut self, round: u32, gate: &Gate, spare: &mpmc::Ring<Vec<u8>>) -> Result<Sent, Error> {
        let (result, cpu_seconds) = measured(|| self.send_all_encoded(round, gate, spare));
        result.map(|sent| Sent { cpu_seconds, ..sent })
    }

    /// After a failure it takes on, and drops what it takes, so that nobody waits for room for ever.
    fn send_all_encoded(&mut self, round: u32, gate: &Gate, spare: &mpmc::Ring<Vec<u8>>) -> Result<Sent, Error> {
        let mut sent = Sent::default();
        let mut packets = 0;
        let mut outcome = Ok(());
        let mut laps = Laps::begin();
        loop {
            let ready = match gate.next() {
                Some(Ready::RoundEnd) | None => break,
                Some(ready) => ready,
            };
            let is_raw = matches!(&ready, Ready::Unseen(window) | Ready::Window { window, .. } if window.raw);
            if outcome.is_ok() && !self.shared.failed.load(Relaxed) {
                outcome = self.send_ready(ready, round, gate, spare, &mut sent, &mut packets);
                if outcome.is_err() {
                    self.shared.failed.store(true, Relaxed);
                }
            }
            self.shared.progress.cpu.channels.add(laps.next());
            if is_raw {
                gate.took_raw();
            }
            gate.took();
        }
        outcome?;
        self.write(&Packet::RoundEnd { round, packets }.encode(), &mut sent)?;
        Ok(sent)
    }

    fn send_ready(
        &mut self,
        ready: Ready,
        round: u32,
        gate: &Gate,
        spare: &mpmc::Ring<Vec<u8>>,
        sent: &mut Sent,
        packets: &mut u64,
    ) -> Result<(), Error> {
        let (mut window, encoded) = match ready {
            Ready::Hole { region, range } => return self.send_hole(round, region, range, sent, packets),
            Ready::RoundEnd => return Ok(()),
            Ready::Unseen(window) => (window, None),
            Ready::Window { window, encoded } => (window, encoded),
        };
        gate.meters.look(&self.shared, &mut window);
        let (pages, bytes) = (sent.normal, sent.bytes);
        self.send_window(window, encoded.as_ref(), sent, packets)?;
        gate.meters.sent(window.encoding, sent.normal - pages, sent.bytes - bytes);
        if let Some(Encoded { bytes, .. }) = encoded {
            let _ = spare.push(bytes); // full: one buffer less to keep
        }
        Ok(())
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
        window: Window,
        encoded: Option<&Encoded>,
        sent: &mut Sent,
        packets: &mut u64,
    ) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let Window { round, region, first, wanted, .. } = window;
        let found = window.zero.unwrap_or_else(|| shared.look(&window));
        let content = &shared.content[region];
        let had = content.window(first);
        let present = wanted & !found;
        // What the destination holds no content for reads as zero there already.
        let zero = found & had;
        sent.normal += u64::from(present.count_ones());
        sent.zero += u64::from(found.count_ones());
        sent.zero_sent += u64::from(zero.count_ones());
        sent.resent += u64::from((present & had).count_ones());
        shared.progress.normal_pages.fetch_add(present.count_ones().into(), Relaxed);
        shared.progress.zero_pages.fetch_add(found.count_ones().into(), Relaxed);
        let looked_at = u64::from(wanted.count_ones()) * PAGE_BYTES as u64;
        let _ = shared.progress.round_left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(looked_at)));
        if present | zero == 0 {
            return Ok(());
        }
        content.insert(first, present);
        content.remove(first, zero);
        *packets += 1;
        let number = region as u16;
        if let Some(Encoded { method, bytes }) = encoded {
            let length = bytes.len() as u32; // shorter than the pages of a window
            let packet =
                Packet::Encoded { round, region: number, first, present, zero, method: *method, bytes: length };
            self.write(&packet.encode(), sent)?;
            return self.write(bytes, sent);
        }
        let packet = Packet::Pages { round, region: number, first, present, zero };
        self.book(PACKET_BYTES + packet.payload_bytes(), sent);
        shared.memory.regions()[region]
            .send_window(self.connection.as_fd(), &packet.encode(), first, present)
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

/// Pages of one window to look at and to send.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) round: u32,
    pub(crate) region: usize,
    pub(crate) first: u64,
    pub(crate) wanted: u128,
    /// Those that read as zero; none: nobody has looked yet.
    pub(crate) zero: Option<u128>,
    /// Which of the encoders' encodings; of no meaning without encoders.
    pub(crate) encoding: u8,
    /// The encoder is to try them all.
    pub(crate) sample: bool,
    /// It is to be left as it is, and few such windows are to be on their way.
    pub(crate) raw: bool,
}

/// The pages of a window that are not zero, encoded.
pub(crate) struct Encoded {
    pub(crate) method: u8,
    pub(crate) bytes: Vec<u8>,
}

impl Shared {
    /// The zero pages of a window, if channels and encoders are to look for them.
    pub(crate) fn look(&self, window: &Window) -> u128 {
        if self.look_for_zeros { self.zero_mask(window) } else { 0 }
    }

    /// The zero pages of a window. A window that the region does not have has none; sending it fails.
    pub(crate) fn zero_mask(&self, window: &Window) -> u128 {
        let memory = &self.memory.regions()[window.region];
        // Run by run: reading between them might make pages in holes.
        runs(window.first, window.wanted).for_each(|run| memory.populate_read(run));
        memory.zero_mask(window.first, window.wanted).unwrap_or(0)
    }
}
