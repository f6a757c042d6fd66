//! To a domain that runs, and to one that somebody left by dying.
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use transship_guest::GuestError;

use super::{
    Address,
    calls::{self, Call, Caller, Silence},
    carrier::{FD_NOTE, FD_SET, Passthrough, Remote, result_of},
    claim::Claim,
    connection::Domain,
    definition, disks,
    overlays::{self, Settled},
    process,
    serving::{RETURN_WAIT, find_within},
};
use crate::qemu::qmp::{Qmp, QmpError};

/// How long a process that was killed may take to be gone, and what it has asked libvirt for to be done.
const CLAIM_WAIT: Duration = Duration::from_secs(90);
/// How long a domain may take to be as it was.
const SETTLE_WAIT: Duration = Duration::from_secs(600);

/// What a guard must know: which run of the domain it was.
#[derive(Debug, Serialize, Deserialize)]
struct Will {
    pid: i32,
    /// Overlays of its disks that were made, or about to be.
    overlays: Vec<PathBuf>,
}

/// Whose it is to remove overlays that the domain does not use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unused {
    /// Of the process that puts the domain back.
    IsOurs,
    /// Of the one that made them. Which files those are is not taken from a process that may say what it likes: who
    /// would remove what it names could be made to remove anything.
    IsAnothers,
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
    let mut remote = Remote::reach(address).map_err(named)?;
    let uuid = remote.simple("the domain", Call::Uuid)?;
    let known = look(&uuid, |name| remote.ask(name, json!({})).map_err(not_passed_on)).map_err(named)?;
    let claim = Claim::of(&uuid, known.0).map_err(named)?;
    // The process that makes the calls may outlive us, and end one then that we have asked for.
    remote.call("the claim", Call::Keep, Some(claim.socket()), CLAIM_WAIT)?;
    remote.simple("libvirt's jobs", Call::CheckIdle).map_err(|e| named(e.to_string()))?;
    take_leftovers(|name, arguments| remote.ask(name, arguments).map_err(not_passed_on)).map_err(named)?;
    Ok(Qmp::through(Box::new(Passthrough::new(remote, known, claim))))
}

fn not_passed_on(error: QmpError) -> String {
    match error {
        QmpError::Refused { command, reason } => {
            format!("libvirt does not pass {command} on to QEMU: {reason}; does the domain run?")
        }
        other => other.to_string(),
    }
}

/// QEMU's process and version.
fn look(uuid: &str, mut ask: impl FnMut(&str) -> Result<Value, String>) -> Result<(i32, (u64, u64)), String> {
    let version = ask("query-version")?;
    let number = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    let pid = process::of(&ask("query-cpus-fast")?, uuid)?;
    Ok((pid, (number("major"), number("minor"))))
}

fn ask(domain: &Domain, command: &str, arguments: Value) -> Result<Value, String> {
    let line = json!({ "execute": command, "arguments": arguments }).to_string();
    let answer = domain.command(&line, None).map_err(|failure| {
        format!("libvirt does not pass {command} on to QEMU: {}; does the domain run?", failure.why)
    })?;
    let result = result_of(command, &answer).ok_or("can't read QEMU's answer")?;
    result.map_err(|error| error.to_string())
}

/// libvirt stays connected to QEMU, so a descriptor that a killed process left there stays, too.
fn take_leftovers(mut ask: impl FnMut(&str, Value) -> Result<Value, String>) -> Result<(), String> {
    let sets = ask("query-fdsets", json!({}))?;
    let ours = sets.as_array().into_iter().flatten().find(|set| set["fdset-id"] == json!(FD_SET));
    for fd in ours.and_then(|set| set["fds"].as_array()).into_iter().flatten() {
        if fd["opaque"] == json!(FD_NOTE) {
            ask("remove-fd", json!({ "fdset-id": FD_SET, "fd": fd["fd"] }))?;
        }
    }
    Ok(())
}

/// Lets a domain run again whose transship died while it stood still, and leaves nothing of that one in QEMU.
pub(crate) fn settle(address: &Address, will: &str, run: bool) -> Result<(), GuestError> {
    if !calls::are_made_elsewhere() {
        return settle_here(address, will, run, Unused::IsOurs);
    }
    let named = |why: String| GuestError::Unfit(format!("{address}: {why}"));
    let mut caller = Caller::reach(address).map_err(named)?;
    let call = Call::Settle { will: will.to_owned(), run };
    match caller.call(call, None, Instant::now() + SETTLE_WAIT) {
        Ok(settled) => settled.map(drop).map_err(|failure| GuestError::Unfit(failure.text)),
        Err(Silence::TimedOut) => Err(named("libvirt does not answer".to_owned())),
        Err(Silence::Ended(why)) => Err(named(format!("the process that makes libvirt's calls has ended: {why}"))),
    }
}

/// The same by this process.
pub(super) fn settle_here(address: &Address, will: &str, run: bool, unused: Unused) -> Result<(), GuestError> {
    let named = |why: String| GuestError::Unfit(format!("{address}: {why}"));
    let (_connection, domain) = find_within(address, RETURN_WAIT).map_err(GuestError::Unfit)?;
    let uuid = domain.uuid().map_err(|failure| named(failure.why))?;
    let (pid, _) = look(&uuid, |name| ask(&domain, name, json!({}))).map_err(named)?;
    let will = serde_json::from_str::<Will>(will).unwrap_or(Will { pid, overlays: Vec::new() });
    if will.pid != pid {
        return Err(named("it was started anew meanwhile, so nothing is to be put back".to_owned()));
    }
    // Another one may have begun since, and is not to be disturbed: it finds a guest that stands still, and says so.
    let _claim = Claim::within(&uuid, pid, CLAIM_WAIT).map_err(named)?;
    if let Err(why) = take_leftovers(|name, arguments| ask(&domain, name, arguments)) {
        tracing::warn!("can't close what was left open in QEMU: {why}");
    }
    let failed = |why| named(format!("{why}; let it run by hand: {}", address.by_hand("resume")));
    if run && domain.is_paused().map_err(|failure| failed(failure.why))? {
        domain.resume().map_err(|failure| failed(failure.why))?;
    }
    settle_overlays(&domain, will.overlays, unused).map_err(named)
}

/// Of those that the domain writes to, and of those that are left behind, it is said that they are there.
fn settle_overlays(domain: &Domain, overlays: Vec<PathBuf>, unused: Unused) -> Result<(), String> {
    if overlays.is_empty() {
        return Ok(());
    }
    let live = domain.xml(definition::LIVE).map_err(|failure| failure.why)?;
    let Settled { used, left } = overlays::settle(overlays, &disks::defined(&live)?, unused == Unused::IsOurs);
    for overlay in left {
        tracing::warn!("{} was made for a disk, and the domain does not use it; remove it", overlay.display());
    }
    for overlay in used {
        tracing::warn!(
            "the domain writes to {} now, over what its disk was when it was to be saved; to merge them: virsh blockcommit",
            overlay.display()
        );
    }
    Ok(())
}
