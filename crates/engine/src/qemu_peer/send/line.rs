//! The main connection: the stream in one direction, what the destination answers in the other.
use std::{
    io,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SendFlags, send},
};
use transship_secure::Caller;
use transship_wire::qemu::{Command, Reply, Step, StreamWriter};

use crate::{
    Error, Progress, Rule, Uri,
    control::TICK,
    pacer::Pacer,
    transport::{Connection, STALL_TIMEOUT, sending_failed},
};

/// The number of the RAM section: another than that of any section of a device.
const RAM_SECTION: u32 = u32::from_be_bytes(*b"\0ram");
/// Bytes that are sent at once.
const PIECE: usize = 1 << 20;
/// Bytes of answers that are read at once; the longest answer has less.
const ANSWER_BYTES: usize = 1024;
/// How long a destination that broke the connection may take to say why.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// The main connection.
pub(crate) struct Line {
    connection: Connection,
    /// This side has shown a certificate.
    shows_certificate: bool,
    pub(crate) peer: String,
    /// What is put here goes out with the next `flush`.
    pub(crate) writer: StreamWriter,
    /// Answers that were not looked at yet; they begin at `position` of all.
    answers: Vec<u8>,
    position: u64,
    pings: u32,
    pacer: Option<Arc<Pacer>>,
    progress: Arc<Progress>,
    /// Bytes sent so far.
    pub(crate) sent: u64,
}

/// Why a write ended early.
enum Stopped {
    /// The system refused, or nothing was taken for too long.
    Failed(io::Error),
    /// The destination has spoken, or hung up.
    Spoke(Error),
    Cancelled,
}

impl Line {
    pub(crate) fn open(
        to: &Uri,
        caller: Option<&Caller>,
        pacer: Option<Arc<Pacer>>,
        progress: &Arc<Progress>,
    ) -> Result<Self, Error> {
        Ok(Self {
            connection: Connection::call(to, caller)?,
            shows_certificate: caller.is_some(),
            peer: to.to_string(),
            writer: StreamWriter::new(0, RAM_SECTION),
            answers: Vec::new(),
            position: 0,
            pings: 0,
            pacer,
            progress: Arc::clone(progress),
            sent: 0,
        })
    }

    /// Sends what was written if there is enough for a piece.
    pub(crate) fn flush_pieces(&mut self) -> Result<(), Error> {
        if self.writer.buffered() < PIECE { Ok(()) } else { self.flush() }
    }

    /// Sends what was written.
    ///
    /// # Errors
    /// The system's; what the destination says instead of taking it; cancelled.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        let bytes = self.writer.take_bytes();
        for piece in bytes.chunks(PIECE) {
            if let Some(pacer) = &self.pacer {
                pacer.wait(piece.len());
            }
            let mut at = 0;
            self.push(piece, &mut at, false).map_err(|stopped| self.explain(stopped))?;
            self.sent += piece.len() as u64;
            self.progress.wire_bytes.fetch_add(piece.len() as u64, Relaxed);
        }
        Ok(())
    }

    /// Sends it, and leaves in `at` how many bytes went out, of what it is on its way. `last`: nothing can be cancelled
    /// any more, and answers are left for later.
    fn push(&mut self, bytes: &[u8], at: &mut usize, last: bool) -> Result<(), Stopped> {
        let bytes = self.connection.seal(bytes).map_err(Stopped::Failed)?;
        self.push_sealed(&bytes, at, last).inspect_err(|_| self.connection.end_sealing())
    }

    fn push_sealed(&mut self, bytes: &[u8], at: &mut usize, last: bool) -> Result<(), Stopped> {
        let mut deadline = Instant::now() + STALL_TIMEOUT;
        while *at < bytes.len() {
            if !last && self.progress.is_cancelled() {
                return Err(Stopped::Cancelled);
            }
            match send(self.connection.as_fd(), &bytes[*at..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(taken) => {
                    *at += taken;
                    deadline = Instant::now() + STALL_TIMEOUT;
                    continue;
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Stopped::Failed(error.into())),
            }
            if Instant::now() >= deadline {
                return Err(Stopped::Failed(io::ErrorKind::WouldBlock.into()));
            }
            let wanted = if last { PollFlags::OUT } else { PollFlags::IN | PollFlags::OUT };
            let ready = self.wait(wanted, TICK).map_err(Stopped::Failed)?;
            if !last && ready.contains(PollFlags::IN) {
                self.check_silence().map_err(Stopped::Spoke)?;
            }
        }
        Ok(())
    }

    fn wait(&self, wanted: PollFlags, limit: Duration) -> io::Result<PollFlags> {
        if wanted.contains(PollFlags::IN) && self.connection.holds_something() {
            return Ok(PollFlags::IN);
        }
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut polled = [PollFd::from_borrowed_fd(self.connection.as_fd(), wanted)];
        match poll(&mut polled, Some(&limit)) {
            Ok(_) => Ok(polled[0].revents()),
            Err(rustix::io::Errno::INTR) => Ok(PollFlags::empty()),
            Err(error) => Err(error.into()),
        }
    }

    /// The best that can be said of a write that failed: the destination's own word, if it has one.
    fn explain(&mut self, stopped: Stopped) -> Error {
        match stopped {
            Stopped::Cancelled => Error::CANCELLED,
            Stopped::Spoke(error) => error,
            Stopped::Failed(source) => {
                // A peer that accepts nothing sends nothing.
                let reason = if source.kind() == io::ErrorKind::WouldBlock { None } else { self.reason() };
                reason.unwrap_or_else(|| sending_failed(&self.peer, "the main connection", source))
            }
        }
    }

    /// What a destination that has broken a connection says of it, if it says anything.
    pub(crate) fn reason(&mut self) -> Option<Error> {
        let deadline = Instant::now() + REASON_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.answer(left) {
                Ok(Some(Reply::Pong(_) | Reply::SwitchoverAck)) => {}
                Ok(Some(other)) => return Some(self.unexpected(&other)),
                Ok(None) if left.is_zero() => return None,
                Ok(None) => {}
                Err(error @ Error::Breach { .. }) => return Some(error),
                Err(_) => return None,
            }
        }
    }

    /// An error if the destination has said anything but what is of no interest: nothing is expected from it now.
    pub(crate) fn check_silence(&mut self) -> Result<(), Error> {
        while let Some(reply) = self.answer(Duration::ZERO)? {
            if reply != Reply::SwitchoverAck {
                return Err(self.unexpected(&reply));
            }
        }
        Ok(())
    }

    /// Asks for a sign that all that was written so far has been processed. Await it with [`Line::await_pong`].
    pub(crate) fn ping(&mut self) {
        self.pings += 1;
        self.writer.command(&Command::Ping(self.pings));
    }

    /// Sends what was written, the ping that ends it included, and waits until the destination has come to that.
    /// `others`: of its other connections, which is an error if one of them has ended; it is asked again and again.
    ///
    /// # Errors
    /// It gives up, breaks the rules, or takes longer than `limit`; `doing` says what it was to do. Cancelled.
    pub(crate) fn await_pong(
        &mut self,
        doing: &str,
        limit: Duration,
        others: impl Fn() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.flush()?;
        let deadline = Instant::now() + limit;
        loop {
            if self.progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
            match self.answer(TICK)? {
                Some(Reply::Pong(number)) if number == self.pings => return Ok(()),
                Some(Reply::SwitchoverAck) => {}
                Some(other) => return Err(self.unexpected(&other)),
                None => others().map_err(|error| self.reason().unwrap_or(error))?,
            }
            if Instant::now() >= deadline {
                let what = format!("was to {doing}, but has not confirmed it within {} s", limit.as_secs());
                return Err(Error::breach(&self.peer, Rule::Answers, what));
            }
        }
    }

    /// The next answer, if there is one within `limit`.
    fn answer(&mut self, limit: Duration) -> Result<Option<Reply>, Error> {
        let failed = |peer: &str, source| Error::Io { what: format!("read the answers of {peer}"), source };
        loop {
            let step = Reply::read(&self.answers, self.position)
                .map_err(|source| Error::Wire { peer: self.peer.clone(), source })?;
            if let Step::Done { record, used } = step {
                self.answers.drain(..used);
                self.position += used as u64;
                return Ok(Some(record));
            }
            let ready = self.wait(PollFlags::IN, limit).map_err(|error| failed(&self.peer, error))?;
            if ready.is_empty() {
                return Ok(None);
            }
            let mut piece = [0; ANSWER_BYTES];
            match self.connection.read_now(&mut piece) {
                Ok(0) => return Err(self.gone()),
                Ok(read) => self.answers.extend(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(self.gone()),
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(error) => return Err(failed(&self.peer, error)),
            }
        }
    }

    fn gone(&self) -> Error {
        // In TLS a caller is not told whether the other side trusts it.
        let is_new = self.position == 0 && self.shows_certificate;
        let doubts = if is_new { "does not trust this certificate, " } else { "" };
        let why = "refuses the guest or has ended, and its own output says why";
        let what = format!("has closed the connection: it {doubts}{why}");
        Error::breach(&self.peer, Rule::Stays, what)
    }

    fn unexpected(&self, reply: &Reply) -> Error {
        let (rule, what) = match reply {
            Reply::Shut(0) => {
                (Rule::Order, "reported that it has loaded everything before everything was sent".to_owned())
            }
            Reply::Shut(status) => {
                let what = format!("gave up (status {status}): it refuses the data, and its own output says why");
                (Rule::Perseverance, what)
            }
            other => (Rule::Turn, format!("sent the answer {other:?} without being asked")),
        };
        Error::breach(&self.peer, rule, what)
    }

    /// Sends the end of the stream, upon which the destination runs the guest.
    ///
    /// # Errors
    /// Not one byte of it was taken: nothing was handed over.
    pub(crate) fn send_end(&mut self, end: &[u8]) -> Result<(), Error> {
        let mut at = 0;
        let result = self.push(end, &mut at, true);
        self.sent += at as u64;
        match result {
            // What is missing is of no interest to it, and it may run already: see what it says.
            Err(_) if at > 0 => Ok(()),
            Err(stopped) => Err(self.explain(stopped)),
            Ok(()) => Ok(()),
        }
    }

    /// Waits for the last word: that everything is loaded. Nothing can be cancelled any more.
    ///
    /// # Errors
    /// Anything else than just that.
    pub(crate) fn await_loaded(&mut self, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        loop {
            match self.answer(TICK)? {
                Some(Reply::Shut(0)) => return Ok(()),
                Some(Reply::SwitchoverAck) => {}
                Some(other) => return Err(self.unexpected(&other)),
                None if Instant::now() >= deadline => {
                    let what = format!("has not confirmed within {} s that it has loaded everything", limit.as_secs());
                    return Err(Error::breach(&self.peer, Rule::Answers, what));
                }
                None => {}
            }
        }
    }

    /// Tells a destination that speaks TLS that nothing more comes.
    pub(crate) fn say_goodbye(&mut self) {
        self.connection.say_goodbye();
    }

    /// Ends the connection: a destination that does not have the end of the stream will never run the guest.
    pub(crate) fn hang_up(&self) {
        self.connection.shutdown();
    }
}
