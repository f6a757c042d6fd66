//! What of ours could be left in a QEMU: threads, descriptors, memory that a userfaultfd watches, settings of its
//! migration, a debugger.
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};
use transship_lab::process::open_files;
use transship_lab::{LabError, Qemu, Result};

/// How long a QEMU may take to close what belonged to a connection that has ended.
const SETTLING: Duration = Duration::from_secs(20);
/// QEMU's own threads: two that come and go with requests to its disks, and one that gives itself its name only when it
/// is first scheduled.
const COME_AND_GO: [&str; 3] = ["worker", "qemu-system-x86", "call_rcu"];
/// Devices that a guest's drivers use have them; nothing of ours has.
const OF_DEVICES: &str = "anon_inode:[eventfd]";
/// What `VmFlags` says of memory that a userfaultfd watches: writes, missing pages, minor faults.
const WATCHED: [&str; 3] = ["uw", "um", "ui"];

/// How a QEMU was.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Traces {
    /// Names of its threads.
    threads: Vec<String>,
    /// How many descriptors of each kind it has.
    files: BTreeMap<String, usize>,
    capabilities: Value,
    parameters: Value,
}

impl Traces {
    /// As it is now.
    pub(crate) fn of(qemu: &Qemu) -> Result<Self> {
        Ok(Self {
            threads: threads(qemu.pid())?,
            files: files(qemu.pid())?,
            capabilities: qemu.qmp("query-migrate-capabilities", json!({}))?,
            parameters: qemu.qmp("query-migrate-parameters", json!({}))?,
        })
    }

    /// Nothing of ours is in it that was not there before.
    pub(crate) fn assert_nothing_new(&self, qemu: &Qemu) -> Result<()> {
        let deadline = Instant::now() + SETTLING;
        loop {
            let left = self.left(qemu)?;
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(LabError(format!("left behind in the QEMU: {}", left.join("; "))));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn left(&self, qemu: &Qemu) -> Result<Vec<String>> {
        let now = Self::of(qemu)?;
        let mut left = Vec::new();
        let is_new = |name: &&String| !self.threads.contains(name) && !COME_AND_GO.contains(&name.as_str());
        left.extend(now.threads.iter().filter(is_new).map(|name| format!("thread {name}")));
        let more = now.files.iter().filter(|(kind, count)| self.files.get(*kind).unwrap_or(&0) < count);
        left.extend(
            more.map(|(kind, count)| format!("{count} × {kind}, {} before", self.files.get(kind).unwrap_or(&0))),
        );
        left.extend(watched(qemu.pid())?.into_iter().map(|line| format!("watched memory {line}")));
        left.extend(different("capabilities", &self.capabilities, &now.capabilities));
        left.extend(different("parameters", &self.parameters, &now.parameters));
        if qemu.is_traced()? {
            left.push("a debugger".into());
        }
        Ok(left)
    }
}

fn different(what: &str, before: &Value, now: &Value) -> Option<String> {
    (before != now).then(|| format!("{what} {now}, {before} before"))
}

fn threads(pid: u32) -> Result<Vec<String>> {
    let folder = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&folder).map_err(|error| LabError(format!("{folder}: {error}")))?;
    // A thread may end while we look.
    let names = entries.flatten().filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok());
    Ok(names.map(|name| name.trim().to_owned()).collect())
}

/// Sockets and pipes have numbers, which say nothing.
fn files(pid: u32) -> Result<BTreeMap<String, usize>> {
    let mut kinds = BTreeMap::new();
    for target in open_files(pid)?.into_iter().filter(|target| target != OF_DEVICES) {
        let kind = target.split_once(":[").filter(|(kind, _)| ["socket", "pipe"].contains(kind));
        *kinds.entry(kind.map_or(target.clone(), |(kind, _)| kind.to_owned())).or_default() += 1;
    }
    Ok(kinds)
}

fn watched(pid: u32) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).map_err(|error| LabError(format!("{path}: {error}")))?;
    let (mut mapping, mut found) = ("", Vec::new());
    for line in text.lines() {
        match line.strip_prefix("VmFlags:") {
            Some(flags) if flags.split(' ').any(|flag| WATCHED.contains(&flag)) => {
                found.push(format!("{mapping} ({})", flags.trim()));
            }
            Some(_) => {}
            // The first word of all other lines of a mapping ends with a colon.
            None if !line.split(' ').next().unwrap_or_default().ends_with(':') => mapping = line,
            None => {}
        }
    }
    Ok(found)
}
