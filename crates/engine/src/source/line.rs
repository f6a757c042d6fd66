//! A supply line: the connections over which a guest that was handed over before its pages gets them. One connection
//! has what is waited for, in messages both ways; the others have the rest, in packets. A line that breaks is followed
//! by the next, which begins with what the destination says that it lacks.
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, TryRecvError};
use transship_memory::{Freeing, GuestMemory, PageCount, PageRange, PageSet, WindowPages};
use transship_wire::{Message, Pages, Refusal, Role, SessionId};

use super::{
    beside::Beside,
    channels::{Channels, Setup, connect, connect_channels},
    give_way::give_way,
};
use crate::{
    Error, MoveOptions, PostCopyReport, Progress, Rule, Uri,
    channels::{MainThread, RoundWork},
    control::{Control, TICK},
    fail_point,
    free::FreePages,
    owed,
    page_map::PageMap,
    scan::Pending,
    transport::{Connection, STALL_TIMEOUT},
};

/// What all lines of a move have in common.
pub(super) struct Base<'a> {
    pub(super) to: &'a Uri,
    pub(super) options: &'a MoveOptions,
    pub(super) session: SessionId,
    pub(super) memory: GuestMemory,
    pub(super) progress: Arc<Progress>,
}

/// One that stands.
pub(super) struct Line {
    channels: Channels,
    /// By region: what the destination lacked when the line began.
    lacks: Vec<PageSet>,
    state: Arc<Shared>,
    /// Its end is the end of the thread that serves.
    urgent: Connection,
    server: Option<thread::JoinHandle<()>>,
}

/// What the thread that serves and the main thread know of a line.
struct Shared {
    /// By region: pages that nobody has sent on this line.
    unsent: Vec<PageMap>,
    told: Mutex<Told>,
    changed: Condvar,
}

/// What has become known.
#[derive(Default)]
struct Told {
    /// The guest was started.
    runs: bool,
    /// All pages are there.
    is_complete: bool,
    /// It is broken, for this reason, which somebody may have taken.
    broken: Option<Option<Error>>,
    /// Pages sent because somebody waited.
    sent: u64,
    /// What the destination is to hear when the line ends.
    last_word: Option<String>,
}

impl Shared {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told());
        self.changed.notify_all();
    }
}

impl Line {
    /// Dials. The destination may begin to wait for pages when this returns. `given`: the guest was given away, and
    /// whether it is to run. That is said once more: the destination may not have heard it.
    pub(super) fn open(base: &Base<'_>, number: u32, given: Option<bool>) -> Result<Self, Error> {
        let Base { to, options, session, memory, progress } = base;
        let mut connection = connect(to, options.terms.caller.as_ref(), *session, Role::Supply(number))?;
        connection.await_word(to)?;
        let failed = |source| Error::Io { what: format!("set up the connection with {to}"), source };
        connection.hold_little().map_err(failed)?;
        let urgent = connection.try_clone().map_err(failed)?;
        let mut control = Control::new(connection, to.to_string())?;
        if let Some(run) = given {
            control.send(&Message::Go { run })?;
        }
        let content: Vec<_> = memory.regions().iter().map(|region| PageMap::new(region.pages())).collect();
        // Each page is announced, also one that is zero: somebody may wait for it.
        let everything = |(map, region): (&PageMap, &transship_memory::Region)| {
            map.insert_range(PageRange::all(region.pages()));
        };
        content.iter().zip(memory.regions()).for_each(everything);
        let setup = Setup { session: *session, memory: memory.clone(), content };
        let role = |channel| Role::Push { line: number, channel };
        let channels = connect_channels(to, setup, role, options, progress)?;
        let lacks = owed::receive(&control, None, memory, STALL_TIMEOUT * 2, progress)?;
        let unsent = lacks.iter().map(PageMap::of).collect();
        let state = Arc::new(Shared { unsent, told: Mutex::default(), changed: Condvar::new() });
        let server = Server { control, memory: memory.clone(), state: Arc::clone(&state), beside: Beside::default() };
        let server = thread::Builder::new().name("urgent".into()).spawn(move || server.run()).map_err(failed)?;
        Ok(Self { channels, lacks, state, urgent, server: Some(server) })
    }

    /// By region: what the destination lacked when the line began.
    pub(super) fn lacks(&self) -> &[PageSet] {
        &self.lacks
    }

    /// An error if it is broken.
    pub(super) fn check(&self) -> Result<(), Error> {
        check(&self.state)
    }

    /// Whether the destination has said that the guest was started.
    pub(super) fn guest_runs(&self) -> bool {
        self.state.told().runs
    }

    /// Sends what nobody has waited for, and waits until the destination says that it has all.
    pub(super) fn serve(&mut self, report: &mut PostCopyReport) -> Result<(), Error> {
        let pending: Vec<_> = self.lacks.iter().cloned().map(Pending::all).collect();
        let work = RoundWork { round: 0, pending: &pending, freeing: Freeing::Never };
        let pushing = Pushing { state: &self.state };
        let failed = |source| Error::Io { what: "watch the connections that pages go over".into(), source };
        let connections = self.channels.connections().map_err(failed)?;
        let shared = Arc::clone(self.channels.shared());
        let pushed = thread::scope(|scope| {
            let _until = give_way(scope, &connections, &self.urgent, &shared.at_once);
            self.channels.run_round(&work, &mut FreePages::none(), &pushing)
        });
        let result = pushed.and_then(|(sent, _)| {
            report.by_push += (sent.normal + sent.zero).get();
            fail_point::reach("source.pushed")?;
            self.await_the_end()
        });
        report.by_fault += self.state.told().sent;
        result
    }

    fn await_the_end(&self) -> Result<(), Error> {
        let mut told = self.state.told();
        loop {
            if told.is_complete {
                return Ok(());
            }
            if told.broken.is_some() {
                drop(told);
                return self.check();
            }
            told = self.state.changed.wait(told).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends it for good: the destination hears why.
    pub(super) fn give_up(mut self, reason: String) {
        self.state.told().last_word = Some(reason);
        self.urgent.end_reading();
        self.await_server();
    }

    /// Returns when the thread that serves has ended, which somebody has brought about.
    fn await_server(&mut self) {
        if let Some(server) = self.server.take() {
            // A panic there has been printed.
            let _ = server.join();
        }
    }

    /// What it did, added to the report.
    pub(super) fn report(&self, report: &mut crate::Report) {
        self.channels.report(report);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.channels.hang_up();
        // What was said last is still to arrive.
        self.urgent.end_writing();
        self.urgent.end_reading();
        self.await_server();
    }
}

fn check(state: &Shared) -> Result<(), Error> {
    let mut told = state.told();
    if told.is_complete {
        return Ok(()); // whoever has all pages hangs up
    }
    match &mut told.broken {
        None => Ok(()),
        Some(why) => Err(why.take().unwrap_or_else(|| Error::Io {
            what: "use the supply line".into(),
            source: std::io::ErrorKind::BrokenPipe.into(),
        })),
    }
}

/// The main thread while it sends the rest.
struct Pushing<'a> {
    state: &'a Shared,
}

impl MainThread for Pushing<'_> {
    fn check(&self) -> Result<(), Error> {
        check(self.state)
    }

    fn check_at_the_end(&self) -> Result<(), Error> {
        check(self.state)
    }

    fn reason(&self) -> Option<Error> {
        check(self.state).err()
    }

    fn still_wanted(&self, region: usize, pages: WindowPages) -> WindowPages {
        self.state.unsent[region].claim(pages)
    }
}

/// The thread that serves those who wait.
struct Server {
    control: Control,
    memory: GuestMemory,
    state: Arc<Shared>,
    /// Pages beside those that were waited for: sent when nobody waits.
    beside: Beside,
}

impl Server {
    fn run(mut self) {
        let incoming = self.control.incoming.clone();
        let over = loop {
            match self.next(&incoming).and_then(|message| self.answer(message)) {
                Ok(true) => {}
                Ok(false) => break None,
                Err(error) => break Some(error),
            }
        };
        let reason = match &over {
            Some(error @ Error::Memory(_)) => Some(cant_read(error)),
            _ => self.state.told().last_word.take(),
        };
        if let Some(reason) = reason {
            // If it does not arrive the destination waits for another line.
            let _ = self.control.send(&Message::Abort(Refusal { reason }));
        }
        self.state.tell(|told| told.broken = Some(over));
    }

    /// What the destination says next; none: there is time for something else.
    fn next(&self, incoming: &Receiver<Result<Message, Error>>) -> Result<Option<Message>, Error> {
        let message = match self.beside.is_empty() {
            true => incoming.recv().map_err(|_| self.control.gone())?,
            false => match incoming.try_recv() {
                Ok(message) => message,
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => return Err(self.control.gone()),
            },
        };
        self.control.unless_abort(message?).map(Some)
    }

    /// False: all is done.
    fn answer(&mut self, message: Option<Message>) -> Result<bool, Error> {
        match message {
            None => self.send_beside()?,
            Some(Message::Want { region, page }) => self.send_wanted(region, page)?,
            Some(Message::Running) => self.state.tell(|told| told.runs = true),
            Some(Message::Complete) => {
                // If it does not arrive the destination waits for a moment, and ends all the same.
                let _ = self.control.send(&Message::Complete);
                self.state.tell(|told| told.is_complete = true);
                return Ok(false);
            }
            Some(other) => return Err(self.control.unexpected(&other, "on a supply line")),
        }
        Ok(true)
    }

    fn send_wanted(&mut self, region: u16, page: u64) -> Result<(), Error> {
        let index = usize::from(region);
        let pages = self.memory.get(index).map_or(PageCount::ZERO, transship_memory::Region::pages);
        if page >= pages.get() {
            let what = format!("wants page {page} of region {region}, which has {pages}");
            return Err(Error::breach(&self.control.peer, Rule::Bounds, what));
        }
        fail_point::reach("source.wanted")?;
        let wanted = PageRange::new(page, 1);
        // It may be on its way with the rest, behind much else: then it goes twice.
        self.state.unsent[index].claim(WindowPages::within(wanted, wanted.first.window()));
        self.send(region, wanted)?;
        self.beside.note(region, page);
        Ok(())
    }

    /// A few pages beside those that were waited for.
    fn send_beside(&mut self) -> Result<(), Error> {
        let pages =
            |region: u16| self.memory.get(usize::from(region)).map_or(PageCount::ZERO, transship_memory::Region::pages);
        let Some((region, group)) = self.beside.take(pages) else { return Ok(()) };
        let window = group.first.window();
        let unsent = self.state.unsent[usize::from(region)].claim(WindowPages::within(group, window));
        unsent.runs().try_for_each(|run| self.send(region, run))
    }

    /// Pages of one window.
    fn send(&mut self, region: u16, pages: PageRange) -> Result<(), Error> {
        let memory = &self.memory.regions()[usize::from(region)];
        let window = pages.first.window();
        let wanted = WindowPages::within(pages, window);
        let zero = memory.zero_mask(wanted)?;
        for (these, is_zero) in [(wanted.without(zero), false), (wanted.with(zero), true)] {
            for run in these.runs() {
                let mut bytes = Vec::new();
                if !is_zero {
                    memory.copy_out(WindowPages::within(run, window), &mut bytes)?;
                }
                let count = run.count.get() as u8; // at most as many as travel at once
                self.control.send(&Message::Page(Pages { region, first: run.first.get(), count, bytes }))?;
            }
        }
        self.state.told().sent += pages.count.get();
        Ok(())
    }
}

/// What a destination is told that waits for pages that nobody can read any more.
pub(super) fn cant_read(error: &Error) -> String {
    format!("the rest of the guest's memory can't be read at the source any more, and is lost: {error}")
}

/// Waits for a moment, before a line is dialled again.
pub(super) fn pause(attempt: u32) {
    let wait = (TICK * 4 * attempt.clamp(1, 10)).min(Duration::from_secs(2));
    // Nobody ever says anything here: there is no event for a network that is back.
    let _ = crossbeam_channel::never::<()>().recv_timeout(wait);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{io::Write, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn pages_that_the_guest_does_not_have_are_no_wish() {
        // A page further than the last one, and a region.
        for (region, page) in [(0, 300), (1, 0)] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 300 << 12).unwrap();
            let memory = transship_memory::Region::map(
                "ram",
                file,
                transship_memory::ByteRange::sized(0, 300 << 12),
                transship_memory::Access::Read,
            );
            let unsent = vec![PageMap::new(PageCount::new(300))];
            let server = Server {
                control: Control::new(Connection::Unix(ours), "peer".into()).unwrap(),
                memory: GuestMemory::new(vec![memory.unwrap()]),
                state: Arc::new(Shared { unsent, told: Mutex::default(), changed: Condvar::new() }),
                beside: Beside::default(),
            };
            let state = Arc::clone(&server.state);
            theirs.write_all(&Message::Want { region, page }.encode(1)).unwrap();
            drop(theirs);
            server.run();
            let error = check(&state).unwrap_err();
            assert_eq!(error.rule(), Some(Rule::Bounds), "{error}");
        }
    }
}
