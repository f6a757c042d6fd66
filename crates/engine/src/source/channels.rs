//! The data connections of a source, and how a round's work is spread over them.
use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use transship_memory::{GuestMemory, PageRange};
use transship_wire::{Message, Preamble, Role, Session};

use super::{
    rounds::Pending,
    sender::{PageSender, Sent, Shared},
};
use crate::{
    Error, MoveOptions, Progress, Uri, ZeroPages,
    control::{Control, TICK},
    cpu,
    pacer::Pacer,
    page_map::PageMap,
    transport::Connection,
};

/// Windows that travel between threads as one piece of work: 4 MiB.
const WINDOWS_PER_BATCH: usize = 8;
/// How long a peer that broke a data connection may take to say why on the control connection.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// What a round has to send.
pub(crate) struct RoundWork<'a> {
    pub(crate) round: u32,
    pub(crate) pending: &'a [Pending],
    /// Map pages in bulk before they are read: pays while they are not mapped yet.
    pub(crate) populate: bool,
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

    /// The pages of a region that the destination holds content for.
    pub(crate) fn content(&self, region: usize) -> &PageMap {
        &self.shared.content[region]
    }

    /// Sends a round over all channels, each by a thread of its own, and closes it on each with its `RoundEnd`.
    pub(crate) fn run_round(
        &mut self,
        work: &RoundWork<'_>,
        control: &Control,
        progress: &Progress,
    ) -> Result<Sent, Error> {
        let count = self.senders.len();
        let (queue, batches) = bounded(2 * count);
        let (done, results) = bounded(count);
        let Self { senders, lines, shared, zero_pages } = self;
        let watch = Watch { control, progress, shared };
        thread::scope(|scope| {
            for sender in senders {
                let (batches, done) = (batches.clone(), done.clone());
                let (round, populate) = (work.round, work.populate);
                scope.spawn(move || {
                    let result = sender.run(round, populate, &batches);
                    // The receiver outlives the scope, and has room for all.
                    let _ = done.send(result);
                });
            }
            drop((batches, done));
            let look = *zero_pages == ZeroPages::Main;
            let fed = feed(work, &queue, shared, look, &watch);
            drop(queue);
            let result = fed.and_then(|()| collect(&results, count, &watch));
            if result.is_err() {
                shared.failed.store(true, Relaxed);
                lines.iter().for_each(Connection::shutdown);
            }
            result.map_err(|error| watch.explain(error, &results))
        })
    }
}

/// Cuts the round into batches and hands them over, in memory order.
fn feed(
    work: &RoundWork<'_>,
    queue: &Sender<Batch>,
    shared: &Shared,
    look: bool,
    watch: &Watch<'_>,
) -> Result<(), Error> {
    for (region, pending) in work.pending.iter().enumerate() {
        for range in pending.gone.ranges() {
            hand_over(Batch::Hole { region, range }, queue, watch)?;
        }
        let mut windows = pending.send.windows().peekable();
        while windows.peek().is_some() {
            let windows: Vec<_> = windows.by_ref().take(WINDOWS_PER_BATCH).collect();
            let zero = if look { Some(shared.zero_masks(region, &windows, work.populate)?) } else { None };
            hand_over(Batch::Pages { region, windows, zero }, queue, watch)?;
        }
    }
    Ok(())
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

fn collect(results: &Receiver<Result<Sent, Error>>, count: usize, watch: &Watch<'_>) -> Result<Sent, Error> {
    let mut total = Sent::default();
    for _ in 0..count {
        let sent = loop {
            match results.recv_timeout(TICK) {
                Ok(result) => break result?,
                // No look at the control connection: `RoundDone` may be there before our last thread has reported.
                Err(_) if watch.progress.is_cancelled() => return Err(Error::Cancelled),
                Err(_) => {}
            }
        };
        total.add(&sent);
    }
    Ok(total)
}

/// What the main thread looks at while the channels work.
struct Watch<'a> {
    control: &'a Control,
    progress: &'a Progress,
    shared: &'a Shared,
}

impl Watch<'_> {
    fn check(&self) -> Result<(), Error> {
        if self.shared.failed.load(Relaxed) {
            return Err(Error::Protocol { peer: self.control.peer.clone(), what: "broke a data connection".into() });
        }
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

impl Shared {
    /// The zero pages of each window.
    pub(crate) fn zero_masks(
        &self,
        region: usize,
        windows: &[(u64, u128)],
        populate: bool,
    ) -> Result<Vec<u128>, Error> {
        let memory = &self.memory.regions()[region];
        if populate {
            super::sender::populate(memory, windows);
        }
        windows.iter().map(|(first, wanted)| Ok(memory.zero_mask(*first, *wanted)?)).collect()
    }
}

/// CPU seconds that `work` takes on this thread.
pub(crate) fn measured<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begin = cpu::thread_seconds();
    let value = work();
    (value, cpu::thread_seconds() - begin)
}
