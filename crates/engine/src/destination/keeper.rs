//! The supply lines at their other end: taken as they come, and followed until they break or all is there.
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::PageRange;
use transship_wire::{Message, SessionId};

use super::{
    accept::{Arrivals, Gathering, Supply},
    arrival::Arrival,
    arriving::ArrivingMemory,
    channel::Channels,
    decoding::{Decoders, Origin},
    event::ChannelEvent,
};
use crate::{
    Error, Progress, Rule,
    control::{Control, TICK},
    fail_point,
};

/// How long a source that has named what it owes may take to open the supply line.
const LINE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a source may take to answer that it has heard that all is there. If it has not, no harm is done here.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the reason for the end of a line may take to be heard, where a data connection has ended first.
const REASON_TIMEOUT: Duration = Duration::from_millis(500);

/// What is known of the supply lines.
pub(super) struct Lines {
    told: Mutex<Told>,
    changed: Condvar,
    /// Has a word when the first line is broken before the guest was handed over.
    broken: (Sender<()>, Receiver<()>),
}

impl Default for Lines {
    fn default() -> Self {
        Self { told: Mutex::default(), changed: Condvar::new(), broken: bounded(1) }
    }
}

#[derive(Default)]
pub(super) struct Told {
    /// One has stood.
    pub(super) is_there: bool,
    /// None will come any more.
    failed: Option<Error>,
    pub(super) reconnects: u64,
    /// Nothing waits for them any more.
    is_over: bool,
}

impl Lines {
    /// Has a word when the first line is broken before the guest was handed over. [`Lines::why`] says why.
    pub(super) fn broken(&self) -> &Receiver<()> {
        &self.broken.1
    }

    /// Why none is there.
    pub(super) fn why(&self) -> Error {
        self.told().failed.take().unwrap_or_else(|| broken(Rule::Stays, "has closed the supply line"))
    }

    fn fail(&self, error: Error) {
        self.told().failed = Some(error);
        self.changed.notify_all();
        // One word is enough.
        let _ = self.broken.0.try_send(());
    }

    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the first, for as long as the source is there. What it says meanwhile, if the line was slower than
    /// that, is returned.
    pub(super) fn first(&self, control: &Control, progress: &Progress) -> Result<Option<Message>, Error> {
        let deadline = Instant::now() + LINE_TIMEOUT;
        let mut early = None;
        loop {
            let is_waiting = |told: &mut Told| !told.is_there && told.failed.is_none();
            let waited = self.changed.wait_timeout_while(self.told(), TICK, is_waiting);
            let (mut told, _) = waited.unwrap_or_else(PoisonError::into_inner);
            match told.failed.take() {
                Some(error) => return Err(error),
                None if told.is_there => return Ok(early),
                None => drop(told),
            }
            if progress.is_cancelled() {
                return Err(Error::CANCELLED);
            }
            if early.is_none() {
                early = control.hear()?;
            }
            if Instant::now() > deadline {
                let what = format!("has not opened its supply line within {} s", LINE_TIMEOUT.as_secs());
                return Err(Error::breach("the source", Rule::Answers, what));
            }
        }
    }
}

/// However a block ends, nothing waits for lines any more.
pub(super) struct OverOnDrop<'a>(pub(super) &'a Lines);

impl Drop for OverOnDrop<'_> {
    fn drop(&mut self) {
        self.0.told().is_over = true;
    }
}

/// The thread that takes lines as they come, and sees them break.
pub(super) struct Keeper<'a, 'l> {
    arrivals: &'a mut Arrivals<'l>,
    arrival: &'a Arc<Arrival>,
    progress: &'a Arc<Progress>,
    lines: &'a Lines,
    session: SessionId,
    gathering: Gathering,
    /// All is there. Until then the source is waited for, which may not know it yet.
    farewell: Option<Instant>,
    /// Why the source can send no more, said before this side knew that the guest was its own.
    last_word: Option<Error>,
}

/// A line that stands.
struct Line {
    /// Pages that were waited for; the last message is the end.
    urgent: Receiver<Result<Message, Error>>,
    /// Dropped before the decoders.
    channels: Channels,
    _decoders: Decoders,
    /// Channels that have not brought all of theirs.
    left: usize,
    /// The source was told on this line that all is there.
    has_told: bool,
}

/// What became of a line.
enum Outcome {
    Stands,
    /// All pages are there, and the source knows it, or can't be told.
    Complete,
}

impl<'a, 'l> Keeper<'a, 'l> {
    /// For lines of so many channels.
    pub(super) fn new(
        arrivals: &'a mut Arrivals<'l>,
        arrival: &'a Arc<Arrival>,
        lines: &'a Lines,
        progress: &'a Arc<Progress>,
        (session, channels): (SessionId, u8),
    ) -> Self {
        Self {
            arrivals,
            arrival,
            progress,
            lines,
            session,
            gathering: Gathering::new(channels),
            farewell: None,
            last_word: None,
        }
    }

    /// All is there already. The source is waited for no longer than this: if it knows, it does not come.
    pub(super) fn has_all(&mut self, wait: Duration) {
        self.farewell = Some(Instant::now() + wait);
    }

    /// The life of the thread.
    pub(super) fn run(&mut self) {
        let mut line = None;
        while !self.lines.told().is_over {
            let is_over = self.farewell.is_some_and(|until| Instant::now() > until);
            match if is_over { Ok(Outcome::Complete) } else { self.step(&mut line) } {
                Ok(Outcome::Stands) => {}
                Ok(Outcome::Complete) => {
                    // Whatever it says, all is there.
                    let _ = fail_point::reach("destination.farewell");
                    self.arrival.filling.tell_complete();
                    break;
                }
                Err(error) => {
                    self.lines.fail(error);
                    break;
                }
            }
        }
        self.arrival.end_line();
    }

    fn step(&mut self, line: &mut Option<Line>) -> Result<Outcome, Error> {
        if self.arrival.was_handed_over()
            && let Some(error) = self.last_word.take()
        {
            self.arrival.filling.tell(error);
        }
        // While a line stands its pages have the first word.
        let patience = if line.is_some() { Duration::ZERO } else { TICK };
        if let Some(supply) = self.arrivals.supply(self.session, &mut self.gathering, patience)? {
            self.arrival.end_line();
            self.last_word = None;
            *line = None; // ends its threads, before others bring the same pages
            match self.begin(supply) {
                Ok(begun) => *line = Some(begun),
                Err(error) => self.broke(&error),
            }
        }
        let Some(stands) = line else { return Ok(Outcome::Stands) };
        let followed = stands.follow(self.arrival);
        if stands.has_told {
            self.farewell.get_or_insert_with(|| Instant::now() + FAREWELL_TIMEOUT);
        }
        match followed.map_err(|error| stands.explain(error)) {
            Ok(outcome) => Ok(outcome),
            // A source that has heard the last word hangs up.
            Err(_) if stands.has_told && stands.was_answered() => Ok(Outcome::Complete),
            // What is missing can't be had any more, or can't be put.
            Err(error @ (Error::Memory(_) | Error::Refused(_))) if self.is_final(&error) => {
                self.arrival.filling.tell(error);
                self.arrival.end_line();
                *line = None;
                Ok(Outcome::Stands)
            }
            Err(error) => {
                self.arrival.end_line();
                *line = None;
                self.broke(&error);
                // It is final once the guest is ours, of which we may not know yet: the source had given it away
                // before.
                self.last_word = matches!(error, Error::Refused(_)).then_some(error);
                Ok(Outcome::Stands)
            }
        }
    }

    /// Whether no other line can make up for it.
    fn is_final(&self, error: &Error) -> bool {
        matches!(error, Error::Memory(_)) || self.arrival.was_handed_over()
    }

    fn broke(&self, error: &Error) {
        if self.arrival.was_handed_over() {
            tracing::warn!(
                "the supply line is broken: {error}. The guest runs on, and waits at pages that it lacks, until the \
                 source has dialled again. Leave this command and the VMM as they are. If all processes of the move were \
                 killed there, start it again with --recover"
            );
        } else {
            let rule = match error {
                Error::Refused(_) => Rule::Perseverance,
                Error::Wire { .. } => Rule::Turn,
                _ => error.rule().unwrap_or(Rule::Stays),
            };
            self.lines.fail(broken(rule, format!("broke off: {error}")));
        }
    }

    fn begin(&self, supply: Supply) -> Result<Line, Error> {
        let Supply { urgent: (urgent, peer), push } = supply;
        let control = Control::new(urgent, peer)?;
        let urgent = control.incoming.clone();
        let arriving = ArrivingMemory::arriving(self.arrival, Arc::clone(self.progress));
        let arriving = Arc::new(arriving);
        let (events, incoming) = bounded(push.len() * 2);
        let origin = |(channel, (_, peer)): (usize, &(_, String))| Origin { peer: peer.clone(), channel };
        let (decoders, lanes) = Decoders::start(push.iter().enumerate().map(origin).collect(), &arriving, &events)?;
        let left = push.len();
        let channels = Channels::start(push, lanes, &arriving, (events, incoming))?;
        self.arrival.begin(control)?;
        let mut told = self.lines.told();
        told.reconnects += u64::from(told.is_there);
        told.is_there = true;
        self.lines.changed.notify_all();
        Ok(Line { urgent, channels, _decoders: decoders, left, has_told: false })
    }
}

impl Line {
    /// Puts what comes, for a moment.
    fn follow(&mut self, arrival: &Arrival) -> Result<Outcome, Error> {
        crossbeam_channel::select! {
            recv(self.urgent) -> message => {
                let message = message.map_err(|_| broken(Rule::Stays, "has closed the supply line"))??;
                return self.hear(message, arrival);
            }
            recv(self.channels.events()) -> event => match event {
                Ok(ChannelEvent::RoundEnd { .. }) => self.left = self.left.saturating_sub(1),
                Ok(ChannelEvent::Failed(error)) => return Err(error),
                Err(_) => return Err(broken(Rule::Stays, "has closed its data connections")),
            },
            default(TICK) => {}
        }
        self.settle(arrival)
    }

    fn hear(&mut self, message: Message, arrival: &Arrival) -> Result<Outcome, Error> {
        match message {
            Message::Page(pages) => {
                let region = arrival.filling.regions().get(usize::from(pages.region));
                let end = PageRange::new(pages.first, pages.count.into()).end();
                if region.is_none_or(|region| end > PageRange::all(region.pages).end()) {
                    return Err(broken(
                        Rule::Bounds,
                        format!("sent pages up to {end} of region {}, which it has not", pages.region),
                    ));
                }
                arrival.wanted(&pages)?;
                self.settle(arrival)
            }
            Message::Complete if self.has_told => Ok(Outcome::Complete),
            Message::Go { run } => {
                arrival.give(run);
                Ok(Outcome::Stands)
            }
            Message::Abort(refusal) => Err(Error::Refused(refusal.reason)),
            other => Err(broken(Rule::Turn, format!("sent {} on the supply line", other.name()))),
        }
    }

    /// Says that all is there, once it is.
    fn settle(&mut self, arrival: &Arrival) -> Result<Outcome, Error> {
        let may_be_over = !self.has_told && self.left == 0 && arrival.may_be_over();
        if may_be_over && arrival.filling.claims().are_all_done() {
            fail_point::reach("destination.complete")?;
            arrival.say(&Message::Complete)?;
            self.has_told = true;
        }
        Ok(Outcome::Stands)
    }

    /// The source's reason for the end of the line, if it has said one. A data connection may be seen to end before
    /// that is heard. Pages that are heard here come again on the next line.
    fn explain(&self, error: Error) -> Error {
        if self.has_told || matches!(error, Error::Memory(_) | Error::Refused(_)) {
            return error;
        }
        let until = Instant::now() + REASON_TIMEOUT;
        while let Ok(Ok(message)) = self.urgent.recv_deadline(until) {
            if let Message::Abort(refusal) = message {
                return Error::Refused(refusal.reason);
            }
        }
        error
    }

    /// Whether the source has answered the last word, on a line that has broken since.
    fn was_answered(&self) -> bool {
        self.urgent
            .try_iter()
            .chain(self.urgent.recv_timeout(TICK))
            .any(|message| matches!(message, Ok(Message::Complete)))
    }
}

fn broken(rule: Rule, what: impl Into<String>) -> Error {
    Error::breach("the source", rule, what)
}
