//! How the device state is saved where that is a migration of QEMU's own: its settings, the channel that the state
//! comes through, and the word that QEMU waits for in the end.
use std::{
    io::Read,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use serde_json::json;
use transship_guest::GuestError;

use super::{
    machine,
    migration::{self, Answers, Purpose, STATE_FD, STATE_URI, Settings},
    qmp::Qmp,
    questions,
    state_channel::{self, OurEnd, SAVE_WAIT, StateChannel},
    state_stream::{ToTheEnd, ToTheTrailer},
};

/// Such a save: from the settings that it needs until they are put back.
#[derive(Default)]
pub(super) struct Saving {
    /// To be put back.
    settings: Option<Settings>,
    /// QEMU waits for word: whether all of the state has come, and what QEMU's guest was in before.
    waiting: Option<(Arc<AtomicBool>, String)>,
    /// Our end of the channel, beside the one that is read; until all has come.
    channel: Option<OurEnd>,
    /// A channel that the will names, before there is a save.
    promised: Option<StateChannel>,
}

impl Saving {
    /// Sets what can be set while the guest still runs.
    pub(super) fn prepare(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if self.settings.is_some() {
            return Ok(());
        }
        qmp.ask_ahead(&questions::settings())?;
        let settings = Settings::apply(qmp, Purpose::Save(Answers::No));
        qmp.forget_answers();
        self.settings = Some(settings?);
        Ok(())
    }

    /// Our end of the channel that the next save will use.
    pub(super) fn promise(&mut self) -> Result<OurEnd, GuestError> {
        self.promised.insert(StateChannel::open()?).our_end()
    }

    /// Has QEMU save the state of a guest that stands still, in the run state `before`. Where the guest `stays`, QEMU
    /// is to have it in that state again.
    pub(super) fn begin(
        &mut self,
        qmp: &mut Qmp,
        stays: bool,
        before: String,
    ) -> Result<Box<dyn Read + Send>, GuestError> {
        let answers = answers(qmp, stays);
        if answers == Answers::Yes {
            self.restore_settings(qmp)?;
        }
        let channel = self.promised.take().map_or_else(StateChannel::open, Ok)?;
        self.channel = Some(channel.our_end()?);
        let StateChannel { ours, qemus } = channel;
        ours.set_read_timeout(Some(SAVE_WAIT)).map_err(state_channel::failed)?;
        if self.settings.is_none() {
            self.settings = Some(Settings::apply(qmp, Purpose::Save(answers))?);
        }
        qmp.send_fd(STATE_FD, qemus.as_fd())?;
        drop(qemus);
        qmp.forget_events();
        qmp.execute_until_written("migrate", json!({ "uri": STATE_URI }), ours.as_fd())?;
        if answers == Answers::No {
            return Ok(Box::new(ToTheEnd(ours)));
        }
        let complete = Arc::new(AtomicBool::new(false));
        self.waiting = Some((Arc::clone(&complete), before));
        Ok(Box::new(ToTheTrailer::new(ours, complete)))
    }

    /// What [`Saving::begin`] gave was read to its end: QEMU is done with it.
    pub(super) fn end(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if self.channel.is_none() {
            return Err(GuestError::Bug("no device state is being saved".to_owned()));
        }
        match self.waiting.take() {
            Some((complete, before)) => self.take_back(qmp, &complete, &before)?,
            None => migration::wait_completed(qmp, SAVE_WAIT)?,
        }
        self.channel = None;
        Ok(())
    }

    /// A save has begun, and has not ended.
    pub(super) fn is_under_way(&self) -> bool {
        self.channel.is_some() || self.waiting.is_some()
    }

    /// Has QEMU, which waits for word that the state has arrived, take its guest back.
    fn take_back(&mut self, qmp: &mut Qmp, complete: &AtomicBool, before: &str) -> Result<(), GuestError> {
        // Acquire: pairs with the reader's store; it may have been another thread.
        if !complete.load(Ordering::Acquire) {
            if let Some(channel) = self.channel.take() {
                channel.hang_up();
            }
            migration::wait_completed(qmp, SAVE_WAIT)?;
            return Err(GuestError::Bug("the device state was not read to its end".to_owned()));
        }
        migration::take_back(qmp, SAVE_WAIT)?;
        match machine::settled_state(qmp)? {
            // Old versions (7.2) leave it there all the same; `cont` is possible, another save is not.
            now if now == before || now == "postmigrate" => Ok(()),
            now => Err(GuestError::vmm(format!("QEMU's guest was {before} before it was saved, and is {now} now"))),
        }
    }

    /// Puts the settings back. What QEMU refuses is tried again at the next occasion, the last of which is our end: it
    /// is no reason for the guest to stand still.
    pub(super) fn restore_settings(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        let Some(settings) = &self.settings else { return Ok(()) };
        settings.restore(qmp)?;
        self.settings = None;
        Ok(())
    }

    /// Ends a save that is under way and puts the settings back.
    ///
    /// # Errors
    /// Something of it could not be done; the rest was.
    pub(super) fn undo(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        self.waiting = None;
        if self.settings.is_none() {
            return Ok(());
        }
        // While QEMU writes device state that nobody reads, it answers no command either: hang up first.
        if let Some(channel) = self.channel.take() {
            channel.hang_up();
        }
        let cancelled = migration::cancel(qmp, SAVE_WAIT);
        self.restore_settings(qmp).and(cancelled)
    }
}

/// Whether QEMU is to wait for word after it has saved. Only the trailer tells then where the state ends, and a machine
/// can be told to leave it out; such a guest is left as QEMU leaves it (`postmigrate`: `cont` is possible, another save
/// is not).
fn answers(qmp: &mut Qmp, stays: bool) -> Answers {
    let get = json!({ "path": "/machine", "property": "suppress-vmdesc" });
    match stays && qmp.execute("qom-get", get).ok() != Some(json!(true)) {
        true => Answers::Yes,
        false => Answers::No,
    }
}
