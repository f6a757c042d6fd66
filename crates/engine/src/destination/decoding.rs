//! Decoders beside the channels of a destination.
//!
//! The source's model turned round: a channel hands packets to decoders through a bounded ring to each, looks at all of
//! them for a free place, and when there is none decodes by itself, so it never waits for one. A decoder puts the pages
//! into place; nothing comes back but the count of what is done. Nobody takes a lock on the way of a page.
//!
//! A packet of lent pages takes the same way. It is a few bytes on a channel, so one channel may have many of them
//! while another has none, and there may be fewer channels than cores.
use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
            Ordering::Release,
        },
    },
    thread,
};

use crossbeam_channel::Sender;
use transship_codec::{DecodeError, Decoder, Method};
use transship_memory::{WindowBuffer, WindowPages};
use transship_ring::{
    Parker, mpmc,
    spsc::{self, Consumer, Producer},
};

use super::{arriving::ArrivingMemory, event::ChannelEvent};
use crate::{Error, Rule, cpu};

/// Packets that wait at each decoder for each channel.
const RING_PLACES: usize = 4;
/// Packets of one channel that are on their way through the decoders: bounds what they hold to 2 MiB a channel.
const ON_THE_WAY_MAX: usize = 4;

/// A packet whose pages are not there yet, checked but for its contents.
pub(super) struct Job {
    pub(super) region: u16,
    pub(super) first: u64,
    pub(super) present: u128,
    pub(super) zero: u128,
    pub(super) pages: Pages,
    /// Which packet of the round it is, for errors.
    pub(super) packet: u64,
}

/// Where the pages of a packet are.
pub(super) enum Pages {
    Encoded(Method, Vec<u8>),
    /// In lent memory. Zero pages are to be found if `look`.
    Lent {
        look: bool,
    },
}

/// What makes pages of packets: one for each thread that decodes.
#[derive(Default)]
pub(super) struct Unpacker {
    /// Made when the first packet of their method comes.
    decoders: HashMap<Method, Box<dyn Decoder>>,
    pages: Vec<u8>,
    lent: WindowBuffer,
}

impl Unpacker {
    /// Puts the pages of a packet into place. How many were found to be zero.
    pub(super) fn unpack(&mut self, job: &Job, arriving: &ArrivingMemory, origin: &Origin) -> Result<u64, Error> {
        let present = WindowPages::new(job.first, job.present);
        let found = match &job.pages {
            Pages::Encoded(method, bytes) => {
                self.pages.resize(present.bytes() as usize, 0);
                let decoder = self.decoders.entry(*method).or_insert_with(|| method.decoder());
                decoder.decode(bytes, &mut self.pages).map_err(|error| origin.undecodable(job.packet, &error))?;
                arriving.write(job.region, present, &self.pages)?;
                0
            }
            Pages::Lent { look } => {
                let copied = arriving.copy_lent(job.region, present, *look, &mut self.lent);
                copied.map_err(|source| origin.unread(job.region, source))?
            }
        };
        arriving.clear_window(job.region, present.with(job.zero | found))?;
        Ok(found.count_ones().into())
    }
}

/// Whose packets they are, for errors.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub(super) peer: String,
    pub(super) channel: usize,
}

impl Origin {
    fn undecodable(&self, packet: u64, error: &DecodeError) -> Error {
        let what = format!("sent packet {packet} on data channel {}, which can't be decoded: {error}", self.channel);
        Error::breach(&self.peer, Rule::Encoding, what)
    }

    /// Pages of a region that was lent.
    fn unread(&self, region: u16, source: io::Error) -> Error {
        let source = match source.downcast::<transship_memory::Error>() {
            // They were read, and memory for them can't be had.
            Ok(memory) => return memory.into(),
            Err(source) => source,
        };
        match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                let what = format!("has cut the file short that it lent for region {region}");
                Error::breach(&self.peer, Rule::Bounds, what)
            }
            _ => Error::Io { what: format!("read region {region}, which {} lends", self.peer), source },
        }
    }
}

/// What a channel and the decoders share about its packets.
struct OnTheWay {
    origin: Origin,
    /// Added to by the channel before it hands a packet over. A decoder subtracts with Release when the pages are in
    /// place; the channel's Acquire load of 0 at the end of a round pairs with that.
    packets: AtomicUsize,
    /// Pages of its packets that were found to be zero. Added to before its packet is subtracted.
    found: AtomicU64,
    done: Parker,
}

/// Where one channel hands its packets in.
pub(super) struct Lane {
    rings: Vec<Producer<Job>>,
    next: usize,
    on_the_way: Arc<OnTheWay>,
    shared: Arc<Shared>,
}

impl Lane {
    /// Hands a packet to a decoder; gives it back if all are busy.
    pub(super) fn try_hand_over(&mut self, job: Job) -> Result<(), Job> {
        if self.on_the_way.packets.load(Relaxed) >= ON_THE_WAY_MAX {
            return Err(job);
        }
        self.on_the_way.packets.fetch_add(1, Relaxed);
        let mut job = job;
        let count = self.rings.len();
        for index in (self.next..count).chain(0..self.next) {
            match self.rings[index].push(job) {
                Ok(()) => {
                    self.shared.work[index].wake_one();
                    self.next = (index + 1) % count;
                    return Ok(());
                }
                Err(spsc::PushError::Full(back) | spsc::PushError::Gone(back)) => job = back,
            }
        }
        self.on_the_way.packets.fetch_sub(1, AcqRel);
        Err(job)
    }

    /// Waits until all packets that were handed over are in place, or were refused, which the main thread hears of. How
    /// many of their pages were found to be zero.
    ///
    /// # Errors
    /// A decoder ended early, and with it what was in its rings.
    pub(super) fn wait(&self) -> Result<u64, Error> {
        let OnTheWay { packets, found, done, .. } = &*self.on_the_way;
        done.wait(|| match packets.load(Acquire) {
            0 => Some(Ok(found.swap(0, Relaxed))),
            _ if self.shared.broken.load(Acquire) => Some(Err(gone())),
            _ => None,
        })
    }

    /// A buffer for a packet's bytes.
    pub(super) fn buffer(&self) -> Vec<u8> {
        self.shared.spare.pop().unwrap_or_default()
    }

    pub(super) fn give_back(&self, buffer: Vec<u8>) {
        let _ = self.shared.spare.push(buffer); // full: one buffer less to keep
    }
}

struct Shared {
    /// A decoder sleeps at its own.
    work: Vec<Parker>,
    spare: mpmc::Ring<Vec<u8>>,
    stop: AtomicBool,
    /// A decoder has panicked. Stored with Release before the channels are woken, who load it with Acquire.
    broken: AtomicBool,
}

/// The decoders of a session; dropping it ends them. The channels are ended first, so that nobody waits for a packet
/// for ever.
pub(super) struct Decoders {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Decoders {
    /// Starts a decoder for each core, with a lane for each channel.
    pub(super) fn start(
        origins: Vec<Origin>,
        arriving: &Arc<ArrivingMemory>,
        events: &Sender<ChannelEvent>,
    ) -> Result<(Self, Vec<Lane>), Error> {
        let count = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            work: (0..count).map(|_| Parker::new()).collect(),
            spare: mpmc::Ring::new((origins.len() * ON_THE_WAY_MAX).next_power_of_two()),
            stop: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        });
        let on_the_way = |origin| {
            let (packets, found) = (AtomicUsize::new(0), AtomicU64::new(0));
            Arc::new(OnTheWay { origin, packets, found, done: Parker::new() })
        };
        let mut lanes: Vec<_> = origins
            .into_iter()
            .map(|origin| Lane {
                rings: Vec::new(),
                next: 0,
                on_the_way: on_the_way(origin),
                shared: Arc::clone(&shared),
            })
            .collect();
        let mut decoders = Self { shared: Arc::clone(&shared), threads: Vec::new() };
        for number in 0..count {
            let inlets = lanes
                .iter_mut()
                .map(|lane| {
                    let (inlet, outlet) = spsc::ring(RING_PLACES);
                    lane.rings.push(inlet);
                    (outlet, Arc::clone(&lane.on_the_way))
                })
                .collect();
            let (arriving, events) = (Arc::clone(arriving), events.clone());
            let thread = DecoderThread { number, shared: Arc::clone(&shared), inlets, next: 0, arriving, events };
            let started = thread::Builder::new().name(format!("decoder {number}")).spawn(move || thread.run());
            decoders.threads.push(started.map_err(|source| Error::Io { what: "start a decoder".into(), source })?);
        }
        Ok((decoders, lanes))
    }
}

impl Drop for Decoders {
    fn drop(&mut self) {
        // Release: pairs with the Acquire load in `next_job`; what was handed over before is still done.
        self.shared.stop.store(true, Release);
        self.shared.work.iter().for_each(Parker::wake_all);
        for thread in self.threads.drain(..) {
            // A panic in there has been printed; the session fails by what is missing.
            let _ = thread.join();
        }
    }
}

fn gone() -> Error {
    Error::Bug("can't decode pages: a decoder ended early")
}

impl Drop for DecoderThread {
    fn drop(&mut self) {
        if thread::panicking() {
            self.shared.broken.store(true, Release);
            self.inlets.iter().for_each(|(_, channel)| channel.done.wake_all());
        }
    }
}

struct DecoderThread {
    number: usize,
    shared: Arc<Shared>,
    /// A ring from each channel.
    inlets: Vec<(Consumer<Job>, Arc<OnTheWay>)>,
    /// The channel to look at first, so that none is served always before the others.
    next: usize,
    arriving: Arc<ArrivingMemory>,
    events: Sender<ChannelEvent>,
}

impl DecoderThread {
    fn run(mut self) {
        let mut unpacker = Unpacker::default();
        let mut laps = cpu::Laps::begin();
        while let Some((job, from)) = self.next_job() {
            match unpacker.unpack(&job, &self.arriving, &from.origin) {
                Ok(zero) => drop(from.found.fetch_add(zero, Relaxed)),
                // The first failure always finds room; where there is none the session has failed already. It is told
                // before the packet counts as done, so that the main thread hears of it before the round's end.
                Err(error) => drop(self.events.try_send(ChannelEvent::Failed(error))),
            }
            if let Pages::Encoded(_, bytes) = job.pages {
                let _ = self.shared.spare.push(bytes);
            }
            self.arriving.progress.cpu.decoders.add(laps.next());
            from.packets.fetch_sub(1, Release);
            from.done.wake_all();
        }
    }

    fn next_job(&mut self) -> Option<(Job, Arc<OnTheWay>)> {
        let Self { number, shared, inlets, next, .. } = self;
        shared.work[*number].wait(|| {
            let stop = shared.stop.load(Acquire);
            let count = inlets.len();
            for index in (*next..count).chain(0..*next) {
                if let Ok(job) = inlets[index].0.pop() {
                    *next = (index + 1) % count;
                    return Some(Some((job, Arc::clone(&inlets[index].1))));
                }
            }
            stop.then_some(None)
        })
    }
}
