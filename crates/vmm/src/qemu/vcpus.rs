//! Which threads of a QEMU may be held at a page that they want to write.
//!
//! The guest's processors may, for a few milliseconds, as long as they run the guest: then they hold nothing that
//! another thread waits for. QEMU's main loop, its I/O threads and whoever else is a thread of its own are never
//! held; nor is a processor that emulates a device, with QEMU's lock in its hand. KVM has pages of the guest brought
//! by workers of the kernel, too, which are no threads of QEMU's; they may be held.
use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use transship_guest::GuestError;
use transship_memory::LetWait;

use super::qmp::Qmp;

/// A processor that runs the guest by KVM.
const HOLD: Duration = Duration::from_millis(4);
/// Where that can't be known: it may emulate a device.
const HOLD_UNKNOWN: Duration = Duration::from_millis(1);
/// Threads come and go; how often they are listed at most.
const LIST_EVERY: Duration = Duration::from_secs(1);

const IOCTL: &str = "16";
const KVM_RUN: &str = "0xae80";

/// What QEMU says of its processors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Processors {
    pid: i32,
    has_kvm: bool,
    /// As QEMU knows them, which may be in a namespace of its own.
    threads: HashSet<u32>,
}

impl Processors {
    pub(super) fn of(qmp: &mut Qmp) -> Result<Self, GuestError> {
        let processors = qmp.execute("query-cpus-fast", json!({}))?;
        let number = |cpu: &Value| cpu["thread-id"].as_u64().and_then(|thread| u32::try_from(thread).ok());
        let threads = processors.as_array().into_iter().flatten().filter_map(number).collect();
        let has_kvm = qmp.execute("query-kvm", json!({}))?["enabled"] == json!(true);
        Ok(Self { pid: qmp.pid(), has_kvm, threads })
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// The numbers that their threads have here, of those that there are.
    pub(super) fn numbers_here(&self) -> Vec<u32> {
        let known = list(self.pid);
        self.threads.iter().filter_map(|thread| known.get(thread).copied()).collect()
    }

    /// For another process.
    pub(super) fn to_text(&self) -> Option<String> {
        serde_json::to_string(self).ok()
    }
}

/// Knows the threads of a VMM in the place of a source that has given up the right to look at them. `threads`: what its
/// [`SourceGuest::threads`](transship_guest::SourceGuest::threads) has said.
///
/// # Errors
/// That was no such text.
pub fn threads_that_may_wait(threads: &str) -> Result<Box<dyn LetWait>, GuestError> {
    let processors = serde_json::from_str(threads)
        .map_err(|e| GuestError::Bug(format!("can't read whose threads they are: {e}")))?;
    Ok(Box::new(Threads::of(processors)))
}

/// The threads of one QEMU.
pub(super) struct Threads {
    processors: Processors,
    /// By QEMU's number: ours.
    known: HashMap<u32, u32>,
    listed: Instant,
}

impl Threads {
    /// They are looked at from this process.
    pub(super) fn of(processors: Processors) -> Self {
        Self { known: list(processors.pid), processors, listed: Instant::now() }
    }

    /// Whether it is in the guest now.
    fn runs_guest(&self, thread: u32) -> bool {
        let Some(ours) = self.known.get(&thread) else { return false };
        let call = fs::read_to_string(format!("/proc/{}/task/{ours}/syscall", self.processors.pid)).unwrap_or_default();
        is_kvm_run(&call)
    }
}

/// `16 0xd 0xae80 0x0 …`: the system call, and its arguments.
fn is_kvm_run(call: &str) -> bool {
    let mut words = call.split_ascii_whitespace();
    words.next() == Some(IOCTL) && words.nth(1) == Some(KVM_RUN)
}

impl LetWait for Threads {
    fn at_most(&mut self, thread: u32) -> Duration {
        let Processors { pid, has_kvm, .. } = self.processors;
        if self.processors.threads.contains(&thread) {
            return match has_kvm {
                true if self.runs_guest(thread) => HOLD,
                true => Duration::ZERO,
                false => HOLD_UNKNOWN,
            };
        }
        if !self.known.contains_key(&thread) && self.listed.elapsed() >= LIST_EVERY {
            (self.known, self.listed) = (list(pid), Instant::now());
        }
        match self.known.contains_key(&thread) {
            true => Duration::ZERO,
            // It was started since they were listed.
            false if Path::new(&format!("/proc/{pid}/task/{thread}")).exists() => Duration::ZERO,
            // A worker of KVM's.
            false if has_kvm && self.listed.elapsed() < LIST_EVERY => HOLD_UNKNOWN,
            false => Duration::ZERO,
        }
    }
}

/// The threads of a process: by their number in its own namespace, their number here.
fn list(pid: i32) -> HashMap<u32, u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let number = |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse::<u32>().ok();
    let known = tasks.filter_map(number).filter_map(|ours| {
        let status = fs::read_to_string(format!("/proc/{pid}/task/{ours}/status")).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some((numbers.split_whitespace().last()?.parse().ok()?, ours))
    });
    known.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_thread_in_the_guest_is_told_from_one_that_is_not() {
        assert!(is_kvm_run("16 0x11 0xae80 0x0 0x7f 0x1 0x2 0x7ffc 0x7f11\n"));
        for call in ["running\n", "-1 0x7f 0x7f\n", "16 0xae80 0x1 0x0\n", "1 0x11 0xae80 0x0\n", ""] {
            assert!(!is_kvm_run(call), "{call}");
        }
    }

    /// This process has no processors, and only threads that are never held.
    #[test]
    fn only_processors_are_held() {
        let pid = std::process::id();
        let known = list(pid as i32);
        assert!(known.contains_key(&pid), "{known:?}");
        let processors = Processors { pid: pid as i32, has_kvm: true, threads: HashSet::new() };
        let mut threads = Threads { processors, known, listed: Instant::now() };
        assert_eq!(threads.at_most(pid), Duration::ZERO);
        threads.processors.threads.insert(pid);
        assert_eq!(threads.at_most(pid), Duration::ZERO, "it is not in a guest");
        threads.processors.has_kvm = false;
        assert_eq!(threads.at_most(pid), HOLD_UNKNOWN);
        // A worker of the kernel, and a thread that has not been listed.
        threads.processors = Processors { pid: pid as i32, has_kvm: true, threads: HashSet::new() };
        threads.known = HashMap::new();
        assert_eq!(threads.at_most(u32::MAX), HOLD_UNKNOWN);
        assert_eq!(threads.at_most(pid), Duration::ZERO, "it is the process's own");
    }
}
