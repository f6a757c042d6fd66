//! The end of a move: stop, last round, device state, hand over.
//!
//! Up to the point of no return, which is in [`give_up`], every failure leads back: the guest is resumed here, and the destination,
//! which has not been told to go, never starts it. From there on the guest is the destination's, whatever happens to us.
use std::{
    io::Read,
    panic::resume_unwind,
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::GuestMemory;
use transship_wire::Message;

use super::{Source, session::Session};
use crate::{
    Error, Phase, Progress, Report, control::Control, digest::digest, fail_point, guest::SourceGuest, rounds::Rounds,
    transport::STALL_TIMEOUT,
};

/// Bytes of device state that travel as one message.
const STATE_PIECE: usize = 256 * 1024;
/// Pieces that are kept until the last round has arrived; then the VMM has to wait.
const STATE_PIECES: usize = 64;
/// How long a destination may take to load the device state, or to digest its memory.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long the last round may take to arrive after it was sent: the guest stands still meanwhile.
const DONE_TIMEOUT_STOPPED: Duration = Duration::from_secs(60);

/// Stops the guest and hands it over. `run`: it was running, so it is to run there.
pub(crate) fn run(source: &mut Source<'_>, session: &mut Session, rounds: &mut Rounds, run: bool) -> Result<(), Error> {
    let stopped = Instant::now();
    let loaded = source
        .guest
        .stop()
        .map_err(Error::from)
        .and_then(|()| fail_point::reach("source.stopped"))
        .and_then(|()| bring_the_rest(source, session, rounds));
    let control = &mut session.control;
    let given_up = loaded.and_then(|()| give_up(source, control, run));
    if let Err(error) = given_up {
        return Err(take_back(source.guest, error, run));
    }
    let confirmed = await_confirmation(source, control);
    source.report.downtime_ms = if run { stopped.elapsed().as_secs_f64() * 1e3 } else { 0.0 };
    confirmed
}

/// Everything that the destination needs, up to its word that it has loaded it all. The VMM saves the device state while the last round is sent: it
/// writes to no guest memory any more.
fn bring_the_rest(source: &mut Source<'_>, session: &mut Session, rounds: &mut Rounds) -> Result<(), Error> {
    let Source { guest, options, progress, report, .. } = source;
    let memory = guest.memory();
    let (pieces, state) = bounded(STATE_PIECES);
    let (sent, saved) = thread::scope(|scope| {
        let saving = scope.spawn(|| save_state(*guest, pieces));
        let sent = rounds
            .send_the_rest(session, DONE_TIMEOUT_STOPPED, progress, report)
            .and_then(|()| {
                if options.verify { verify(&memory, &mut session.control, rounds, progress, report) } else { Ok(()) }
            })
            .and_then(|()| send_state(&state, &mut session.control));
        drop(state); // after a failure nobody takes the rest of it
        (sent, saving.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let (bytes, digest) = sent?;
    saved?;
    report.bytes.wire += bytes;
    let control = &mut session.control;
    control.send(&Message::StateEnd { bytes, digest })?;
    fail_point::reach("source.state-sent")?;
    match control.receive("its Loaded", LOAD_TIMEOUT, progress)? {
        Message::Loaded => {}
        other => return Err(control.unexpected(&other, "where Loaded was due")),
    }
    fail_point::reach("source.loaded")
}

fn verify(
    memory: &GuestMemory,
    control: &mut Control,
    rounds: &Rounds,
    progress: &Progress,
    report: &mut Report,
) -> Result<(), Error> {
    // What the guest can do without was not sent, and reads as zero there.
    let ours = digest(memory, rounds.dead())?;
    control.send(&Message::Digest { digest: ours })?;
    let theirs = match control.receive("its digest", LOAD_TIMEOUT, progress)? {
        Message::DigestIs { digest } => digest,
        other => return Err(control.unexpected(&other, "where DigestIs was due")),
    };
    report.verified = Some(ours == theirs);
    if ours == theirs {
        return Ok(());
    }
    let what =
        "holds other memory than the source: the digests differ. This is a bug of transship; the source guest runs on";
    Err(Error::Protocol { peer: control.peer.clone(), what: what.into() })
}

/// Reads the device state to its end, and hands it over in pieces until nobody takes them any more.
fn save_state(guest: &mut dyn SourceGuest, pieces: Sender<Vec<u8>>) -> Result<(), Error> {
    let mut state = guest.save_state()?;
    loop {
        let mut piece = vec![0; STATE_PIECE];
        let length =
            state.read(&mut piece).map_err(|e| Error::Io { what: "read the device state".into(), source: e })?;
        if length == 0 {
            break;
        }
        piece.truncate(length);
        if pieces.send(piece).is_err() {
            return Ok(()); // the move has failed
        }
    }
    Ok(guest.state_saved()?)
}

/// Sends the device state as it comes, up to the last piece. Returns its size in bytes, and its digest.
fn send_state(state: &Receiver<Vec<u8>>, control: &mut Control) -> Result<(u64, [u8; 32]), Error> {
    let mut hasher = blake3::Hasher::new();
    let mut total = 0;
    for bytes in state {
        hasher.update(&bytes);
        total += bytes.len() as u64;
        control.send(&Message::State { bytes })?;
        control.check_silence()?;
    }
    Ok((total, hasher.finalize().into()))
}

/// A failure before the guest was given up: it goes on here.
pub(crate) fn take_back(guest: &mut dyn SourceGuest, error: Error, run: bool) -> Error {
    match guest.resume(run) {
        Ok(()) => error,
        Err(resume) => Error::Unknown(format!(
            "{error}; and the guest could not be resumed here: {resume}. It stands still, whole, and is not running anywhere else: \
             resume it with: {}",
            guest.resume_hint()
        )),
    }
}

/// The point of no return. An error means that not one byte of `Go` left this side: the guest is still ours. Otherwise we must assume
/// from here on that the destination runs it, whatever we hear or don't hear afterwards.
fn give_up(source: &mut Source<'_>, control: &mut Control, run: bool) -> Result<(), Error> {
    control.check_silence()?;
    if source.progress.is_cancelled() {
        return Err(Error::Cancelled);
    }
    source.guest.give_up()?;
    source.progress.set_phase(Phase::HandedOver);
    control.send_whole(&Message::Go { run }).inspect_err(|_| source.progress.set_phase(Phase::Switchover))
}

/// Waits for the word that the guest runs there.
fn await_confirmation(source: &Source<'_>, control: &mut Control) -> Result<(), Error> {
    let deaf = crate::Progress::default(); // cancelling has no effect any more
    let answer = fail_point::reach("source.go-sent")
        .and_then(|()| control.receive("word that the guest runs", STALL_TIMEOUT * 2, &deaf));
    match answer {
        Ok(Message::Running) => Ok(()),
        Ok(other) => Err(unknown(source, &control.unexpected(&other, "where Running was due"))),
        Err(error) => Err(unknown(source, &error)),
    }
}

fn unknown(source: &Source<'_>, error: &Error) -> Error {
    Error::Unknown(format!(
        "the guest was handed over, but the destination did not confirm that it runs: {error}. Look there first. If it runs there, \
         all is well and this one can be ended. Only if it does not run there and will not be started there, resume it here with: {}",
        source.guest.resume_hint()
    ))
}
