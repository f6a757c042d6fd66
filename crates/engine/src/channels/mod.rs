//! The channels of a source and the encoders in front of them, whatever is spoken on them.
//!
//! - `shared`: what all threads use, and what travels between them; `sent`: what they have done in a round
//! - here: all channels of a session, and how a round's work is spread over them
//! - `thread`: one of them; `feed`: what the main thread hands over
//! - `encoding`, `encoder`, `meters`, `sampler`: the encoders; `gate`: between them and the channels
//! - `dispatcher`, `coder`: what they share with those of relays
pub(crate) mod coder;
pub(crate) mod dispatcher;
mod encoder;
mod encoding;
mod feed;
mod gate;
pub(crate) mod meters;
mod sampler;
mod sent;
mod shared;
mod thread;

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread as threads,
};

use crossbeam_channel::{Receiver, bounded};
use transship_memory::{Freeing, PageRange, WindowBuffer};

pub(crate) use encoding::{Encoders, EncodingOptions};
pub(crate) use feed::{MainThread, trim};
pub(crate) use sent::Sent;
use shared::SessionOver;
pub(crate) use shared::{Batch, Body, Encoded, PagesAtOnce, Settled, Shared, Window};

use crate::{
    Error, Progress, Report, Rule, control::TICK, free::FreePages, guest::RegionPages, page_map::PageMap,
    scan::Pending, transport::Connection,
};
use feed::Feed;

/// One connection that pages go over.
pub(crate) trait Channel: Send {
    /// What it shares with the others.
    fn shared(&self) -> &Arc<Shared>;

    /// Where a window's pages go by way of a slot: has it filled, and says which. None: this window's do not.
    fn fill_slot(
        &mut self,
        _window: &mut Window,
        _fill: &mut dyn FnMut(&mut Window, &mut WindowBuffer) -> Result<(), Error>,
    ) -> Result<Option<u8>, Error> {
        Ok(None)
    }

    /// Sends a window's pages, and announces those that became zero.
    fn send_window(&mut self, window: &Window, pages: Settled, body: Body<'_>, sent: &mut Sent) -> Result<(), Error>;

    /// Announces that pages became a hole.
    fn send_hole(&mut self, round: u32, region: usize, range: PageRange, sent: &mut Sent) -> Result<(), Error>;

    /// Ends a round on this connection.
    fn end_round(&mut self, round: u32, sent: &mut Sent) -> Result<(), Error>;
}

/// The pages that a round has to send.
pub(crate) struct RoundWork<'a> {
    pub(crate) round: u32,
    pub(crate) pending: &'a [Pending],
    /// Whether the guest may give memory back while the round is sent.
    pub(crate) freeing: Freeing,
}

/// All channels of a session.
pub(crate) struct Channels<C> {
    channels: Vec<C>,
    /// Second handles, to end a thread that is blocked in a send.
    lines: Vec<Connection>,
    shared: Arc<Shared>,
    encoders: Option<Encoders>,
}

impl<C: Channel> Channels<C> {
    /// None yet.
    pub(crate) fn new(shared: &Arc<Shared>, encoders: Option<Encoders>) -> Self {
        Self { channels: Vec::new(), lines: Vec::new(), shared: Arc::clone(shared), encoders }
    }

    /// One more, which `make` makes of the connection.
    pub(crate) fn add(
        &mut self,
        connection: Connection,
        make: impl FnOnce(Connection) -> Result<C, Error>,
    ) -> Result<(), Error> {
        let what = || format!("connect to {}", self.shared.peer);
        let line = connection.try_clone().map_err(|source| Error::Io { what: what(), source })?;
        self.lines.push(line);
        self.channels.push(make(connection)?);
        Ok(())
    }

    pub(crate) fn all(&self) -> &[C] {
        &self.channels
    }

    pub(crate) fn all_mut(&mut self) -> &mut [C] {
        &mut self.channels
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// From now on pages go as they are.
    pub(crate) fn encode_nothing(&mut self) {
        self.encoders = None;
    }

    /// A second handle of the first connection.
    pub(crate) fn first(&self) -> &Connection {
        &self.lines[0]
    }

    /// Second handles of the connections.
    pub(crate) fn connections(&self) -> std::io::Result<Vec<Connection>> {
        self.lines.iter().map(Connection::try_clone).collect()
    }

    /// By region: the pages for which the destination holds content.
    pub(crate) fn content(&self) -> &[PageMap] {
        &self.shared.content
    }

    /// Sends a round over all channels, each in a thread of its own, and ends it on each. Pages that become known as
    /// free meanwhile are left out if they were not handed over yet. Pages that became holes are left out, too, and
    /// returned.
    pub(crate) fn run_round(
        &mut self,
        work: &RoundWork<'_>,
        free: &mut FreePages,
        main: &dyn MainThread,
    ) -> Result<(Sent, Vec<RegionPages>), Error> {
        let (done, results) = bounded(self.channels.len());
        let Self { channels, lines, shared, encoders } = self;
        let (new_holes, buffer) = (Vec::new(), WindowBuffer::default());
        let mut feed = Feed { work, shared, free, main, new_holes, buffer };
        threads::scope(|scope| {
            let count = channels.len();
            // In all cases `results` outlives the scope, and has room for all.
            let result = match encoders {
                None => {
                    let (queue, batches) = bounded(2 * count);
                    for channel in channels {
                        let (batches, done) = (batches.clone(), done.clone());
                        scope.spawn(move || {
                            let _ = done.send(thread::run(channel, work.round, &batches));
                        });
                    }
                    drop(batches);
                    let fed = feed.hand_to_channels(&queue);
                    drop(queue);
                    fed.and_then(|()| collect(&results, count, shared, main, || Ok(())))
                }
                Some(encoders) => {
                    let gate = Arc::new(encoders.open_gate());
                    for channel in channels {
                        let (gate, done) = (Arc::clone(&gate), done.clone());
                        let spare = encoders.spare();
                        scope.spawn(move || {
                            let _ = done.send(thread::run_encoded(channel, work.round, &gate, &spare));
                        });
                    }
                    let fed = feed.hand_to_encoders(encoders, &gate);
                    gate.close(encoders.handed_over());
                    let result = fed.and_then(|()| collect(&results, count, shared, main, || encoders.check()));
                    if result.is_err() && encoders.check().is_err() {
                        gate.end(); // what the dead encoder had will never come
                    }
                    result
                }
            };
            if result.is_err() {
                shared.end();
                lines.iter().for_each(Connection::shutdown);
            }
            result.map(|sent| (sent, std::mem::take(&mut feed.new_holes))).map_err(|error| explain(error, main, shared))
        })
    }

    /// Adds the work of the encoders so far to the report.
    pub(crate) fn report(&self, report: &mut Report) {
        let Progress { encoding, cpu, .. } = &*self.shared.progress;
        report.busy_ratio = encoding.busy_ratio();
        report.pages.raw_busy = encoding.raw_busy_pages.load(Relaxed);
        report.bytes.encoder_in = encoding.bytes_in.load(Relaxed);
        report.bytes.encoder_out = encoding.bytes_out.load(Relaxed);
        report.cpu.encoders = cpu.encoders.seconds();
    }

    /// Ends all connections.
    pub(crate) fn hang_up(&self) {
        self.lines.iter().for_each(Connection::shutdown);
    }
}

fn collect(
    results: &Receiver<Result<Sent, SessionOver>>,
    count: usize,
    shared: &Shared,
    main: &dyn MainThread,
    helpers_live: impl Fn() -> Result<(), Error>,
) -> Result<Sent, Error> {
    let mut total = Sent::default();
    for _ in 0..count {
        let sent = loop {
            match results.recv_timeout(TICK) {
                Ok(Ok(sent)) => break sent,
                Ok(Err(SessionOver)) => {
                    let what = "broke a connection that pages go over";
                    return Err(Error::breach(&shared.peer, Rule::Stays, what));
                }
                Err(_) if shared.progress.is_cancelled() => return Err(Error::CANCELLED),
                Err(_) => main.check_at_the_end().and_then(|()| helpers_live())?,
            }
        };
        total.add(&sent);
    }
    Ok(total)
}

/// The best that can be said about a failure: the peer's own reason, else that of the channel that failed first, else
/// the error itself.
fn explain(error: Error, main: &dyn MainThread, shared: &Shared) -> Error {
    if matches!(error, Error::Cancelled(_) | Error::Refused(_)) {
        return error;
    }
    main.reason().or_else(|| shared.failure.take()).unwrap_or(error)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::Read,
        os::unix::net::UnixStream,
        sync::Barrier,
        time::{Duration, Instant},
    };

    use transship_memory::GuestMemory;

    use super::*;

    /// Ends its round by an error.
    struct Failing {
        shared: Arc<Shared>,
        connection: Connection,
        /// It has no error to report before its connection is shut down.
        is_sound: bool,
        /// Where it meets the other one.
        both_there: Arc<Barrier>,
    }

    /// The rule that whoever fails first says was broken. No other error here has it.
    const CAUSE: Rule = Rule::Bounds;

    fn broke(rule: Rule) -> Error {
        Error::breach("peer", rule, "ended its round")
    }

    impl Channel for Failing {
        fn shared(&self) -> &Arc<Shared> {
            &self.shared
        }

        fn send_window(&mut self, _: &Window, _: Settled, _: Body<'_>, _: &mut Sent) -> Result<(), Error> {
            Ok(())
        }

        fn send_hole(&mut self, _: u32, _: usize, _: PageRange, _: &mut Sent) -> Result<(), Error> {
            Ok(())
        }

        fn end_round(&mut self, _: u32, _: &mut Sent) -> Result<(), Error> {
            self.both_there.wait();
            if !self.is_sound {
                return Err(broke(CAUSE));
            }
            assert_eq!(self.connection.read(&mut [0]).unwrap(), 0);
            Err(broke(Rule::Order))
        }
    }

    /// A main thread that fails or not, and asks the peer for a reason for so long that all channels have ended.
    struct Watching {
        shared: Arc<Shared>,
        fails: bool,
    }

    impl MainThread for Watching {
        fn check(&self) -> Result<(), Error> {
            Ok(())
        }

        fn check_at_the_end(&self) -> Result<(), Error> {
            if self.fails { Err(broke(CAUSE)) } else { Ok(()) }
        }

        fn reason(&self) -> Option<Error> {
            // Both channels have one, and each of their threads another.
            let deadline = Instant::now() + Duration::from_secs(10);
            while Arc::strong_count(&self.shared) > 5 && Instant::now() < deadline {
                threads::sleep(Duration::from_millis(10));
            }
            None
        }
    }

    /// When a round breaks, all connections are shut down, and so the others fail, too: they know nothing.
    #[test]
    fn a_round_that_breaks_is_explained_by_what_failed_first() {
        // One of the channels, the first or the last of them, or the main thread.
        for culprit in [Some(0), Some(1), None] {
            let shared = Arc::new(Shared::with_nobody(GuestMemory::new(Vec::new())));
            let mut channels = Channels::new(&shared, None);
            let both_there = Arc::new(Barrier::new(2));
            let ends = [0, 1].map(|number| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let (shared, both_there) = (Arc::clone(&shared), Arc::clone(&both_there));
                let is_sound = culprit != Some(number);
                let make = |connection| Ok(Failing { shared, connection, is_sound, both_there });
                channels.add(Connection::Unix(ours), make).unwrap();
                theirs
            });
            let work = RoundWork { round: 1, pending: &[], freeing: Freeing::Never };
            let main = Watching { shared: Arc::clone(&shared), fails: culprit.is_none() };
            let error = channels.run_round(&work, &mut FreePages::none(), &main).unwrap_err();
            assert_eq!(error.rule(), Some(CAUSE), "{culprit:?}: {error}");
            drop(ends);
        }
    }
}
