//! The data connections of a destination, a thread each: read a packet, check it, put its pages into place.
use std::{
    io::{self, Read, Write},
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
};

use crossbeam_channel::{Receiver, Sender};
use transship_codec::Method;
use transship_memory::{PageCount, PageRange, WindowPages};
use transship_wire::{PACKET_BYTES, Packet};

use super::{
    arriving::ArrivingMemory,
    decoding::{Job, Lane, Origin, Pages, Unpacker},
    event::{Arrived, ChannelEvent},
};
use crate::{Error, Progress, Rule, cpu, transport::Connection};

/// Pages that are read from the socket before they are written into place: 256 KiB stay in a core's second-level cache.
const PAGES_PER_READ: PageCount = PageCount::new(64);

/// All channel threads; dropping it ends them.
pub(super) struct Channels {
    lines: Vec<Connection>,
    threads: Vec<thread::JoinHandle<()>>,
    events: Receiver<ChannelEvent>,
}

impl Channels {
    pub(super) fn start(
        connections: Vec<(Connection, String)>,
        lanes: Vec<Lane>,
        arriving: &Arc<ArrivingMemory>,
        (events, incoming): (Sender<ChannelEvent>, Receiver<ChannelEvent>),
    ) -> Result<Self, Error> {
        let mut channels = Self { lines: Vec::new(), threads: Vec::new(), events: incoming };
        for (number, ((connection, peer), lane)) in connections.into_iter().zip(lanes).enumerate() {
            let failed = |source| Error::Io { what: format!("start data channel {number}"), source };
            channels.lines.push(connection.try_clone().map_err(failed)?);
            let receiver = PageReceiver {
                connection,
                peer,
                number,
                arriving: Arc::clone(arriving),
                buffer: Vec::new(),
                lane,
                unpacker: Unpacker::default(),
            };
            let events = events.clone();
            let thread = thread::Builder::new()
                .name(format!("channel {number}"))
                .spawn(move || receiver.run(&events))
                .map_err(failed)?;
            channels.threads.push(thread);
        }
        Ok(channels)
    }

    pub(super) fn count(&self) -> usize {
        self.lines.len()
    }

    /// What their threads and the decoders have to say.
    pub(super) fn events(&self) -> &Receiver<ChannelEvent> {
        &self.events
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        self.lines.iter().for_each(Connection::shutdown);
        // A thread may be waiting for room for an event, which nobody makes any more.
        self.events = crossbeam_channel::never();
        for thread in self.threads.drain(..) {
            // A panic in there has been printed; the session fails by what is missing.
            let _ = thread.join();
        }
    }
}

struct PageReceiver {
    connection: Connection,
    peer: String,
    number: usize,
    arriving: Arc<ArrivingMemory>,
    buffer: Vec<u8>,
    lane: Lane,
    unpacker: Unpacker,
}

/// What came in a round on one channel.
#[derive(Default)]
struct Received {
    packets: u64,
    arrived: Arrived,
    /// Of the pages that were lent: those that turned out to be zero. They count as pages until the round ends.
    found: u64,
}

impl Received {
    /// What came when all of it is in place.
    fn settled(self) -> Arrived {
        let Self { mut arrived, found, .. } = self;
        arrived.pages -= found;
        arrived.zero += found;
        arrived.lent -= PageCount::new(found).bytes();
        arrived
    }

    fn count(&mut self, present: u128, zero: u128, progress: &Progress) {
        self.arrived.pages += u64::from(present.count_ones());
        self.arrived.zero += u64::from(zero.count_ones());
        progress.normal_pages.fetch_add(present.count_ones().into(), Relaxed);
        progress.zero_pages.fetch_add(zero.count_ones().into(), Relaxed);
    }
}

impl PageReceiver {
    fn run(mut self, events: &Sender<ChannelEvent>) {
        let mut cpu_before = cpu::thread_seconds();
        for round in 0.. {
            let event = match self.receive_round(round) {
                Ok(received) => {
                    let arrived = received.settled();
                    let cpu_now = cpu::thread_seconds();
                    let cpu_seconds = cpu_now - std::mem::replace(&mut cpu_before, cpu_now);
                    ChannelEvent::RoundEnd { round, arrived, cpu_seconds }
                }
                Err(error) => ChannelEvent::Failed(error),
            };
            let failed = matches!(event, ChannelEvent::Failed(_));
            if events.send(event).is_err() || failed {
                return;
            }
        }
    }

    fn receive_round(&mut self, round: u32) -> Result<Received, Error> {
        let mut received = Received::default();
        let mut laps = cpu::Laps::begin();
        loop {
            let mut head = [0; PACKET_BYTES];
            self.fill(&mut head)?;
            let packet = Packet::decode(&head).map_err(|source| Error::Wire { peer: self.peer.clone(), source })?;
            let bytes = (PACKET_BYTES + packet.payload_bytes()) as u64;
            received.arrived.bytes += bytes;
            self.arriving.progress.wire_bytes.fetch_add(bytes, Relaxed);
            self.check_round(round, &packet)?;
            match packet {
                Packet::Pages { region, first, present, zero, .. } => {
                    let named = WindowPages::new(first, present | zero);
                    self.arriving.check(region, named.reach()).map_err(|what| self.broke(Rule::Bounds, &what))?;
                    let window = named.with(present);
                    self.receive_pages(region, window)?;
                    self.arriving.clear_window(region, window.with(zero))?;
                    received.count(present, zero, &self.arriving.progress);
                }
                Packet::Encoded { region, first, present, zero, method, bytes, .. } => {
                    let named = WindowPages::new(first, present | zero);
                    self.arriving.check(region, named.reach()).map_err(|what| self.broke(Rule::Bounds, &what))?;
                    let (encoding, packet) = (method, received.packets);
                    let method = self.method(encoding, packet)?;
                    let mut encoded = self.lane.buffer();
                    encoded.resize(bytes as usize, 0); // bounded by the header
                    self.fill(&mut encoded)?;
                    self.unpack(Job { region, first, present, zero, pages: Pages::Encoded(method, encoded), packet })?;
                    received.count(present, zero, &self.arriving.progress);
                }
                Packet::Hole { region, first, count, .. } => {
                    let pages = PageRange::new(first, count);
                    self.arriving.check(region, pages).map_err(|what| self.broke(Rule::Bounds, &what))?;
                    self.arriving.clear_range(region, pages)?;
                    received.arrived.zero += count;
                }
                Packet::Lent { .. } => self.take_lent(&packet, &mut received)?,
                Packet::Slot { .. } => self.take_slot(&packet, &mut received)?,
                Packet::RoundEnd { packets, .. } if packets == received.packets => {
                    received.found += self.lane.wait()?;
                    return Ok(received);
                }
                Packet::RoundEnd { packets, .. } => {
                    let what = format!(
                        "announced {packets} packets at the end of round {round}, but {} came",
                        received.packets
                    );
                    return Err(self.broke(Rule::Count, &what));
                }
            }
            received.packets += 1;
            self.arriving.progress.cpu.channels.add(laps.next());
        }
    }

    /// Pages that are read here.
    fn take_lent(&mut self, packet: &Packet, received: &mut Received) -> Result<(), Error> {
        let Packet::Lent { region, first, wanted, zero, look, .. } = *packet else { return Ok(()) };
        let named = WindowPages::new(first, wanted | zero);
        self.arriving.check(region, named.reach()).map_err(|what| self.broke(Rule::Bounds, &what))?;
        if !self.arriving.is_lent(region) {
            return Err(self.broke(Rule::Bounds, &format!("named pages of region {region}, which was not lent")));
        }
        let (pages, packet) = (Pages::Lent { look }, received.packets);
        received.found += self.unpack(Job { region, first, present: wanted, zero, pages, packet })?;
        received.count(0, zero, &self.arriving.progress); // of the others whoever reads them
        received.arrived.pages += named.with(wanted).count().get();
        received.arrived.lent += named.with(wanted).bytes();
        Ok(())
    }

    /// Pages in a slot, which the source may fill again then.
    fn take_slot(&mut self, packet: &Packet, received: &mut Received) -> Result<(), Error> {
        let Packet::Slot { region, first, present, zero, slot, .. } = *packet else { return Ok(()) };
        let named = WindowPages::new(first, present | zero);
        self.arriving.check(region, named.reach()).map_err(|what| self.broke(Rule::Bounds, &what))?;
        if !self.arriving.has_slot(slot) {
            return Err(self.broke(Rule::Bounds, &format!("named slot {slot}, which there is not")));
        }
        let window = named.with(present);
        let written = self.arriving.write_slot(region, window, (self.number, slot));
        written.map_err(|error| self.unread(error))?;
        self.connection.write_all(&[slot]).map_err(|error| self.unread(error))?;
        self.arriving.clear_window(region, named.with(zero))?;
        received.count(present, zero, &self.arriving.progress);
        received.arrived.lent += window.bytes();
        Ok(())
    }

    fn check_round(&self, expected: u32, packet: &Packet) -> Result<(), Error> {
        let (Packet::Pages { round, .. }
        | Packet::Encoded { round, .. }
        | Packet::Hole { round, .. }
        | Packet::RoundEnd { round, .. }
        | Packet::Lent { round, .. }
        | Packet::Slot { round, .. }) = *packet;
        if round != expected {
            return Err(self.broke(Rule::Order, &format!("sent a packet of round {round} in round {expected}")));
        }
        if !self.arriving.is_released(round) {
            return Err(self.broke(Rule::Order, &format!("began round {round} before the previous round was done")));
        }
        Ok(())
    }

    fn method(&self, number: u8, packet: u64) -> Result<Method, Error> {
        Method::from_number(number)
            .filter(|method| *method != Method::None)
            .ok_or_else(|| self.broke(Rule::Encoding, &format!("sent packet {packet} in unknown encoding {number}")))
    }

    /// By a decoder, or right here if all are busy. How many pages were found to be zero here.
    fn unpack(&mut self, job: Job) -> Result<u64, Error> {
        let Err(job) = self.lane.try_hand_over(job) else { return Ok(0) };
        let unpacked = self.unpacker.unpack(&job, &self.arriving, &self.origin());
        if let Pages::Encoded(_, bytes) = job.pages {
            self.lane.give_back(bytes);
        }
        unpacked
    }

    fn origin(&self) -> Origin {
        Origin { peer: self.peer.clone(), channel: self.number }
    }

    fn receive_pages(&mut self, region: u16, mut present: WindowPages) -> Result<(), Error> {
        if self.arriving.receives(region, present)
            && let Some(socket) = self.connection.in_clear()
        {
            return self.arriving.receive(region, present, socket).map_err(|error| self.unread(error));
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(PAGES_PER_READ.buffer_bytes(), 0);
        while !present.is_empty() {
            let piece = present.lowest(PAGES_PER_READ);
            let bytes = &mut buffer[..piece.bytes() as usize];
            self.fill(bytes)?;
            self.arriving.write(region, piece, bytes)?;
            present = present.without(piece.mask);
        }
        self.buffer = buffer;
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.connection.read_exact(bytes).map_err(|source| self.unread(source))
    }

    fn unread(&self, source: io::Error) -> Error {
        let source = match source.downcast::<transship_memory::Error>() {
            // The pages have come, and memory for them can't be had.
            Ok(memory) => return memory.into(),
            Err(source) => source,
        };
        match source.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => self.broke(Rule::Stays, "has closed it"),
            _ => Error::Io { what: format!("read from {} on data channel {}", self.peer, self.number), source },
        }
    }

    fn broke(&self, rule: Rule, what: &str) -> Error {
        Error::breach(&self.peer, rule, format!("on data channel {}: {what}", self.number))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::Write,
        os::unix::net::UnixStream,
        time::{Duration, Instant},
    };

    use crossbeam_channel::bounded;
    use transship_memory::GuestMemory;

    use super::{super::decoding::Decoders, *};
    use crate::intake::Intake;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// The threads fill their queue, and more, while nobody reads it.
    #[test]
    fn threads_that_wait_for_room_for_an_event_end() {
        const ROUNDS: u32 = 8;
        let arriving = Arc::new(ArrivingMemory::new(Intake::of_zeros(GuestMemory::new(Vec::new())), Progress::new()));
        arriving.release_round(ROUNDS);
        let (events, incoming) = bounded(2);
        let origins = vec![Origin { peer: "test".into(), channel: 0 }];
        let (decoders, lanes) = Decoders::start(origins, &arriving, &events).unwrap();
        let (mut source, here) = UnixStream::pair().unwrap();
        let connections = vec![(Connection::Unix(here), "test".into())];
        let channels = Channels::start(connections, lanes, &arriving, (events, incoming)).unwrap();
        (0..ROUNDS).for_each(|round| source.write_all(&Packet::RoundEnd { round, packets: 0 }.encode()).unwrap());
        // All are sent, so a full queue means that the thread waits for room, or is about to.
        let begin = Instant::now();
        while !channels.events().is_full() {
            assert!(begin.elapsed() < PATIENCE);
            thread::yield_now();
        }
        let (done, ended) = bounded(1);
        thread::spawn(move || {
            drop((channels, decoders));
            let _ = done.send(());
        });
        ended.recv_timeout(PATIENCE).unwrap();
    }
}
