//! All multifd channels of a migration, and how a round's work is spread over them.
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
};

use crossbeam_channel::{SendTimeoutError, Sender, bounded};

use super::{
    line::Line,
    packets::{Batch, PacketSender, Sent, Shared},
};
use crate::{Error, Uri, control::TICK, transport::Connection};

/// The channels.
pub(crate) struct Channels {
    senders: Vec<PacketSender>,
    /// Second handles, to end a thread that is blocked in a send.
    lines: Vec<Connection>,
    shared: Arc<Shared>,
}

impl Channels {
    /// Connects them one after the other, in the order of their numbers: a destination that has fewer has then closed its door before it sees
    /// a number that it would not expect.
    pub(crate) fn connect(to: &Uri, count: u8, uuid: [u8; 16], shared: &Arc<Shared>) -> Result<Self, Error> {
        let mut channels = Self { senders: Vec::new(), lines: Vec::new(), shared: Arc::clone(shared) };
        for number in 0..count {
            let connection = Connection::open(to).map_err(|error| refused(error, number, count))?;
            let line =
                connection.try_clone().map_err(|source| Error::Io { what: format!("connect to {to}"), source })?;
            channels.lines.push(line);
            channels.senders.push(PacketSender::greet(connection, number, uuid, Arc::clone(shared))?);
        }
        Ok(channels)
    }

    /// Every channel's half of a barrier, with no pages before it.
    pub(crate) fn barrier(&mut self) -> Result<u64, Error> {
        self.senders.iter_mut().map(PacketSender::barrier).sum()
    }

    /// See [`PacketSender::check_open`].
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        self.senders.iter().try_for_each(PacketSender::check_open)
    }

    /// Has `feed` hand over a round's work, sends it, each channel by a thread of its own, and ends it with a barrier on every channel.
    pub(crate) fn run_round(
        &mut self,
        line: &mut Line,
        feed: impl FnOnce(&Queue, &mut Line) -> Result<(), Error>,
    ) -> Result<Sent, Error> {
        let Self { senders, lines, shared } = self;
        let count = senders.len();
        let (done, results) = bounded(count);
        let (queue, batches) = bounded(2 * count);
        thread::scope(|scope| {
            for sender in senders {
                let (batches, done) = (batches.clone(), done.clone());
                // The receiver outlives the scope, and has room for all.
                scope.spawn(move || {
                    let _ = done.send(sender.run(&batches));
                });
            }
            drop(batches);
            let queue = Queue { queue, shared: Arc::clone(shared) };
            let fed = feed(&queue, line);
            drop(queue);
            let collect = |line: &mut Line| {
                let mut total = Sent::default();
                for _ in 0..count {
                    let sent = loop {
                        match results.recv_timeout(TICK) {
                            Ok(result) => break result?,
                            Err(_) if shared.progress.is_cancelled() => return Err(Error::Cancelled),
                            Err(_) => line.check_silence()?,
                        }
                    };
                    total.add(&sent);
                }
                Ok(total)
            };
            let result = fed.and_then(|()| collect(line));
            if result.is_err() {
                shared.failed.store(true, Relaxed);
                lines.iter().for_each(Connection::shutdown);
            }
            result.map_err(|error| match error {
                Error::Cancelled => Error::Cancelled,
                // What a channel has to say is closer to the cause than that the whole has ended.
                error => results.try_iter().find_map(Result::err).unwrap_or(error),
            })
        })
    }

    /// Ends all connections.
    pub(crate) fn hang_up(&self) {
        self.lines.iter().for_each(Connection::shutdown);
    }
}

fn refused(error: Error, number: u8, count: u8) -> Error {
    match error {
        Error::Io { what, source } if number > 0 || source.kind() == std::io::ErrorKind::ConnectionRefused => {
            let what = format!(
                "{what} for channel {number} of {count} (the destination must have the capability multifd and multifd-channels {count})"
            );
            Error::Io { what, source }
        }
        error => error,
    }
}

/// Where a round's work goes.
pub(crate) struct Queue {
    queue: Sender<Batch>,
    shared: Arc<Shared>,
}

impl Queue {
    /// Waits for room.
    ///
    /// # Errors
    /// A channel has failed; the destination has spoken; cancelled.
    pub(crate) fn hand_over(&self, mut batch: Batch, line: &mut Line) -> Result<(), Error> {
        loop {
            if self.shared.failed.load(Relaxed) {
                let what = "broke a channel".into();
                return Err(Error::Protocol { peer: self.shared.peer.clone(), what });
            }
            if self.shared.progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            match self.queue.send_timeout(batch, TICK) {
                Ok(()) => return Ok(()),
                Err(SendTimeoutError::Timeout(back)) => {
                    line.check_silence()?;
                    batch = back;
                }
                // All threads have failed; collecting their results says how.
                Err(SendTimeoutError::Disconnected(_)) => return Ok(()),
            }
        }
    }
}
