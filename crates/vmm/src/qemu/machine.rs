//! What QEMU says of its machine.
use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use transship_guest::GuestError;

use super::qmp::{Keeper, Qmp, QmpError, Question};
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
    let (command, arguments) = state_question();
    let answer = qmp.execute(command, arguments)?;
    Ok(answer["status"].as_str().unwrap_or("unknown").to_owned())
}

/// Whether a guest in this state is to run on, wherever it ends up.
pub(super) fn runs(state: &str) -> bool {
    ["running", "suspended"].contains(&state)
}

/// What [`run_state`] asks.
pub(super) fn state_question() -> Question {
    ("query-status", json!({}))
}

/// How long QEMU may take, after it has called a migration completed, to be ready for `cont`. Without load that is a
/// millisecond.
const FINAL_WAIT: Duration = Duration::from_secs(10);
/// How often it is asked meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Its state until then.
const FINISHING: &str = "finish-migrate";

/// The guest's state behind a migration that has ended: QEMU says that it has a moment before the guest is as it was.
/// It has no event for that.
pub(super) fn settled_state(qmp: &mut Qmp) -> Result<String, QmpError> {
    let deadline = Instant::now() + FINAL_WAIT;
    loop {
        let state = run_state(qmp)?;
        if state != FINISHING || Instant::now() > deadline {
            return Ok(state);
        }
        thread::sleep(LOOK_EVERY);
    }
}

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
            Err(_) if Instant::now() < deadline && run_state(qmp)? == FINISHING => thread::sleep(LOOK_EVERY),
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
    match run_state(qmp) {
        Ok(state) if was_let_run(&state) => Ok(()),
        Ok(state) => Err(GuestError::vmm(format!("QEMU did not let the guest run; its state is {state:?}"))),
        // It said yes, and has ended since, as it does when its guest shuts down.
        Err(QmpError::Closed { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// As [`let_run`], for a guest that was stopped by us. One that stands by itself now has run since: somebody else has
/// let it run, or we have before we were killed. What it did then is its own affair, and QEMU refuses to let some such
/// guests run.
pub(super) fn let_run_again(qmp: &mut Qmp, rival: &str) -> Result<(), GuestError> {
    match has_run(&run_state(qmp)?) {
        true => Ok(()),
        false => let_run(qmp, rival),
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

/// That a guest in this state, whose devices are to be saved, was stopped before.
pub(super) fn stands(state: &str) -> Result<(), GuestError> {
    match state {
        "running" => {
            Err(GuestError::Bug("the guest runs: its device state can be saved only when it is stopped".to_owned()))
        }
        _ => Ok(()),
    }
}

/// Whether QEMU, which has answered `cont` well, has let its guest run. Where it waits for a guest it only keeps the
/// word in mind. Into any other state it has come since: the guest by itself, or somebody has brought it there.
fn was_let_run(state: &str) -> bool {
    !["inmigrate", "unknown"].contains(&state)
}

/// The states that a guest comes to by itself once it runs.
fn has_run(state: &str) -> bool {
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
    use crate::qemu::qmp::tests::peer;

    /// What the guest may have come to when somebody asks, right after it was let run.
    const STATES: [&str; 9] = [
        "running",
        "suspended",
        "shutdown",
        "guest-panicked",
        "io-error",
        "watchdog",
        "internal-error",
        // By another monitor.
        "paused",
        "postmigrate",
    ];

    const YES: &str = r#"{"return": {}, "id": ID}"#;
    const NO: &str =
        r#"{"error": {"class": "GenericError", "desc": "Resetting the Virtual Machine is required"}, "id": ID}"#;

    fn state(state: &str) -> String {
        format!(r#"{{"return": {{"status": "{state}"}}, "id": ID}}"#)
    }

    /// A QEMU that answers so, and ends.
    fn qemu(answers: &[&str]) -> (tempfile::TempDir, Qmp) {
        let (dir, path) = peer(answers);
        let qmp = Qmp::connect(&path).unwrap();
        (dir, qmp)
    }

    fn let_run_by(answers: &[&str]) -> Result<(), GuestError> {
        let (_dir, mut qmp) = qemu(answers);
        let_run(&mut qmp, "somebody")
    }

    /// Its word is enough: it may not even be there any more to be asked.
    #[test]
    fn a_guest_runs_once_qemu_has_said_so_whatever_it_does_next() {
        let resumed = format!("{}\n{YES}", r#"{"event": "RESUME", "timestamp": {}}"#);
        let_run_by(&[&resumed]).unwrap();
        let stopped = format!("{}\n{}\n{YES}", r#"{"event": "RESUME"}"#, r#"{"event": "STOP"}"#);
        let_run_by(&[&stopped]).unwrap();
    }

    #[test]
    fn a_guest_that_comes_to_something_at_once_was_let_run() {
        for found in STATES {
            let_run_by(&[YES, &state(found)]).unwrap_or_else(|error| panic!("{found}: {error}"));
        }
        // It has shut down, and its QEMU has ended.
        let_run_by(&[YES]).unwrap();
        for found in ["inmigrate", "unknown"] {
            let error = let_run_by(&[YES, &state(found)]).unwrap_err().to_string();
            assert!(error.contains("did not let the guest run") && error.contains(found), "{error}");
        }
    }

    #[test]
    fn a_refusal_is_none_that_the_guest_has_run() {
        let error = let_run_by(&[NO, &state("paused"), NO, &state("paused")]).unwrap_err().to_string();
        assert!(error.contains("Resetting the Virtual Machine is required"), "{error}");
        // Its answer to the second try counts.
        let_run_by(&[NO, &state("paused"), YES, &state("running")]).unwrap();
    }

    /// It is asked for its state, and nothing is tried where it has run since it was stopped.
    #[test]
    fn a_guest_that_has_run_since_it_was_stopped_is_left_as_it_is() {
        for found in STATES.into_iter().filter(|state| has_run(state)) {
            let (_dir, mut qmp) = qemu(&[&state(found), NO, NO]);
            let_run_again(&mut qmp, "somebody").unwrap_or_else(|error| panic!("{found}: {error}"));
        }
        for found in ["paused", "postmigrate", "finish-migrate", "prelaunch"] {
            let (_dir, mut qmp) = qemu(&[&state(found), YES, &state("shutdown")]);
            let_run_again(&mut qmp, "somebody").unwrap_or_else(|error| panic!("{found}: {error}"));
            let (_dir, mut qmp) = qemu(&[&state(found), NO, &state(found), NO, &state(found)]);
            assert!(let_run_again(&mut qmp, "somebody").is_err(), "{found}");
        }
    }

    #[test]
    fn a_uuid_is_read_in_the_order_of_its_text() {
        let text = "00112233-4455-6677-8899-AAbbccddeeff";
        assert_eq!(read_uuid(text).unwrap(), std::array::from_fn(|i| i as u8 * 0x11));
        for wrong in ["", "00112233", "x0112233-4455-6677-8899-aabbccddeeff", "00112233-4455-6677-8899-aabbccddeeff0"] {
            assert_eq!(read_uuid(wrong), None, "{wrong}");
        }
    }
}
