//! A mark in a QEMU that gives its guest away, left there when only the destination's word is waited for.
//!
//! QEMU's own migration leaves it in a state of its own (`postmigrate`). Where the device state was saved without that
//! ([`super::device_state`]) it only stands, as any guest does that somebody has paused. If it were moved or saved once
//! more, the guest would be there twice. So an object that does nothing is left in it, whose name says it.
use serde_json::json;
use transship_guest::GuestError;

use super::qmp::{Qmp, QmpError};

/// The object's id.
const MARK: &str = "transship-gave-this-guest-away";

/// Leaves the mark.
pub(super) fn mark(qmp: &mut Qmp) -> Result<(), GuestError> {
    match qmp.execute("object-add", json!({ "qom-type": "throttle-group", "id": MARK })) {
        // Of a time before this: the guest was let run again by hand.
        Err(QmpError::Refused { .. }) if is_marked(qmp)? => Ok(()),
        added => Ok(added.map(drop)?),
    }
}

/// The guest is here after all.
pub(super) fn unmark(qmp: &mut Qmp) -> Result<(), GuestError> {
    Ok(qmp.execute("object-del", json!({ "id": MARK })).map(drop)?)
}

/// Whether there is the mark.
pub(super) fn is_marked(qmp: &mut Qmp) -> Result<bool, GuestError> {
    let objects = qmp.execute("qom-list", json!({ "path": "/objects" }))?;
    Ok(objects.as_array().into_iter().flatten().any(|object| object["name"] == MARK))
}
