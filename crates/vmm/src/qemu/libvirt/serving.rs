//! Makes libvirt's calls for whoever asks, in a thread or a process of its own, because they have no deadline and those
//! who ask have. When libvirt's daemon is restarted, it finds the domain again; what only asks is asked once more, and
//! what does not has failed.
use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_lines::LineSocket;

use super::{
    Address, Purpose,
    attach::{Unused, settle_here},
    calls::{self, Answer, Call, Failure, Why},
    carrier::{EVENTS, result_of},
    connection::{Connection, Domain, Events, LibvirtFailure, Listening, find},
    definition, disks, jobs,
    overlays::{DefinedDisk, Keeper, Overlays},
    permitted::permits,
};

/// A daemon that is restarted is back by then.
pub(super) const RETURN_WAIT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Longer than anything runs.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Makes libvirt's calls about a domain for whoever is at the other end, until that has ended. It does what follows
/// from the purpose, and nothing else.
pub fn serve(stream: UnixStream, address: &Address, purpose: &Purpose) {
    let mut line = LineSocket::new(stream);
    // It goes last: who waits for its end finds nothing else of ours.
    let mut kept = Vec::new();
    let mut worker = match purpose {
        Purpose::Settle => Err(Failure::unfit("it was started for something else")),
        _ => Worker::find(address, purpose).map_err(Failure::unfit),
    };
    while let Some((number, call, fd)) = calls::next(&mut line, Instant::now() + FOREVER) {
        let done = match (call, fd) {
            (Call::Settle { will, run }, _) if *purpose == Purpose::Settle => {
                let settled = settle_here(address, &will, run, Unused::IsAnothers);
                settled.map(|()| String::new()).map_err(Failure::unfit)
            }
            (Call::Keep, Some(fd)) if worker.is_ok() => {
                kept.push(fd);
                Ok(String::new())
            }
            (call, fd) => worker.as_mut().map_err(|why| why.clone()).and_then(|worker| worker.make(call, fd)),
        };
        if calls::answer(&line, number, done, Instant::now() + FOREVER).is_err() {
            break;
        }
    }
    drop(worker);
    drop(kept);
}

struct Worker {
    address: Address,
    purpose: Purpose,
    connection: Arc<Connection>,
    domain: Domain,
    /// The number of the run of the domain that we have to do with.
    id: u32,
    listening: Vec<Listening>,
    events: Arc<Events>,
    /// The daemon was away for a while, and with it the events of that time.
    missed: bool,
    /// Files that it is to write to from a stop on. Those that it does not use go with us.
    overlays: Option<Overlays>,
}

impl Worker {
    fn find(address: &Address, purpose: &Purpose) -> Result<Self, String> {
        let (connection, domain) = find(address)?;
        let events = Arc::new(Events::default());
        let listening = listen(&domain, &events).map_err(|failure| format!("{address}: {}", failure.why))?;
        Ok(Self {
            address: address.clone(),
            purpose: purpose.clone(),
            connection,
            id: domain.id(),
            domain,
            listening,
            events,
            missed: false,
            overlays: None,
        })
    }

    fn make(&mut self, call: Call, fd: Option<OwnedFd>) -> Answer {
        if !permits(&self.purpose, &call, fd.is_some()) {
            return Err(Failure::unfit("that does not follow from the command line"));
        }
        let nothing = |()| String::new();
        match call {
            Call::Uuid => self.attempt(true, Domain::uuid),
            Call::CheckIdle => jobs::refuse(&self.domain).map(nothing).map_err(Failure::unfit),
            Call::Command { name, arguments } => self.command(&name, &arguments, fd.as_ref()),
            Call::Lasting => self.attempt(true, |domain| domain.xml(definition::LASTING)),
            Call::Live => self.attempt(true, |domain| domain.xml(definition::LIVE)),
            // What is so already is no error.
            Call::Suspend => self.attempt(true, Domain::suspend).map(nothing),
            Call::Resume => {
                let resume = |domain: &Domain| if domain.is_paused()? { domain.resume() } else { Ok(()) };
                self.attempt(true, resume).map(nothing)
            }
            Call::TakeEvents { name } => self.take_events(&name),
            Call::PlanDisks { folder } => self.plan_disks(folder.as_deref()),
            Call::MakeOverlays => {
                let overlays = self.overlays.as_mut().ok_or_else(|| Failure::unfit("none were planned"))?;
                overlays.make().map(nothing).map_err(Failure::unfit)
            }
            Call::UseOverlays => {
                let mut overlays = self.overlays.take().ok_or_else(|| Failure::unfit("none were planned"))?;
                let used = overlays.take_into_use(self);
                self.overlays = Some(overlays);
                used.map(nothing)
            }
            Call::Keep | Call::Settle { .. } => Err(Failure::unfit("nothing came with it")),
        }
    }

    /// Makes a call, if need be by a connection to a daemon that was started anew.
    fn attempt<T>(
        &mut self,
        may_repeat: bool,
        call: impl Fn(&Domain) -> Result<T, LibvirtFailure>,
    ) -> Result<T, Failure> {
        let done = match call(&self.domain) {
            Err(failure) if failure.is_lost => {
                self.find_again(&failure).and_then(|()| if may_repeat { call(&self.domain) } else { Err(failure) })
            }
            other => other,
        };
        done.map_err(|LibvirtFailure { why, is_lost }| Failure {
            kind: if is_lost { Why::Lost } else { Why::Refused },
            text: why,
        })
    }

    fn command(&mut self, name: &str, arguments: &Value, fd: Option<&OwnedFd>) -> Answer {
        let line = json!({ "execute": name, "arguments": arguments }).to_string();
        self.attempt(only_asks(name), |domain| domain.command(&line, fd))
    }

    fn take_events(&mut self, name: &str) -> Answer {
        if self.missed {
            return Err(Failure::unfit(format!(
                "libvirt's daemon was restarted meanwhile, and nobody knows whether QEMU said {name} in that time; save \
                 again"
            )));
        }
        let data: Vec<Value> = self.events.take(name).into_iter().map(|event| event.data).collect();
        Ok(Value::from(data).to_string())
    }

    fn plan_disks(&mut self, folder: Option<&Path>) -> Answer {
        let disks = self.disks()?;
        let blocks = self.command("query-block", &json!({}), None)?;
        let blocks = match result_of("query-block", &blocks) {
            Some(blocks) => blocks.map_err(Failure::unfit)?,
            None => return Err(Failure::unfit("QEMU's answer to query-block is none")),
        };
        let overlays = Overlays::plan(disks, &blocks, folder).map_err(Failure::unfit)?;
        let planned = serde_json::to_string(overlays.all()).map_err(Failure::unfit);
        self.overlays = Some(overlays);
        planned
    }

    /// The daemon went away: waits until it is back.
    fn find_again(&mut self, failure: &LibvirtFailure) -> Result<(), LibvirtFailure> {
        self.missed = true;
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

impl Keeper for Worker {
    fn disks(&mut self) -> Result<Vec<DefinedDisk>, Failure> {
        let live = self.attempt(true, |domain| domain.xml(definition::LIVE))?;
        disks::defined(&live)
            .map_err(|why| Failure::unfit(format!("{}: libvirt's definition of it: {why}", self.address)))
    }

    fn use_overlays(&mut self, overlays: &Overlays) -> Result<(), Failure> {
        let xml = disks::snapshot_xml(overlays);
        self.attempt(false, |domain| domain.snapshot_disks(&xml))
    }
}

/// A command that changes nothing, or only what it has changed already.
fn only_asks(command: &str) -> bool {
    command.starts_with("query-") || ["qom-get", "qom-list", "human-monitor-command", "transaction"].contains(&command)
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
    use super::*;

    #[test]
    fn what_changes_something_is_not_done_twice() {
        assert!(only_asks("query-status") && only_asks("qom-get"));
        for changes in ["add-fd", "remove-fd", "xen-save-devices-state", "qom-set", "blockdev-set-active"] {
            assert!(!only_asks(changes), "{changes}");
        }
    }
}
