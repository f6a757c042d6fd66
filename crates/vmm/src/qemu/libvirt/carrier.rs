//! QMP by libvirt's monitor passthrough.
//!
//! A thread of its own makes libvirt's calls, because they have no deadline and this has. When libvirt's daemon is
//! restarted, it finds the domain again; what only asks is asked once more, and what does not has failed.
use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_wire::libvirt::Definition;

use super::{
    Address,
    claim::Claim,
    connection::{Connection, Domain, Events, LibvirtFailure, Listening, find},
    definition, disks,
};
use crate::qemu::{
    overlays::{DefinedDisk, Overlays},
    qmp::{Carrier, Event, Keeper, QmpError},
};

/// libvirt itself waits so long for another operation on the domain to end, before it begins.
const TURN_WAIT: Duration = Duration::from_secs(31);
/// A daemon that is restarted is back by then.
pub(super) const RETURN_WAIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// An event may still be on its way when the answer to a later command is there.
const EVENT_WAIT: Duration = Duration::from_millis(200);
/// The number of our descriptor set in QEMU: not one that libvirt gives.
pub(super) const FD_SET: u64 = 0x7472_6e73;
/// What is written beside our descriptors there.
pub(super) const FD_NOTE: &str = "transship";
/// Events that somebody may ask for.
const EVENTS: [&str; 1] = ["BALLOON_CHANGE"];

/// A call of libvirt's.
enum Call {
    Command { line: String, fd: Option<OwnedFd>, may_repeat: bool },
    Xml { flags: u32 },
    SnapshotDisks { xml: String },
    Suspend,
    Resume,
}

type Answer = Result<String, LibvirtFailure>;

/// One domain, claimed for this process.
pub(in crate::qemu) struct Passthrough {
    address: Address,
    /// For messages.
    path: PathBuf,
    pid: i32,
    version: (u64, u64),
    calls: Sender<(u64, Call)>,
    answers: Receiver<(u64, Answer)>,
    next: u64,
    events: Arc<Events>,
    /// The daemon was away for a while, and with it the events of that time.
    missed: Arc<AtomicBool>,
    _claim: Claim,
}

impl Passthrough {
    /// Of a domain that was looked at before.
    pub(super) fn new(
        address: Address,
        (connection, domain): (Arc<Connection>, Domain),
        (pid, version): (i32, (u64, u64)),
        claim: Claim,
    ) -> Result<Self, String> {
        let (events, missed) = (Arc::new(Events::default()), Arc::new(AtomicBool::new(false)));
        let listening = listen(&domain, &events).map_err(|failure| failure.why)?;
        let (calls, to_make) = mpsc::channel();
        let (give, answers) = mpsc::channel();
        let id = domain.id();
        let worker = Worker {
            address: address.clone(),
            connection,
            domain,
            id,
            listening,
            events: Arc::clone(&events),
            missed: Arc::clone(&missed),
        };
        // It ends with us, unless libvirt never answers it.
        thread::Builder::new()
            .name("libvirt calls".into())
            .spawn(move || worker.run(&to_make, &give))
            .map_err(|e| format!("can't start a thread: {e}"))?;
        let path = PathBuf::from(address.to_string());
        Ok(Self { address, path, pid, version, calls, answers, next: 0, events, missed, _claim: claim })
    }

    fn call(&mut self, what: &str, call: Call, limit: Duration) -> Result<String, QmpError> {
        self.next += 1;
        let ended = || QmpError::Connection(format!("can't make libvirt's call for {what}: its thread has ended"));
        self.calls.send((self.next, call)).map_err(|_| ended())?;
        let limit = limit + TURN_WAIT;
        let deadline = Instant::now() + limit;
        loop {
            match self.answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((number, answer)) if number == self.next => {
                    return answer.map_err(|failure| match failure.is_lost {
                        true => QmpError::Connection(format!(
                            "{}: libvirt's daemon went away during {what}: {}; start it, and try again",
                            self.address, failure.why
                        )),
                        false => QmpError::Refused {
                            command: what.to_owned(),
                            reason: format!("{} (libvirt, of {})", failure.why, self.address),
                        },
                    });
                }
                // To a call for which nobody waits any more.
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    let (path, command) = (self.path.clone(), what.to_owned());
                    return Err(QmpError::Timeout { path, command, seconds: limit.as_secs() });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            }
        }
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
        &self.path
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
        let fd = fd.map(|fd| fd.try_clone_to_owned()).transpose();
        let fd = fd.map_err(|e| QmpError::Connection(format!("can't hand a descriptor to libvirt: {e}")))?;
        tracing::debug!(pid = self.pid, command, "qmp by libvirt");
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        let answer = self.call(command, Call::Command { line, fd, may_repeat: only_asks(command) }, limit)?;
        result_of(command, &answer).unwrap_or_else(|| {
            let what = "an answer that is neither a result nor an error".to_owned();
            Err(QmpError::Protocol { path: self.path.clone(), what })
        })
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

    fn add_fd(&mut self, fd: BorrowedFd<'_>, limit: Duration) -> Result<Value, QmpError> {
        // libvirt counts its own sets.
        self.execute("add-fd", json!({ "fdset-id": FD_SET, "opaque": FD_NOTE }), Some(fd), limit)
    }

    fn stop(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.call("stop", Call::Suspend, limit).map(drop)
    }

    fn cont(&mut self, limit: Duration) -> Result<(), QmpError> {
        self.call("cont", Call::Resume, limit).map(drop)
    }

    fn cont_by_hand(&self) -> String {
        self.address.by_hand("resume")
    }

    fn definition(&mut self, limit: Duration) -> Result<Option<Definition>, QmpError> {
        let mut xml = |flags| self.call("the domain's definition", Call::Xml { flags }, limit);
        let (lasting, live) = (xml(definition::LASTING)?, xml(definition::LIVE)?);
        match definition::of(lasting, &live) {
            Ok(definition) => Ok(Some(definition)),
            Err(why) => Err(QmpError::Connection(format!("{}: libvirt's definition of it: {why}", self.address))),
        }
    }

    fn disks(&mut self, limit: Duration) -> Result<Vec<DefinedDisk>, QmpError> {
        let live = self.call("the domain's definition", Call::Xml { flags: definition::LIVE }, limit)?;
        disks::defined(&live)
            .map_err(|why| QmpError::Connection(format!("{}: libvirt's definition of it: {why}", self.address)))
    }

    fn use_overlays(&mut self, overlays: &Overlays, limit: Duration) -> Result<(), QmpError> {
        let xml = disks::snapshot_xml(overlays);
        self.call("a snapshot of the disks", Call::SnapshotDisks { xml }, limit).map(drop)
    }

    /// libvirt passes no events of migrations on, and nothing here waits for others.
    fn wait_event(&mut self, name: &str, deadline: Instant) -> Result<Option<Event>, QmpError> {
        thread::sleep(deadline.saturating_duration_since(Instant::now()).min(EVENT_WAIT));
        Ok(self.events.take(name).into_iter().next())
    }

    fn take_events(&mut self, name: &str) -> Result<Vec<Event>, QmpError> {
        thread::sleep(EVENT_WAIT);
        // Acquire: pairs with the worker's store, made before it answers.
        match self.missed.load(Ordering::Acquire) {
            false => Ok(self.events.take(name)),
            true => Err(QmpError::Connection(format!(
                "libvirt's daemon was restarted meanwhile, and nobody knows whether QEMU said {name} in that time; save again"
            ))),
        }
    }

    fn forget_events(&mut self) {
        EVENTS.iter().for_each(|name| drop(self.events.take(name)));
    }
}

/// A command that changes nothing, or only what it has changed already.
fn only_asks(command: &str) -> bool {
    command.starts_with("query-") || ["qom-get", "qom-list", "human-monitor-command", "transaction"].contains(&command)
}

/// The result in a line of QEMU's; none: it is none.
fn result_of(command: &str, answer: &str) -> Option<Result<Value, QmpError>> {
    let mut answer: Value = serde_json::from_str(answer).ok()?;
    if let Some(error) = answer.get("error") {
        let reason = error["desc"].as_str().unwrap_or("no reason given").to_owned();
        return Some(Err(QmpError::Refused { command: command.to_owned(), reason }));
    }
    answer.get_mut("return").map(|result| Ok(result.take()))
}

/// Makes the calls.
struct Worker {
    address: Address,
    connection: Arc<Connection>,
    domain: Domain,
    /// The number of the run of the domain that we have to do with.
    id: u32,
    listening: Vec<Listening>,
    events: Arc<Events>,
    missed: Arc<AtomicBool>,
}

impl Worker {
    fn run(mut self, calls: &Receiver<(u64, Call)>, answers: &Sender<(u64, Answer)>) {
        for (number, call) in calls {
            if answers.send((number, self.make(&call))).is_err() {
                break;
            }
        }
    }

    fn make(&mut self, call: &Call) -> Answer {
        let may_repeat = match call {
            Call::Command { may_repeat, .. } => *may_repeat,
            Call::SnapshotDisks { .. } => false,
            // What is so already is no error.
            Call::Xml { .. } | Call::Suspend | Call::Resume => true,
        };
        match self.make_once(call) {
            Err(failure) if failure.is_lost => {
                self.find_again(&failure)?;
                if may_repeat { self.make_once(call) } else { Err(failure) }
            }
            other => other,
        }
    }

    fn make_once(&self, call: &Call) -> Answer {
        let done = |result: Result<(), LibvirtFailure>| result.map(|()| String::new());
        match call {
            Call::Command { line, fd, .. } => self.domain.command(line, fd.as_ref()),
            Call::Xml { flags } => self.domain.xml(*flags),
            Call::SnapshotDisks { xml } => done(self.domain.snapshot_disks(xml)),
            Call::Suspend => done(self.domain.suspend()),
            Call::Resume if !self.domain.is_paused()? => Ok(String::new()),
            Call::Resume => done(self.domain.resume()),
        }
    }

    /// The daemon went away: waits until it is back.
    fn find_again(&mut self, failure: &LibvirtFailure) -> Result<(), LibvirtFailure> {
        // Release: the answer to this call comes after it.
        self.missed.store(true, Ordering::Release);
        self.listening.clear();
        let (connection, domain) = find_within(&self.address, RETURN_WAIT)
            .map_err(|why| LibvirtFailure { why: format!("{}; {why}", failure.why), is_lost: true })?;
        if domain.id() != self.id {
            return Err(LibvirtFailure { why: "the domain was started anew".to_owned(), is_lost: false });
        }
        self.listening = listen(&domain, &self.events)?;
        (self.connection, self.domain) = (connection, domain);
        Ok(())
    }
}

/// The domain, of a daemon that may be just about to return.
pub(super) fn find_within(address: &Address, limit: Duration) -> Result<(Arc<Connection>, Domain), String> {
    let deadline = Instant::now() + limit;
    loop {
        match find(address) {
            Err(_) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
            other => return other,
        }
    }
}

fn listen(domain: &Domain, events: &Arc<Events>) -> Result<Vec<Listening>, LibvirtFailure> {
    EVENTS.iter().map(|name| domain.listen(name, events)).collect()
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

    #[test]
    fn what_changes_something_is_not_done_twice() {
        assert!(only_asks("query-status") && only_asks("qom-get"));
        for changes in ["add-fd", "remove-fd", "xen-save-devices-state", "qom-set", "blockdev-set-active"] {
            assert!(!only_asks(changes), "{changes}");
        }
    }
}
