//! Guests that somebody left by dying: a source that was stopped is put back as it was, or its memory is looked for
//! again if it was given away before all of that was sent; a destination that can't get its memory is stopped.
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use transship_guest::{GuestError, LastWill};
use transship_memory::{Access, GuestMemory};

use super::{
    DESTINATION,
    balloon::Made,
    destination::{SOURCE, pause},
    given_away, machine, memory,
    migration::{self, Settings},
    qmp::{self, Qmp},
    state_channel::OurEnd,
};
use crate::freeze::Freezer;

/// The dead process's connection is closed by the kernel, but QEMU takes a moment to notice before it serves the next.
const CONNECT_WAIT: Duration = Duration::from_secs(30);
const CANCEL_WAIT: Duration = Duration::from_secs(30);
/// What was being loaded when its sender died is loaded, or has failed, soon after.
const LOAD_WAIT: Duration = Duration::from_secs(30);

/// What is to be put back.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Will {
    /// All that saving the device state may change.
    pub(super) settings: Settings,
    /// A device that may be unplugged meanwhile.
    pub(super) balloon: Option<Made>,
}

impl Will {
    /// For [`settle`].
    pub(super) fn to_text(&self) -> Result<String, GuestError> {
        written(self)
    }
}

fn written(will: &impl Serialize) -> Result<String, GuestError> {
    serde_json::to_string(will).map_err(|e| GuestError::Bug(format!("can't record QEMU's settings: {e}")))
}

/// Ends what is left of saving the device state, puts QEMU's settings back as `will` says, with `run` lets the guest
/// run, and plugs in what was unplugged.
pub(crate) fn settle(socket: &Path, will: LastWill, run: bool) -> Result<(), GuestError> {
    let LastWill { text, files } = will;
    // Of the channel that the state is saved to. Nobody reads it any more.
    let channel = files.into_iter().next().map(OurEnd::passed);
    channel.iter().for_each(OurEnd::hang_up);
    let mut qmp = connect(socket)?;
    // Whatever fails, the next step is tried: above all the guest is to run.
    let cancelled = migration::cancel(&mut qmp, CANCEL_WAIT);
    let (settled, balloon) = match serde_json::from_str(&text) {
        Ok(Will { settings, balloon }) => (settings.restore(&mut qmp), balloon),
        Err(_) => (migration::forget_settings(&mut qmp).map_err(GuestError::from), None),
    };
    // Set shortly before a guest is given away, which it was not. As a rule there is none.
    let _ = given_away::unmark(&mut qmp);
    let runs = if run { machine::let_run_again(&mut qmp, DESTINATION) } else { Ok(()) };
    // It may be there, be about to go, or be gone: nobody can be asked which.
    let plugged = balloon.map_or(Ok(()), |balloon| balloon.plug_back(&mut qmp).map(drop));
    for (what, result) in [
        ("can't end the save of its device state", cancelled),
        ("can't restore QEMU's migration settings", settled),
        ("can't plug the guest's balloon in again", plugged),
    ] {
        if let Err(error) = result {
            tracing::warn!("{what}: {error}");
        }
    }
    runs
}

/// The will of a destination, for [`loaded`].
pub(super) fn loading(settings: &Settings) -> Result<String, GuestError> {
    written(settings)
}

/// Puts back what loading a guest had changed in QEMU: with `x-ignore-shared` left on, a later migration of QEMU's own
/// would leave out the guest's memory.
pub(crate) fn loaded(socket: &Path, will: &str) -> Result<(), GuestError> {
    let settings: Settings =
        serde_json::from_str(will).map_err(|e| GuestError::Bug(format!("can't read QEMU's settings: {e}")))?;
    let mut qmp = connect(socket)?;
    migration::wait_loaded(&mut qmp, LOAD_WAIT)?;
    settings.restore(&mut qmp)
}

/// The memory of a guest that was given away, where it was before.
pub struct GivenAway {
    /// As it was when the guest was stopped.
    pub memory: GuestMemory,
    /// The VMM's.
    pub process: i32,
}

/// Looks for the memory of a guest that was given away. Changes nothing in QEMU.
pub(crate) fn given_away(socket: &Path) -> Result<GivenAway, GuestError> {
    let mut qmp = connect(socket)?;
    match machine::run_state(&mut qmp)?.as_str() {
        "postmigrate" => {}
        "paused" if given_away::is_marked(&mut qmp)? => {}
        state => {
            return Err(GuestError::Unfit(format!(
                "the guest of this QEMU was not given away, or was let run again since (it is {state:?}), so nobody waits \
                 for its memory as it is now"
            )));
        }
    }
    let backends = memory::backends(&mut qmp)?;
    let memory = memory::map(qmp.pid(), &backends, Access::Read)?;
    Ok(GivenAway { memory, process: qmp.pid() })
}

/// Tries again while QEMU has not noticed that the one before is gone.
fn connect(socket: &Path) -> Result<Qmp, GuestError> {
    let deadline = Instant::now() + CONNECT_WAIT;
    loop {
        match Qmp::connect(socket) {
            Ok(qmp) => return Ok(qmp),
            Err(error) if Instant::now() > deadline || crate::is_gone(socket) => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// For whoever was handed a guest, and died before it ran.
pub(crate) fn start(socket: &Path) -> Result<(), GuestError> {
    machine::let_run_again(&mut connect(socket)?, SOURCE)
}

/// Stops the guest, or freezes QEMU with it. Returns what a person finds.
pub(crate) fn stop(socket: &Path) -> Result<String, GuestError> {
    let freezer = Freezer::of(qmp::listener(socket)?)?;
    let asked = Qmp::connect(socket).map_err(GuestError::from).and_then(|mut qmp| pause(&mut qmp));
    freezer.unless_stopped(asked)
}
