//! What QEMU says of its machine.
use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use transship_guest::GuestError;

use super::qmp::{Keeper, Qmp, QmpError};
use crate::looked::DeviceFound;

/// The VM's UUID; all zero if it was given none.
pub(super) fn uuid(qmp: &mut Qmp) -> Result<[u8; 16], GuestError> {
    let answer = qmp.execute("query-uuid", json!({}))?;
    let text = answer["UUID"].as_str().unwrap_or_default();
    read_uuid(text).ok_or_else(|| GuestError::vmm(format!("QEMU reports its UUID as {text:?}, which is not a UUID")))
}

/// `8-4-4-4-12` digits, in the order of the text.
fn read_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> =
        text.chars().filter(|&c| c != '-').map(|c| Some(c.to_digit(16)? as u8)).collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks();
    let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
    if rest.is_empty() { bytes.try_into().ok() } else { None }
}

/// `query-status`: running, paused, inmigrate, …
pub(super) fn run_state(qmp: &mut Qmp) -> Result<String, QmpError> {
    let status = qmp.execute("query-status", json!({}))?;
    Ok(status["status"].as_str().unwrap_or("unknown").to_owned())
}

/// How long QEMU may take, after it has called a migration completed, to be ready for `cont`. Without load that is a
/// millisecond.
const FINAL_WAIT: Duration = Duration::from_secs(10);

/// Lets the guest run. `rival`: the QEMU that may have its disks instead, in words.
///
/// # Errors
/// QEMU refuses; the text says what to do if somebody else has a disk.
pub(super) fn let_run(qmp: &mut Qmp, rival: &str) -> Result<(), GuestError> {
    let deadline = Instant::now() + FINAL_WAIT;
    // libvirt's events come late, and have to be waited for.
    let has_events = qmp.keeper() == Keeper::Nobody;
    if has_events {
        // Those of earlier times.
        let _ = qmp.take_events("RESUME");
    }
    let mut once_more = true;
    loop {
        match qmp.cont() {
            Ok(()) => break,
            // It has no event for that.
            Err(_) if Instant::now() < deadline && run_state(qmp)? == "finish-migrate" => {
                thread::sleep(Duration::from_millis(2));
            }
            // What it refused for may have ended between its answer and the question.
            Err(QmpError::Refused { .. }) if std::mem::take(&mut once_more) => {}
            Err(QmpError::Refused { reason, .. }) if is_of_a_lock(&reason) => {
                return Err(GuestError::Unfit(format!(
                    "QEMU refused cont: {reason}: another process has a disk of the guest; end {rival} first, then let this guest run"
                )));
            }
            Err(error) => return Err(error.into()),
        }
    }
    // QEMU says so by itself before it answers, and may then be busy with what its guest wants at once.
    if has_events && qmp.take_events("RESUME").is_ok_and(|events| !events.is_empty()) {
        return Ok(());
    }
    match run_state(qmp)? {
        state if was_let_run(&state) => Ok(()),
        state => Err(GuestError::vmm(format!("QEMU did not let the guest run; its state is {state:?}"))),
    }
}

/// Whether QEMU refuses because somebody else has locked a disk.
fn is_of_a_lock(reason: &str) -> bool {
    ["Failed to get", "Failed to lock"].iter().any(|words| reason.contains(words)) && reason.contains("lock")
}

/// Whether a guest that was in the state `before` can be given away when `stop` has left it in the state `after`.
///
/// # Errors
/// It runs or may run, or is in a state in which nobody would take it over.
pub(super) fn check_stopped(before: &str, after: &str) -> Result<(), GuestError> {
    Err(GuestError::Unfit(match (before, after) {
        // QEMU 9 and newer stop it, and older ones do not; an alarm would wake it.
        ("suspended", _) | (_, "suspended") => {
            "the guest has gone to sleep meanwhile (suspended), and can't be moved or saved asleep; wake it up first: system_wakeup".to_owned()
        }
        (_, "paused" | "prelaunch" | "io-error" | "postmigrate") => return Ok(()),
        (_, "running") => "QEMU runs its guest again right after it was stopped; does another program control it?".to_owned(),
        (_, other) => {
            format!("the guest is in state {other:?} by now, in which it can't be moved or saved; let it run first")
        }
    }))
}

/// The states that a guest comes to by itself once it runs.
fn was_let_run(state: &str) -> bool {
    ["running", "suspended", "shutdown", "guest-panicked", "io-error", "watchdog", "internal-error"].contains(&state)
}

/// A device of the machine.
pub(super) struct Device {
    /// In QEMU's tree of objects.
    pub(super) path: String,
    name: String,
    kind: String,
}

impl Device {
    /// Its id, if it has one.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its type.
    pub(super) fn kind(&self) -> &str {
        &self.kind
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {} ({})", self.name, self.kind)
    }
}

/// Where QEMU's tree of objects has the devices: those with an id, those without, and those of the machine itself.
pub(super) const CONTAINERS: [&str; 3] = ["/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached"];

/// The devices of a kind.
pub(super) fn devices(qmp: &mut Qmp, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<Device>, GuestError> {
    let mut found = Vec::new();
    for container in CONTAINERS {
        // A machine without user-made devices may lack one of the containers.
        let Ok(list) = qmp.execute("qom-list", json!({ "path": container })) else { continue };
        for device in list.as_array().into_iter().flatten() {
            let kind = device["type"].as_str().and_then(|t| t.strip_prefix("child<")?.strip_suffix('>')).unwrap_or("");
            if is_wanted(kind) {
                let name = device["name"].as_str().unwrap_or("?").to_owned();
                found.push(Device { path: format!("{container}/{name}"), name, kind: kind.to_owned() });
            }
        }
    }
    Ok(found)
}

/// The devices that the machine was given beside those that it has by itself.
pub(super) fn user_devices(qmp: &mut Qmp) -> Result<Vec<DeviceFound>, GuestError> {
    let given = devices(qmp, |kind| !kind.is_empty())?
        .into_iter()
        .filter(|device| !device.path.starts_with("/machine/unattached/"));
    Ok(given.map(|device| DeviceFound { name: device.name, kind: device.kind }).collect())
}

/// A virtio device of which only its other process knows what it is, such as transship's own balloon.
pub(super) fn may_be_anything(device_type: &str) -> bool {
    ["vhost-user-device", "vhost-user-test-device"].iter().any(|prefix| device_type.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_uuid_is_read_in_the_order_of_its_text() {
        let text = "00112233-4455-6677-8899-AAbbccddeeff";
        assert_eq!(read_uuid(text).unwrap(), std::array::from_fn(|i| i as u8 * 0x11));
        for wrong in ["", "00112233", "x0112233-4455-6677-8899-aabbccddeeff", "00112233-4455-6677-8899-aabbccddeeff0"] {
            assert_eq!(read_uuid(wrong), None, "{wrong}");
        }
    }
}
