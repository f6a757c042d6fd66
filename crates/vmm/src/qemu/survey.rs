//! All that attaching looks at, and all that it refuses. Attaching itself ends at the first refusal. `check`
//! collects them: it is the same code, so the two can't differ. Nothing here changes anything in QEMU.
use transship_guest::{GuestError, StateFormat};
use transship_memory::{Access, Freeing, GuestMemory};
use transship_wire::GuestDescription;

use super::{
    back_ends::BackEnds,
    balloon::OwnBalloon,
    blocks, checks, describe,
    device_state::{self, DeviceState},
    faults, giving_back,
    memory::{self, Backend},
    migration,
    qmp::{Keeper, Qmp},
    tracking,
    writers::{self, Allowed, Lookout, When},
};
use crate::{AttachOptions, freeze::Freezer};

/// What becomes of a refusal: given back as an error, it ends the look; kept, the look goes on.
pub(super) type Refuse<'a> = &'a mut dyn FnMut(GuestError) -> Result<(), GuestError>;

/// A QEMU whose guest is to be moved or saved.
pub(super) struct SourceSeen {
    pub(super) own_balloon: Option<OwnBalloon>,
    pub(super) back_ends: BackEnds,
    pub(super) has_direct_disks: bool,
    pub(super) backends: Vec<Backend>,
    pub(super) memory: GuestMemory,
    pub(super) description: GuestDescription,
    pub(super) state_format: StateFormat,
    /// Where it has to be saved so.
    pub(super) device_state: Option<DeviceState>,
    /// Where it can be.
    pub(super) quick_state: Option<DeviceState>,
    pub(super) freeing: Freeing,
}

impl SourceSeen {
    /// # Errors
    /// A refusal that `refuse` gave back, or one without which nothing more can be seen.
    pub(super) fn look(qmp: &mut Qmp, options: &AttachOptions, refuse: Refuse<'_>) -> Result<Self, GuestError> {
        checks::host().or_else(&mut *refuse)?;
        let own_balloon = options.balloon.as_ref().map(|balloon| OwnBalloon::find(qmp, &balloon.socket)).transpose()?;
        checks::source_state(qmp, own_balloon.as_ref()).or_else(&mut *refuse)?;
        migration::check_ignore_shared(qmp).or_else(&mut *refuse)?;
        checks::may_ptrace(qmp.pid()).or_else(&mut *refuse)?;
        faults::may_track(qmp.pid()).or_else(&mut *refuse)?;
        let backends = memory::backends(qmp)?;
        let has_direct_disks = writers::has_direct_disks(qmp)?;
        let back_ends = BackEnds::find(qmp, &backends)?;
        back_ends.may_track().or_else(&mut *refuse)?;
        if !options.allow_untracked_writers {
            let allowed = Allowed { balloon: own_balloon.as_ref(), back_ends: &back_ends, drained: has_direct_disks };
            let others = Lookout::of(qmp, &backends, allowed).look();
            writers::refuse(qmp, others, allowed, When::First).or_else(&mut *refuse)?;
        }
        let memory = memory::map(qmp.pid(), &backends, Access::Read)?;
        checks::trackable(&memory).or_else(&mut *refuse)?;
        tracking::way(options.tracking, &memory, &back_ends).map(drop).or_else(&mut *refuse)?;
        let description = describe(qmp, &backends)?;
        let state_format = blocks::state_format(qmp, &backends)?;
        // QEMU's own migration would be one that libvirt knows nothing of.
        let device_state = match memory::can_be_left_out(&backends) && qmp.keeper() == Keeper::Nobody {
            true => None,
            false => {
                checks::state_without_memory(qmp).or_else(&mut *refuse)?;
                Some(DeviceState::of(qmp, &description, &state_format)?)
            }
        };
        let quick_state = match device_state.is_none() && back_ends.is_empty() && device_state::is_quicker(qmp)? {
            true => DeviceState::of(qmp, &description, &state_format).ok(),
            false => None,
        };
        let freeing = giving_back::freeing(qmp)?;
        Ok(Self {
            own_balloon,
            back_ends,
            has_direct_disks,
            backends,
            memory,
            description,
            state_format,
            device_state,
            quick_state,
            freeing,
        })
    }
}

/// What a background snapshot refuses beside that.
///
/// # Errors
/// What `refuse` gave back.
pub(super) fn background(qmp: &mut Qmp, back_ends: &BackEnds, refuse: Refuse<'_>) -> Result<(), GuestError> {
    giving_back::refuse(qmp).or_else(&mut *refuse)?;
    waiting_writers(qmp, back_ends, refuse)
}

/// The part of it that no balloon changes.
///
/// # Errors
/// What `refuse` gave back.
pub(super) fn waiting_writers(qmp: &mut Qmp, back_ends: &BackEnds, refuse: Refuse<'_>) -> Result<(), GuestError> {
    back_ends.refuse("--background", "save the guest with --live, or paused").or_else(&mut *refuse)?;
    checks::can_make_writers_wait().or_else(&mut *refuse)?;
    faults::may_make_wait(qmp).or_else(refuse)
}

/// A QEMU that waits for a guest.
pub(super) struct DestinationSeen {
    pub(super) backends: Vec<Backend>,
    pub(super) memory: GuestMemory,
    pub(super) description: GuestDescription,
    pub(super) state_format: StateFormat,
}

impl DestinationSeen {
    /// # Errors
    /// As [`SourceSeen::look`].
    pub(super) fn look(qmp: &mut Qmp, refuse: Refuse<'_>) -> Result<Self, GuestError> {
        checks::destination_state(qmp).or_else(&mut *refuse)?;
        checks::no_balloon_yet(qmp).or_else(&mut *refuse)?;
        migration::check_ignore_shared(qmp).or_else(&mut *refuse)?;
        let backends = memory::backends(qmp)?;
        writers::alone_in_memory(qmp, &backends).or_else(&mut *refuse)?;
        let memory = memory::map(qmp.pid(), &backends, Access::ReadWrite)?;
        let description = describe(qmp, &backends)?;
        let state_format = blocks::state_format(qmp, &backends)?;
        Ok(Self { backends, memory, description, state_format })
    }
}

/// What a lazy restore refuses beside that.
///
/// # Errors
/// What `refuse` gave back.
pub(super) fn lazy(qmp: &mut Qmp, memory: &GuestMemory, refuse: Refuse<'_>) -> Result<(), GuestError> {
    checks::host().or_else(&mut *refuse)?;
    writers::refuse_readers(qmp).or_else(&mut *refuse)?;
    checks::may_ptrace(qmp.pid()).or_else(&mut *refuse)?;
    memory.check_can_be_empty().map_err(GuestError::from).or_else(&mut *refuse)?;
    checks::huge_pages_stay_promised(memory).or_else(&mut *refuse)?;
    Freezer::of(qmp.pid()).map(drop).or_else(&mut *refuse)?;
    faults::may_make_wait(qmp).or_else(refuse)
}
