//! Whether a guest is still what it was when it was attached to.
use transship_guest::{Found, GuestError};
use transship_memory::{Area, Freeing};

use super::QemuSource;
use crate::qemu::{
    blocks::{self, RamBlock},
    checks, giving_back, machine,
    memory::{self, Backend},
    qmp::Qmp,
    questions,
    writers::{self, Allowed, Lookout, When},
};

impl QemuSource {
    /// What a guest that was just stopped turns out to have done before.
    pub(super) fn look_at_stopped(&mut self, before: &str) -> Result<Found, GuestError> {
        let after = machine::run_state(&mut self.qmp)?;
        if after != "paused" {
            // It has not been stopped by us.
            self.found = Found::by(after == "suspended");
        }
        machine::check_stopped(before, &after)?;
        Ok(self.found)
    }

    /// Whether a guest that is about to be stopped is as it was when attached. Its devices are looked at now: one that
    /// comes between this and the stop, which follows at once, has no driver in the guest yet.
    pub(super) fn look_before_stop(&mut self) -> Result<(), GuestError> {
        self.qmp.ask_ahead(&questions::stopping())?;
        let _mappings = self.qmp.process().hold_mappings();
        let seen = self
            .check_no_writers_came()
            .and_then(|()| self.check_memory_unchanged())
            .and_then(|()| Ok(blocks::list(&mut self.qmp)?));
        self.qmp.forget_answers();
        self.before_stop = Some(seen?);
        Ok(())
    }

    /// Whether a guest that was stopped still is what it was when attached. Of one that was looked at right before, the
    /// memory alone is looked at: QEMU takes too long for all the rest while a guest stands still.
    pub(super) fn look_after_stop(&mut self) -> Result<(), GuestError> {
        if self.asks_later() {
            return Ok(());
        }
        let before = self.before_stop.take();
        let _mappings = self.qmp.process().hold_mappings();
        let checked = match before {
            Some(before) => self.check_blocks_unchanged(&before),
            None => self
                .qmp
                .ask_ahead(&questions::stopping())
                .map_err(GuestError::from)
                .and_then(|()| self.check_no_writers_came())
                .and_then(|()| self.check_memory_unchanged()),
        };
        self.qmp.forget_answers();
        checked
    }

    /// QEMU's list of its memory shows what was plugged in, and its mappings where the guest's memory is.
    fn check_blocks_unchanged(&mut self, before: &[RamBlock]) -> Result<(), GuestError> {
        self.back_ends.check_unchanged(&self.backends)?;
        let now = blocks::list(&mut self.qmp)?;
        let moved = has_moved(&mut self.qmp, &self.backends, self.tracked.as_deref())?;
        if now == before && !moved { Ok(()) } else { Err(changed()) }
    }

    /// The tracker knows nothing of memory that was plugged, unplugged or mapped elsewhere meanwhile.
    pub(super) fn check_memory_unchanged(&mut self) -> Result<(), GuestError> {
        if self.departure.is_without_migration() {
            checks::state_is_whole(&mut self.qmp)?;
        }
        self.back_ends.check_unchanged(&self.backends)?;
        let backends = memory::backends_again(&mut self.qmp, &self.backends)?;
        let moved = has_moved(&mut self.qmp, &backends, self.tracked.as_deref())?;
        // Without what may give memory back there are no more holes than were thought possible.
        let frees = self.freeing != Freeing::Possible && giving_back::freeing(&mut self.qmp)? > self.freeing;
        if moved || backends != self.backends || frees {
            return Err(changed());
        }
        Ok(())
    }

    /// Those that write past QEMU, and are tracked or harmless.
    pub(super) fn allowed(&self) -> Allowed<'_> {
        Allowed { balloon: self.own_balloon.as_ref(), back_ends: &self.back_ends, drained: self.has_direct_disks }
    }

    fn qmp_and_allowed(&mut self) -> (&mut Qmp, Allowed<'_>) {
        let Self { qmp, own_balloon, back_ends, has_direct_disks, .. } = self;
        (qmp, Allowed { balloon: own_balloon.as_ref(), back_ends, drained: *has_direct_disks })
    }

    /// Looks at all processes: not while a guest stands still that is to run on.
    pub(super) fn check_no_writers_came(&mut self) -> Result<(), GuestError> {
        if self.allow_untracked_writers {
            return Ok(());
        }
        let others = match &mut self.ask_others {
            Some(ask) => ask().map_err(GuestError::system("ask who else writes guest memory"))?,
            None => Lookout::of(&self.qmp, &self.backends, self.allowed()).look(),
        };
        let (qmp, allowed) = self.qmp_and_allowed();
        writers::refuse(qmp, others, allowed, When::Later)
    }

    pub(super) fn check_balloon(&mut self) -> Result<(), GuestError> {
        self.balloon.map_or(Ok(()), |balloon| balloon.check_unchanged(&mut self.qmp))
    }
}

/// Whether QEMU has its memory elsewhere than where it was tracked, if it was.
fn has_moved(qmp: &mut Qmp, backends: &[Backend], tracked: Option<&[Area]>) -> Result<bool, GuestError> {
    tracked.map_or(Ok(false), |tracked| Ok(memory::areas(qmp, backends)? != tracked))
}

fn changed() -> GuestError {
    GuestError::Unfit(
        "the guest's memory, or a balloon, was plugged, unplugged or remapped meanwhile; start again".to_owned(),
    )
}
