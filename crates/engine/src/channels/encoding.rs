//! Encoders between the main thread and the channels.
//!
//! ```text
//!   main ── windows ──► a ring of 4 for each encoder ──► encode ──► one ring of results ──► whichever channel is free
//!     └── all rings full, and told not to wait ──────────────────────────► as it is ──┘
//! ```
//!
//! Nobody takes a lock on this path. An encoder copies the pages before it encodes them: the guest writes to them meanwhile, and a compressor
//! may misbehave on input that changes. A packet stands for itself, so any encoder serves any channel.
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use transship_codec::{Encoder, Outcome, Setting};
use transship_memory::{PAGE_BYTES, PageRange};
use transship_ring::{Parker, Results, Submitter, TrySubmitError, Worker, mpmc, pool};

use super::{
    Encoded, Main, Shared, Window,
    auto::{self, Auto, PROBING_WINDOWS, Sample, Threads},
    meters::Meters,
};
use crate::{Compress, Error, Progress, WhenBusy, control::TICK, cpu};

/// Windows that wait at each encoder. More would only lengthen the way of a page.
const RING_PLACES: usize = 4;

/// How long a window that finds no room waits until its encoding is chosen anew.
const CHOOSE_AGAIN: Duration = Duration::from_millis(5);
/// Windows that wait for channels while pages are left as they are and the encoding may change: what waits can't be encoded any more.
const RAW_WAITING: u64 = 2;

/// How many encode what, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EncodingOptions {
    pub(crate) compress: Compress,
    pub(crate) encoders: u8,
    pub(crate) when_busy: WhenBusy,
    pub(crate) channels: u8,
    /// The destination takes pages that are left as they are. If not, they are encoded although they do not shrink.
    pub(crate) may_be_raw: bool,
}

/// What a channel gets.
pub(crate) enum Ready {
    /// A window that an encoder has looked at, with its pages encoded if that was worth it.
    Window { window: Window, encoded: Option<Encoded> },
    /// A window that nobody has looked at: all encoders were busy.
    Unseen(Window),
    /// Pages that became a hole.
    Hole { region: usize, range: PageRange },
    /// The round is over for one channel; each takes one of these.
    RoundEnd,
}

/// Says when all that was handed over in a round has been taken, and then ends it for every channel.
///
/// The main thread stores how much it was and then loads how much was taken; a channel adds to what was taken and then loads how much it was.
/// Both are SeqCst, so at least one of the two sees that the numbers are equal; `ended` lets only the first one act.
pub(crate) struct Gate {
    results: Results<Ready>,
    channels: usize,
    handed_over: AtomicU64,
    taken: AtomicU64,
    ended: AtomicBool,
    /// Windows among them that are to be left as they are, and where the main thread sleeps until enough of those were taken.
    raw_taken: AtomicU64,
    fewer: Parker,
    pub(crate) meters: Arc<Meters>,
}

impl Gate {
    pub(crate) fn next(&self) -> Option<Ready> {
        self.results.next_result()
    }

    /// Hands something to the channels past the encoders. A destination that hangs leaves no room: the user may cancel meanwhile.
    pub(crate) fn pass(&self, mut ready: Ready, main: &dyn Main) -> Result<(), Error> {
        loop {
            match self.results.inject_timeout(ready, TICK) {
                Ok(()) => return Ok(()),
                Err(back) => ready = back,
            }
            main.check()?;
        }
    }

    /// One more was taken and dealt with.
    pub(crate) fn took(&self) {
        if self.taken.fetch_add(1, SeqCst) + 1 == self.handed_over.load(SeqCst) {
            self.end();
        }
    }

    /// It was a window that is to be left as it is.
    pub(crate) fn took_raw(&self) {
        self.raw_taken.fetch_add(1, SeqCst);
        self.fewer.wake_one();
    }

    /// Whether, within the time, fewer than `most` of the windows that are to be left as they are are on their way.
    fn wait_for_fewer(&self, handed_over: u64, most: u64, time: Duration) -> bool {
        let few = || (handed_over - self.raw_taken.load(SeqCst) < most).then_some(());
        self.fewer.wait_timeout(time, few).is_some()
    }

    /// No more come than these.
    pub(crate) fn close(&self, handed_over: u64) {
        self.handed_over.store(handed_over, SeqCst);
        if self.taken.load(SeqCst) == handed_over {
            self.end();
        }
    }

    /// Ends the round. The ring has room: it was made for a marker a channel, and when nothing failed it is empty.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, SeqCst) {
            (0..self.channels).for_each(|_| self.results.inject(Ready::RoundEnd));
        }
    }
}

/// The encoders of a session.
pub(crate) struct Encoders {
    /// None only while it is dropped.
    submitter: Option<Submitter<Window>>,
    results: Option<Results<Ready>>,
    threads: Vec<thread::JoinHandle<()>>,
    when_busy: WhenBusy,
    channels: usize,
    /// If there is a choice.
    auto: Option<Auto>,
    /// Windows of this round that are to be left as they are.
    raw_handed_over: u64,
    progress: Arc<Progress>,
    meters: Arc<Meters>,
    /// Buffers of packets that were written, to be filled again.
    pub(crate) spare: Arc<mpmc::Ring<Vec<u8>>>,
}

impl Encoders {
    /// None if nothing is to be encoded.
    pub(crate) fn start(options: &EncodingOptions, shared: &Arc<Shared>) -> Result<Option<Self>, Error> {
        let settings = match options.compress {
            Compress::Fixed(Setting::NONE) => return Ok(None),
            Compress::Fixed(setting) => vec![setting],
            Compress::Auto => auto::candidates(),
        };
        let channels = usize::from(options.channels);
        let count = usize::from(options.encoders.max(1));
        let places = (channels + 2 * count).next_power_of_two().max(16);
        let (submitter, workers, results) = pool(count, RING_PLACES, places);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (raw, threads) = (raw(&settings), Threads { encoders: count, channels, cores });
        let mut encoders = Self {
            submitter: Some(submitter),
            results: Some(results),
            threads: Vec::new(),
            when_busy: options.when_busy,
            channels,
            raw_handed_over: 0,
            auto: raw.map(|raw| Auto::new(settings.len(), raw, threads)),
            progress: Arc::clone(&shared.progress),
            meters: Arc::new(Meters::new(settings.len())),
            spare: Arc::new(mpmc::Ring::new(places)),
        };
        for (number, worker) in workers.into_iter().enumerate() {
            let thread = EncoderThread {
                worker,
                encoders: settings.iter().map(|s| (s.method().number(), s.encoder())).collect(),
                raw,
                may_be_raw: options.may_be_raw,
                shared: Arc::clone(shared),
                meters: Arc::clone(&encoders.meters),
                spare: Arc::clone(&encoders.spare),
                pages: Vec::new(),
                scratch: Vec::new(),
            };
            let started = thread::Builder::new().name(format!("encoder {number}")).spawn(move || thread.run());
            encoders.threads.push(started.map_err(|source| Error::Io { what: "start an encoder".into(), source })?);
        }
        Ok(Some(encoders))
    }

    /// For a round: what the channels take from.
    pub(crate) fn open_gate(&mut self) -> Gate {
        self.raw_handed_over = 0;
        if let Some(auto) = &mut self.auto {
            auto.pause();
        }
        Gate {
            results: self.results.clone().expect("taken only in drop"),
            channels: self.channels,
            handed_over: AtomicU64::new(u64::MAX),
            taken: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            raw_taken: AtomicU64::new(0),
            fewer: Parker::new(),
            meters: Arc::clone(&self.meters),
        }
    }

    /// An encoder that ended early takes its windows with it: the session can't go on.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.threads.iter().any(thread::JoinHandle::is_finished) { Err(gone()) } else { Ok(()) }
    }

    /// Hands a window to an encoder, or past them all.
    pub(crate) fn submit(&mut self, window: Window, gate: &Gate, main: &dyn Main) -> Result<(), Error> {
        let Some(mut auto) = self.auto.take() else {
            return self.encode(window, gate, main);
        };
        let submitted = self.submit_chosen(&mut auto, window, gate, main);
        self.auto = Some(auto);
        submitted
    }

    fn submit_chosen(
        &mut self,
        auto: &mut Auto,
        mut window: Window,
        gate: &Gate,
        main: &dyn Main,
    ) -> Result<(), Error> {
        loop {
            while let Some(sample) = self.meters.samples.pop() {
                auto.learn(&sample);
            }
            let choice = auto.choose(Instant::now(), &self.meters.counts(auto.current()));
            window.encoding = choice.encoding as u8;
            window.sample |= choice.sample;
            window.raw = choice.encoding == auto.raw();
            if !window.raw {
                return self.encode(window, gate, main);
            }
            let most = if auto.is_probing() { PROBING_WINDOWS } else { RAW_WAITING + self.channels as u64 };
            if gate.wait_for_fewer(self.raw_handed_over, most, CHOOSE_AGAIN) {
                self.raw_handed_over += 1;
                return if window.sample {
                    self.encode(window, gate, main)
                } else {
                    gate.pass(Ready::Unseen(window), main)
                };
            }
            main.check()?;
        }
    }

    /// Hands a window to an encoder, or past them if all are busy and that is wanted.
    fn encode(&mut self, window: Window, gate: &Gate, main: &dyn Main) -> Result<(), Error> {
        let encoding = &self.progress.encoding;
        encoding.submitted.fetch_add(1, Relaxed);
        let submitter = self.submitter.as_mut().expect("taken only in drop");
        let mut window = match submitter.try_submit(window) {
            Ok(_) => return Ok(()),
            Err(TrySubmitError::Gone(_)) => return Err(gone()),
            Err(TrySubmitError::Busy(back)) => back,
        };
        encoding.busy.fetch_add(1, Relaxed);
        if self.when_busy == WhenBusy::Raw {
            encoding.raw_busy_pages.fetch_add(window.wanted.count_ones().into(), Relaxed);
            return gate.pass(Ready::Unseen(window), main);
        }
        loop {
            match submitter.submit_timeout(window, TICK) {
                Ok(_) => return Ok(()),
                Err(TrySubmitError::Gone(_)) => return Err(gone()),
                Err(TrySubmitError::Busy(back)) => window = back,
            }
            main.check()?;
        }
    }
}

/// The encoding that leaves pages as they are, if it is one to choose from.
fn raw(settings: &[Setting]) -> Option<usize> {
    settings.iter().position(|setting| *setting == Setting::NONE)
}

fn gone() -> Error {
    Error::Io { what: "encode pages".into(), source: std::io::Error::other("an encoder ended early; this is a bug") }
}

impl Drop for Encoders {
    fn drop(&mut self) {
        // Without a submitter they find no more work, without a taker they don't wait for room.
        drop((self.submitter.take(), self.results.take()));
        for thread in self.threads.drain(..) {
            // A panic in there has been printed, and failed the session by `gone`.
            let _ = thread.join();
        }
    }
}

struct EncoderThread {
    worker: Worker<Window, Ready>,
    /// By the number of the encoding: its method's number on the wire, and what makes it.
    encoders: Vec<(u8, Box<dyn Encoder>)>,
    /// The encoding that leaves pages as they are.
    raw: Option<usize>,
    may_be_raw: bool,
    shared: Arc<Shared>,
    meters: Arc<Meters>,
    spare: Arc<mpmc::Ring<Vec<u8>>>,
    /// The pages of a packet, copied.
    pages: Vec<u8>,
    /// For what is encoded to learn from, and not sent.
    scratch: Vec<u8>,
}

impl EncoderThread {
    fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut laps = cpu::Laps::begin();
        while let Some(window) = self.worker.next_job() {
            let (begin, sample) = (Instant::now(), window.sample);
            let ready = self.handle(window);
            self.meters.encoded(begin.elapsed());
            if self.worker.deliver(ready).is_err() {
                return; // nobody takes any more
            }
            if sample {
                self.sample();
            }
            shared.progress.cpu.encoders.add(laps.next());
        }
    }

    fn handle(&mut self, mut window: Window) -> Ready {
        self.pages.clear();
        if self.shared.failed.load(Relaxed) {
            return Ready::Window { window, encoded: None }; // nobody sends it: a cancelled move need not wait for what is slow to encode
        }
        self.meters.look(&self.shared, &mut window);
        let present = window.wanted & !window.zero.unwrap_or(0);
        let memory = &self.shared.memory.regions()[window.region];
        // A window that the region does not have can't come from a scan of it; the channel would report it.
        let copied = present == 0 || memory.copy_out(window.first, present, &mut self.pages).is_ok();
        debug_assert!(!copied || self.pages.len() == present.count_ones() as usize * PAGE_BYTES);
        let encoding = usize::from(window.encoding);
        let encoded = if self.pages.is_empty() || Some(encoding) == self.raw { None } else { self.encode(encoding) };
        Ready::Window { window, encoded }
    }

    fn encode(&mut self, encoding: usize) -> Option<Encoded> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        let (method, encoder) = &mut self.encoders[encoding];
        let outcome = encoder.encode(&self.pages, &mut bytes);
        let stays_raw = outcome == Outcome::Raw && self.may_be_raw;
        let made = if stays_raw { self.pages.len() } else { bytes.len() };
        let tally = &self.shared.progress.encoding;
        tally.bytes_in.fetch_add(self.pages.len() as u64, Relaxed);
        tally.bytes_out.fetch_add(made as u64, Relaxed);
        if stays_raw {
            let _ = self.spare.push(bytes); // full: one buffer less to keep
            return None;
        }
        Some(Encoded { method: *method, bytes })
    }

    /// Encodes the pages at hand in all ways, after they have gone, and keeps only what there is to learn from it.
    fn sample(&mut self) {
        let Self { encoders, raw, pages, scratch, .. } = self;
        let mut outcomes = Vec::with_capacity(encoders.len());
        for (index, (_, encoder)) in encoders.iter_mut().enumerate() {
            let (begin, mut laps) = (Instant::now(), cpu::Laps::begin());
            let is_raw = Some(index) == *raw || pages.is_empty() || encoder.encode(pages, scratch) == Outcome::Raw;
            let left = if is_raw { pages.len() } else { scratch.len() };
            // Who has to share the core with others would not have it for himself later, but more of it than beside all that is done now.
            let needs = (begin.elapsed().as_secs_f64() * laps.next()).sqrt();
            let needs = if Some(index) == *raw { Duration::ZERO } else { Duration::from_secs_f64(needs) };
            outcomes.push((left as u64, needs));
        }
        let sample = Sample { pages: (pages.len() / PAGE_BYTES) as u64, outcomes };
        let _ = self.meters.samples.push(sample); // there is room for all that can be asked for at a time
    }
}
