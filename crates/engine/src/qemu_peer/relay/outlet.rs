//! Packets go out: by way of the encoders, or past them, into one ring, from which each data connection of the link
//! takes what is next.
//!
//! What is small, and all of it without encoders, goes past them: there is nothing to win, and it may be an answer that
//! somebody waits for.
use std::{
    io::{self, Write},
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
    },
    time::Duration,
};

use transship_codec::Setting;
use transship_memory::{PAGE_BYTES, PageCount};
use transship_ring::{Parker, Results, Worker};
use transship_wire::relay::{Content, Packet};

use super::{RelayOptions, buffers::Buffer, fate::lock, session::RelaySession};
use crate::{
    Compress, Error,
    channels::{
        Encoded,
        coder::{Coder, EncoderSetup, Tools, Work},
        dispatcher::{Chosen, Dispatcher},
    },
    control::TICK,
    cpu::Laps,
    transport::{Connection, sending_failed},
};

/// Fewer bytes are not encoded.
const ENCODED_MIN: usize = 512;
/// How long a chunk that is to go as it is waits until its encoding is chosen anew.
const CHOOSE_AGAIN: Duration = Duration::from_millis(5);

/// Bytes of one of QEMU's connections.
#[derive(Debug)]
pub(super) struct Chunk {
    connection: u16,
    sequence: u64,
    bytes: Buffer,
    gives_end: bool,
    chosen: Chosen,
}

impl Chunk {
    pub(super) fn new(connection: u16, sequence: u64, bytes: Buffer, gives_end: bool) -> Self {
        Self { connection, sequence, bytes, gives_end, chosen: Chosen::default() }
    }

    fn raw_packet(self) -> Ready {
        let content = Content::Raw { bytes: self.bytes.len() as u32, gives_end: self.gives_end };
        Ready {
            packet: self.packet(content),
            pages: self.pages(),
            chosen: self.chosen,
            payload: Payload::AsItIs(self.bytes),
        }
    }

    fn packet(&self, content: Content) -> Packet {
        Packet { connection: self.connection, sequence: self.sequence, content }
    }

    /// The model of what pays counts in pages.
    fn pages(&self) -> PageCount {
        PageCount::holding(self.bytes.len() as u64)
    }
}

/// What a data connection gets.
#[derive(Debug)]
struct Ready {
    packet: Packet,
    payload: Payload,
    pages: PageCount,
    chosen: Chosen,
}

/// What follows a packet's header.
#[derive(Debug)]
enum Payload {
    Nothing,
    AsItIs(Buffer),
    Encoded(Vec<u8>),
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Nothing => &[],
            Self::AsItIs(bytes) => bytes,
            Self::Encoded(bytes) => bytes,
        }
    }
}

/// Where packets go out. When it is dropped, its threads end with what they have.
pub(super) struct Outlet {
    session: Arc<RelaySession>,
    results: Results<Ready>,
    shared: Arc<Shared>,
    entry: Option<Mutex<Entry>>,
    /// Without encoders this stands for them: while it lives, there may be more to take.
    _no_encoder: Option<Mutex<Worker<Chunk, Ready>>>,
}

/// Where chunks are handed to encoders. Whoever reads from a QEMU takes it for as long as all encoders are busy: then
/// the others would wait as well.
struct Entry {
    dispatcher: Dispatcher<Chunk>,
    /// Chunks that go as they are by choice.
    raw_handed_over: u64,
}

struct Shared {
    tools: Tools,
    /// Chunks that went as they are by choice and were sent, and where it is waited for these.
    raw_sent: AtomicU64,
    fewer: Parker,
}

impl Outlet {
    /// Starts the encoders and a thread for each data connection.
    pub(super) fn start(
        options: Option<&RelayOptions>,
        lines: Vec<Connection>,
        session: &Arc<RelaySession>,
    ) -> Result<Arc<Self>, Error> {
        let (compress, encoders) =
            options.map_or((Compress::Fixed(Setting::NONE), 1), |options| (options.compress, options.encoders));
        let setup = EncoderSetup::new(compress, encoders, lines.len());
        let (submitter, mut workers, results) = setup.pool();
        let shared = Arc::new(Shared {
            tools: setup.tools(&session.progress),
            raw_sent: AtomicU64::new(0),
            fewer: Parker::new(),
        });
        for (number, line) in lines.into_iter().enumerate() {
            let (results, shared) = (results.clone(), Arc::clone(&shared));
            session
                .spawn(&format!("link {number}"), move |session| send_all(line, number, &results, &shared, session))?;
        }
        let (mut entry, mut no_encoder) = (None, None);
        if setup.is_empty() {
            no_encoder = workers.pop().map(Mutex::new);
        } else {
            for (number, worker) in workers.into_iter().enumerate() {
                let coder = setup.coder(&shared.tools, true);
                let work = ChunkEncoder { session: Arc::clone(session), sample: None };
                session.spawn(&format!("encoder {number}"), move |_| {
                    coder.run(worker, work);
                    Ok(())
                })?;
            }
            let dispatcher = Dispatcher::new(submitter, &setup, &shared.tools);
            entry = Some(Mutex::new(Entry { dispatcher, raw_handed_over: 0 }));
        }
        Ok(Arc::new(Self { session: Arc::clone(session), results, shared, entry, _no_encoder: no_encoder }))
    }

    /// Sends a chunk. If the session is broken it may be dropped.
    pub(super) fn send(&self, mut chunk: Chunk) -> Result<(), Error> {
        let Some(entry) = self.entry.as_ref().filter(|_| chunk.bytes.len() >= ENCODED_MIN) else {
            self.pass(chunk.raw_packet());
            return Ok(());
        };
        let mut entry = lock(entry);
        if entry.choose(&mut chunk.chosen, &self.shared, &self.session) {
            drop(entry);
            self.pass(chunk.raw_packet());
            return Ok(());
        }
        match entry.dispatcher.try_submit(chunk)? {
            Some(chunk) => entry.dispatcher.submit(chunk, || Ok(!self.session.fate.is_broken())),
            None => Ok(()),
        }
    }

    /// Says that nothing follows in this direction of a connection.
    pub(super) fn end(&self, connection: u16, sequence: u64) -> Result<(), Error> {
        let packet = Packet { connection, sequence, content: Content::End };
        self.pass(Ready { packet, payload: Payload::Nothing, pages: PageCount::ZERO, chosen: Chosen::default() });
        Ok(())
    }

    fn pass(&self, mut ready: Ready) {
        while !self.session.fate.is_broken() {
            match self.results.inject_timeout(ready, TICK) {
                Ok(()) => return,
                Err(back) => ready = back,
            }
        }
    }
}

impl Entry {
    /// Chooses the encoding of a chunk, if there is a choice. True: it goes past the encoders.
    fn choose(&mut self, chosen: &mut Chosen, shared: &Shared, session: &RelaySession) -> bool {
        while let Some(flow) = self.dispatcher.choose(chosen) {
            let few = || (self.raw_handed_over - shared.raw_sent.load(SeqCst) < flow.most_alone).then_some(());
            if session.fate.is_broken() || shared.fewer.wait_timeout(CHOOSE_AGAIN, few).is_some() {
                self.raw_handed_over += 1;
                return !chosen.sample;
            }
        }
        false
    }
}

/// A data connection's thread. After a failure it takes on, and drops what it takes, so that nobody waits for room for
/// ever.
fn send_all(
    mut line: Connection,
    number: usize,
    results: &Results<Ready>,
    shared: &Shared,
    session: &RelaySession,
) -> Result<(), Error> {
    let mut laps = Laps::begin();
    while let Some(ready) = results.next_result() {
        let raw = ready.chosen.raw;
        if !session.fate.is_broken()
            && let Err(error) = send(&mut line, &ready, shared, session)
        {
            session.fail(failed(error, number, session), None);
        }
        if let Payload::Encoded(bytes) = ready.payload {
            let _ = shared.tools.spare.push(bytes); // full: one buffer less to keep
        }
        if raw {
            shared.raw_sent.fetch_add(1, SeqCst);
            shared.fewer.wake_one();
        }
        session.progress.cpu.channels.add(laps.next());
    }
    Ok(())
}

fn send(line: &mut Connection, ready: &Ready, shared: &Shared, session: &RelaySession) -> io::Result<()> {
    let header = ready.packet.encode();
    if ready.payload.len() <= PAGE_BYTES {
        line.write_all(&[&header[..], &ready.payload].concat())?;
    } else {
        line.write_all(&header)?;
        line.write_all(&ready.payload)?;
    }
    let length = (header.len() + ready.payload.len()) as u64;
    session.counts.link_out.fetch_add(length, Relaxed);
    session.progress.wire_bytes.fetch_add(length, Relaxed);
    if ready.pages > PageCount::ZERO {
        shared.tools.meters.sent(ready.chosen.encoding, ready.pages, ready.pages, length);
    }
    let (method, bytes) = match ready.packet.content {
        Content::Raw { bytes, .. } => (0, bytes),
        Content::Encoded { bytes, method, .. } => (usize::from(method), bytes),
        Content::End => return Ok(()),
    };
    let (given, made) = &session.counts.methods[method];
    given.fetch_add(bytes.into(), Relaxed);
    made.fetch_add(ready.payload.len() as u64, Relaxed);
    Ok(())
}

fn failed(source: io::Error, number: usize, session: &RelaySession) -> Error {
    session
        .link_failed(source, |source| sending_failed(&session.fate.peer, &format!("data connection {number}"), source))
}

/// What an encoder's thread makes of a chunk.
struct ChunkEncoder {
    session: Arc<RelaySession>,
    /// The bytes of the last chunk, if they are wanted.
    sample: Option<Vec<u8>>,
}

impl Work<Chunk, Ready> for ChunkEncoder {
    fn make(&mut self, chunk: Chunk, coder: &mut Coder) -> Ready {
        self.sample = chunk.chosen.sample.then(|| chunk.bytes.to_vec());
        let encoded = match self.session.fate.is_broken() {
            true => None,
            false => coder.encode(usize::from(chunk.chosen.encoding), &chunk.bytes),
        };
        let Some(Encoded { method, bytes: payload }) = encoded else { return chunk.raw_packet() };
        let bytes = chunk.bytes.len() as u32; // at most MAX_BYTES
        let content = Content::Encoded { bytes, gives_end: chunk.gives_end, method, payload: payload.len() as u32 };
        let payload = Payload::Encoded(payload);
        Ready { packet: chunk.packet(content), pages: chunk.pages(), chosen: chunk.chosen, payload }
    }

    fn sample(&self) -> Option<&[u8]> {
        self.sample.as_deref()
    }
}
