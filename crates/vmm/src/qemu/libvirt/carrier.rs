//! QMP by libvirt's monitor passthrough. Somebody else makes libvirt's calls ([`super::calls`]): they have no deadline,
//! and this process may have given up the right to make them.
use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use transship_guest::DiskSnapshot;
use transship_wire::libvirt::Definition;

use super::{
    Address,
    calls::{Call, Caller, Failure, Silence, Why},
    claim::Claim,
    definition,
};
use crate::qemu::qmp::{Carrier, Event, Keeper, QmpError, Question};

/// libvirt itself waits so long for another operation on the domain to end, before it begins.
const TURN_WAIT: Duration = Duration::from_secs(31);
/// An event may still be on its way when the answer to a later command is there.
const EVENT_WAIT: Duration = Duration::from_millis(200);
/// The number of our descriptor set in QEMU: not one that libvirt gives.
pub(super) const FD_SET: u64 = 0x7472_6e73;
/// What is written beside our descriptors there.
pub(super) const FD_NOTE: &str = "transship";
/// Events that somebody may ask for.
pub(super) const EVENTS: [&str; 1] = ["BALLOON_CHANGE"];
/// For what only takes libvirt's own time.
const CALL_WAIT: Duration = Duration::from_secs(20);

/// One domain, by somebody who makes libvirt's calls.
pub(super) struct Remote {
    address: Address,
    /// For messages.
    path: PathBuf,
    caller: Caller,
}

impl Remote {
    pub(super) fn reach(address: &Address) -> Result<Self, String> {
        let path = PathBuf::from(address.to_string());
        Ok(Self { address: address.clone(), path, caller: Caller::reach(address)? })
    }

    /// `what`: for messages.
    pub(super) fn call(
        &mut self,
        what: &str,
        call: Call,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<String, QmpError> {
        let (limit, address) = (limit + TURN_WAIT, &self.address);
        match self.caller.call(call, fd, Instant::now() + limit) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Failure { kind: Why::Unfit, text })) => Err(QmpError::Connection(text)),
            Ok(Err(Failure { kind: Why::Lost, text })) => Err(QmpError::Connection(format!(
                "{address}: libvirt's daemon went away during {what}: {text}; start it, and try again"
            ))),
            Ok(Err(Failure { kind: Why::Refused, text })) => {
                Err(QmpError::Refused { command: what.to_owned(), reason: format!("{text} (libvirt, of {address})") })
            }
            Err(Silence::TimedOut) => {
                let (path, command) = (self.path.clone(), what.to_owned());
                Err(QmpError::Timeout { path, command, seconds: limit.as_secs() })
            }
            Err(Silence::Ended(why)) => Err(QmpError::Connection(format!(
                "{address}: the process that makes libvirt's calls has ended, before or during {what}: {why}"
            ))),
        }
    }

    /// A call whose name says all.
    pub(super) fn simple(&mut self, what: &str, call: Call) -> Result<String, QmpError> {
        self.call(what, call, None, CALL_WAIT)
    }

    pub(super) fn command(
        &mut self,
        name: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let answer = self.call(name, Call::Command { name: name.to_owned(), arguments }, fd, limit)?;
        result_of(name, &answer).unwrap_or_else(|| {
            let what = "an answer that is neither a result nor an error".to_owned();
            Err(QmpError::Protocol { path: self.path.clone(), what })
        })
    }

    /// What an answer holds.
    fn read<T: DeserializeOwned>(&self, answer: &str) -> Result<T, QmpError> {
        serde_json::from_str(answer).map_err(|e| QmpError::Protocol { path: self.path.clone(), what: e.to_string() })
    }

    /// A command that takes no time.
    pub(super) fn ask(&mut self, name: &str, arguments: Value) -> Result<Value, QmpError> {
        self.command(name, arguments, None, CALL_WAIT)
    }
}

/// The same, claimed for this process.
pub(in crate::qemu) struct Passthrough {
    remote: Remote,
    pid: i32,
    version: (u64, u64),
    _claim: Claim,
}

impl Passthrough {
    /// Of a domain that was looked at before.
    pub(super) fn new(remote: Remote, (pid, version): (i32, (u64, u64)), claim: Claim) -> Self {
        Self { remote, pid, version, _claim: claim }
    }
}

impl Carrier for Passthrough {
    fn pid(&self) -> i32 {
        self.pid
    }

    fn version(&self) -> (u64, u64) {
        self.version
    }

    fn path(&self) -> &Path {
        &self.remote.path
    }

    fn keeper(&self) -> Keeper {
        Keeper::Libvirt
    }

    fn execute(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        tracing::debug!(pid = self.pid, command, "qmp by libvirt");
        self.remote.command(command, arguments, fd, limit)
    }

    fn execute_until_written(
        &mut self,
        command: &str,
        arguments: Value,
        _: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<(), QmpError> {
        self.execute(command, arguments, None, limit).map(drop)
    }

    fn add_fd(&mut self, fd: BorrowedFd<'_>, _questions: &[Question], limit: Duration) -> Result<Value, QmpError> {
        // libvirt counts its own sets. It takes questions one by one.
        self.execute("add-fd", json!({ "fdset-id": FD_SET, "opaque": FD_NOTE }), Some(fd), limit)
    }

    fn stop(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.remote.call("stop", Call::Suspend, None, limit).map(drop)
    }

    fn cont(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.remote.call("cont", Call::Resume, None, limit).map(drop)
    }

    fn cont_by_hand(&self) -> String {
        self.remote.address.by_hand("resume")
    }

    fn definition(&mut self, limit: Duration) -> Result<Option<Definition>, QmpError> {
        let mut xml = |call| self.remote.call("the domain's definition", call, None, limit);
        let (lasting, live) = (xml(Call::Lasting)?, xml(Call::Live)?);
        match definition::of(lasting, &live) {
            Ok(definition) => Ok(Some(definition)),
            Err(why) => {
                Err(QmpError::Connection(format!("{}: libvirt's definition of it: {why}", self.remote.address)))
            }
        }
    }

    fn plan_disks(&mut self, folder: Option<&Path>, limit: Duration) -> Result<Vec<DiskSnapshot>, QmpError> {
        let call = Call::PlanDisks { folder: folder.map(Path::to_owned) };
        let planned = self.remote.call("the overlays of the disks", call, None, limit)?;
        self.remote.read(&planned)
    }

    fn make_overlays(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.remote.call("the overlays of the disks", Call::MakeOverlays, None, limit).map(drop)
    }

    fn use_overlays(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.remote.call("a snapshot of the disks", Call::UseOverlays, None, limit).map(drop)
    }

    /// libvirt passes no events of migrations on, and nothing here waits for others.
    fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Option<Event>, QmpError> {
        thread::sleep(deadline.saturating_duration_since(Instant::now()).min(EVENT_WAIT));
        Ok(self.events(name)?.into_iter().next())
    }

    fn take_events(&mut self, name: &str) -> Result<Vec<Event>, QmpError> {
        thread::sleep(EVENT_WAIT);
        self.events(name)
    }

    fn forget_events(&mut self) {
        EVENTS.iter().for_each(|name| drop(self.events(name)));
    }
}

impl Passthrough {
    fn events(&mut self, name: &str) -> Result<Vec<Event>, QmpError> {
        let taken = self.remote.simple(name, Call::TakeEvents { name: name.to_owned() })?;
        let all: Vec<Value> = self.remote.read(&taken)?;
        Ok(all.into_iter().map(|data| Event { name: name.to_owned(), data }).collect())
    }
}

/// The result in a line of QEMU's; none: it is none.
pub(super) fn result_of(command: &str, answer: &str) -> Option<Result<Value, QmpError>> {
    let mut answer: Value = serde_json::from_str(answer).ok()?;
    if let Some(error) = answer.get("error") {
        let reason = error["desc"].as_str().unwrap_or("no reason given").to_owned();
        return Some(Err(QmpError::Refused { command: command.to_owned(), reason }));
    }
    answer.get_mut("return").map(|result| Ok(result.take()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_line_of_qemu_is_a_result_or_a_refusal() {
        assert_eq!(result_of("x", r#"{"return":{"a":1},"id":"libvirt-4"}"#).unwrap().unwrap(), json!({ "a": 1 }));
        let refused = result_of("x", r#"{"id":"libvirt-4","error":{"class":"GenericError","desc":"no"}}"#);
        assert_eq!(refused.unwrap().unwrap_err().to_string(), "QEMU refused x: no");
        for strange in ["", "{}", "[1]", "\"text\""] {
            assert!(result_of("x", strange).is_none(), "{strange}");
        }
    }
}
