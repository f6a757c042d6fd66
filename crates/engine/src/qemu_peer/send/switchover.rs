//! The end: stop, last round, the state of the devices, hand over.
//!
//! ```text
//!   START: blocks of devices   SWITCHOVER_START   END: their pages   device sections   ping ─► pong     everything is loaded
//!   ─────────────────────────────── up to here the guest is ours ───────────────────────────────
//!   EOF, description of the sections                                                 ─► SHUT 0   it runs there
//! ```
//!
//! A stock QEMU runs the guest by itself as soon as it has the end of the stream, one byte, and not before: a stream that breaks off without
//! it is a failed one. So that byte is the point of no return. It is sent only after the destination has answered a ping that stands behind
//! the last section, since from there on nothing can fail any more that has to do with what we have sent.
use std::time::{Duration, Instant};

use transship_memory::PAGE_BYTES;
use transship_wire::qemu::{Command, StreamWriter, Tail, describe};

use super::{Send, session::Session};
use crate::{Error, Phase, fail_point, rounds::Rounds, snapshot::DeviceState, source::take_back};

/// How long the last round may take to arrive after it was sent: the guest stands still meanwhile.
const DONE_TIMEOUT_STOPPED: Duration = Duration::from_secs(60);
/// How long the destination may take to load the devices.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long it may take from the last byte to its word that the guest runs.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Stops the guest and hands it over. `run`: it was running, so it is to run there.
pub(crate) fn run(send: &mut Send<'_>, session: &mut Session, rounds: &mut Rounds, run: bool) -> Result<(), Error> {
    let stopped = Instant::now();
    let loaded = send
        .guest
        .stop()
        .map_err(Error::from)
        .and_then(|()| fail_point::reach("peer.stopped"))
        .and_then(|()| bring_the_rest(send, session, rounds, run));
    let given_up = loaded.and_then(|end| give_up(send, session, &end));
    if let Err(error) = given_up {
        // First of all: nothing that is still on its way may become a whole stream.
        session.hang_up();
        return Err(take_back(send.guest, error, run));
    }
    let confirmed = fail_point::reach("peer.end-sent")
        .and_then(|()| session.line.await_loaded(RUN_TIMEOUT))
        .map_err(|error| unknown(send, &error));
    send.report.downtime_ms = if run { stopped.elapsed().as_secs_f64() * 1e3 } else { 0.0 };
    confirmed
}

/// Everything but the end of the stream, which is returned, up to the destination's word that it has loaded all of it.
fn bring_the_rest(
    send: &mut Send<'_>,
    session: &mut Session,
    rounds: &mut Rounds,
    run: bool,
) -> Result<Vec<u8>, Error> {
    rounds.send_the_rest(session, DONE_TIMEOUT_STOPPED, send.progress, send.report)?;
    let mut state = DeviceState::take(send.guest, &send.regions, run)?;
    let end = cut_end(&mut state.tail)?;
    check(&state, session)?;
    let before = session.line.sent;
    send_state(&state, session)?;
    fail_point::reach("peer.state-sent")?;
    session.settle("load the devices", LOAD_TIMEOUT)?;
    send.report.bytes.wire += session.line.sent - before + end.len() as u64;
    fail_point::reach("peer.loaded")?;
    Ok(end)
}

/// Takes the end off the device sections: the byte that says so, and what follows. It is not sent before everything else is loaded.
///
/// A machine can be told to leave the description behind it out. A destination that was not told so would wait for it, and one that was does not
/// look: so there always is one.
fn cut_end(tail: &mut Vec<u8>) -> Result<Vec<u8>, Error> {
    let strange = |why: &dyn std::fmt::Display| {
        Error::Unfit(format!("the end of the device state that the VMM has written can't be found: {why}"))
    };
    /// The byte itself, the trailer's type and its length.
    const BEFORE_DESCRIPTION: usize = 1 + 1 + 4;
    let parsed = Tail::parse(tail, 0).map_err(|error| strange(&error))?;
    let end = match &parsed.vmdesc {
        Some(json) => json.start.checked_sub(BEFORE_DESCRIPTION),
        None => parsed.end.checked_sub(1),
    };
    let end = end.filter(|&end| tail.get(end) == Some(&0)).ok_or_else(|| strange(&"no end where it should be"))?;
    let mut last = tail.split_off(end);
    if parsed.vmdesc.is_none() {
        let mut writer = StreamWriter::new(0, 0);
        writer.vmdesc(&describe(&[]));
        last.extend(writer.take_bytes());
    }
    Ok(last)
}

/// What was sent before the device state was known must fit it.
fn check(state: &DeviceState, session: &Session) -> Result<(), Error> {
    let (said, is) = (&session.plan.machine, &state.configuration.machine);
    if said != is {
        return Err(Error::Unfit(format!(
            "the VMM calls its machine {said} when it is asked, and {is} in its device state"
        )));
    }
    if !state.early.is_empty() {
        let why = "a machine with virtio-mem says before the first page how much memory is plugged, and that is known only when it stands still";
        return Err(Error::Unfit(format!("{why}; move it to a transship on the other side (--peer transship)")));
    }
    Ok(())
}

fn send_state(state: &DeviceState, session: &mut Session) -> Result<(), Error> {
    if !state.blocks.is_empty() {
        session.start(state.blocks.iter().map(|block| (&block.name, block.bytes)))?;
    }
    if state.switchover_start {
        session.line.writer.command(&Command::SwitchoverStart);
    }
    session.line.writer.end();
    for block in &state.blocks {
        for page in 0..block.bytes / PAGE_BYTES as u64 {
            let offset = page * PAGE_BYTES as u64;
            match block.pages.get(&page) {
                Some(bytes) => session.line.writer.page(&block.name, offset, bytes),
                None => session.line.writer.zero_page(&block.name, offset),
            };
            session.line.flush_pieces()?;
        }
    }
    session.end_of_memory()?;
    session.line.writer.raw(&state.tail);
    Ok(())
}

/// The point of no return. An error means that not one byte of the end left this side: the guest is still ours. Otherwise we must assume from
/// here on that the destination runs it, whatever we hear or don't hear afterwards.
fn give_up(send: &mut Send<'_>, session: &mut Session, end: &[u8]) -> Result<(), Error> {
    session.line.check_silence()?;
    if send.progress.is_cancelled() {
        return Err(Error::Cancelled);
    }
    send.guest.give_up()?;
    send.progress.set_phase(Phase::HandedOver);
    session.line.send_end(end).inspect_err(|_| send.progress.set_phase(Phase::Switchover))
}

/// Not even a clear "failed" makes it sure: the destination says it also when only the description behind the end has not come.
fn unknown(send: &Send<'_>, error: &Error) -> Error {
    Error::Unknown(format!(
        "the guest was handed over, but the destination did not confirm that it has it: {error}. Look at that QEMU first (info status). If it \
         runs there, or is paused there with its state loaded, all is well and this one can be ended. Only if that QEMU has ended, or says \
         inmigrate and is ended now, resume it here with: {}",
        send.guest.resume_hint()
    ))
}
