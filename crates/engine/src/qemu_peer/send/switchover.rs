//! The end of a move to a stock QEMU: last round, the state of the devices, the byte that ends the stream.
//!
//! ```text
//!   START: blocks of devices   SWITCHOVER_START   END: their pages   device sections   ping ─► pong     everything is loaded
//!   ─────────────────────────────── up to here the guest is ours ───────────────────────────────
//!   EOF, description of the sections                                                 ─► SHUT 0   it runs there
//! ```
//!
//! A stock QEMU runs the guest by itself as soon as it has the end of the stream, one byte, and not before: a stream
//! that breaks off without it is a failed one. So that byte is the point of no return. It is sent only after the
//! destination has answered a ping that stands behind the last section, since from there on nothing can fail any more
//! that has to do with what we have sent.
use std::time::Duration;

use transship_memory::{PageCount, PageRange};
use transship_wire::qemu::{Command, StreamWriter, Tail, describe};

use super::session::SendSession;
use crate::{
    Error, Misfit, fail_point,
    guest::Found,
    hand_over::Peer,
    rounds::{MoveInProgress, Rounds},
    stream::{regions::RegionBlock, state::DeviceState},
};

/// How long the last round may take to arrive after it was sent: the guest stands still meanwhile.
const DONE_TIMEOUT_STOPPED: Duration = Duration::from_secs(60);
/// How long the destination may take to load the devices.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long it may take from the last byte to its word that the guest runs.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// The QEMU that waits.
pub(super) struct StockQemu<'a> {
    session: &'a mut SendSession,
    regions: &'a [RegionBlock],
    /// The end of the stream, which is kept back.
    end: Vec<u8>,
}

impl<'a> StockQemu<'a> {
    pub(super) fn new(session: &'a mut SendSession, regions: &'a [RegionBlock]) -> Self {
        Self { session, regions, end: Vec::new() }
    }
}

impl Peer for StockQemu<'_> {
    fn name(&self) -> &'static str {
        "peer"
    }

    /// Everything but the end of the stream.
    fn bring_the_rest(
        &mut self,
        course: &mut MoveInProgress<'_, '_>,
        rounds: &mut Rounds,
        found: Found,
    ) -> Result<(), Error> {
        let Self { session, regions, end } = self;
        let MoveInProgress { guest, progress, report, .. } = course;
        rounds.find_the_rest(*session)?;
        if guest.state_ends_writers() {
            rounds.let_others_end();
        }
        rounds.send_the_rest(*session, DONE_TIMEOUT_STOPPED, progress, report)?;
        let mut state = DeviceState::take(guest.unguarded(), regions, found)?;
        rounds.send_the_late(*session, DONE_TIMEOUT_STOPPED, progress, report)?;
        *end = cut_end(&mut state.tail)?;
        check(&state, session)?;
        let before = session.line.sent;
        send_state(&state, session)?;
        fail_point::reach("peer.state-sent")?;
        session.settle("load the devices", LOAD_TIMEOUT)?;
        report.bytes.wire += session.line.sent - before + end.len() as u64;
        fail_point::reach("peer.loaded")
    }

    fn check_silence(&mut self) -> Result<(), Error> {
        self.session.line.check_silence()
    }

    /// The destination runs the guest as soon as it has this, or stands it there as the device state says.
    fn commit(&mut self, _found: Found) -> Result<(), Error> {
        self.session.line.send_end(&self.end)
    }

    fn await_word(&mut self) -> Result<(), Error> {
        fail_point::reach("peer.end-sent")?;
        self.session.line.await_loaded(RUN_TIMEOUT)
    }

    fn hang_up(&mut self) {
        self.session.hang_up();
    }

    /// Not even a clear "failed" makes it sure: the destination says it also when only the description behind the end
    /// has not come.
    fn without_word(&self, error: &Error, by_hand: &str) -> String {
        format!(
            "the guest was handed over, but the destination did not confirm that it has it: {error}. Check that QEMU \
             first (info status). If the guest runs there, or is paused there with its state loaded, all is well and \
             this one can be ended. Only if that QEMU has ended, or says inmigrate and you end it now, resume it here \
             with: {by_hand}"
        )
    }
}

/// Takes the end off the device sections: the byte that says so, and what follows. It is not sent before everything
/// else is loaded.
///
/// A machine can be told to leave the description behind it out. A destination that was not told so would wait for it,
/// and one that was does not look: so there always is one.
fn cut_end(tail: &mut Vec<u8>) -> Result<Vec<u8>, Error> {
    let strange = |why: &dyn std::fmt::Display| {
        Error::unfit(format!("can't find the end of the device state that the VMM has written: {why}"))
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
fn check(state: &DeviceState, session: &SendSession) -> Result<(), Error> {
    let (said, is) = (&session.plan.machine, &state.configuration.machine);
    if said != is {
        return Err(
            Misfit::Machine.unfit(format!("the VMM reports its machine as {said}, but its device state names {is}"))
        );
    }
    if !state.early.is_empty() {
        let why = "a machine with virtio-mem sends the amount of plugged memory before the first page, and that \
                   amount is known only when the guest is stopped";
        return Err(
            Misfit::Machine.unfit(format!("{why}; move it to a transship on the other side (--peer transship)"))
        );
    }
    Ok(())
}

fn send_state(state: &DeviceState, session: &mut SendSession) -> Result<(), Error> {
    if !state.blocks.is_empty() {
        session.start(state.blocks.iter().map(|block| (&block.name, block.bytes)))?;
    }
    if state.switchover_start {
        session.line.writer.command(&Command::SwitchoverStart);
    }
    session.line.writer.end();
    for block in &state.blocks {
        for page in PageRange::all(PageCount::within(block.bytes)).iter() {
            let offset = page.offset();
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
