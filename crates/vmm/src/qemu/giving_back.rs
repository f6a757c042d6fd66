//! Memory that the guest gives back to the host, which QEMU punches out of its file at once.
//!
//! A balloon is what nearly every guest has and hardly any host uses. It takes memory only where its host asks it to,
//! and says how much it has: the guest says so while it inflates, and QEMU tells us, also of what came and went in
//! between. No guest relies on what is in the memory that it gets back from there. Other devices take memory at any
//! time without a word, and promise zeros (free page reporting), or may do so (virtio-mem, Hyper-V's balloon, a device
//! in another process).
//!
//! While a snapshot of an earlier moment is being saved, what is given back is lost to it. Write protection does not
//! stop that: the content of the moment is gone before it was saved. QEMU itself forbids it during its own background
//! snapshots; from outside nobody can. So all but a balloon that tells is refused beforehand, and that has to hold as
//! much at the end as at the beginning. (The engine sees the holes themselves too.)
use serde_json::json;
use transship_guest::GuestError;
use transship_memory::Freeing;

use super::{
    machine::{self, Device},
    qmp::{Qmp, QmpError},
};

/// How much memory the balloon leaves to the guest, in bytes; none: there is no balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Balloon(Option<u64>);

impl Balloon {
    /// As it is now.
    pub(super) fn now(qmp: &mut Qmp) -> Result<Self, GuestError> {
        match qmp.execute("query-balloon", json!({})) {
            Ok(balloon) => Ok(Self(balloon["actual"].as_u64())),
            Err(QmpError::Refused { .. }) => Ok(Self(None)),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it says that it is another size by now, which is then its size; or nothing. What it took and gave back
    /// in between does not count.
    pub(super) fn has_changed(&mut self, qmp: &mut Qmp) -> Result<bool, GuestError> {
        let now = Self::now(qmp)?;
        let before = std::mem::replace(self, now);
        Ok(now == Self(None) || now != before)
    }

    /// An error if it has been different at any time since.
    pub(super) fn check_unchanged(self, qmp: &mut Qmp) -> Result<(), GuestError> {
        let now = Self::now(qmp)?;
        if now == Self(None) && self == now {
            return Ok(());
        }
        let changed = qmp.take_events("BALLOON_CHANGE")?.into_iter().map(|event| Self(event.data["actual"].as_u64()));
        match changed.chain([now]).find(|then| *then != self) {
            None => Ok(()),
            Some(_) => Err(GuestError::Unfit(
                "the guest's balloon changed while its memory was saved, which removes content that belongs to the \
                 snapshot; leave the balloon alone meanwhile, or use --live"
                    .to_owned(),
            )),
        }
    }
}

/// Whether the VM has a device by which the guest or its host gives memory back: then there may be new holes, at any
/// time or when it says so.
pub(super) fn freeing(qmp: &mut Qmp) -> Result<Freeing, GuestError> {
    Ok(devices(qmp)?.into_iter().map(|(_, freeing)| freeing).max().unwrap_or(Freeing::Never))
}

/// The devices by which memory is given back, and how each does it.
fn devices(qmp: &mut Qmp) -> Result<Vec<(Device, Freeing)>, GuestError> {
    // Of a device that only its other process knows it can't be told; a balloon is what it most likely is.
    let gives_back =
        |kind: &str| kind.contains("balloon") || kind.starts_with("virtio-mem") || machine::may_be_anything(kind);
    let found = machine::devices(qmp, gives_back)?.into_iter().map(|device| {
        let tells = device.kind().starts_with("virtio-balloon") && !reports(qmp, &device)?;
        Ok((device, if tells { Freeing::Announced } else { Freeing::Possible }))
    });
    found.collect()
}

/// Whether a balloon of QEMU's takes what the guest reports.
fn reports(qmp: &mut Qmp, balloon: &Device) -> Result<bool, GuestError> {
    match qmp.execute("qom-get", json!({ "path": balloon.path, "property": "free-page-reporting" })) {
        Ok(value) => Ok(value != json!(false)),
        // A QEMU that does not know the property (before 5.1) does not know the feature.
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Refuses a guest that may give memory back at any time.
pub(super) fn refuse(qmp: &mut Qmp) -> Result<(), GuestError> {
    match devices(qmp)?.into_iter().find(|(_, freeing)| *freeing == Freeing::Possible) {
        None => Ok(()),
        Some((device, _)) => Err(GuestError::Unfit(format!(
            "{device} gives memory back to the host while the guest runs (free page reporting, virtio-mem, Hyper-V's \
             balloon, or a balloon in another process), which would remove content before it is saved; use --live or \
             --paused, or start the guest without it"
        ))),
    }
}
