//! What moves, saves and relays share of their encoders: which encodings there are, how many threads, and what each of
//! these does with bytes. What becomes of the result, a packet of pages or a piece of a stream, is up to their owners.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Instant,
};

use transship_auto::{Auto, Threads, candidates};
use transship_codec::{Encoder, Outcome, Setting};
use transship_ring::{Results, Submitter, Worker, mpmc, pool};

use super::{Encoded, meters::Meters, sampler::Sampler};
use crate::{Compress, Error, Progress, cpu};

/// Jobs that wait at each encoder. More would only lengthen the way of a page.
const RING_PLACES: usize = 4;

/// A pool of threads that make `Made` of `Job`.
pub(crate) type Pool<Job, Made> = (Submitter<Job>, Vec<Worker<Job, Made>>, Results<Made>);

/// The encoders that a session is to have.
#[derive(Debug)]
pub(crate) struct EncoderSetup {
    settings: Vec<Setting>,
    encoders: usize,
    channels: usize,
}

impl EncoderSetup {
    pub(crate) fn new(compress: Compress, encoders: u8, channels: usize) -> Self {
        let settings = match compress {
            Compress::Fixed(Setting::NONE) => Vec::new(),
            Compress::Fixed(setting) => vec![setting],
            Compress::Auto => candidates(),
        };
        let encoders = if settings.is_empty() { 1 } else { usize::from(encoders.max(1)) };
        Self { settings, encoders, channels }
    }

    /// Nothing is to be encoded.
    pub(crate) fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    /// The rings between whoever submits, the encoders and the channels.
    pub(crate) fn pool<Job, Made>(&self) -> Pool<Job, Made> {
        pool(self.encoders, RING_PLACES, self.places())
    }

    /// Results that may wait for a channel.
    fn places(&self) -> usize {
        (self.channels + 2 * self.encoders).next_power_of_two().max(16)
    }

    /// Chooses among them, if there is a choice.
    pub(crate) fn auto(&self) -> Option<Auto> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = Threads { encoders: self.encoders, channels: self.channels, cores };
        self.raw().map(|raw| Auto::new(self.settings.len(), raw, threads))
    }

    pub(crate) fn tools(&self, progress: &Arc<Progress>) -> Tools {
        Tools {
            progress: Arc::clone(progress),
            meters: Arc::new(Meters::new(self.settings.len().max(1))),
            spare: Arc::new(mpmc::Ring::new(self.places())),
        }
    }

    /// One thread's encoders. `may_be_raw`: what does not shrink may be left as it is.
    pub(crate) fn coder(&self, tools: &Tools, may_be_raw: bool) -> Coder {
        Coder {
            encoders: self.settings.iter().map(|setting| (setting.method().number(), setting.encoder())).collect(),
            raw: self.raw(),
            may_be_raw,
            tools: tools.clone(),
            sampler: Sampler::default(),
        }
    }

    /// The encoding that leaves bytes as they are, if it is one to choose from.
    fn raw(&self) -> Option<usize> {
        self.settings.iter().position(|setting| *setting == Setting::NONE)
    }
}

/// What all threads of a session that encode and send have in common.
#[derive(Clone)]
pub(crate) struct Tools {
    pub(crate) progress: Arc<Progress>,
    pub(crate) meters: Arc<Meters>,
    /// Buffers of packets that were sent, to be filled again.
    pub(crate) spare: Arc<mpmc::Ring<Vec<u8>>>,
}

/// The work of a thread that encodes.
pub(crate) trait Work<Job, Made> {
    fn make(&mut self, job: Job, coder: &mut Coder) -> Made;

    /// The bytes of the last job, if they are wanted as a sample.
    fn sample(&self) -> Option<&[u8]>;
}

/// The encoders of one thread.
pub(crate) struct Coder {
    /// By the number of the encoding: its method's number on the wire, and what makes it.
    encoders: Vec<(u8, Box<dyn Encoder>)>,
    raw: Option<usize>,
    may_be_raw: bool,
    tools: Tools,
    sampler: Sampler,
}

impl Coder {
    /// Does what comes, until there is no more.
    pub(crate) fn run<Job, Made>(mut self, mut worker: Worker<Job, Made>, mut work: impl Work<Job, Made>) {
        let mut laps = cpu::Laps::begin();
        while let Some(job) = worker.next_job() {
            let begin = Instant::now();
            let made = work.make(job, &mut self);
            self.tools.meters.encoded(begin.elapsed());
            if worker.deliver(made).is_err() {
                return; // nobody takes any more
            }
            if let Some(bytes) = work.sample() {
                // After they have gone.
                let sample = self.sampler.take(&mut self.encoders, self.raw, bytes);
                let _ = self.tools.meters.samples.push(sample); // there is room for all that can be asked for at a time
            }
            self.tools.progress.cpu.encoders.add(laps.next());
        }
    }

    /// None: they are to go as they are.
    pub(crate) fn encode(&mut self, encoding: usize, bytes: &[u8]) -> Option<Encoded> {
        if bytes.is_empty() || Some(encoding) == self.raw {
            return None;
        }
        let spare = &self.tools.spare;
        let mut made = spare.pop().unwrap_or_default();
        let (method, encoder) = &mut self.encoders[encoding];
        let stays_raw = encoder.encode(bytes, &mut made) == Outcome::Raw && self.may_be_raw;
        let tally = &self.tools.progress.encoding;
        tally.bytes_in.fetch_add(bytes.len() as u64, Relaxed);
        tally.bytes_out.fetch_add(if stays_raw { bytes.len() } else { made.len() } as u64, Relaxed);
        if stays_raw {
            let _ = spare.push(made); // full: one buffer less to keep
            return None;
        }
        Some(Encoded { method: *method, bytes: made })
    }
}

/// An encoder that ended early takes its jobs with it.
pub(crate) fn gone() -> Error {
    Error::Bug("can't encode: an encoder ended early")
}
