//! The end of a move to a transship: last round, device state, `Go`.
use std::{io::Read, panic::resume_unwind, thread, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded};
use transship_memory::GuestMemory;
use transship_wire::Message;

use super::session::Session;
use crate::{
    Error, Progress, Report,
    control::Control,
    digest::digest,
    fail_point,
    guest::SourceGuest,
    hand_over::Peer,
    rounds::{Course, Rounds},
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

/// The transship that receives. It never starts a guest before `Go`, so hanging up can wait until the guest runs here again.
pub(super) struct Transship<'a> {
    pub(super) session: &'a mut Session,
    pub(super) verify: bool,
}

impl Peer for Transship<'_> {
    fn name(&self) -> &'static str {
        "source"
    }

    /// The VMM saves the device state while the last round is sent: it writes to no guest memory any more.
    fn bring_the_rest(&mut self, course: &mut Course<'_>, rounds: &mut Rounds, _run: bool) -> Result<(), Error> {
        let Self { session, verify } = self;
        let Course { guest, progress, report, .. } = course;
        let memory = guest.memory();
        let (pieces, state) = bounded(STATE_PIECES);
        let (sent, saved) = thread::scope(|scope| {
            let saving = scope.spawn(|| save_state(*guest, pieces));
            let sent = rounds
                .send_the_rest(*session, DONE_TIMEOUT_STOPPED, progress, report)
                .and_then(|()| {
                    if *verify { compare(&memory, &mut session.control, rounds, progress, report) } else { Ok(()) }
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

    fn check_silence(&mut self) -> Result<(), Error> {
        self.session.control.check_silence()
    }

    fn commit(&mut self, run: bool) -> Result<(), Error> {
        self.session.control.send_whole(&Message::Go { run })
    }

    fn await_word(&mut self) -> Result<(), Error> {
        let control = &mut self.session.control;
        let deaf = Progress::default(); // cancelling has no effect any more
        fail_point::reach("source.go-sent")?;
        match control.receive("word that the guest runs", STALL_TIMEOUT * 2, &deaf)? {
            Message::Running => Ok(()),
            other => Err(control.unexpected(&other, "where Running was due")),
        }
    }

    fn hang_up(&mut self) {}

    fn without_word(&self, error: &Error, by_hand: &str) -> String {
        format!(
            "the guest was handed over, but the destination did not confirm that it runs: {error}. Look there first. If it runs there, \
             all is well and this one can be ended. Only if it does not run there and will not be started there, resume it here with: {by_hand}"
        )
    }
}

fn compare(
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
