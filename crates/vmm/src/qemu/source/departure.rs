//! How the guest's device state leaves a QEMU, and what that changes in it.
use std::{
    io::{self, Read},
    os::fd::OwnedFd,
};

use serde_json::json;
use transship_guest::{GuestError, StateFormat};
use transship_wire::GuestDescription;

use crate::qemu::{
    blocks::RamBlock,
    checks,
    device_state::{DeviceState, Disks},
    given_away, machine,
    qmp::{Keeper, Qmp, WithStop},
    saving::Saving,
};

/// By a migration of QEMU's that leaves out all memory, or without one.
#[derive(Default)]
pub(super) struct Departure {
    /// For memory that QEMU's own migration would take along, and for those in a hurry.
    device_state: Option<DeviceState>,
    /// For those who might be.
    quick_state: Option<DeviceState>,
    /// The state is saved as soon as the guest is stopped.
    at_once: bool,
    /// It was saved by that.
    is_saved: bool,
    /// And the guest's disks were let go for that.
    has_released_disks: bool,
    /// QEMU, which does not know that the guest is given up by that, was told so by a mark.
    is_marked: bool,
    /// Of the state, where that is a migration of QEMU's.
    saving: Saving,
    /// The guest stays after its state was saved.
    stays: bool,
    /// And stays stopped.
    stays_stopped: bool,
}

impl Departure {
    /// What memory asks for, and what could be had in a hurry.
    pub(super) fn by(device_state: Option<DeviceState>, quick_state: Option<DeviceState>) -> Self {
        Self { device_state, quick_state, ..Self::default() }
    }

    /// It shall be quick. `at_once`: the state is saved as soon as the guest is stopped.
    pub(super) fn hurry(&mut self, at_once: bool) {
        self.at_once = at_once;
        self.device_state = self.device_state.take().or_else(|| self.quick_state.take());
    }

    /// A migration of QEMU's begins by tracking all memory, which is felt where the guest stands still for nothing
    /// else. Where the device state can come without one, it does.
    pub(super) fn avoid_migration(&mut self, qmp: &mut Qmp, guest: &GuestDescription, format: &StateFormat) {
        if self.device_state.is_none() && checks::state_without_memory(qmp).is_ok() {
            self.device_state = DeviceState::of(qmp, guest, format).ok();
        }
    }

    /// The state will come without a migration of QEMU's.
    pub(super) fn is_without_migration(&self) -> bool {
        self.device_state.is_some()
    }

    /// The guest stays here when its state was saved.
    pub(super) fn guest_stays(&mut self) {
        self.stays = true;
    }

    /// And is not to run then.
    pub(super) fn guest_stays_stopped(&mut self) {
        self.stays_stopped = true;
    }

    /// Does what can be done while the guest still runs. `known`: the blocks of memory as they are now, if it is looked
    /// at after the stop whether they are still the same.
    pub(super) fn prepare(&mut self, qmp: &mut Qmp, known: Option<&[RamBlock]>) -> Result<(), GuestError> {
        match &mut self.device_state {
            None => self.saving.prepare(qmp),
            Some(device_state) if may_go_with_stop(self.at_once, qmp) => device_state.prepare(qmp, known),
            Some(_) => Ok(()),
        }
    }

    /// What QEMU is told with the stop, if that is good for the state that is saved right behind it.
    pub(super) fn with_stop(&self, qmp: &Qmp) -> WithStop {
        match &self.device_state {
            Some(device_state) if may_go_with_stop(self.at_once, qmp) => device_state.with_stop(self.disks(qmp)),
            _ => WithStop::default(),
        }
    }

    /// What becomes of the guest's disks when its state is saved.
    fn disks(&self, qmp: &Qmp) -> Disks {
        let stays = self.stays || self.stays_stopped || qmp.keeper() == Keeper::Libvirt;
        if stays { Disks::Kept } else { Disks::Released }
    }

    /// Has QEMU save the state of a guest that stands still.
    pub(super) fn save(&mut self, qmp: &mut Qmp) -> Result<Box<dyn Read + Send>, GuestError> {
        let disks = self.disks(qmp);
        let Some(device_state) = &mut self.device_state else {
            let before = machine::run_state(qmp)?;
            machine::stands(&before)?;
            return self.saving.begin(qmp, self.stays_stopped, before);
        };
        // Also if it fails.
        self.has_released_disks = disks == Disks::Released;
        let state = device_state.save(qmp, disks, may_go_with_stop(self.at_once, qmp))?;
        self.is_saved = true;
        Ok(Box::new(io::Cursor::new(state)))
    }

    /// What [`Departure::save`] gave was read to its end: QEMU is done with it.
    pub(super) fn end(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if std::mem::take(&mut self.is_saved) {
            return Ok(());
        }
        self.saving.end(qmp)
    }

    /// The guest may be somebody else's from now on, which QEMU knows only after a migration.
    pub(super) fn mark(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if self.is_without_migration() && !self.is_marked {
            given_away::mark(qmp)?;
            self.is_marked = true;
        }
        Ok(())
    }

    /// The guest is ours again, whatever becomes of the rest.
    pub(super) fn take_back(&mut self, qmp: &mut Qmp) {
        if self.saving.is_under_way() {
            // It has to end before.
            let _ = self.saving.undo(qmp);
        }
        if std::mem::take(&mut self.is_marked) {
            // A mark on a guest that runs says nothing.
            let _ = given_away::unmark(qmp);
        }
    }

    /// A guest that stays as it is has its disks again, as far as QEMU can do that without letting it run (since 10.0);
    /// else they come with `cont`.
    pub(super) fn take_disks_back(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if std::mem::take(&mut self.has_released_disks) && qmp.version() >= (10, 0) {
            qmp.execute("blockdev-set-active", json!({ "active": true }))?;
        }
        Ok(())
    }

    /// What was set for a migration is as it was, and QEMU has no file of a save any more.
    pub(super) fn tidy(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if let Some(device_state) = &mut self.device_state {
            device_state.undo(qmp);
        }
        self.saving.restore_settings(qmp)
    }

    /// The same, with the end of one that is under way.
    pub(super) fn undo(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if let Some(device_state) = &mut self.device_state {
            device_state.undo(qmp);
        }
        self.saving.undo(qmp)
    }

    /// Our end of the channel that the next save by a migration will use.
    pub(super) fn promise(&mut self) -> Result<OwnedFd, GuestError> {
        Ok(self.saving.promise()?.into_file())
    }
}

/// Whether what a save begins with may go before the stop and with it. Through libvirt each word goes by itself.
fn may_go_with_stop(at_once: bool, qmp: &Qmp) -> bool {
    at_once && qmp.keeper() == Keeper::Nobody
}
