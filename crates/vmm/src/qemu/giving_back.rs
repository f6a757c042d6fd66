//! Memory that the guest gives back to the host while a snapshot of an earlier moment is being saved.
//!
//! What the guest gives back, QEMU punches out of the memory's file at once. Write protection does not stop that: the
//! content of the moment is gone before it was saved. QEMU itself forbids it during its own background snapshots; from
//! outside nobody can. So what gives memory back all the time is refused beforehand (free page reporting, virtio-mem).
//! A balloon is what nearly every guest has and hardly any host uses, so it may stay, if it holds as much at the end as
//! at the beginning: while it inflates the guest says so, and QEMU tells us, also what came and went in between. (The
//! engine sees the holes themselves too.)
use serde_json::json;
use transship_guest::GuestError;

use super::{
    machine,
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

/// Refuses a guest that may give memory back at any time.
pub(super) fn refuse(qmp: &mut Qmp) -> Result<(), GuestError> {
    // Of a device that only its other process knows it can't be told; a balloon is what it most likely is.
    let at_any_time = |kind: &str| kind.starts_with("virtio-mem") || machine::may_be_anything(kind);
    let mut found = machine::devices(qmp, at_any_time)?;
    for balloon in machine::devices(qmp, |kind| kind.starts_with("virtio-balloon"))? {
        let get = json!({ "path": balloon.path, "property": "free-page-reporting" });
        // A QEMU that does not know the property (before 5.1) does not know the feature.
        if qmp.execute("qom-get", get).is_ok_and(|value| value == json!(true)) {
            found.push(balloon);
        }
    }
    let Some(first) = found.first() else { return Ok(()) };
    Err(GuestError::Unfit(format!(
        "{first} gives memory back to the host while the guest runs (free page reporting, virtio-mem, or a balloon in \
         another process), which would remove content before it is saved; use --live or --paused, or start the guest \
         without it"
    )))
}
