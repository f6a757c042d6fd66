//! One multifd channel, and the thread that scans, encodes and sends on it.
use std::{
    io::{self, Write},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use crossbeam_channel::Receiver;
use rustix::net::{RecvFlags, recv};
use transship_codec::{Encoder, Setting, ZLIB_STREAM_HEADER};
use transship_memory::{GuestMemory, PAGE_BYTES, PageRange};
use transship_wire::qemu::{Greeting, Method, Name, PACKET_HEADER_BYTES, Pages};

use crate::{
    Error, Progress,
    cpu::{self, Laps},
    pacer::Pacer,
    page_map::{PageMap, runs},
    transport::{Connection, STALL_TIMEOUT},
};

/// What all threads of a migration use.
pub(crate) struct Shared {
    pub(crate) memory: GuestMemory,
    /// By region: the names of their blocks.
    pub(crate) names: Vec<Name>,
    /// By region: pages that the destination was sent content for. All others read as zero there, once the first round is over.
    pub(crate) content: Vec<PageMap>,
    pub(crate) pacer: Option<Arc<Pacer>>,
    pub(crate) look_for_zeros: bool,
    pub(crate) compress: Setting,
    pub(crate) progress: Arc<Progress>,
    /// A channel has failed: the others need not go on.
    pub(crate) failed: AtomicBool,
    /// Packets are numbered over all channels.
    pub(crate) numbers: AtomicU64,
    pub(crate) peer: String,
}

/// What was done in a round.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sent {
    pub(crate) normal: u64,
    pub(crate) zero: u64,
    pub(crate) resent: u64,
    pub(crate) bytes: u64,
    pub(crate) cpu_seconds: f64,
}

impl Sent {
    pub(crate) fn add(&mut self, other: &Self) {
        self.normal += other.normal;
        self.zero += other.zero;
        self.resent += other.resent;
        self.bytes += other.bytes;
        self.cpu_seconds += other.cpu_seconds;
    }
}

/// A piece of a round: ranges only, no contents.
pub(crate) enum Batch {
    /// First page and wanted pages of windows, and which of these are zero where the main thread has looked for them.
    Pages { region: usize, windows: Vec<(u64, u128)>, zero: Option<Vec<u128>> },
    /// Pages that were sent, and became a hole.
    Hole { region: usize, range: PageRange },
}

impl Shared {
    /// The zero pages of a window, if they are to be looked for.
    pub(crate) fn look(&self, region: usize, first: u64, wanted: u128) -> Result<u128, Error> {
        let memory = &self.memory.regions()[region];
        // Run by run: reading between them might make pages in holes.
        runs(first, wanted).for_each(|run| memory.populate_read(run));
        if self.look_for_zeros { Ok(memory.zero_mask(first, wanted)?) } else { Ok(0) }
    }

    /// Counts the pages of a window that has been looked at. Returns those that hold something, and those of the zero ones that the
    /// destination was sent content for.
    pub(crate) fn settle(
        &self,
        region: usize,
        (first, wanted): (u64, u128),
        found: u128,
        sent: &mut Sent,
    ) -> (u128, u128) {
        let content = &self.content[region];
        let had = content.window(first);
        let (present, zero) = (wanted & !found, found & had);
        sent.normal += u64::from(present.count_ones());
        sent.zero += u64::from(found.count_ones());
        sent.resent += u64::from((present & had).count_ones());
        content.insert(first, present);
        content.remove(first, zero);
        let progress = &self.progress;
        progress.normal_pages.fetch_add(present.count_ones().into(), Relaxed);
        progress.zero_pages.fetch_add(found.count_ones().into(), Relaxed);
        let looked_at = u64::from(wanted.count_ones()) * PAGE_BYTES as u64;
        let _ = progress.round_left.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(looked_at)));
        (present, zero)
    }
}

/// One channel.
pub(crate) struct PacketSender {
    connection: Connection,
    number: u8,
    shared: Arc<Shared>,
    method: Method,
    /// None: pages go as they are, straight from guest memory.
    encoder: Option<Box<dyn Encoder>>,
    /// Put in front of the first payload.
    stream_header: &'static [u8],
    copy: Vec<u8>,
    encoded: Vec<u8>,
}

impl PacketSender {
    /// Greets at once: until it has the first bytes of a connection, a destination does nothing else at all.
    pub(crate) fn greet(
        connection: Connection,
        number: u8,
        uuid: [u8; 16],
        shared: Arc<Shared>,
    ) -> Result<Self, Error> {
        let (method, encoder, stream_header): (_, _, &[u8]) = match shared.compress.method() {
            transship_codec::Method::None => (Method::None, None, &[]),
            transship_codec::Method::Zlib => (Method::Zlib, Some(shared.compress.encoder()), &ZLIB_STREAM_HEADER),
            transship_codec::Method::Zstd => (Method::Zstd, Some(shared.compress.encoder()), &[]),
            other => {
                return Err(Error::Unfit(format!(
                    "{other} is nothing that is sent to a QEMU; take none, zlib or zstd"
                )));
            }
        };
        let mut sender =
            Self { connection, number, shared, method, encoder, stream_header, copy: Vec::new(), encoded: Vec::new() };
        sender.write(&Greeting { uuid, channel: number }.encode(), &mut Sent::default())?;
        Ok(sender)
    }

    /// Sends batches until there are no more, then this channel's half of a barrier.
    pub(crate) fn run(&mut self, batches: &Receiver<Batch>) -> Result<Sent, Error> {
        let begin = cpu::thread_seconds();
        let result = self.send_all(batches);
        if result.is_err() {
            self.shared.failed.store(true, Relaxed);
        }
        result.map(|sent| Sent { cpu_seconds: cpu::thread_seconds() - begin, ..sent })
    }

    fn send_all(&mut self, batches: &Receiver<Batch>) -> Result<Sent, Error> {
        let shared = Arc::clone(&self.shared);
        let mut sent = Sent::default();
        let mut laps = Laps::begin();
        for batch in batches {
            if shared.failed.load(Relaxed) {
                break; // the main thread ends the session
            }
            match batch {
                Batch::Hole { region, range } => {
                    for (first, pages) in shared.content[region].take(range) {
                        self.send_window(region, first, 0, pages, &mut sent)?;
                    }
                }
                Batch::Pages { region, windows, zero } => {
                    for (index, (first, wanted)) in windows.into_iter().enumerate() {
                        let (present, zero) = match &zero {
                            // The main stream tells the zero ones.
                            Some(zero) => (shared.settle(region, (first, wanted), zero[index], &mut sent).0, 0),
                            None => {
                                let found = shared.look(region, first, wanted)?;
                                shared.settle(region, (first, wanted), found, &mut sent)
                            }
                        };
                        self.send_window(region, first, present, zero, &mut sent)?;
                    }
                }
            }
            shared.progress.cpu.channels.add(laps.next());
        }
        sent.bytes += self.barrier()?;
        Ok(sent)
    }

    /// Sends this channel's half of a barrier: the destination reads on here when it has come to the other halves.
    pub(crate) fn barrier(&mut self) -> Result<u64, Error> {
        let mut sent = Sent::default();
        let number = self.shared.numbers.fetch_add(1, Relaxed);
        self.write(&Pages::barrier().numbered(number).encode(), &mut sent)?;
        Ok(sent.bytes)
    }

    fn send_window(
        &mut self,
        region: usize,
        first: u64,
        present: u128,
        zero: u128,
        sent: &mut Sent,
    ) -> Result<(), Error> {
        if present | zero == 0 {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let offsets = |pages| -> Vec<u64> {
            runs(first, pages).flat_map(|run| run.first..run.end()).map(|page| page * PAGE_BYTES as u64).collect()
        };
        let (normal, zeros) = (offsets(present), offsets(zero));
        let header = |length| {
            let number = shared.numbers.fetch_add(1, Relaxed);
            Pages::new(shared.names[region].clone(), &normal, &zeros, self.method, length).numbered(number)
        };
        let memory = &shared.memory.regions()[region];
        if present == 0 {
            let header = header(0).encode();
            return self.write(&header, sent);
        }
        let Some(encoder) = &mut self.encoder else {
            self.book(PACKET_HEADER_BYTES + normal.len() * PAGE_BYTES, sent);
            return memory
                .send_window(self.connection.as_fd(), &header(0).encode(), first, present)
                .map_err(|source| self.failed(source));
        };
        // A copy: the guest writes meanwhile, and a compressor may misbehave on input that changes.
        self.copy.clear();
        memory.copy_out(first, present, &mut self.copy)?;
        // Whether it has become shorter or not: a QEMU takes nothing else here.
        let _ = encoder.encode(&self.copy, &mut self.encoded);
        let stream_header = std::mem::take(&mut self.stream_header);
        let length = (stream_header.len() + self.encoded.len()) as u32; // hardly longer than 128 pages
        let mut packet = header(length).encode().to_vec();
        packet.extend(stream_header);
        packet.extend(&self.encoded);
        let encoding = &shared.progress.encoding;
        encoding.submitted.fetch_add(1, Relaxed);
        encoding.bytes_in.fetch_add(self.copy.len() as u64, Relaxed);
        encoding.bytes_out.fetch_add(self.encoded.len() as u64, Relaxed);
        self.write(&packet, sent)
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

    /// The destination says nothing on a channel, and keeps it open until it has everything. One that knows nothing of this channel lets it
    /// drop, and what was sent on it would be missing.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        let mut byte = [0];
        match recv(self.connection.as_fd(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            Ok(_) | Err(_) => Err(self.closed()),
        }
    }

    fn closed(&self) -> Error {
        let what = format!(
            "has closed channel {}: it has ended or refuses what it was sent, and its own output says why; are its multifd-channels, \
             multifd-compression and uuid the same?",
            self.number
        );
        Error::Protocol { peer: self.shared.peer.clone(), what }
    }

    fn failed(&self, source: io::Error) -> Error {
        let Self { number, shared, .. } = self;
        match source.kind() {
            io::ErrorKind::WouldBlock => Error::Protocol {
                peer: shared.peer.clone(),
                what: format!("has taken nothing from channel {number} for {} s", STALL_TIMEOUT.as_secs()),
            },
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.closed(),
            _ => Error::Io { what: format!("send pages to {} on channel {number}", shared.peer), source },
        }
    }
}
