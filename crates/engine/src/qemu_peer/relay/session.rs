//! What all threads of a relay share.
use std::{
    io::{self, ErrorKind},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_codec::Method;
use transship_wire::relay::{Message, TheEnd};

use super::{
    buffers::Buffers,
    control_line::ControlLine,
    fate::{Fate, lock},
    stream::Stream,
};
use crate::{
    Error, MethodBytes, Progress, RelayReport, Report, Rule,
    control::TICK,
    transport::{Connection, sending_failed},
};

/// How long the other relay may take to say why the link breaks.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);
/// How long it may take to close the link when all is over.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(10);

/// A link, and all that goes over it.
pub(super) struct RelaySession {
    pub(super) progress: Arc<Progress>,
    pub(super) control: ControlLine,
    pub(super) fate: Arc<Fate>,
    /// This is the one near the source.
    is_near: bool,
    /// By number. Grows only.
    streams: RwLock<Vec<Arc<Stream>>>,
    /// Handles of the link's data connections, to end threads that are blocked in them.
    lines: Vec<Connection>,
    /// The waiting QEMU may have got the end of the stream: near the source from the moment on at which it is put on
    /// the link, at the destination from that at which it is written to that QEMU.
    pub(super) end_given: AtomicBool,
    /// The waiting QEMU has said that everything is loaded, and at the source that was written to its QEMU.
    pub(super) all_is_well: AtomicBool,
    /// It has said anything at all.
    pub(super) answered: AtomicBool,
    link_lost: AtomicBool,
    control_ended: AtomicBool,
    /// The other relay says that all has ended.
    pub(super) peer_is_done: AtomicBool,
    news: (Sender<()>, Receiver<()>),
    pub(super) counts: Counts,
    pub(super) buffers: Arc<Buffers>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

/// Bytes. Relaxed: numbers for people.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) from_qemu: AtomicU64,
    pub(super) to_qemu: AtomicU64,
    pub(super) link_out: AtomicU64,
    pub(super) link_in: AtomicU64,
    /// What went out by method: bytes of QEMU's, and what was made of them.
    pub(super) methods: [(AtomicU64, AtomicU64); Method::ALL.len()],
}

impl RelaySession {
    pub(super) fn new(
        control: ControlLine,
        peer: String,
        lines: Vec<Connection>,
        is_near: bool,
        progress: &Arc<Progress>,
    ) -> Arc<Self> {
        Arc::new(Self {
            progress: Arc::clone(progress),
            control,
            fate: Fate::new(peer),
            is_near,
            streams: RwLock::default(),
            lines,
            end_given: AtomicBool::new(false),
            all_is_well: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            link_lost: AtomicBool::new(false),
            control_ended: AtomicBool::new(false),
            peer_is_done: AtomicBool::new(false),
            news: bounded(1),
            counts: Counts::default(),
            buffers: Buffers::new(),
            threads: Mutex::default(),
        })
    }

    /// Starts a thread that ends when the session does. Its error is the session's.
    pub(super) fn spawn(
        self: &Arc<Self>,
        name: &str,
        work: impl FnOnce(&Arc<Self>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let session = Arc::clone(self);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let guard = Panicked(&session);
            let result = work(&session);
            std::mem::forget(guard);
            if let Err(error) = result {
                session.fail(error, None);
            }
        });
        let thread = thread.map_err(|source| Error::Io { what: format!("start the thread {name}"), source })?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    pub(super) fn join(&self) {
        loop {
            let threads = std::mem::take(&mut *lock(&self.threads));
            if threads.is_empty() {
                return;
            }
            // A panic in there has been printed, and has failed the session.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }

    pub(super) fn add(&self, stream: Arc<Stream>) {
        self.streams.write().unwrap_or_else(PoisonError::into_inner).push(stream);
    }

    pub(super) fn stream(&self, number: u16) -> Result<Arc<Stream>, Error> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        streams
            .get(usize::from(number))
            .cloned()
            .ok_or_else(|| self.fate.broke(Rule::Bounds, format!("named connection {number}, which is not open")))
    }

    pub(super) fn streams(&self) -> Vec<Arc<Stream>> {
        self.streams.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Breaks the session, unless it is broken or over.
    pub(super) fn fail(&self, error: Error, told: Option<TheEnd>) {
        self.fate.fail(error, told);
        self.streams().iter().for_each(|stream| stream.wake());
        self.tell();
    }

    /// What the other relay says of why it ended the session, also if it was seen by other signs before.
    pub(super) fn heard_abort(&self, reason: String, end: TheEnd) {
        if self.fate.add_word(&reason, end) {
            self.tell();
        } else {
            self.fail(Error::Refused(reason), Some(end));
        }
    }

    /// The link is gone, as far as this thread can see.
    pub(super) fn lost_link(&self) -> Error {
        self.link_lost.store(true, SeqCst);
        self.fate.broke(Rule::Stays, "has closed the link, or the link is gone")
    }

    /// A thread can't do this with the link. When the other relay has gone, a thread that writes learns it later than
    /// one that reads.
    pub(super) fn link_failed(&self, source: io::Error, otherwise: impl FnOnce(io::Error) -> Error) -> Error {
        match source.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => self.lost_link(),
            _ => otherwise(source),
        }
    }

    /// Tells the other relay.
    pub(super) fn say(&self, message: &Message) -> Result<(), Error> {
        let failed = |source| sending_failed(&self.fate.peer, "the control connection", source);
        self.control.send(message).map_err(|source| self.link_failed(source, failed))
    }

    /// What is seen first of a relay that ends the session may be that its connections close: waits a moment for its
    /// reason; also if `anyway`.
    pub(super) fn wait_for_reason(&self, anyway: bool) {
        let deadline = Instant::now() + REASON_TIMEOUT;
        let may_come = || !self.fate.was_told() && !self.control_ended.load(SeqCst) && Instant::now() < deadline;
        while (anyway || self.link_lost.load(SeqCst)) && may_come() {
            let _ = self.news.1.recv_timeout(TICK);
        }
    }

    /// The other relay says no more on the control connection.
    pub(super) fn control_has_ended(&self) {
        self.control_ended.store(true, SeqCst);
        self.tell();
    }

    /// Lets the other relay, which has been told that all is over, close the link first: it is to hear that before it
    /// sees connections end.
    pub(super) fn let_it_close(&self) {
        let deadline = Instant::now() + CLOSING_TIMEOUT;
        while !self.control_ended.load(SeqCst) && Instant::now() < deadline {
            let _ = self.news.1.recv_timeout(TICK);
        }
    }

    /// Wakes the main thread.
    pub(super) fn tell(&self) {
        let _ = self.news.0.try_send(()); // full: it will look
    }

    /// Where the main thread waits for news.
    pub(super) fn news(&self) -> &Receiver<()> {
        &self.news.1
    }

    /// Whether all that was opened has ended in both directions.
    pub(super) fn all_have_ended(&self) -> bool {
        let streams = self.streams();
        !streams.is_empty() && streams.iter().all(|stream| stream.has_ended())
    }

    /// Ends the link's threads.
    pub(super) fn close_link(&self) {
        self.fate.set_over();
        self.lines.iter().for_each(Connection::shutdown);
        self.control.close();
    }

    /// Counts bytes that go with the opening of a connection.
    pub(super) fn count_first(&self, bytes: &[u8]) {
        let Counts { from_qemu, to_qemu, .. } = &self.counts;
        // One relay hears them from its QEMU, the other one tells them to its own.
        let count = if self.is_near { from_qemu } else { to_qemu };
        count.fetch_add(bytes.len() as u64, Relaxed);
        self.progress.relayed_bytes.fetch_add(bytes.len() as u64, Relaxed);
    }

    pub(super) fn report(&self, report: &mut Report) {
        let Counts { from_qemu, to_qemu, link_out, link_in, methods } = &self.counts;
        let [from_qemu, to_qemu, link_out, link_in] = [from_qemu, to_qemu, link_out, link_in].map(|n| n.load(Relaxed));
        let link = link_out + link_in;
        let methods = Method::ALL.iter().zip(methods).map(|(method, (bytes, made))| MethodBytes {
            method: method.name().into(),
            bytes: bytes.load(Relaxed),
            made: made.load(Relaxed),
        });
        report.relay = Some(RelayReport {
            connections: self.streams().len() as u64,
            from_qemu,
            to_qemu,
            link_out,
            link_in,
            ratio: if link == 0 { 0.0 } else { (from_qemu + to_qemu) as f64 / link as f64 },
            methods: methods.filter(|method| method.bytes > 0).collect(),
        });
        let Progress { encoding, cpu, .. } = &*self.progress;
        report.bytes.wire = link;
        report.bytes.encoder_in = encoding.bytes_in.load(Relaxed);
        report.bytes.encoder_out = encoding.bytes_out.load(Relaxed);
        report.busy_ratio = encoding.busy_ratio();
        report.cpu.encoders = cpu.encoders.seconds();
        report.cpu.decoders = cpu.decoders.seconds();
        report.cpu.channels = cpu.channels.seconds();
    }
}

/// Fails the session when its thread panics; forgotten otherwise.
struct Panicked<'a>(&'a RelaySession);

impl Drop for Panicked<'_> {
    fn drop(&mut self) {
        self.0.fail(Error::Bug("can't relay: a thread ended early"), None);
    }
}
