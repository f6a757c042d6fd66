//! The multifd channels, a thread each: read a packet, check it, decode it, put its pages where they belong.
use std::{
    collections::HashMap,
    io::{self, Read},
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
};

use transship_codec::{Decoder, Method as Codec};
use transship_memory::{PAGE, PageCount, PageNumber};
use transship_wire::qemu::{Block, GREETING_BYTES, Method, Name, PACKET_HEADER_BYTES, Packet, Pages, Step};

use super::barrier::Barrier;
use crate::{
    Error, Progress, Rule, cpu,
    door::Line,
    stream::store::{PageWriter, Store, write_pages},
    transport::Connection,
};

// Sections 6.2 and 6.3 of docs/qemu-stream.md.
const FLAGS: Range<usize> = 8..12;
/// In the last byte of the flags.
const DEVICE_STATE: u8 = 0x40;

/// All channel threads; dropping it ends them and closes their connections.
pub(super) struct Channels {
    lines: Vec<Connection>,
    threads: Vec<thread::JoinHandle<()>>,
    pub(super) barrier: Arc<Barrier>,
}

/// What the threads share.
pub(super) struct Shared {
    /// By name: number and length.
    blocks: HashMap<Name, (usize, u64)>,
    progress: Arc<Progress>,
}

impl Shared {
    pub(super) fn new(blocks: &[Block], progress: &Arc<Progress>) -> Arc<Self> {
        let numbered = blocks.iter().enumerate();
        let blocks = numbered.map(|(number, block)| (block.name.clone(), (number, block.used_bytes))).collect();
        Arc::new(Self { blocks, progress: Arc::clone(progress) })
    }
}

impl Channels {
    pub(super) fn start(lines: Vec<Line>, store: &Arc<dyn Store>, shared: &Arc<Shared>) -> Result<Self, Error> {
        let barrier = Arc::new(Barrier::new(lines.len()));
        let mut channels = Self { lines: Vec::new(), threads: Vec::new(), barrier };
        for (number, (connection, peer)) in lines.into_iter().enumerate() {
            let failed = |source| Error::Io { what: format!("start channel {number}"), source };
            channels.lines.push(connection.try_clone().map_err(failed)?);
            let channel = Channel {
                input: Input { number, connection, peer, position: GREETING_BYTES as u64 },
                writer: Arc::clone(store).writer()?,
                shared: Arc::clone(shared),
                barrier: Arc::clone(&channels.barrier),
                decoder: None,
                payload: Vec::new(),
            };
            let spawned = thread::Builder::new().name(format!("channel {number}")).spawn(move || channel.run());
            channels.threads.push(spawned.map_err(failed)?);
        }
        Ok(channels)
    }

    pub(super) fn count(&self) -> usize {
        self.lines.len()
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        self.barrier.close();
        self.lines.iter().for_each(Connection::shutdown);
        for thread in self.threads.drain(..) {
            // A panic in there has been printed; the reception fails by what is missing.
            let _ = thread.join();
        }
    }
}

struct Channel {
    input: Input,
    /// Where pages go, and the room that they are read into.
    writer: Box<dyn PageWriter>,
    shared: Arc<Shared>,
    barrier: Arc<Barrier>,
    /// The whole channel is one stream.
    decoder: OnlyDecoder,
    payload: Vec<u8>,
}

/// What comes on it.
struct Input {
    number: usize,
    connection: Connection,
    peer: String,
    /// Where in the channel the next byte is.
    position: u64,
}

impl Channel {
    fn run(mut self) {
        match self.receive() {
            Ok(()) => self.barrier.end(self.input.number),
            Err(error) => self.barrier.fail(error),
        }
    }

    /// Until the source closes the channel.
    fn receive(&mut self) -> Result<(), Error> {
        let mut laps = cpu::Laps::begin();
        while let Some(packet) = self.input.read_packet()? {
            let bytes = PACKET_HEADER_BYTES as u64 + u64::from(packet.payload_bytes());
            self.shared.progress.wire_bytes.fetch_add(bytes, Relaxed);
            if let Some(block) = packet.block() {
                self.barrier.note_pages(self.input.number);
                self.place(&packet, block)?;
            }
            self.shared.progress.cpu.channels.add(laps.next());
            if packet.sync {
                // Whatever comes behind the barrier, on any channel, comes after what is here.
                self.writer.finish()?;
                if !self.barrier.wait(self.input.number) {
                    return Ok(());
                }
            }
        }
        self.writer.finish()
    }

    fn place(&mut self, packet: &Pages, name: &Name) -> Result<(), Error> {
        let Some(&(block, bytes)) = self.shared.blocks.get(name) else {
            let what = format!("sent pages of block {:?}, which its main stream has not listed", &**name);
            return Err(self.input.broke(Rule::Bounds, what));
        };
        if let Some(beyond) = packet.normal().iter().chain(packet.zero()).find(|&&offset| offset >= bytes) {
            let what = format!("sent a page at {beyond:#x} of block {:?}, which has {bytes} bytes", &**name);
            return Err(self.input.broke(Rule::Bounds, what));
        }
        let normal = packet.normal();
        if !normal.is_empty() {
            self.read_pages(packet)?;
            let counts = write_pages(self.writer.as_mut(), block, normal)?;
            self.count(counts.normal, counts.zero);
        }
        // Whether or not the page came before: what the memory held is not known to be zero.
        for run in packet.zero().chunk_by(|one, next| one + PAGE == *next) {
            self.writer.clear(block, PageNumber::at(run[0]).run(PageCount::new(run.len() as u64)))?;
        }
        self.count(PageCount::ZERO, PageCount::new(packet.zero().len() as u64));
        Ok(())
    }

    /// Into the writer's room.
    fn read_pages(&mut self, packet: &Pages) -> Result<(), Error> {
        let Self { input, writer, payload, decoder, .. } = self;
        let pages = writer.room(packet.normal().len())?;
        if packet.method == Method::None {
            return input.fill_all(pages);
        }
        payload.resize(packet.payload_bytes() as usize, 0); // at most 1 MiB: the header was checked
        input.fill_all(payload)?;
        let decoded = input.decoder(decoder, packet.method)?.decode(payload, pages);
        decoded.map_err(|error| {
            let position = input.position;
            input.broke(
                Rule::Encoding,
                format!("sent a packet that can't be decoded, before offset {position:#x}: {error}"),
            )
        })
    }

    fn count(&self, normal: PageCount, zero: PageCount) {
        self.shared.progress.normal_pages.fetch_add(normal.get(), Relaxed);
        self.shared.progress.zero_pages.fetch_add(zero.get(), Relaxed);
    }
}

/// Of the method that a channel began with.
type OnlyDecoder = Option<(Method, Box<dyn Decoder>)>;

impl Input {
    fn read_packet(&mut self) -> Result<Option<Pages>, Error> {
        let mut header = [0; PACKET_HEADER_BYTES];
        // The flags come first: they say which header it is, and the shorter one may be all that comes.
        let (mut have, mut wanted) = (0, FLAGS.end);
        loop {
            match self.fill(&mut header[have..wanted])? {
                Filled::All => {}
                Filled::Ended if have == 0 => return Ok(None),
                Filled::Ended => return Err(self.broke(Rule::Stays, "has closed it within a packet")),
            }
            have = wanted;
            wanted = match Packet::read(&header[..have], self.position).map_err(|source| self.wrong(source))? {
                Step::Done { record: Packet::Pages(pages), used } => {
                    self.position += used as u64;
                    return Ok(Some(pages));
                }
                Step::Done { record: Packet::DeviceState(state), .. } => {
                    let what = format!(
                        "sent state of the device {:?}, which only QEMU can load; unplug that device, or move without \
                         transship",
                        &*state.name
                    );
                    return Err(self.broke(Rule::Abilities, what));
                }
                Step::More { at_least } if header[FLAGS.end - 1] & DEVICE_STATE != 0 => at_least,
                Step::More { .. } => PACKET_HEADER_BYTES,
            };
        }
    }

    fn decoder<'d>(&self, decoder: &'d mut OnlyDecoder, method: Method) -> Result<&'d mut dyn Decoder, Error> {
        if let Some((before, _)) = decoder
            && *before != method
        {
            let what = format!("changed its compression from {before:?} to {method:?}");
            return Err(self.broke(Rule::Encoding, what));
        }
        let codec = match method {
            Method::None => Codec::None,
            Method::Zlib => Codec::Zlib,
            Method::Zstd => Codec::Zstd,
            Method::Qatzip => Codec::Qatzip,
            Method::Qpl | Method::Uadk => {
                let what = format!(
                    "compresses with {method:?}, which transship does not know; set multifd-compression to zstd or none"
                );
                return Err(self.broke(Rule::Abilities, what));
            }
        };
        if decoder.is_none() {
            let made = codec
                .stock_decoder()
                .ok_or_else(|| self.broke(Rule::Abilities, "compresses with a method that has no streams"))?;
            *decoder = Some((method, made));
        }
        Ok(decoder.as_mut().expect("it was made above").1.as_mut())
    }

    fn fill_all(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        match self.fill(bytes)? {
            Filled::All => {
                self.position += bytes.len() as u64;
                Ok(())
            }
            Filled::Ended => Err(self.broke(Rule::Stays, "has closed it within a packet")),
        }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<Filled, Error> {
        let mut have = 0;
        while have < bytes.len() {
            match self.connection.read(&mut bytes[have..]) {
                Ok(0) if have == 0 => return Ok(Filled::Ended),
                Ok(0) => return Err(self.broke(Rule::Stays, "has closed it within a packet")),
                Ok(read) => have += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && have == 0 => return Ok(Filled::Ended),
                Err(source) => {
                    return Err(Error::Io {
                        what: format!("read from {} on channel {}", self.peer, self.number),
                        source,
                    });
                }
            }
        }
        Ok(Filled::All)
    }

    fn wrong(&self, source: transship_wire::Error) -> Error {
        Error::Wire { peer: format!("{} on channel {}", self.peer, self.number), source }
    }

    fn broke(&self, rule: Rule, what: impl std::fmt::Display) -> Error {
        Error::breach(&self.peer, rule, format!("on channel {}: {what}", self.number))
    }
}

/// How far it came.
enum Filled {
    All,
    /// Not a byte: the source has closed the channel.
    Ended,
}
