//! The data connections of a source, and how a round's work is spread over them.
use std::{
    cell::RefCell,
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use transship_memory::{Freeing, GuestMemory, PAGE_BYTES, PageRange};
use transship_wire::{Message, Preamble, Role, Session};

use super::{
    encoding::{Encoders, Gate, Ready},
    sender::{PageSender, Sent, Shared, Window},
};
use crate::{
    Error, MoveOptions, Progress, Report, Uri, ZeroPages,
    control::{Control, TICK},
    cpu,
    free::FreePages,
    guest::Place,
    pacer::Pacer,
    page_map::{PageMap, runs},
    scan::{Pending, new_holes},
    transport::Connection,
};

/// How long a peer that broke a data connection may take to say why on the control connection.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// What a round has to send.
pub(crate) struct RoundWork<'a> {
    pub(crate) round: u32,
    pub(crate) pending: &'a [Pending],
    /// Whether the guest may give memory back while the round is sent.
    pub(crate) freeing: Freeing,
}

/// A piece of a round: ranges only, no contents.
pub(crate) enum Batch {
    Pages {
        region: usize,
        /// First page and wanted pages.
        windows: Vec<(u64, u128)>,
        /// The zero pages of each window, where the main thread has looked for them.
        zero: Option<Vec<u128>>,
    },
    Hole {
        region: usize,
        range: PageRange,
    },
}

/// Opens the control connection of a new session.
pub(crate) fn connect_control(to: &Uri) -> Result<(Control, Session), Error> {
    let session = Session(random()?);
    let connection = connect(to, session, Role::Control)?;
    Ok((Control::new(connection, to.to_string())?, session))
}

fn connect(to: &Uri, session: Session, role: Role) -> Result<Connection, Error> {
    let mut connection = Connection::open(to)?;
    let preamble = Preamble { session, role }.encode();
    connection.write_all(&preamble).map_err(|source| Error::Io { what: format!("greet {to}"), source })?;
    Ok(connection)
}

fn random() -> Result<[u8; 16], Error> {
    use std::io::Read;
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|source| Error::Io { what: "read /dev/urandom".into(), source })?;
    Ok(bytes)
}

/// All data connections of a session.
pub(crate) struct Channels {
    senders: Vec<PageSender>,
    /// Second handles, to end a thread that is blocked in a send.
    lines: Vec<Connection>,
    shared: Arc<Shared>,
    zero_pages: ZeroPages,
    encoders: Option<Encoders>,
}

impl Channels {
    pub(crate) fn connect(
        to: &Uri,
        session: Session,
        memory: GuestMemory,
        options: &MoveOptions,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        let content = memory.regions().iter().map(|region| PageMap::new(region.pages())).collect();
        let shared = Arc::new(Shared {
            memory,
            content,
            pacer: options.bandwidth.map(Pacer::new),
            look_for_zeros: options.zero_pages == ZeroPages::Channels,
            progress: Arc::clone(progress),
            failed: AtomicBool::new(false),
            peer: to.to_string(),
        });
        let mut channels = Self {
            senders: Vec::new(),
            lines: Vec::new(),
            shared: Arc::clone(&shared),
            zero_pages: options.zero_pages,
            encoders: Encoders::start(options, &shared)?,
        };
        for number in 0..options.channels {
            let connection = connect(to, session, Role::Data(number))?;
            let line =
                connection.try_clone().map_err(|source| Error::Io { what: format!("connect to {to}"), source })?;
            channels.lines.push(line);
            channels.senders.push(PageSender::new(connection, number, Arc::clone(&shared)));
        }
        Ok(channels)
    }

    /// By region, the pages that the destination holds content for.
    pub(crate) fn content(&self) -> &[PageMap] {
        &self.shared.content
    }

    /// Sends a round over all channels, each by a thread of its own, and closes it on each with its `RoundEnd`. What becomes known as free
    /// meanwhile is left out, as far as it was not handed over yet; and so is what became a hole, which is returned.
    pub(crate) fn run_round(
        &mut self,
        work: &RoundWork<'_>,
        free: &mut FreePages,
        control: &Control,
        progress: &Progress,
    ) -> Result<(Sent, Vec<Place>), Error> {
        let (done, results) = bounded(self.senders.len());
        let Self { senders, lines, shared, zero_pages, encoders } = self;
        let watch = Watch { control, progress, shared };
        let new_holes = RefCell::default();
        let feed = Feed { work, shared, look: *zero_pages == ZeroPages::Main, watch: &watch, new_holes: &new_holes };
        thread::scope(|scope| {
            let count = senders.len();
            let result = match encoders {
                None => {
                    let (queue, batches) = bounded(2 * count);
                    for sender in senders {
                        let (batches, done) = (batches.clone(), done.clone());
                        // The receiver outlives the scope, and has room for all.
                        scope.spawn(move || {
                            let _ = done.send(sender.run(work.round, &batches));
                        });
                    }
                    drop(batches);
                    let fed = feed.to_channels(&queue, free);
                    drop(queue);
                    fed.and_then(|()| collect(&results, count, &watch, || Ok(())))
                }
                Some(encoders) => {
                    let gate = Arc::new(encoders.open_gate());
                    for sender in senders {
                        let (gate, done) = (Arc::clone(&gate), done.clone());
                        let spare = Arc::clone(&encoders.spare);
                        scope.spawn(move || {
                            let _ = done.send(sender.run_encoded(work.round, &gate, &spare));
                        });
                    }
                    let mut handed_over = 0;
                    let fed = feed.to_encoders(encoders, &gate, free, &mut handed_over);
                    gate.close(handed_over);
                    let result = fed.and_then(|()| collect(&results, count, &watch, || encoders.check()));
                    if result.is_err() && encoders.check().is_err() {
                        gate.end(); // what the dead encoder had will never come
                    }
                    result
                }
            };
            if result.is_err() {
                shared.failed.store(true, Relaxed);
                lines.iter().for_each(Connection::shutdown);
            }
            result.map(|sent| (sent, new_holes.take())).map_err(|error| watch.explain(error, &results))
        })
    }

    /// What the encoders did so far, into the report.
    pub(crate) fn report(&self, report: &mut Report) {
        let Progress { encoding, cpu, .. } = &*self.shared.progress;
        report.busy_ratio = encoding.busy_ratio();
        report.pages.raw_busy = encoding.raw_busy_pages.load(Relaxed);
        report.bytes.encoder_in = encoding.bytes_in.load(Relaxed);
        report.bytes.encoder_out = encoding.bytes_out.load(Relaxed);
        report.cpu.encoders = cpu.encoders.seconds();
    }
}

/// Cuts a round into pieces and hands them over, in memory order.
struct Feed<'a> {
    work: &'a RoundWork<'a>,
    shared: &'a Shared,
    /// The main thread looks for zero pages.
    look: bool,
    watch: &'a Watch<'a>,
    /// Pages that were not handed over since they are holes by now.
    new_holes: &'a RefCell<Vec<Place>>,
}

impl Feed<'_> {
    fn to_channels(&self, queue: &Sender<Batch>, free: &mut FreePages) -> Result<(), Error> {
        for (region, pending) in self.work.pending.iter().enumerate() {
            for range in pending.gone.ranges() {
                hand_over(Batch::Hole { region, range }, queue, self.watch)?;
            }
            for mut windows in pending.batches() {
                self.trim(region, &mut windows, free);
                let zero = self.zero_masks(region, &windows);
                hand_over(Batch::Pages { region, windows, zero }, queue, self.watch)?;
            }
        }
        Ok(())
    }

    /// Counts in `handed_over` what the channels will get, also on failure.
    fn to_encoders(
        &self,
        encoders: &mut Encoders,
        gate: &Gate,
        free: &mut FreePages,
        handed_over: &mut u64,
    ) -> Result<(), Error> {
        for (region, pending) in self.work.pending.iter().enumerate() {
            for range in pending.gone.ranges() {
                self.watch.check()?;
                gate.pass(Ready::Hole { region, range }, self.watch)?;
                *handed_over += 1;
            }
            for mut windows in pending.batches() {
                self.trim(region, &mut windows, free);
                let zero = self.zero_masks(region, &windows);
                for (index, (first, wanted)) in windows.into_iter().enumerate() {
                    self.watch.check()?;
                    let zero = zero.as_ref().map(|masks| masks[index]);
                    let window = Window {
                        round: self.work.round,
                        region,
                        first,
                        wanted,
                        zero,
                        encoding: 0,
                        sample: false,
                        raw: false,
                    };
                    encoders.submit(window, gate, self.watch)?;
                    *handed_over += 1;
                }
            }
        }
        Ok(())
    }

    /// Leaves out what the guest can do without, or has given back since the look: reading a hole would fill it again.
    fn trim(&self, region: usize, windows: &mut Vec<(u64, u128)>, free: &mut FreePages) {
        let pages = |windows: &[(u64, u128)]| -> u64 { windows.iter().map(|(_, w)| u64::from(w.count_ones())).sum() };
        let before = pages(windows);
        free.trim(region, windows);
        if self.work.freeing == Freeing::Possible {
            windows.retain_mut(|(first, wanted)| {
                let holes = new_holes(&self.shared.memory.regions()[region], *first, *wanted);
                self.new_holes.borrow_mut().extend(runs(*first, holes).map(|pages| Place { region, pages }));
                *wanted &= !holes;
                *wanted != 0
            });
        }
        let bytes = (before - pages(windows)) * PAGE_BYTES as u64;
        self.shared.progress.round_left.fetch_sub(bytes, Relaxed);
    }

    /// The zero pages of each window, if the main thread is to look for them.
    fn zero_masks(&self, region: usize, windows: &[(u64, u128)]) -> Option<Vec<u128>> {
        let round = self.work.round;
        let look = |(first, wanted): &(u64, u128)| {
            self.shared.zero_mask(&Window {
                round,
                region,
                first: *first,
                wanted: *wanted,
                zero: None,
                encoding: 0,
                sample: false,
                raw: false,
            })
        };
        self.look.then(|| windows.iter().map(look).collect())
    }
}

fn hand_over(mut batch: Batch, queue: &Sender<Batch>, watch: &Watch<'_>) -> Result<(), Error> {
    loop {
        watch.check()?;
        match queue.send_timeout(batch, TICK) {
            Ok(()) => return Ok(()),
            Err(SendTimeoutError::Timeout(back)) => batch = back,
            // All threads have failed; collecting their results says how.
            Err(SendTimeoutError::Disconnected(_)) => return Ok(()),
        }
    }
}

fn collect(
    results: &Receiver<Result<Sent, Error>>,
    count: usize,
    watch: &Watch<'_>,
    helpers_live: impl Fn() -> Result<(), Error>,
) -> Result<Sent, Error> {
    let mut total = Sent::default();
    for _ in 0..count {
        let sent = loop {
            match results.recv_timeout(TICK) {
                Ok(result) => break result?,
                // No look at the control connection: `RoundDone` may be there before our last thread has reported.
                Err(_) if watch.progress.is_cancelled() => return Err(Error::Cancelled),
                Err(_) => helpers_live()?,
            }
        };
        total.add(&sent);
    }
    Ok(total)
}

/// What the main thread looks at while the channels work.
pub(crate) struct Watch<'a> {
    control: &'a Control,
    pub(crate) progress: &'a Progress,
    shared: &'a Shared,
}

impl Watch<'_> {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.shared.failed.load(Relaxed) {
            return Err(Error::Protocol { peer: self.control.peer.clone(), what: "broke a data connection".into() });
        }
        self.progress.cpu.main.set(cpu::thread_seconds());
        self.control.check_silence()?;
        if self.progress.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// The best that can be said about a failure: the peer's own reason, else a channel's error, else the first one.
    fn explain(&self, error: Error, results: &Receiver<Result<Sent, Error>>) -> Error {
        if matches!(error, Error::Cancelled | Error::Refused(_)) {
            return error;
        }
        if let Ok(Ok(Message::Abort(refusal))) = self.control.incoming.recv_timeout(REASON_TIMEOUT) {
            return Error::Refused(refusal.reason);
        }
        results.try_iter().find_map(Result::err).unwrap_or(error)
    }
}

impl Sent {
    fn add(&mut self, other: &Self) {
        self.normal += other.normal;
        self.zero += other.zero;
        self.zero_sent += other.zero_sent;
        self.resent += other.resent;
        self.bytes += other.bytes;
        self.cpu_seconds += other.cpu_seconds;
    }
}

/// CPU seconds that `work` takes on this thread.
pub(crate) fn measured<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = cpu::thread_seconds();
    let value = work();
    (value, cpu::thread_seconds() - begin)
}
