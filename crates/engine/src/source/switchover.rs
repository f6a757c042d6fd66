//! The end of a move to a transship: last round, device state, `Go`.
use std::{
    io::Read,
    panic::resume_unwind,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use crossbeam_channel::bounded;
use transship_memory::{Freeing, GuestMemory};
use transship_wire::Message;

use super::session::MoveSession;
use crate::{
    Error, Progress, Report, Rule,
    control::Control,
    digest::digest,
    fail_point,
    guest::{Found, SourceGuest, StateFormat},
    hand_over::Peer,
    rounds::{MoveInProgress, Rounds},
    stream::standing::keep_from_running,
};

/// Bytes of device state that travel as one message. The destination has its VMM begin with the first one.
const STATE_PIECE: usize = 64 << 10;
/// Bytes of it that are read at once.
const STATE_READ: u64 = 1 << 20;
/// How long a destination may take to load the device state.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long the last round may take to arrive after it was sent: the guest stands still meanwhile.
const DONE_TIMEOUT_STOPPED: Duration = Duration::from_secs(60);
/// How long it may take from `Go` to the word that the guest runs.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// The transship that receives. It never starts a guest before `Go`, so hanging up can wait until the guest runs here
/// again.
pub(super) struct Transship<'a> {
    pub(super) session: &'a mut MoveSession,
    pub(super) verify: bool,
}

impl Transship<'_> {
    /// Behind the last page. `compared`: the memory, if the destination's is to be compared with it.
    fn send_state_last(
        &mut self,
        state: &[u8],
        rounds: &mut Rounds,
        compared: Option<(GuestMemory, Freeing)>,
        (progress, report): (&Progress, &mut Report),
    ) -> Result<(), Error> {
        rounds.send_the_late(self.session, DONE_TIMEOUT_STOPPED, progress, report)?;
        let control = &mut self.session.control;
        if let Some((memory, freeing)) = compared {
            compare(&memory, freeing, control, rounds, progress, report)?;
        }
        send_state(state, control)?;
        report.bytes.wire += state.len() as u64;
        fail_point::reach("source.state-sent")
    }
}

impl Peer for Transship<'_> {
    fn name(&self) -> &'static str {
        "source"
    }

    /// The VMM saves the device state while the last round is found and sent: it should write to no guest memory any
    /// more. The last look sees whether it did. Where processes beside the VMM may end when it saves its state, the
    /// round is found before that. While the destination loads, the guest is looked at: whether it is what it was. That
    /// begins at once for a guest that stood still anyway, as its memory is all in that round.
    fn bring_the_rest(
        &mut self,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
        found: Found,
    ) -> Result<(), Error> {
        let MoveInProgress { guest, progress, report, .. } = course;
        let ends_writers = guest.state_ends_writers();
        if ends_writers {
            rounds.find_the_rest(&*self.session)?;
            rounds.let_others_end();
        }
        let compared = self.verify.then(|| (guest.memory(), guest.freeing()));
        let failed = AtomicBool::new(false); // Relaxed: it says nothing about other memory
        let (tell_state, saved_state) = bounded(1);
        let (sent, saved) = thread::scope(|scope| {
            let saving = scope.spawn(|| {
                // Hung up when this thread ends.
                let tell_state = tell_state;
                let state = save_state(guest.unguarded(), &failed)?;
                let _ = tell_state.send(state);
                if found.ran() { Ok(()) } else { Ok(guest.check_unchanged()?) }
            });
            let rest = if ends_writers { Ok(()) } else { rounds.find_the_rest(&*self.session) };
            let send = || {
                rest?;
                rounds.send_the_rest(self.session, DONE_TIMEOUT_STOPPED, progress, report)?;
                // None: why is known to the thread that saves.
                let Ok(state) = saved_state.recv() else { return Ok(()) };
                self.send_state_last(&state, rounds, compared, (progress, report))
            };
            let sent = send();
            failed.store(sent.is_err(), Relaxed);
            (sent, saving.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        sent.and(saved)?;
        guest.check_unchanged()?;
        guest.unguarded().prepare_to_give_up()?;
        await_loaded(&self.session.control, progress)?;
        fail_point::reach("source.loaded")
    }

    fn check_silence(&mut self) -> Result<(), Error> {
        self.session.control.check_silence()
    }

    fn commit(&mut self, found: Found) -> Result<(), Error> {
        self.session.control.send_whole(&Message::Go { run: found.ran() })
    }

    fn await_word(&mut self) -> Result<(), Error> {
        let control = &mut self.session.control;
        let deaf = Progress::default(); // cancelling has no effect any more
        fail_point::reach("source.go-sent")?;
        match control.receive("the confirmation that the guest runs", RUN_TIMEOUT, &deaf)? {
            Message::Running => Ok(()),
            other => Err(control.unexpected(&other, "where Running was due")),
        }
    }

    fn hang_up(&mut self) {}

    fn without_word(&self, error: &Error, by_hand: &str) -> String {
        format!(
            "the guest was handed over, but the destination did not confirm that it runs: {error}. Check there first. \
             If it runs there, all is well and this one can be ended. Only if it does not run there and will not be \
             started there, resume it here with: {by_hand}"
        )
    }
}

/// How long a destination may take to digest its memory, beside a source that has done so: a slow one, or one with
/// slower memory.
fn digest_timeout(memory: &GuestMemory) -> Duration {
    LOAD_TIMEOUT + Duration::from_secs(memory.bytes() >> 30)
}

fn compare(
    memory: &GuestMemory,
    freeing: Freeing,
    control: &mut Control,
    rounds: &Rounds,
    progress: &Progress,
    report: &mut Report,
) -> Result<(), Error> {
    // It computes while we do.
    control.send_or_hear(&Message::DigestWanted)?;
    // What the guest can do without was not sent, and reads as zero there.
    let ours = digest(memory, rounds.dead())?;
    control.send_or_hear(&Message::Digest { digest: ours })?;
    let theirs = match control.receive("its digest", digest_timeout(memory), progress)? {
        Message::DigestIs { digest } => digest,
        other => return Err(control.unexpected(&other, "where DigestIs was due")),
    };
    report.verified = Some(ours == theirs);
    if ours == theirs {
        return Ok(());
    }
    let why = match freeing {
        // A page that was given back, and only read since, is written nowhere. Where no note is kept of it, it holds
        // zeros here, and there what it held before.
        Freeing::Announced | Freeing::Possible => {
            "If the guest's memory is in a file on a disk, the difference may be memory that its balloon gave back and \
             it has read since; else it is a bug of transship"
        }
        Freeing::Never => "This is a bug of transship",
    };
    let what = format!(
        "holds different memory than the source: the digests differ. {why}; the guest runs on at the \
                        source"
    );
    Err(Error::breach(&control.peer, Rule::Digest, what))
}

/// Reads the device state to its end, or until the move has failed. It says that the guest stands still, whoever loads
/// it.
pub(super) fn save_state(guest: &mut dyn SourceGuest, failed: &AtomicBool) -> Result<Vec<u8>, Error> {
    let format = guest.state_format();
    let mut stream = guest.save_state()?;
    let mut state = Vec::new();
    while !failed.load(Relaxed) {
        let piece = stream.by_ref().take(STATE_READ).read_to_end(&mut state);
        if piece.map_err(|e| Error::Io { what: "read the device state".into(), source: e })? == 0 {
            break;
        }
    }
    if failed.load(Relaxed) {
        return Err(Error::CANCELLED); // the failure is told elsewhere
    }
    drop(stream);
    guest.state_saved()?;
    if let StateFormat::Qemu { .. } = format {
        keep_from_running(&mut state)?;
    }
    Ok(state)
}

/// Waits until the destination could run the guest.
pub(super) fn await_loaded(control: &Control, progress: &Progress) -> Result<(), Error> {
    match control.receive("its Loaded", LOAD_TIMEOUT, progress)? {
        Message::Loaded => Ok(()),
        other => Err(control.unexpected(&other, "where Loaded was due")),
    }
}

/// Sends the device state, up to its end.
pub(super) fn send_state(state: &[u8], control: &mut Control) -> Result<(), Error> {
    for piece in state.chunks(STATE_PIECE) {
        control.send_or_hear(&Message::State { bytes: piece.to_vec() })?;
        control.check_silence()?;
    }
    control.send_or_hear(&Message::StateEnd { bytes: state.len() as u64, digest: blake3::hash(state).into() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use transship_memory::{Access, ByteRange, Region};

    use super::*;

    #[test]
    fn more_memory_may_be_digested_for_longer() {
        for (gib, seconds) in [(1, 121), (8, 128)] {
            let file = memfd_create("region", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, gib << 30).unwrap();
            let memory = GuestMemory::new(vec![
                Region::map("region", file, ByteRange::sized(0, gib << 30), Access::Read).unwrap(),
            ]);
            assert_eq!(digest_timeout(&memory), Duration::from_secs(seconds));
        }
    }
}
