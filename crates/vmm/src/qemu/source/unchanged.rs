//! Whether a guest is still what it was when it was attached to.
use transship_guest::{Found, GuestError};
use transship_memory::Freeing;

use super::QemuSource;
use crate::qemu::{
    checks, machine, memory,
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

    /// Asks what `look_whether_unchanged` will want to know, if it has not looked since the stop: QEMU reads a question
    /// byte by byte, and can do so while its state is written, sent and loaded.
    pub(super) fn ask_whether_unchanged(&mut self) -> Result<(), GuestError> {
        if !self.is_unchecked || self.asks_later() {
            return Ok(());
        }
        Ok(self.qmp.begin_to_ask(&questions::stopped())?)
    }

    /// Whether a guest that was stopped is as it was when attached.
    pub(super) fn look_whether_unchanged(&mut self) -> Result<(), GuestError> {
        if self.asks_later() {
            return Ok(());
        }
        self.qmp.ask_ahead(&questions::stopped())?;
        let _mappings = self.qmp.process().hold_mappings();
        let checked = self
            .check_balloon()
            .and_then(|()| self.check_no_devices_came())
            .and_then(|()| self.check_memory_unchanged());
        self.qmp.forget_answers();
        checked
    }

    /// The tracker knows nothing of memory that was plugged, unplugged or mapped elsewhere meanwhile.
    pub(super) fn check_memory_unchanged(&mut self) -> Result<(), GuestError> {
        if self.departure.is_without_migration() {
            checks::state_is_whole(&mut self.qmp)?;
        }
        self.back_ends.check_unchanged(&self.backends)?;
        let backends = memory::backends_again(&mut self.qmp, &self.backends)?;
        let moved = match &self.tracked {
            Some(tracked) => memory::areas(&mut self.qmp, &backends)? != *tracked,
            None => false,
        };
        // Without what may give memory back there are no more holes than were thought possible.
        let frees = self.freeing == Freeing::Never && checks::freeing(&mut self.qmp)? == Freeing::Possible;
        if moved || backends != self.backends || frees {
            return Err(GuestError::Unfit(
                "the guest's memory, or a balloon, was plugged, unplugged or remapped meanwhile; start again"
                    .to_owned(),
            ));
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

    /// Looks at all processes: not while the guest stands still.
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

    /// The part of it that is quick.
    pub(super) fn check_no_devices_came(&mut self) -> Result<(), GuestError> {
        if self.allow_untracked_writers {
            return Ok(());
        }
        let (qmp, allowed) = self.qmp_and_allowed();
        writers::refuse_devices(qmp, allowed, When::Later)
    }

    pub(super) fn check_balloon(&mut self) -> Result<(), GuestError> {
        self.balloon.map_or(Ok(()), |balloon| balloon.check_unchanged(&mut self.qmp))
    }
}
