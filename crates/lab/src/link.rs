//! A slow link: two network namespaces with one limited cable between them.
use crate::{LabError, Result, failed};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// Two hosts on this host. Removed when dropped. Needs root and iproute2.
#[derive(Debug)]
pub struct SlowLink {
    source: String,
    destination: String,
    /// Bytes that pass at once, as `tc` takes them.
    burst: &'static str,
}

/// Packets of 64 KiB, as the kernel hands them to a network card, do not fit, with their headers. So the kernel cuts
/// them, and whoever waits for a few bytes waits behind no large one.
const CUT: &str = "64kb";
/// They fit, and a card would cut them by itself. Where the kernel does, that takes a fifth of two cores at 1 Gbit/s.
const WHOLE: &str = "128kb";

/// The addresses of the two ends. No other link is in these namespaces, so they can't collide.
const SOURCE_IP: &str = "192.0.2.1";
const DESTINATION_IP: &str = "192.0.2.2";

impl SlowLink {
    /// Makes a link that carries `mbit` Mbit/s in each direction, in packets of 1500 bytes.
    ///
    /// # Errors
    /// No right to do so, or no iproute2.
    pub fn new(mbit: u32) -> Result<Self> {
        Self::with_burst(mbit, CUT)
    }

    /// As [`Self::new`], for measuring how much passes: packets are not cut, so that the link takes little of the
    /// processors.
    ///
    /// # Errors
    /// See [`Self::new`].
    pub fn with_offload(mbit: u32) -> Result<Self> {
        Self::with_burst(mbit, WHOLE)
    }

    fn with_burst(mbit: u32, burst: &'static str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let link = Self { source: format!("ts-src-{unique}"), destination: format!("ts-dst-{unique}"), burst };
        let Self { source, destination, .. } = &link;
        ip(&format!("netns add {source}"))?;
        ip(&format!("netns add {destination}"))?;
        ip(&format!("-n {source} link add cable type veth peer name cable netns {destination}"))?;
        for (name, address) in [(source, SOURCE_IP), (destination, DESTINATION_IP)] {
            ip(&format!("-n {name} addr add {address}/30 dev cable"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set cable up"))?;
        }
        link.set_rate(mbit)?;
        Ok(link)
    }

    /// Changes the rate while the link is in use.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_rate(&self, mbit: u32) -> Result<()> {
        for name in [&self.source, &self.destination] {
            let limit = format!("root tbf rate {mbit}mbit burst {} latency 50ms", self.burst);
            run("ip", &format!("netns exec {name} tc qdisc replace dev cable {limit}"))?;
        }
        Ok(())
    }

    /// Pulls the cable: nothing passes, and nobody is told.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn cut(&self) -> Result<()> {
        for name in [&self.source, &self.destination] {
            run("ip", &format!("netns exec {name} tc qdisc replace dev cable root netem loss 100%")).or_else(|_| {
                // A kernel without netem. The other end loses its carrier too, but no connection is reset by that.
                ip(&format!("-n {name} link set cable down"))
            })?;
        }
        Ok(())
    }

    /// Runs a command on the source's side: goes before its program.
    pub fn source(&self) -> Vec<String> {
        on(&self.source)
    }

    /// Runs a command on the destination's side: goes before its program.
    pub fn destination(&self) -> Vec<String> {
        on(&self.destination)
    }

    /// Removes all links that this process has made, for a program that a signal is about to end.
    pub fn remove_all() {
        let Ok(list) = Command::new("ip").args(["netns", "list"]).output() else { return };
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        let ours = |name: &&str| {
            ["src", "dst"].iter().any(|end| name.starts_with(&format!("ts-{end}-{}-", std::process::id())))
        };
        for name in list.lines().filter_map(|line| line.split_whitespace().next()).filter(ours) {
            let _ = ip(&format!("netns del {name}"));
        }
    }

    /// Does something on the source's side, such as connecting.
    ///
    /// # Errors
    /// This process may not go there.
    pub fn within_source<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        within(&self.source, what)
    }

    /// Does something on the destination's side, such as listening.
    ///
    /// # Errors
    /// This process may not go there.
    pub fn within_destination<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T> {
        within(&self.destination, what)
    }

    /// The destination's address, for whoever calls from the source's side.
    pub fn destination_address(&self, port: u16) -> (&'static str, u16) {
        (DESTINATION_IP, port)
    }

    /// Where to move to, when the destination listens at `tcp:0.0.0.0:PORT`.
    pub fn destination_uri(&self, port: u16) -> String {
        format!("tcp:{DESTINATION_IP}:{port}")
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        // One that was never made can't be removed, and there is nobody to tell.
        let _ = ip(&format!("netns del {}", self.source));
        let _ = ip(&format!("netns del {}", self.destination));
    }
}

/// On a thread of its own, which is in that network namespace until it ends.
fn within<T: Send>(name: &str, what: impl FnOnce() -> T + Send) -> Result<T> {
    let path = format!("/run/netns/{name}");
    let namespace = File::open(&path).map_err(failed(&path))?;
    let go = || -> Result<T> {
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(namespace.as_fd(), kind).map_err(failed(format!("can't enter {path}")))?;
        Ok(what())
    };
    thread::scope(|scope| {
        scope.spawn(go).join().unwrap_or_else(|_| Err(LabError(format!("a thread in {path} panicked"))))
    })
}

fn on(name: &str) -> Vec<String> {
    ["ip", "netns", "exec", name].map(str::to_owned).to_vec()
}

fn ip(args: &str) -> Result<()> {
    run("ip", args)
}

fn run(program: &str, args: &str) -> Result<()> {
    let output = Command::new(program).args(args.split(' ')).output().map_err(failed(format!("{program} {args}")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(LabError(format!("{program} {args}: {}", String::from_utf8_lossy(&output.stderr).trim()))),
    }
}
