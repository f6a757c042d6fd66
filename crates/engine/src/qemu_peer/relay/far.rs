//! The relay near the destination: what comes from the relay near the source is told to the QEMU that waits.
use std::{
    io::Write,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Instant,
};

use transship_wire::{
    Refusal,
    relay::{MAX_CONNECTIONS, Message, TheEnd},
};

use super::{
    carry::{Sender, read_on, write_on},
    fate::SessionFailure,
    follow::Replies,
    link,
    near::{Ending, check, end, start},
    outlet::Outlet,
    session::RelaySession,
    stream::{CLOSING, Stream, WINDOW},
};
use crate::{
    Error, Listener, Phase, Progress, Report, Rule, Uri, control::TICK, ending::finish, transport::Connection,
};

/// Relays one migration to the stock QEMU that waits at `to`, from the relay that connects to `listener`.
///
/// On success that QEMU has said that everything is loaded. On failure it can't run the guest, except that
/// [`Error::Unknown`] means what it says.
///
/// # Errors
/// See [`Error`].
pub fn relay_to_qemu(listener: Listener, to: &Uri, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    let mut begin = Instant::now();
    let result = link::accept(&listener, progress).and_then(|link| {
        drop(listener); // nobody else has any business here
        begin = Instant::now(); // waiting for somebody to come is not part of the work
        progress.set_phase(Phase::Relaying);
        let (session, outlet, messages) = start(link, None, progress)?;
        let served = serve(&session, &outlet, messages, to);
        if let Err(error) = served {
            session.fail(error, None);
        }
        let result = match session.fate.is_broken() {
            false => well(&session, to),
            true => broken(&session, to),
        };
        // What the QEMU here was given with the end must arrive.
        let ending = if session.end_given.load(SeqCst) { Ending::Closed } else { Ending::Broken };
        end(&session, outlet, ending, report);
        result
    });
    finish(result, begin, progress, report)
}

fn serve(session: &Arc<RelaySession>, outlet: &Arc<Outlet>, messages: link::Messages, to: &Uri) -> Result<(), Error> {
    let (opener, to) = (Arc::downgrade(outlet), to.clone());
    session.spawn("control", move |session| {
        messages.run(session, |message| match (message, opener.upgrade()) {
            (Message::Open { connection, first }, Some(outlet)) => open(connection, &first, session, &outlet, &to),
            (Message::Open { .. }, None) => Ok(()), // it is over
            _ => Err(link::unexpected(session)),
        })
    })?;
    while !(session.peer_is_done.load(SeqCst) && session.all_have_ended()) {
        check(session)?;
        let _ = session.news().recv_timeout(TICK);
        if session.peer_is_done.load(SeqCst) && session.streams().is_empty() {
            break; // it had nothing to relay
        }
        if session.end_given.load(SeqCst) && session.progress.phase() != Phase::HandedOver {
            session.progress.set_phase(Phase::HandedOver);
        }
    }
    // From here on it may close the link.
    session.fate.set_over();
    session.say(&Message::Done)?;
    session.let_it_close();
    Ok(())
}

/// Opens a connection to the QEMU that waits. It is given the first bytes at once: a QEMU that accepts a connection
/// does nothing else until it has heard something.
fn open(number: u16, first: &[u8], session: &Arc<RelaySession>, outlet: &Arc<Outlet>, to: &Uri) -> Result<(), Error> {
    if usize::from(number) != session.streams().len() || number >= MAX_CONNECTIONS {
        return Err(session.fate.broke(Rule::Turn, format!("opened connection {number} out of turn")));
    }
    let mut connection = Connection::open(to)?;
    connection.write_all(first).map_err(|source| Error::Io { what: format!("send to {to}"), source })?;
    session.count_first(first);
    let stream = Stream::new(number, connection, to.to_string(), &session.fate)?;
    session.add(Arc::clone(&stream));
    let sender = Sender::new(&stream, outlet, session);
    let (is_main, broken_off) = (number == 0, Arc::clone(&stream));
    session.spawn("from qemu", move |session| {
        let mut replies = Replies::default();
        let mut hear = |bytes: &[u8]| replies.hear(bytes, session);
        read_on(sender, if is_main { Some(&mut hear) } else { None })
    })?;
    session.spawn("to qemu", move |session| write_on(&stream, session, |_| ()))?;
    if session.fate.is_broken() {
        // The thread that ends the streams may have run before this one existed.
        broken_off.break_off();
    }
    session.say(&Message::Credit { connection: number, amount: WINDOW })
}

fn well(session: &RelaySession, to: &Uri) -> Result<(), Error> {
    let has_all = session.end_given.load(SeqCst);
    // A QEMU that never answered needs no answer.
    if session.all_is_well.load(SeqCst) || has_all && !session.answered.load(SeqCst) {
        return Ok(());
    }
    let what = match session.streams().is_empty() {
        true => "got no data: no source connected",
        false => "has not loaded the guest, or the source has given up; its own output says why",
    };
    Err(Error::breach(to.to_string(), Rule::Perseverance, what))
}

/// Something broke: what that means depends on whether the QEMU here was given the end.
fn broken(session: &RelaySession, to: &Uri) -> Result<(), Error> {
    session.wait_for_reason(false);
    let Some(SessionFailure { error, told }) = session.fate.take_failure() else {
        return Err(session.fate.broke(Rule::Stays, "has broken the link"));
    };
    let given = session.end_given.load(SeqCst);
    let end = if given { TheEnd::Given } else { TheEnd::Withheld };
    // The other one's own reason is no news to it.
    let reason = if told.is_some() { String::new() } else { error.to_string() };
    let _ = session.control.send(&Message::Abort { end, refusal: Refusal { reason } }); // the link may be gone
    if !given {
        return Err(error);
    }
    // It may be loading. Whatever it was given still arrives.
    let streams = session.streams();
    streams.iter().for_each(|stream| stream.end_writing());
    if let Some(main) = streams.first() {
        main.wait_until_silent(CLOSING); // the thread that reads from it hears its word
    }
    let here = match session.all_is_well.load(SeqCst) {
        true => "The QEMU here has loaded all of the guest, which runs here (if it ran)",
        false => "The QEMU here was given all of the guest: check whether it runs (`info status`)",
    };
    Err(Error::unknown(error, |error| {
        format!(
            "{error}, just when the guest was handed over to {to}. {here}. If so, end the QEMU at the source; \
             otherwise end this one, and let the guest run again there. See also the message of the relay near the \
             source"
        )
    }))
}
