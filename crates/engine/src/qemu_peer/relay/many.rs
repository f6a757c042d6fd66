//! Relays as a service: any number of migrations, at once and one after another, at one address.
//!
//! Each migration has a relay of its own, on a thread of its own, which knows nothing of the others: it gets its
//! connections from here in place of a listener. Which connection belongs to which is seen from its first words, which
//! are left in it. On the link it is the number of the session. Near a source, a stream begins a new migration; a
//! multifd channel names the machine, and on a unix socket the kernel names the process. Channels may come before their
//! stream has said anything: they are held until it does.
use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::net::sockopt::socket_peercred;
use transship_wire::{
    SessionId,
    qemu::{GREETING_BYTES, Greeting},
};

use super::{RelayOptions, far::relay_to_qemu, link, near::relay_from_qemu};
use crate::{
    Error, Listener, Progress, Report, Uri,
    control::TICK,
    door::{Door, Line, Words, turn_away},
    qemu_peer::lobby,
    transport::Connection,
};

/// How long somebody who connects may be silent.
const SILENCE: Duration = Duration::from_secs(60);

/// How long a channel waits for its stream before it is taken for one of a stream that has begun already. Only where
/// the kernel does not name the process.
const EARLY: Duration = Duration::from_secs(1);
/// Channels that are held at once: all that a source of QEMU's can have.
const HELD_MAX: usize = 255;

/// What becomes of migrations.
#[derive(Debug)]
pub enum Relayed {
    /// One has come.
    Begun {
        /// Its number, from 1 on.
        number: u64,
        /// Where from.
        peer: String,
    },
    /// One has ended.
    Ended {
        /// Its number.
        number: u64,
        /// As of a relay that carries just one.
        outcome: Result<(), Error>,
        /// The same.
        report: Box<Report>,
    },
}

/// Relays migrations until the user has had enough, `most` at the same time: with `near`, of stock QEMUs that connect
/// to `listener`, by the relay that waits at `to`; else of relays that connect to it, to the QEMU that waits at `to`.
/// `tell` is called for each. On the user's wish those that have not been handed over are broken off, and their guests
/// run on at their sources.
///
/// # Errors
/// The listener's; nothing that befalls a migration.
pub fn relay_many(
    listener: &Listener,
    to: &Uri,
    near: Option<&RelayOptions>,
    most: usize,
    progress: &Progress,
    tell: &mut dyn FnMut(Relayed),
) -> Result<(), Error> {
    let (ended, endings) = unbounded();
    let mut service =
        Service { to, near, most, running: BTreeMap::new(), held: Vec::new(), begun: 0, ended, endings, tell };
    let understand = if near.is_some() { of_qemu } else { of_relay };
    let mut door = Door::new(listener, progress, SILENCE, understand, link::refuse);
    let stopped = loop {
        match door.next(TICK) {
            Ok(Some((who, line))) => service.place(who, line, listener),
            Ok(None) => {}
            Err(error) => break error,
        }
        service.place_held();
        while let Ok(ending) = service.endings.try_recv() {
            service.note(ending);
        }
    };
    service.end_all(progress);
    match stopped {
        Error::Cancelled(_) => Ok(()),
        error => Err(error),
    }
}

/// What a connection's first words say.
enum Who {
    /// The stream of a source.
    Stream,
    /// A multifd channel of the machine with this UUID.
    Channel([u8; 16]),
    /// The control connection of a link.
    Link(SessionId),
    /// A data connection of a link.
    Data(SessionId),
}

fn of_qemu(_: &mut Line, words: &[u8]) -> Words<Who> {
    match lobby::kind(words) {
        Words::Known(lobby::Kind::Main) => Words::Known(Who::Stream),
        Words::Known(lobby::Kind::Channel) => {
            let Some(greeting) = words.first_chunk::<GREETING_BYTES>() else { return Words::Unfinished };
            match Greeting::decode(greeting) {
                Ok(greeting) => Words::Known(Who::Channel(greeting.uuid)),
                Err(error) => Words::Strange(error.to_string()),
            }
        }
        Words::Unfinished => Words::Unfinished,
        Words::Strange(why) => Words::Strange(why),
    }
}

fn of_relay(line: &mut Line, words: &[u8]) -> Words<Who> {
    match link::role(line, words) {
        Words::Known((session, true)) => Words::Known(Who::Link(session)),
        Words::Known((session, false)) => Words::Known(Who::Data(session)),
        Words::Unfinished => Words::Unfinished,
        Words::Strange(why) => Words::Strange(why),
    }
}

/// A migration that is under way.
struct Running {
    lines: Sender<Line>,
    progress: Arc<Progress>,
    thread: JoinHandle<()>,
    /// On a link.
    session: Option<SessionId>,
    /// Of the source, where the kernel knows it.
    pid: Option<i32>,
    /// Of the source's machine, once a channel has named it.
    uuid: Option<[u8; 16]>,
}

impl Running {
    fn take(&self, line: Line) {
        // One that has just ended needs it no more.
        let _ = self.lines.send(line);
    }

    fn take_channel(&mut self, channel: Held) {
        self.uuid = Some(channel.uuid);
        self.take(channel.line);
    }
}

/// A channel that waits for its stream.
struct Held {
    uuid: [u8; 16],
    pid: Option<i32>,
    line: Line,
    since: Instant,
}

/// Number, how it went, and its report.
type Ending = (u64, Result<(), Error>, Box<Report>);

struct Service<'a> {
    to: &'a Uri,
    near: Option<&'a RelayOptions>,
    most: usize,
    running: BTreeMap<u64, Running>,
    /// Channels whose stream has not begun.
    held: Vec<Held>,
    begun: u64,
    ended: Sender<Ending>,
    endings: Receiver<Ending>,
    tell: &'a mut dyn FnMut(Relayed),
}

impl Service<'_> {
    /// Hands a connection to the migration that it belongs to.
    fn place(&mut self, who: Who, line: Line, at: &Listener) {
        let pid = peer_process(&line.0);
        match who {
            Who::Stream | Who::Link(_) => self.begin(who, line, pid, at),
            Who::Channel(uuid) => self.place_channel(Held { uuid, pid, line, since: Instant::now() }),
            Who::Data(session) => {
                match self.running.values().find(|running| running.session.as_ref() == Some(&session)) {
                    Some(running) => running.take(line),
                    None => turn_away(&line.1, "a data connection of a link that does not exist"),
                }
            }
        }
    }

    /// One that names a machine whose stream has begun belongs to it; on a unix socket one of the same process does.
    fn place_channel(&mut self, channel: Held) {
        let is_of = |running: &&mut Running| match running.uuid {
            Some(uuid) => running.pid == channel.pid && uuid == channel.uuid,
            None => channel.pid.is_some() && running.pid == channel.pid,
        };
        match self.running.values_mut().find(is_of) {
            Some(running) => running.take_channel(channel),
            None if self.held.len() < HELD_MAX => self.held.push(channel),
            None => turn_away(&channel.line.1, "too many channels wait for a migration to begin"),
        }
    }

    /// Those whose stream has just begun: the channels of one machine, and of the process if that is known.
    fn take_held(&mut self, pid: Option<i32>) -> Vec<Held> {
        let Some(uuid) = self.held.iter().find(|held| held.pid == pid).map(|held| held.uuid) else { return Vec::new() };
        let of_it = |held: &mut Held| held.pid == pid && held.uuid == uuid;
        self.held.extract_if(.., of_it).collect()
    }

    /// A source of an old version opens its channels when its stream has begun.
    fn place_held(&mut self) {
        let waited = |held: &mut Held| held.pid.is_none() && held.since.elapsed() > EARLY;
        for channel in self.held.extract_if(.., waited).collect::<Vec<_>>() {
            let is_of =
                |running: &&mut Running| running.pid.is_none() && running.uuid.is_none_or(|uuid| uuid == channel.uuid);
            match self.running.values_mut().rev().find(is_of) {
                Some(running) => running.take_channel(channel),
                None if channel.since.elapsed() < SILENCE => self.held.push(channel),
                None => turn_away(&channel.line.1, "it belongs to no migration that has begun"),
            }
        }
        for Held { line, .. } in self.held.extract_if(.., |held| held.since.elapsed() > SILENCE) {
            turn_away(&line.1, "it belongs to no migration that has begun");
        }
    }

    fn begin(&mut self, who: Who, mut line: Line, pid: Option<i32>, at: &Listener) {
        let full = || format!("{} migrations are relayed already, which is what --many allows", self.most);
        let late = at.check_lifetime().err().map(|error| error.to_string());
        if let Some(why) = late.or_else(|| (self.running.len() >= self.most).then(full)) {
            if let Who::Link(_) = who {
                link::refuse(&mut line.0, &format!("{why}; try again when one has ended"));
            }
            turn_away(&line.1, &why);
            line.0.break_off();
            return;
        }
        self.begun += 1;
        let (number, peer) = (self.begun, line.1.clone());
        let session = match who {
            Who::Link(session) => Some(session),
            _ => None,
        };
        match self.start(number, line, at.uri()) {
            Ok((lines, progress, thread)) => {
                let mut running = Running { lines, progress, thread, session, pid, uuid: None };
                self.take_held(pid).into_iter().for_each(|channel| running.take_channel(channel));
                self.running.insert(number, running);
                (self.tell)(Relayed::Begun { number, peer });
            }
            Err(source) => turn_away(&peer, &format!("can't start a thread: {source}")),
        }
    }

    fn start(
        &self,
        number: u64,
        first: Line,
        at: &Uri,
    ) -> std::io::Result<(Sender<Line>, Arc<Progress>, JoinHandle<()>)> {
        let (lines, listener) = Listener::handed(at);
        // It is there when the relay asks for the first time.
        let _ = lines.send(first);
        let (to, near, ended, progress) = (self.to.clone(), self.near.cloned(), self.ended.clone(), Progress::new());
        let own = Arc::clone(&progress);
        let thread = thread::Builder::new().name(format!("relay {number}")).spawn(move || {
            let mut report = Box::<Report>::default();
            let outcome = match near {
                Some(options) => relay_from_qemu(&listener, &to, &options, &own, &mut report),
                None => relay_to_qemu(listener, &to, &own, &mut report),
            };
            let _ = ended.send((number, outcome, report));
        })?;
        Ok((lines, progress, thread))
    }

    fn note(&mut self, (number, outcome, report): Ending) {
        if let Some(running) = self.running.remove(&number) {
            // A panic there has been printed.
            let _ = running.thread.join();
        }
        (self.tell)(Relayed::Ended { number, outcome, report });
    }

    /// Each wish of the user's goes to all of them: a relay that keeps a source waiting asks for another.
    fn end_all(&mut self, progress: &Progress) {
        while !self.running.is_empty() {
            if progress.take_cancel() {
                self.running.values().for_each(|running| running.progress.cancel());
            }
            if let Ok(ending) = self.endings.recv_timeout(TICK) {
                self.note(ending);
            }
        }
    }
}

/// The process at the other end, where the kernel knows it: on a unix socket.
fn peer_process(connection: &Connection) -> Option<i32> {
    match connection {
        Connection::Unix(_) => socket_peercred(connection.as_fd()).ok().map(|peer| peer.pid.as_raw_nonzero().get()),
        Connection::Tcp(_) | Connection::Secured(_) => None,
    }
}
