//! A supply line: the connections over which a guest that was handed over before its pages gets them. One connection
//! has what is waited for, in messages both ways; the others have the rest, in packets. A line that breaks is followed
//! by the next, which begins with what the destination says that it lacks.
use std::{sync::Arc, thread, time::Duration};

use transship_memory::{Freeing, GuestMemory, PageRange, PageSet};
use transship_wire::{Message, Role, SessionId};

use super::{
    channels::{Channels, Setup, connect, connect_channels},
    give_way::{LinkShare, give_way},
    standing::Standing,
    urgent::Server,
};
use crate::{
    Error, MoveOptions, PostCopyReport, Progress, Uri,
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
    /// Bytes a second of the link, if that is known.
    pub(super) carries: Option<f64>,
}

/// One that stands.
pub(super) struct Line {
    channels: Channels,
    /// Bytes a second of the link, if that is known.
    carries: Option<f64>,
    /// By region: what the destination lacked when the line began.
    lacks: Vec<PageSet>,
    state: Arc<Standing>,
    /// Its end is the end of the thread that serves.
    urgent: Connection,
    server: Option<thread::JoinHandle<()>>,
}

impl Line {
    /// Dials. The destination may begin to wait for pages when this returns. `given`: the guest was given away, and
    /// whether it is to run. That is said once more: the destination may not have heard it.
    pub(super) fn open(base: &Base<'_>, number: u32, given: Option<bool>) -> Result<Self, Error> {
        let Base { to, options, session, memory, progress, carries } = base;
        let mut connection = connect(to, options.terms.caller.as_ref(), *session, Role::Supply(number))?;
        connection.await_word(to)?;
        let failed = |source| Error::Io { what: format!("set up the connection with {to}"), source };
        connection.hold_little().map_err(failed)?;
        let urgent = connection.try_clone().map_err(failed)?;
        let mut control = Control::new(connection, to.to_string())?;
        if let Some(run) = given {
            control.send(&Message::Go { run })?;
        }
        let content = PageMap::empty(memory);
        // Each page is announced, also one that is zero: somebody may wait for it.
        let everything = |(map, region): (&PageMap, &transship_memory::Region)| {
            map.insert_range(PageRange::all(region.pages()));
        };
        content.iter().zip(memory.regions()).for_each(everything);
        let setup = Setup { session: *session, memory: memory.clone(), content };
        let role = |channel| Role::Push { line: number, channel };
        let channels = connect_channels(to, setup, role, options, progress)?;
        let lacks = owed::receive(&control, None, memory, STALL_TIMEOUT * 2, progress)?;
        let state = Arc::new(Standing::new(&lacks));
        let _ = channels.shared().unsent.set(Arc::clone(&state.unsent)); // these channels are new
        let pacer = channels.shared().pacer.clone();
        let server = Server::new(control, memory.clone(), Arc::clone(&state), pacer);
        let server = thread::Builder::new().name("urgent".into()).spawn(move || server.run()).map_err(failed)?;
        Ok(Self { channels, carries: *carries, lacks, state, urgent, server: Some(server) })
    }

    /// By region: what the destination lacked when the line began.
    pub(super) fn lacks(&self) -> &[PageSet] {
        &self.lacks
    }

    /// An error if it is broken.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.state.check()
    }

    /// Whether the destination has said that the guest was started.
    pub(super) fn guest_runs(&self) -> bool {
        self.state.told().runs
    }

    /// Sends what nobody has waited for, and waits until the destination says that it has all.
    pub(super) fn serve(&mut self, report: &mut PostCopyReport) -> Result<(), Error> {
        // Most guests go through their memory upwards. One that meets the channels on its way asks for what they have
        // just taken, and gets it twice; so it meets them once, and does not go along with them.
        let pending: Vec<_> = self.lacks.iter().cloned().map(Pending::from_the_end).collect();
        let work = RoundWork { round: 0, pending: &pending, freeing: Freeing::Never };
        let pushing = Pushing { state: &self.state };
        let failed = |source| Error::Io { what: "watch the connections that pages go over".into(), source };
        let connections = self.channels.connections().map_err(failed)?;
        let shared = Arc::clone(self.channels.shared());
        let pushed = thread::scope(|scope| {
            let link = LinkShare { at_once: &shared.at_once, room: &self.state.room, carries: self.carries };
            let _until = give_way(scope, &connections, &self.urgent, link);
            self.channels.run_round(&work, &mut FreePages::none(), &pushing)
        });
        let result = pushed.and_then(|(sent, _)| {
            report.by_push += (sent.normal + sent.zero).get();
            fail_point::reach("source.pushed")?;
            self.state.await_the_end()
        });
        report.by_fault += self.state.told().sent;
        result
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

/// The main thread while it sends the rest.
struct Pushing<'a> {
    state: &'a Standing,
}

impl MainThread for Pushing<'_> {
    fn check(&self) -> Result<(), Error> {
        self.state.check()
    }

    fn check_at_the_end(&self) -> Result<(), Error> {
        self.state.check()
    }

    fn reason(&self) -> Option<Error> {
        self.state.check().err()
    }
}

/// Waits for a moment, before a line is dialled again.
pub(super) fn pause(attempt: u32) {
    let wait = (TICK * 4 * attempt.clamp(1, 10)).min(Duration::from_secs(2));
    // Nobody ever says anything here: there is no event for a network that is back.
    let _ = crossbeam_channel::never::<()>().recv_timeout(wait);
}
