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
    time::Instant,
};

use transship_codec::{Encoder, Outcome, Setting};
use transship_memory::{PAGE_BYTES, PageRange};
use transship_ring::{Results, Submitter, TrySubmitError, Worker, mpmc, pool};

use super::{
    auto::{self, Auto},
    channels::Watch,
    sender::{Encoded, Shared, Window},
};
use crate::{Compress, Error, MoveOptions, WhenBusy, control::TICK, cpu};

/// Windows that wait at each encoder. More would only lengthen the way of a page.
const RING_PLACES: usize = 4;

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

/// What the encoders did so far.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Windows handed to encoders, and those of them that found all busy.
    submitted: AtomicU64,
    busy: AtomicU64,
    /// Pages that travelled as they are because all were busy.
    raw_busy_pages: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    cpu_nanos: AtomicU64,
}

impl Tally {
    /// Writes itself into a report.
    pub(crate) fn report(&self, report: &mut crate::Report) {
        let submitted = self.submitted.load(Relaxed);
        report.busy_ratio = if submitted == 0 { 0.0 } else { self.busy.load(Relaxed) as f64 / submitted as f64 };
        report.pages.raw_busy = self.raw_busy_pages.load(Relaxed);
        report.bytes.encoder_in = self.bytes_in.load(Relaxed);
        report.bytes.encoder_out = self.bytes_out.load(Relaxed);
        report.cpu.encoders = self.cpu_nanos.load(Relaxed) as f64 / 1e9;
    }
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
}

impl Gate {
    pub(crate) fn next(&self) -> Option<Ready> {
        self.results.next_result()
    }

    /// Hands something to the channels past the encoders. A destination that hangs leaves no room: the user may cancel meanwhile.
    pub(crate) fn pass(&self, mut ready: Ready, watch: &Watch<'_>) -> Result<(), Error> {
        loop {
            match self.results.inject_timeout(ready, TICK) {
                Ok(()) => return Ok(()),
                Err(back) => ready = back,
            }
            watch.check()?;
        }
    }

    /// One more was taken and dealt with.
    pub(crate) fn took(&self) {
        if self.taken.fetch_add(1, SeqCst) + 1 == self.handed_over.load(SeqCst) {
            self.end();
        }
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
    auto: Auto,
    /// The encoding that leaves pages as they are, if it is one to choose from.
    raw: Option<usize>,
    pub(crate) tally: Arc<Tally>,
    /// Buffers of packets that were written, to be filled again.
    pub(crate) spare: Arc<mpmc::Ring<Vec<u8>>>,
}

impl Encoders {
    /// None if nothing is to be encoded.
    pub(crate) fn start(options: &MoveOptions, shared: &Arc<Shared>) -> Result<Option<Self>, Error> {
        let settings = match options.compress {
            Compress::Fixed(Setting::NONE) => return Ok(None),
            Compress::Fixed(setting) => vec![setting],
            Compress::Auto => auto::candidates(),
        };
        let channels = usize::from(options.channels);
        let count = usize::from(options.encoders.max(1));
        let places = (channels + 2 * count).next_power_of_two().max(16);
        let (submitter, workers, results) = pool(count, RING_PLACES, places);
        let mut encoders = Self {
            submitter: Some(submitter),
            results: Some(results),
            threads: Vec::new(),
            when_busy: options.when_busy,
            channels,
            auto: Auto::new(settings.len()),
            raw: settings.iter().position(|setting| *setting == Setting::NONE),
            tally: Arc::default(),
            spare: Arc::new(mpmc::Ring::new(places)),
        };
        for (number, worker) in workers.into_iter().enumerate() {
            let thread = EncoderThread {
                worker,
                encoders: settings.iter().map(|s| (s.method().number(), s.encoder())).collect(),
                shared: Arc::clone(shared),
                tally: Arc::clone(&encoders.tally),
                spare: Arc::clone(&encoders.spare),
                pages: Vec::new(),
            };
            let started = thread::Builder::new().name(format!("encoder {number}")).spawn(move || thread.run());
            encoders.threads.push(started.map_err(|source| Error::Io { what: "start an encoder".into(), source })?);
        }
        Ok(Some(encoders))
    }

    /// For a round: what the channels take from.
    pub(crate) fn open_gate(&mut self) -> Gate {
        self.auto.pause();
        Gate {
            results: self.results.clone().expect("taken only in drop"),
            channels: self.channels,
            handed_over: AtomicU64::new(u64::MAX),
            taken: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// An encoder that ended early takes its windows with it: the session can't go on.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.threads.iter().any(thread::JoinHandle::is_finished) { Err(gone()) } else { Ok(()) }
    }

    /// Hands a window to an encoder, or past them all.
    pub(crate) fn submit(&mut self, mut window: Window, gate: &Gate, watch: &Watch<'_>) -> Result<(), Error> {
        let encoding = self.auto.choose(Instant::now(), watch.progress.normal_pages.load(Relaxed));
        if Some(encoding) == self.raw {
            return gate.pass(Ready::Unseen(window), watch);
        }
        window.encoding = encoding as u8;
        self.tally.submitted.fetch_add(1, Relaxed);
        let submitter = self.submitter.as_mut().expect("taken only in drop");
        let mut window = match submitter.try_submit(window) {
            Ok(_) => return Ok(()),
            Err(TrySubmitError::Gone(_)) => return Err(gone()),
            Err(TrySubmitError::Busy(back)) => back,
        };
        self.tally.busy.fetch_add(1, Relaxed);
        if self.when_busy == WhenBusy::Raw {
            self.tally.raw_busy_pages.fetch_add(window.wanted.count_ones().into(), Relaxed);
            return gate.pass(Ready::Unseen(window), watch);
        }
        loop {
            match submitter.submit_timeout(window, TICK) {
                Ok(_) => return Ok(()),
                Err(TrySubmitError::Gone(_)) => return Err(gone()),
                Err(TrySubmitError::Busy(back)) => window = back,
            }
            watch.check()?;
        }
    }
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
    shared: Arc<Shared>,
    tally: Arc<Tally>,
    spare: Arc<mpmc::Ring<Vec<u8>>>,
    /// The pages of a packet, copied.
    pages: Vec<u8>,
}

impl EncoderThread {
    fn run(mut self) {
        let mut cpu_before = cpu::thread_seconds();
        while let Some(window) = self.worker.next_job() {
            let ready = self.encode(window);
            let cpu_now = cpu::thread_seconds();
            let nanos = (cpu_now - std::mem::replace(&mut cpu_before, cpu_now)) * 1e9;
            self.tally.cpu_nanos.fetch_add(nanos as u64, Relaxed);
            if self.worker.deliver(ready).is_err() {
                return; // nobody takes any more
            }
        }
    }

    fn encode(&mut self, mut window: Window) -> Ready {
        if self.shared.failed.load(Relaxed) {
            return Ready::Window { window, encoded: None }; // nobody sends it: a cancelled move need not wait for what is slow to encode
        }
        let memory = &self.shared.memory.regions()[window.region];
        if window.zero.is_none() {
            window.zero = Some(self.shared.look(&window));
        }
        let present = window.wanted & !window.zero.unwrap_or(0);
        self.pages.clear();
        // A window that the region does not have can't come from a scan of it; the channel would report it.
        if present == 0 || memory.copy_out(window.first, present, &mut self.pages).is_err() {
            return Ready::Window { window, encoded: None };
        }
        debug_assert_eq!(self.pages.len(), present.count_ones() as usize * PAGE_BYTES);
        let mut bytes = self.spare.pop().unwrap_or_default();
        let (method, encoder) = &mut self.encoders[usize::from(window.encoding)];
        let outcome = encoder.encode(&self.pages, &mut bytes);
        self.tally.bytes_in.fetch_add(self.pages.len() as u64, Relaxed);
        if outcome == Outcome::Raw {
            self.tally.bytes_out.fetch_add(self.pages.len() as u64, Relaxed);
            let _ = self.spare.push(bytes); // full: one buffer less to keep
            return Ready::Window { window, encoded: None };
        }
        self.tally.bytes_out.fetch_add(bytes.len() as u64, Relaxed);
        Ready::Window { window, encoded: Some(Encoded { method: *method, bytes }) }
    }
}
