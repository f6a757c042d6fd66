//! To a domain that runs, and to one that somebody left by dying.
use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use transship_guest::GuestError;

use super::{
    Address,
    carrier::{FD_NOTE, FD_SET, Passthrough, RETURN_WAIT, find_within},
    claim::Claim,
    connection::{Domain, find},
    definition, disks, jobs, process,
};
use crate::qemu::{overlays::remove_unused, qmp::Qmp};

/// How long a process that was killed may take to be gone.
const CLAIM_WAIT: Duration = Duration::from_secs(10);

/// What a guard must know: which run of the domain it was.
#[derive(Debug, Serialize, Deserialize)]
struct Will {
    pid: i32,
    /// Overlays of its disks that were made, or about to be.
    overlays: Vec<PathBuf>,
}

/// For [`settle`].
pub(in crate::qemu) fn will(pid: i32, overlays: Vec<PathBuf>) -> Result<String, GuestError> {
    serde_json::to_string(&Will { pid, overlays })
        .map_err(|e| GuestError::Bug(format!("can't record the domain's process: {e}")))
}

/// Claims the domain for this process, and speaks to its QEMU from now on. Changes nothing in it.
///
/// # Errors
/// libvirt or the domain is not there, busy, or somewhere else; or another transship has it.
pub(in crate::qemu) fn attach(address: &Address) -> Result<Qmp, GuestError> {
    let named = |why: String| GuestError::Unfit(format!("{address}: {why}"));
    let found = find(address).map_err(GuestError::Unfit)?;
    let uuid = found.1.uuid().map_err(|failure| named(failure.why))?;
    let known = look(&found.1, &uuid).map_err(named)?;
    let claim = Claim::of(&uuid, known.0).map_err(named)?;
    jobs::refuse(&found.1).map_err(named)?;
    take_leftovers(&found.1).map_err(named)?;
    Ok(Qmp::through(Box::new(Passthrough::new(address.clone(), found, known, claim).map_err(named)?)))
}

/// QEMU's process and version.
fn look(domain: &Domain, uuid: &str) -> Result<(i32, (u64, u64)), String> {
    let version = ask(domain, "query-version", json!({}))?;
    let number = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    let pid = process::of(&ask(domain, "query-cpus-fast", json!({}))?, uuid)?;
    Ok((pid, (number("major"), number("minor"))))
}

fn ask(domain: &Domain, command: &str, arguments: Value) -> Result<Value, String> {
    let line = json!({ "execute": command, "arguments": arguments }).to_string();
    let answer = domain.command(&line, None).map_err(|failure| {
        format!("libvirt does not pass {command} on to QEMU: {}; does the domain run?", failure.why)
    })?;
    let mut answer: Value = serde_json::from_str(&answer).map_err(|e| format!("can't read QEMU's answer: {e}"))?;
    match answer.get("error") {
        Some(error) => Err(format!("QEMU refused {command}: {error}")),
        None => Ok(answer["return"].take()),
    }
}

/// libvirt stays connected to QEMU, so a descriptor that a killed process left there stays, too.
fn take_leftovers(domain: &Domain) -> Result<(), String> {
    let sets = ask(domain, "query-fdsets", json!({}))?;
    let ours = sets.as_array().into_iter().flatten().find(|set| set["fdset-id"] == json!(FD_SET));
    for fd in ours.and_then(|set| set["fds"].as_array()).into_iter().flatten() {
        if fd["opaque"] == json!(FD_NOTE) {
            ask(domain, "remove-fd", json!({ "fdset-id": FD_SET, "fd": fd["fd"] }))?;
        }
    }
    Ok(())
}

/// Lets a domain run again whose transship died while it stood still, and leaves nothing of that one in QEMU.
pub(crate) fn settle(address: &Address, will: &str, run: bool) -> Result<(), GuestError> {
    let named = |why: String| GuestError::Unfit(format!("{address}: {why}"));
    let (_connection, domain) = find_within(address, RETURN_WAIT).map_err(GuestError::Unfit)?;
    let uuid = domain.uuid().map_err(|failure| named(failure.why))?;
    let (pid, _) = look(&domain, &uuid).map_err(named)?;
    let will = serde_json::from_str::<Will>(will).unwrap_or(Will { pid, overlays: Vec::new() });
    if will.pid != pid {
        return Err(named("it was started anew meanwhile, so nothing is to be put back".to_owned()));
    }
    // Another one may have begun since, and is not to be disturbed: it finds a guest that stands still, and says so.
    let _claim = Claim::within(&uuid, pid, CLAIM_WAIT).map_err(named)?;
    if let Err(why) = take_leftovers(&domain) {
        tracing::warn!("can't close what was left open in QEMU: {why}");
    }
    let failed = |why| named(format!("{why}; let it run by hand: {}", address.by_hand("resume")));
    if run && domain.is_paused().map_err(|failure| failed(failure.why))? {
        domain.resume().map_err(|failure| failed(failure.why))?;
    }
    settle_overlays(&domain, will.overlays).map_err(named)
}

/// Those that the domain does not write to go; of the others it is said that they are there.
fn settle_overlays(domain: &Domain, overlays: Vec<PathBuf>) -> Result<(), String> {
    if overlays.is_empty() {
        return Ok(());
    }
    let live = domain.xml(definition::LIVE).map_err(|failure| failure.why)?;
    for overlay in remove_unused(overlays, &disks::defined(&live)?) {
        tracing::warn!(
            "the domain writes to {} now, over what its disk was when it was to be saved; to merge them: virsh blockcommit",
            overlay.display()
        );
    }
    Ok(())
}
