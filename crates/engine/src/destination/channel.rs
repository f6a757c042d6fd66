//! The data connections of a destination, a thread each: read a packet, check it, put its pages into place.
use std::{
    io::{self, Read},
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
};

use crossbeam_channel::Sender;
use transship_memory::PageRange;
use transship_wire::{PACKET_BYTES, PAGE_BYTES, PAGES_PER_PACKET, Packet};

use super::place::Place;
use crate::{Error, cpu, transport::Connection};

/// Pages that are read from the socket before they are written into place: 256 KiB stay in a core's second-level cache.
const PAGES_PER_READ: u32 = 64;

/// What a channel's thread tells the main thread.
pub(super) enum ChannelEvent {
    RoundEnd { round: u32, pages: u64, zero: u64, bytes: u64, cpu_seconds: f64 },
    Failed(Error),
}

/// All channel threads; dropping it ends them.
pub(super) struct Channels {
    lines: Vec<Connection>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Channels {
    pub(super) fn start(
        connections: Vec<(Connection, String)>,
        place: &Arc<Place>,
        events: &Sender<ChannelEvent>,
    ) -> Result<Self, Error> {
        let mut channels = Self { lines: Vec::new(), threads: Vec::new() };
        for (number, (connection, peer)) in connections.into_iter().enumerate() {
            let failed = |source| Error::Io { what: format!("start data channel {number}"), source };
            channels.lines.push(connection.try_clone().map_err(failed)?);
            let receiver = PageReceiver { connection, peer, number, place: Arc::clone(place), buffer: Vec::new() };
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
}

impl Drop for Channels {
    fn drop(&mut self) {
        self.lines.iter().for_each(Connection::shutdown);
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
    place: Arc<Place>,
    buffer: Vec<u8>,
}

/// What came in a round on one channel.
#[derive(Default)]
struct Received {
    packets: u64,
    pages: u64,
    zero: u64,
    bytes: u64,
}

impl PageReceiver {
    fn run(mut self, events: &Sender<ChannelEvent>) {
        self.buffer = vec![0; PAGES_PER_READ as usize * PAGE_BYTES];
        let mut cpu_before = cpu::thread_seconds();
        for round in 0.. {
            let event = match self.receive_round(round) {
                Ok(Received { pages, zero, bytes, .. }) => {
                    let cpu_now = cpu::thread_seconds();
                    let cpu_seconds = cpu_now - std::mem::replace(&mut cpu_before, cpu_now);
                    ChannelEvent::RoundEnd { round, pages, zero, bytes, cpu_seconds }
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
        loop {
            let mut head = [0; PACKET_BYTES];
            self.fill(&mut head)?;
            let packet = Packet::decode(&head).map_err(|source| Error::Wire { peer: self.peer.clone(), source })?;
            received.bytes += (PACKET_BYTES + packet.payload_bytes()) as u64;
            self.place.progress.wire_bytes.fetch_add((PACKET_BYTES + packet.payload_bytes()) as u64, Relaxed);
            self.check_round(round, &packet)?;
            match packet {
                Packet::Pages { region, first, present, zero, .. } => {
                    let end = first + PAGES_PER_PACKET - u64::from((present | zero).leading_zeros());
                    self.place.region(region, first, end).map_err(|what| self.broke(what))?;
                    self.receive_pages(region, first, present)?;
                    self.place.clear_window(region, first, zero)?;
                    received.pages += u64::from(present.count_ones());
                    received.zero += u64::from(zero.count_ones());
                    self.place.progress.normal_pages.fetch_add(present.count_ones().into(), Relaxed);
                    self.place.progress.zero_pages.fetch_add(zero.count_ones().into(), Relaxed);
                }
                Packet::Hole { region, first, count, .. } => {
                    let end = first.saturating_add(count);
                    self.place.region(region, first, end).map_err(|what| self.broke(what))?;
                    self.place.clear_range(region, PageRange::new(first, count))?;
                    received.zero += count;
                }
                Packet::RoundEnd { packets, .. } if packets == received.packets => return Ok(received),
                Packet::RoundEnd { packets, .. } => {
                    let what = format!("ended round {round} with {packets} packets where {} came", received.packets);
                    return Err(self.broke(what));
                }
            }
            received.packets += 1;
        }
    }

    fn check_round(&self, expected: u32, packet: &Packet) -> Result<(), Error> {
        let (Packet::Pages { round, .. } | Packet::Hole { round, .. } | Packet::RoundEnd { round, .. }) = *packet;
        if round != expected {
            return Err(self.broke(format!("sent a packet of round {round} in round {expected}")));
        }
        if !self.place.is_released(round) {
            return Err(self.broke(format!("began round {round} before the one before it was done")));
        }
        Ok(())
    }

    fn receive_pages(&mut self, region: u16, first: u64, mut present: u128) -> Result<(), Error> {
        let mut buffer = std::mem::take(&mut self.buffer);
        while present != 0 {
            let piece = lowest_bits(present, PAGES_PER_READ);
            let bytes = &mut buffer[..piece.count_ones() as usize * PAGE_BYTES];
            self.fill(bytes)?;
            self.place.write(region, first, piece, bytes)?;
            present &= !piece;
        }
        self.buffer = buffer;
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.connection.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => self.broke("has closed it".into()),
            _ => Error::Io { what: format!("read from {} on data channel {}", self.peer, self.number), source },
        })
    }

    fn broke(&self, what: String) -> Error {
        Error::Protocol { peer: self.peer.clone(), what: format!("on data channel {}: {what}", self.number) }
    }
}

/// The lowest `count` set bits.
fn lowest_bits(bits: u128, count: u32) -> u128 {
    let mut rest = bits;
    for _ in 0..count.min(bits.count_ones()) {
        rest &= rest - 1;
    }
    bits & !rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_bits_are_taken_first() {
        assert_eq!(lowest_bits(u128::MAX, 64), u64::MAX.into());
        assert_eq!(lowest_bits(0b1010_1000, 2), 0b0010_1000);
        assert_eq!(lowest_bits(1 << 127, 64), 1 << 127);
        assert_eq!(lowest_bits(0, 64), 0);
    }
}
