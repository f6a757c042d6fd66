//! The main connection: the stream comes in on it, and answers go out.
use std::{
    io::{self, Read, Write},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use transship_wire::qemu::{Command, Configuration, Reply};

use super::barrier::Barrier;
use crate::{Error, Progress, Rule, control::TICK, door::Line, transport::Connection};

/// How long a source that was told that all is well may take to close the connection. It has nothing left to do.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a source that was told that everything is loaded may take to hand its guest over.
const END_TIMEOUT: Duration = Duration::from_secs(120);

/// The stream. It waits for a source that is silent, for as long as that is: a source may be told to wait before its
/// last round.
pub(super) struct Incoming {
    connection: Connection,
    progress: Arc<Progress>,
    /// Once there are channels: one that fails ends the wait.
    barrier: BarrierLater,
    /// If nothing comes for so many milliseconds, what came last is the end. 0: it is not.
    silence: Arc<AtomicU64>,
}

/// That of the channels, once there are any.
pub(super) type BarrierLater = Arc<OnceLock<Arc<Barrier>>>;

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let begin = Instant::now();
        loop {
            match self.silence.load(Relaxed) {
                0 => {}
                limit if begin.elapsed() < Duration::from_millis(limit) => {}
                _ => return Ok(0),
            }
            if self.progress.is_cancelled() {
                return Err(io::Error::other("cancelled"));
            }
            if self.barrier.get().is_some_and(|barrier| barrier.has_failed()) {
                return Err(io::Error::other("a channel has failed"));
            }
            match self.connection.read(into) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                // Records know where in the stream it ended.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(0),
                read => return read,
            }
        }
    }
}

/// What goes back to the source.
pub(super) struct Answers {
    connection: Connection,
    pub(super) peer: String,
    /// The source listens.
    pub(super) open: bool,
    /// It was told how it ended.
    told: bool,
}

/// Both halves of the main connection.
pub(super) fn split((connection, peer): Line, progress: &Arc<Progress>) -> Result<(Incoming, Answers), Error> {
    let failed = |source| Error::Io { what: format!("set up the connection with {peer}"), source };
    connection.set_read_timeout(Some(TICK)).map_err(failed)?;
    let reading = connection.try_clone().map_err(failed)?;
    let (progress, barrier, silence) = (Arc::clone(progress), BarrierLater::default(), Arc::default());
    Ok((
        Incoming { connection: reading, progress, barrier, silence },
        Answers { connection, peer, open: false, told: false },
    ))
}

impl Incoming {
    /// Where the barrier of the channels is to be put.
    pub(super) fn barrier(&self) -> BarrierLater {
        Arc::clone(&self.barrier)
    }

    /// Where it is to be said, of a source that does not close the connection, that what came last may be the end: if
    /// nothing follows for so many milliseconds, it is.
    pub(super) fn silence(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.silence)
    }
}

impl Answers {
    /// Obeys a command of the source.
    ///
    /// # Errors
    /// One that can't be obeyed.
    pub(super) fn obey(&mut self, command: &Command, configuration: Option<&Configuration>) -> Result<(), Error> {
        match command {
            Command::OpenReturnPath => {
                self.open = true;
                match configuration.is_some_and(|configuration| wants_ack(&configuration.machine)) {
                    true => self.send(&Reply::SwitchoverAck),
                    false => Ok(()),
                }
            }
            Command::Ping(number) if self.open => self.send(&Reply::Pong(*number)),
            Command::Ping(_) => Err(self.broke(Rule::Turn, "asked for an answer without having opened a return path")),
            Command::PostcopyAdvise(_) => Err(self.broke(
                Rule::Abilities,
                "wants to send more after its guest has moved (postcopy), which needs a QEMU here; turn postcopy-ram \
                 and dirty-bitmaps off there",
            )),
            other => {
                Err(self
                    .broke(Rule::Abilities, format!("sent the command {}, which is not supported here", other.name())))
            }
        }
    }

    fn send(&mut self, reply: &Reply) -> Result<(), Error> {
        self.connection.write_all(&reply.encode()).map_err(|source| match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.left("it got an answer"),
            _ => Error::Io { what: format!("answer {}", self.peer), source },
        })
    }

    fn broke(&self, rule: Rule, what: impl Into<String>) -> Error {
        Error::breach(&self.peer, rule, what)
    }

    /// The source has gone before that happened, so it keeps its guest.
    fn left(&self, before: &str) -> Error {
        self.broke(Rule::Stays, format!("has closed the connection before {before}; its guest runs on there"))
    }

    /// Answers the question of a source behind its last section: everything is loaded. Then waits until it hands its
    /// guest over, which is the byte that ends the sections.
    ///
    /// # Errors
    /// It does not: its guest is its own. Cancelled.
    pub(super) fn answer_and_await_end(&mut self, number: u32, progress: &Progress) -> Result<(), Error> {
        self.send(&Reply::Pong(number))?;
        let deadline = Instant::now() + END_TIMEOUT;
        let mut byte = [0];
        loop {
            if progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
            match self.connection.read(&mut byte) {
                Ok(1) if byte == [0] => return Ok(()),
                Ok(1) => return Err(self.broke(Rule::Turn, "sent something other than the end after its last section")),
                Ok(_) => {
                    return Err(self.broke(Rule::Stays, "has closed the connection before it handed its guest over"));
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                    ) => {}
                Err(source) => {
                    return Err(Error::Io { what: format!("wait for the end of the data from {}", self.peer), source });
                }
            }
            if Instant::now() >= deadline {
                let what = format!("has not handed its guest over within {} s", END_TIMEOUT.as_secs());
                return Err(self.broke(Rule::Answers, what));
            }
        }
    }

    /// Tells the source that all of it has arrived and is safe: the guest is not its own any more once it has read
    /// that.
    ///
    /// # Errors
    /// It can't be told: it has failed meanwhile, and goes on.
    pub(super) fn all_is_well(&mut self) -> Result<(), Error> {
        self.told = true;
        if !self.open {
            return Ok(());
        }
        if self.connection.is_closed() {
            return Err(self.left("it was told of success"));
        }
        self.send(&Reply::Shut(0))
    }

    /// Tells the source that it failed here, if it can be told. Its guest runs on there.
    pub(super) fn it_failed(&mut self) {
        if self.open && !std::mem::replace(&mut self.told, true) {
            // It may be gone.
            let _ = self.send(&Reply::Shut(1));
        }
        self.connection.shutdown();
    }

    /// Waits until the source, which was told that all is well or has written all that it had, closes the connection:
    /// it is done. False: it was torn down, or stays open.
    pub(super) fn let_go(&mut self) -> bool {
        let deadline = Instant::now() + LET_GO_TIMEOUT;
        let mut rest = [0; 4096];
        while Instant::now() < deadline {
            match self.connection.read(&mut rest) {
                Ok(0) => return true,
                Ok(_) => {} // what follows the end means nothing
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => return false,
            }
        }
        false
    }
}

/// Whether a source of this machine type may wait for word that the destination is ready. Those before 8.1 would not
/// understand it, and may be of a QEMU that is newer or not; those since 11.1 don't ask.
fn wants_ack(machine: &str) -> bool {
    let version = machine.rsplit('-').next().and_then(|version| version.split_once('.'));
    let version = version.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    version.is_some_and(|version: (u32, u32)| ((8, 1)..(11, 1)).contains(&version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_that_know_the_word_are_told() {
        for machine in ["pc-q35-8.1", "pc-i440fx-10.0", "pc-q35-11.0"] {
            assert!(wants_ack(machine), "{machine}");
        }
        for machine in ["pc-q35-8.0", "pc-q35-7.2", "pc-q35-11.1", "pc-q35-12.0", "microvm", "none", "a-b.c"] {
            assert!(!wants_ack(machine), "{machine}");
        }
    }
}
