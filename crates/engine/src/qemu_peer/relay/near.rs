//! The relay near the source: a QEMU migrates to it, and what it says goes to the relay near the destination.
//!
//! As long as the end of the stream has not been put on the link, the waiting QEMU can't run the guest, and whatever
//! breaks ends with the guest running here: all of QEMU's connections are broken at once, as if a network had. From
//! then on the guest may run at the destination before the source learns of it. If the link breaks just then, the
//! source's connections are kept, so that it waits and its guest stands still until a person has checked.
use std::{
    io,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

use transship_wire::{
    Refusal,
    relay::{Message, TheEnd},
};

use super::{
    RelayOptions,
    carry::{Sender, broken, read_on, write_on},
    fate::SessionFailure,
    follow::{Follower, Replies, Sorted},
    inlet::Inlet,
    link::{self, Link},
    outlet::Outlet,
    session::RelaySession,
    stream::{CLOSING, Heard, Stream, WINDOW, read_what_is_there},
};
use crate::{
    Error, Listener, Phase, Progress, Report, Rule, Uri,
    control::TICK,
    door::{Line, turn_away},
    ending::finish,
    qemu_peer::lobby::Lobby,
    transport::Connection,
};

/// How long a source may be silent behind its device sections before what it has said is taken for all of it.
const QUIET: Duration = Duration::from_secs(1);
/// A main stream whose blocks have not begun after so much is none.
const HEAD_MAX: usize = 1 << 20;
/// Of the main stream, to begin with: enough for a QEMU to know it.
const FIRST_BYTES: usize = 8;

/// Relays one migration of a stock QEMU that connects to `listener`, by the relay that waits at `to`.
///
/// On success the source has heard that everything is loaded at the destination. On failure its guest runs on, except
/// that [`Error::Unknown`] means what it says; that is returned when the source has closed its connections, or the user
/// has said that it may go on.
///
/// # Errors
/// See [`Error`].
pub fn relay_from_qemu(
    listener: &Listener,
    to: &Uri,
    options: &RelayOptions,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let mut begin = Instant::now();
    let result = link::connect(to, options.caller.as_ref(), options.channels, progress).and_then(|link| {
        let near = Near { listener, options, progress, begin: &mut begin, return_path: false };
        near.run(link, report)
    });
    finish(result, begin, progress, report)
}

struct Near<'a> {
    listener: &'a Listener,
    options: &'a RelayOptions,
    progress: &'a Arc<Progress>,
    begin: &'a mut Instant,
    /// The source waits for word.
    return_path: bool,
}

/// The threads of a session that carry packets, and where these go out.
pub(super) fn start(
    link: Link,
    options: Option<&RelayOptions>,
    progress: &Arc<Progress>,
) -> Result<(Arc<RelaySession>, Arc<Outlet>, link::Messages), Error> {
    let Link { peer, control, messages, data } = link;
    let handles = || -> Result<Vec<Connection>, Error> {
        let handles: io::Result<_> = data.iter().map(Connection::try_clone).collect();
        handles.map_err(|source| Error::Io { what: format!("set up the link with {peer}"), source })
    };
    let (lines, reading) = (handles()?, handles()?);
    let session = RelaySession::new(control, peer.clone(), lines, options.is_some(), progress);
    let started = Outlet::start(options, data, &session).and_then(|outlet| {
        for (number, line) in reading.into_iter().enumerate() {
            let inlet = Inlet::new(line, number, &session);
            session.spawn(&format!("from link {number}"), move |_| inlet.run())?;
        }
        Ok(outlet)
    });
    match started {
        Ok(outlet) => Ok((session, outlet, messages)),
        Err(error) => {
            session.close_link();
            Err(error)
        }
    }
}

/// How QEMU's connections end that have not ended by themselves.
pub(super) enum Ending {
    /// What was written to them still arrives.
    Closed,
    /// Nothing more does.
    Broken,
}

/// Ends all threads of a session.
pub(super) fn end(session: &RelaySession, outlet: Arc<Outlet>, ending: Ending, report: &mut Report) {
    session.close_link();
    for stream in session.streams() {
        match ending {
            Ending::Closed => stream.close(),
            Ending::Broken => stream.break_off(),
        }
    }
    drop(outlet);
    session.join();
    session.report(report);
}

/// An error if the session is broken or the user has cancelled in time.
pub(super) fn check(session: &RelaySession) -> Result<(), Error> {
    if session.fate.is_broken() {
        return Err(session.fate.broke(Rule::Stays, "has broken the link")); // the session knows better why
    }
    let is_late = session.end_given.load(SeqCst) && session.progress.phase() == Phase::HandedOver;
    if session.progress.is_cancelled() && !is_late { Err(Error::CANCELLED) } else { Ok(()) }
}

impl Near<'_> {
    fn run(mut self, link: Link, report: &mut Report) -> Result<(), Error> {
        let (session, outlet, messages) = start(link, Some(self.options), self.progress)?;
        let served = session
            .spawn("control", move |session| messages.run(session, |_| Err(link::unexpected(session))))
            .and_then(|()| self.serve(&session, &outlet));
        if let Err(error) = served {
            session.fail(error, None);
        }
        let result = match session.fate.is_broken() {
            false => self.well(&session),
            true => self.broken(&session),
        };
        let ending = if result.is_ok() { Ending::Closed } else { Ending::Broken };
        end(&session, outlet, ending, report);
        result
    }

    fn serve(&mut self, session: &Arc<RelaySession>, outlet: &Arc<Outlet>) -> Result<(), Error> {
        let mut lobby = Lobby::new(self.listener, self.progress);
        let (connection, qemu) = loop {
            check(session)?;
            if let Some(main) = lobby.main_within(TICK)? {
                break main;
            }
        };
        *self.begin = Instant::now(); // waiting for somebody to come is not part of the work
        self.progress.set_phase(Phase::Relaying);
        let (head, follower) = self.head(&connection, &qemu, session)?;
        self.return_path = follower.return_path;
        let (first, rest) = head.split_at(FIRST_BYTES.min(head.len()));
        let (main, sender) = open(session, outlet, (connection, qemu), first)?;
        let rest = rest.to_vec();
        // Those that have come are there before anything of the main stream is.
        let mut opened = Vec::new();
        open_channels(&mut lobby, &mut opened, Duration::ZERO, session, outlet)?;
        session.spawn("from qemu", move |_| read_main(sender, follower, &rest))?;
        session.spawn("to qemu", move |session| {
            let mut replies = Replies::default();
            write_on(&main, session, |bytes| replies.hear(bytes, session))
        })?;
        while !session.all_have_ended() {
            check(session)?;
            if session.end_given.load(SeqCst) {
                let _ = session.news().recv_timeout(TICK);
            } else {
                open_channels(&mut lobby, &mut opened, TICK, session, outlet)?;
            }
        }
        session.say(&Message::Done)?;
        while !session.peer_is_done.load(SeqCst) {
            check(session)?;
            let _ = session.news().recv_timeout(TICK);
        }
        session.fate.set_over();
        Ok(())
    }

    /// What the source says before its memory, which tells whether it waits for word. Nothing has been said to the
    /// waiting QEMU yet, so that it can still be used if this source is refused.
    fn head(&self, connection: &Connection, qemu: &str, session: &RelaySession) -> Result<(Vec<u8>, Follower), Error> {
        let failed = |source| Error::Io { what: format!("read from {qemu}"), source };
        let mut connection = connection.try_clone().map_err(failed)?;
        connection.set_read_timeout(Some(TICK)).map_err(failed)?;
        let (mut head, mut follower) = (Vec::new(), Follower::new());
        let mut room = vec![0; 64 << 10];
        let why = loop {
            check(session)?;
            match read_what_is_there(&mut connection, &mut room).map_err(failed)? {
                Heard::Nothing => continue,
                Heard::End => {
                    let what = "has closed the connection before its memory began";
                    return Err(Error::breach(qemu, Rule::Stays, what));
                }
                Heard::Bytes(count) => {
                    let followed = follower.sort(&room[..count]).map(drop);
                    head.extend_from_slice(&room[..count]);
                    match followed {
                        _ if follower.postcopy => {
                            let what = "wants to send more after its guest has moved (postcopy), which can't be \
                                        relayed; turn postcopy-ram and dirty-bitmaps off there";
                            return Err(Error::breach(qemu, Rule::Abilities, what));
                        }
                        Err(error) => break error.to_string(),
                        Ok(()) if head.len() > HEAD_MAX => break "its memory does not begin".into(),
                        Ok(()) if !follower.begun => {}
                        Ok(()) if follower.return_path || self.options.without_return_path => {
                            return Ok((head, follower));
                        }
                        Ok(()) => {
                            let what = "has no return path, so it would take its last write for success, whatever \
                                        happens to it; run there: migrate_set_capability return-path on (or add \
                                        --without-return-path here)";
                            return Err(Error::breach(qemu, Rule::Abilities, what));
                        }
                    }
                }
            }
        };
        if !self.options.without_return_path {
            let what = format!(
                "can't be followed, so it is unknown whether it waits for the destination's confirmation: {why} \
                 (--without-return-path relays it anyway)"
            );
            return Err(Error::breach(qemu, Rule::Abilities, what));
        }
        follower.give_up();
        Ok((head, follower))
    }

    /// All has ended, and the other relay says so, too.
    fn well(&self, session: &RelaySession) -> Result<(), Error> {
        if session.all_is_well.load(SeqCst) || !self.return_path && session.end_given.load(SeqCst) {
            return Ok(());
        }
        Err(Error::Refused(
            "the waiting QEMU there has not loaded the guest, or the source has given up; the output of the two QEMUs \
             says why"
                .into(),
        ))
    }

    /// Something broke: what that means depends on where the end of the stream is.
    fn broken(&self, session: &RelaySession) -> Result<(), Error> {
        if !session.fate.was_told() {
            let refusal = Refusal { reason: session.fate.failure_text() };
            let _ = session.control.send(&Message::Abort { end: TheEnd::Withheld, refusal }); // the link may be gone
        }
        // To that it answers where the end is, if it can.
        session.wait_for_reason(session.end_given.load(SeqCst));
        let Some(SessionFailure { error, told }) = session.fate.take_failure() else {
            return Err(session.fate.broke(Rule::Stays, "has broken the link"));
        };
        let streams = session.streams();
        let main = streams.first();
        if let Some(main) = main {
            main.settle();
        }
        if session.all_is_well.load(SeqCst) {
            // The source was told, and closes its connections by itself.
            let _ = main.map(|main| main.is_closed_within(CLOSING));
            return Ok(());
        }
        if !session.end_given.load(SeqCst) || told == Some(TheEnd::Withheld) {
            return Err(error);
        }
        let Some(main) = main.filter(|main| !main.is_silent()) else {
            return Err(Error::unknown(error, |error| {
                format!(
                    "{error}. The source has closed its connections, and the QEMU at the destination may have all of \
                     the guest: check there whether it runs (`info status`). If it does not and never will, `cont` \
                     lets it run again at the source, if that QEMU still exists"
                )
            }));
        };
        if !self.return_path {
            return Err(Error::unknown(error, |error| {
                format!(
                    "{error}. The source has no return path, so it may report its migration as completed. Check the \
                     destination: if the guest does not run there and never will, let it run again with `cont` at the \
                     source"
                )
            }));
        }
        self.hold(main, &error);
        Err(Error::unknown(error, |error| {
            format!(
                "{error}, just when the guest was handed over. The source was kept waiting until it was told to go on, \
                 or has ended; at most one of the two may run"
            )
        }))
    }

    /// The guest may run at the destination or not; that is unknown. As long as its connections stay as they are, the
    /// source waits for word, and its guest stands still.
    fn hold(&self, main: &Stream, error: &Error) {
        self.progress.set_phase(Phase::Relaying); // Ctrl-C means something again
        // One that came before could not know of this.
        let _ = self.progress.take_cancel();
        tracing::warn!(
            "{error}, just when the guest was handed over: it may run at the destination, or not. It stands still \
             here, as long as this process exists. Check the destination (`info status`): if it runs there, end the \
             QEMU here (`quit`). If it does not, end the QEMU there, and then press Ctrl-C here: the guest runs on at \
             the source"
        );
        while !self.progress.is_cancelled() && !main.is_closed_within(TICK) {}
    }
}

/// Opens the channels that have come, or do within the time.
fn open_channels(
    lobby: &mut Lobby<'_>,
    opened: &mut Vec<u8>,
    time: Duration,
    session: &Arc<RelaySession>,
    outlet: &Arc<Outlet>,
) -> Result<(), Error> {
    for (greeting, line) in lobby.channels_within(time)? {
        if opened.contains(&greeting.channel) {
            turn_away(&line.1, &format!("channel {} is open", greeting.channel));
            continue;
        }
        opened.push(greeting.channel);
        let (stream, sender) = open(session, outlet, line, &greeting.encode())?;
        session.spawn("from qemu", move |_| read_on(sender, None))?;
        session.spawn("to qemu", move |session| write_on(&stream, session, |_| ()))?;
    }
    Ok(())
}

fn open(
    session: &Arc<RelaySession>,
    outlet: &Arc<Outlet>,
    (connection, qemu): Line,
    first: &[u8],
) -> Result<(Arc<Stream>, Sender), Error> {
    let number = session.streams().len() as u16; // at most 256: channels have different numbers below 255
    let stream = Stream::new(number, connection, qemu, &session.fate)?;
    session.add(Arc::clone(&stream));
    session.say(&Message::Open { connection: number, first: first.to_vec() })?;
    session.say(&Message::Credit { connection: number, amount: WINDOW })?;
    session.count_first(first);
    let sender = Sender::new(&stream, outlet, session);
    Ok((stream, sender))
}

/// Carries the main stream, and its end when everything else has arrived on the other side. `head`: what was read of
/// it, and not sent.
fn read_main(mut sender: Sender, mut follower: Follower, head: &[u8]) -> Result<(), Error> {
    let mut socket = sender.stream.handle()?;
    let mut room = sender.room();
    sender.send(head, follower.has_given_up())?;
    loop {
        let patience = follower.holds().then_some(QUIET);
        let set = socket.set_read_timeout(patience);
        set.map_err(|source| Error::Io { what: format!("read from {}", sender.stream.qemu), source })?;
        match read_what_is_there(&mut socket, &mut room) {
            Ok(Heard::Bytes(count)) => {
                let bytes = &room[..count];
                let sorted = follower.sort(bytes).unwrap_or_else(|error| {
                    tracing::warn!(
                        "the main stream can't be followed, so its end is unknown: {error}. If the link breaks, a \
                         person will have to check both QEMUs"
                    );
                    follower.give_up();
                    Sorted { before: Default::default(), end: bytes.into() }
                });
                if sorted.is_all_before_the_end() {
                    drop(sorted);
                    sender.send_first(&mut room, count)?;
                } else {
                    pass(&mut sender, &sorted)?;
                }
            }
            Ok(Heard::Nothing) => pass(&mut sender, &follower.let_go())?,
            Ok(Heard::End) => {
                pass(&mut sender, &follower.let_go())?;
                return sender.end();
            }
            Err(error) => return broken(sender, error),
        }
        if sender.is_broken() {
            return Ok(());
        }
    }
}

fn pass(sender: &mut Sender, sorted: &Sorted<'_>) -> Result<(), Error> {
    sender.send(&sorted.before, false)?;
    if sorted.end.is_empty() || !sender.wait_until_all_is_taken() {
        return Ok(());
    }
    crate::fail_point::reach("relay.end")?;
    sender.hands_over();
    sender.send(&sorted.end, true)
}
