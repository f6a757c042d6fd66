//! Finds writers of guest memory that the tracker does not see.
//!
//! A write is seen that goes through QEMU's own page table. A device or a process with a mapping of its own, and a disk
//! that writes into memory by itself, go past it.
use std::{
    collections::HashSet,
    fs,
    io::{self, ErrorKind},
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use transship_guest::GuestError;

use super::{
    back_ends::{self, BackEnds},
    balloon::OwnBalloon,
    machine::{Device, devices},
    maps::{FileId, Mapping, mappings_of},
    memory::Backend,
    networks::{self, Network},
    qmp::Qmp,
    rights,
};

/// How many processes a message names.
const NAMED: usize = 3;

/// When they are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// When attaching.
    First,
    /// Later: those that are found came meanwhile, since there were none.
    Later,
}

/// Those that write past QEMU, and need not be refused.
#[derive(Clone, Copy)]
pub(super) struct Allowed<'a> {
    pub(super) balloon: Option<&'a OwnBalloon>,
    /// They are tracked.
    pub(super) back_ends: &'a BackEnds,
    /// The disks are waited for after each scan, before pages are read.
    pub(super) drained: bool,
}

/// Refuses a guest that has any. `others`: what a [`Lookout`] has found.
pub(super) fn refuse(qmp: &mut Qmp, others: Vec<String>, allowed: Allowed<'_>, when: When) -> Result<(), GuestError> {
    let mut found = known_to_qemu(qmp, allowed)?;
    found.extend(others);
    refuse_all(&found, when)
}

/// Refuses a QEMU whose guest's memory others read at any time, which can't be made to wait for it.
pub(super) fn refuse_readers(qmp: &mut Qmp) -> Result<(), GuestError> {
    let mut found: Vec<String> = devices(qmp, writes_behind)?.iter().map(Device::to_string).collect();
    found.extend(networks::shared(qmp)?.iter().map(Network::to_string));
    match found.is_empty() {
        true => Ok(()),
        false => Err(GuestError::Unfit(format!(
            "guest memory is used past QEMU, by what can't be made to wait for pages that come later: {}; load the \
             guest whole, without --lazy and --postcopy",
            found.join(", ")
        ))),
    }
}

fn refuse_all(found: &[String], when: When) -> Result<(), GuestError> {
    if found.is_empty() {
        return Ok(());
    }
    let (which, cure) = match when {
        When::First => ("", "remove it"),
        When::Later => (" came meanwhile", "remove it and start again"),
    };
    Err(GuestError::Unfit(format!(
        "writes to guest memory that can't be tracked{which}: {}; {cure}, or give --allow-untracked-writers if it is quiet for the whole \
         move",
        found.join(", ")
    )))
}

/// Devices, network back ends and disks.
fn known_to_qemu(qmp: &mut Qmp, allowed: Allowed<'_>) -> Result<Vec<String>, GuestError> {
    let Allowed { balloon, back_ends, drained } = allowed;
    let is_own = |device: &Device| balloon.is_some_and(|own| own.is(device)) || back_ends.stand_behind(device);
    // One walk: it is repeated while the guest stands still.
    let writers = devices(qmp, |kind| writes_behind(kind) || (!drained && is_passed_through(kind)))?;
    let writers = writers.iter().filter(|device| !is_own(device));
    let why = |of: &str| back_ends.why_not(of).map(|why| format!(": {why}")).unwrap_or_default();
    let mut found: Vec<String> =
        writers.map(|device| format!("{}{}", describe(device, qmp), why(&device.path))).collect();
    let networks = networks::shared(qmp)?;
    let untracked = networks.iter().filter(|network| !back_ends.serve(network));
    found.extend(untracked.map(|network| format!("{network}{}", why(network.name()))));
    found.extend(disks(qmp, drained)?);
    Ok(found)
}

/// What is looked for among all processes: those that write. It may be another process that looks in this one's place.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Lookout {
    /// What these map shared and writable is no surprise: QEMU, this process, the guest's own balloon, and what is
    /// tracked.
    known: Vec<i32>,
    /// Of these, processes that must go on writing so that it is seen.
    back_ends: Vec<i32>,
    /// That hold the memory.
    files: HashSet<FileId>,
}

impl Lookout {
    pub(super) fn of(qmp: &Qmp, backends: &[Backend], allowed: Allowed<'_>) -> Self {
        let ourselves = rustix::process::getpid().as_raw_nonzero().get();
        let known = [Some(qmp.pid()), Some(ourselves), allowed.balloon.and_then(OwnBalloon::process)];
        let back_ends: Vec<i32> = allowed.back_ends.pids().collect();
        Self {
            known: known.into_iter().flatten().chain(back_ends.iter().copied()).collect(),
            back_ends,
            files: backends.iter().filter_map(Backend::shared_file).collect(),
        }
    }

    /// For another process.
    pub(super) fn to_text(&self) -> Option<String> {
        serde_json::to_string(self).ok()
    }

    /// Processes that write, and such of which it can't be known; each in words. It looks at every process of the
    /// machine: not while the guest stands still.
    pub(super) fn look(&self) -> Vec<String> {
        let others = Others::of(self);
        let mut found: Vec<String> = others.writers.iter().map(Process::to_string).collect();
        let unseen = |pid: &i32| Some(format!("{} {}", Process::named(*pid), back_ends::writes_unseen(*pid)?));
        found.extend(self.back_ends.iter().filter_map(unseen));
        if may_look_everywhere() {
            found.extend(others.unreadable());
        } else if let Some(unreadable) = others.unreadable() {
            tracing::info!("it is unknown whether these write to guest memory: {unreadable}");
        }
        found
    }
}

/// Looks in the place of a source that has given up the right to. `lookout`: what its
/// [`SourceGuest::lookout`](transship_guest::SourceGuest::lookout) has said.
///
/// # Errors
/// That was no such text.
pub fn look_for_writers(lookout: &str) -> Result<Vec<String>, GuestError> {
    let lookout: Lookout =
        serde_json::from_str(lookout).map_err(|e| GuestError::Bug(format!("can't read whom to look for: {e}")))?;
    Ok(lookout.look())
}

/// A destination's memory that another process has open for writing is most likely another guest's.
pub(super) fn alone_in_memory(qmp: &Qmp, backends: &[Backend]) -> Result<(), GuestError> {
    let nobody = Allowed { balloon: None, back_ends: &BackEnds::default(), drained: false };
    match Others::of(&Lookout::of(qmp, backends, nobody)).writers.first() {
        None => Ok(()),
        Some(process) => Err(GuestError::Unfit(format!(
            "the destination's memory file is also in use by {process}, and loading would overwrite its contents; \
             give each QEMU a mem-path of its own"
        ))),
    }
}

/// Its own processor or process writes to the guest: VFIO, vDPA, RDMA, vhost-user, vhost-scsi.
fn writes_behind(device_type: &str) -> bool {
    ["vfio-", "vhost-user-", "vhost-vdpa-", "vhost-scsi", "x-vfio-user", "pvrdma"]
        .iter()
        .any(|prefix| device_type.starts_with(prefix))
}

/// It has the disk itself read into guest memory, whatever `cache=` says. (`scsi-generic` reads into memory of QEMU,
/// and copies from there.)
fn is_passed_through(device_type: &str) -> bool {
    device_type == "scsi-block"
}

fn describe(device: &Device, qmp: &mut Qmp) -> String {
    if !is_passed_through(device.kind()) {
        return device.to_string();
    }
    let drive = qmp.execute("qom-get", json!({ "path": device.path, "property": "drive" })).ok();
    let drive = drive.as_ref().and_then(Value::as_str).unwrap_or("?");
    format!("{device} with disk {drive} (use scsi-hd)")
}

/// Whether the guest has disks that are read past the page cache (O_DIRECT): their data goes into guest memory by
/// itself. The kernel notes the page as written when the read begins; if a scan comes between, the data itself goes
/// unseen, unless who reads the page waits for the disks first.
pub(super) fn has_direct_disks(qmp: &mut Qmp) -> Result<bool, GuestError> {
    Ok(nodes(qmp)?.iter().any(is_direct) || !devices(qmp, is_passed_through)?.is_empty())
}

/// Disks that write to guest memory past the tracker. `drained`: but for those that can be waited for.
fn disks(qmp: &mut Qmp, drained: bool) -> Result<Vec<String>, GuestError> {
    let name = |node: &Value| node["node-name"].as_str().unwrap_or("?").to_owned();
    let disk = |node: &Value| match own_driver(node) {
        Some(driver) => Some(format!("disk {} (driver {driver})", name(node))),
        None if is_direct(node) && !drained => Some(format!("disk {} with cache.direct=on", name(node))),
        None => None,
    };
    Ok(nodes(qmp)?.iter().filter_map(disk).collect())
}

/// All block nodes: disks, and what is between them and the guest.
pub(super) fn nodes(qmp: &mut Qmp) -> Result<Vec<Value>, GuestError> {
    // Without what is behind each of them, which has an entry of its own.
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(nodes.as_array().cloned().unwrap_or_default())
}

fn is_direct(node: &Value) -> bool {
    node["cache"]["direct"].as_bool() == Some(true) && own_driver(node).is_none()
}

/// A driver outside the kernel, which has all guest memory pinned for as long as it is there.
fn own_driver(node: &Value) -> Option<&str> {
    let driver = node["drv"].as_str()?;
    (driver.starts_with("nvme") || driver.starts_with("virtio-blk-v")).then_some(driver)
}

/// A process, for messages.
pub(super) struct Process {
    pid: i32,
    name: String,
}

impl Process {
    pub(super) fn named(pid: i32) -> Self {
        Self { pid, name: fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned() }
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Processes other than those that are known.
#[derive(Default)]
struct Others {
    /// They map the memory's files shared and writable.
    writers: Vec<Process>,
    /// What they map we may not know.
    unreadable: Vec<i32>,
}

impl Others {
    /// Processes that end meanwhile don't matter.
    fn of(Lookout { known, files, .. }: &Lookout) -> Self {
        let mut others = Self::default();
        if files.is_empty() {
            // What QEMU has for itself nobody else can map.
            return others;
        }
        for pid in processes().filter(|pid| !known.contains(pid)) {
            match maps_for_writing(pid, files) {
                Ok(true) => others.writers.push(Process::named(pid)),
                Err(error) if error.kind() == ErrorKind::PermissionDenied => others.unreadable.push(pid),
                Ok(false) | Err(_) => {}
            }
        }
        others
    }

    fn unreadable(&self) -> Option<String> {
        let names: Vec<String> =
            self.unreadable.iter().take(NAMED).map(|pid| Process::named(*pid).to_string()).collect();
        let more = match self.unreadable.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let why = "its mappings can't be inspected from here";
        (!names.is_empty()).then(|| format!("{}{more}: {why}", names.join(", ")))
    }
}

/// With all capabilities, transship may inspect every process except those of an outer user namespace. Without them
/// (such as root in a container), there may be processes that it may not inspect, and that most likely have nothing to
/// do with the guest.
fn may_look_everywhere() -> bool {
    rights::has_all()
}

pub(super) fn processes() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn maps_for_writing(pid: i32, files: &HashSet<FileId>) -> io::Result<bool> {
    let wanted = |m: &Mapping| m.is_shared && m.is_writable && files.contains(&m.file);
    Ok(mappings_of(pid)?.iter().any(wanted))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::qemu::qmp::tests::peer;

    /// Neither can be had without its hardware. So QEMU is made of lines here, with two such devices and none else; in
    /// the answers' order: the devices, what the second one is of, the networks, the disks.
    const PASSED_THROUGH: &[&str] = &[
        concat!(
            r#"{"return": [{"name": "type", "type": "string"}, {"name": "host0", "type": "child<vfio-pci>"}, "#,
            r#"{"name": "tape", "type": "child<scsi-generic>"}, {"name": "sda", "type": "child<scsi-block>"}], "id": ID}"#
        ),
        r#"{"return": [{"name": "device[0]", "type": "child<scsi-hd>"}], "id": ID}"#,
        r#"{"error": {"class": "GenericError", "desc": "Property 'unattached' not found"}, "id": ID}"#,
        r#"{"return": "drive0", "id": ID}"#,
        r#"{"return": "", "id": ID}"#,
        r#"{"return": [{"node-name": "drive0", "drv": "host_device", "cache": {"direct": false}}], "id": ID}"#,
    ];

    #[test]
    fn hardware_that_is_passed_through_is_named_also_if_it_came_meanwhile() {
        for (when, words) in [(When::First, "can't be tracked: "), (When::Later, "can't be tracked came meanwhile: ")] {
            let (_dir, path) = peer(PASSED_THROUGH);
            let mut qmp = Qmp::connect(&path).unwrap();
            let allowed = Allowed { balloon: None, back_ends: &BackEnds::default(), drained: false };
            let error = refuse(&mut qmp, Vec::new(), allowed, when).unwrap_err().to_string();
            let named = "device host0 (vfio-pci), device sda (scsi-block) with disk drive0 (use scsi-hd); ";
            assert!(error.contains(&format!("{words}{named}")), "{error}");
        }
    }

    #[test]
    fn disks_that_can_be_waited_for_are_told_from_those_that_pin_memory() {
        let disk =
            |driver: &str, direct: bool| json!({ "node-name": "n0", "drv": driver, "cache": { "direct": direct } });
        for driver in ["nvme", "nvme-io_uring", "virtio-blk-vfio-pci", "virtio-blk-vhost-vdpa"] {
            assert!(own_driver(&disk(driver, false)).is_some() && !is_direct(&disk(driver, true)), "{driver}");
        }
        for driver in ["file", "host_device", "qcow2"] {
            assert!(own_driver(&disk(driver, true)).is_none(), "{driver}");
            assert!(is_direct(&disk(driver, true)) && !is_direct(&disk(driver, false)), "{driver}");
        }
    }

    #[test]
    fn device_types_that_write_by_themselves_are_known() {
        for kind in
            ["vfio-pci", "vhost-user-fs-pci", "vhost-user-blk-pci-non-transitional", "vhost-vdpa-device-pci", "pvrdma"]
        {
            assert!(writes_behind(kind), "{kind}");
        }
        for kind in ["virtio-net-pci", "virtio-blk-pci", "vhost-vsock-pci", "VGA"] {
            assert!(!writes_behind(kind), "{kind}");
        }
        for kind in ["scsi-hd", "scsi-cd", "scsi-generic"] {
            assert!(!is_passed_through(kind), "{kind}");
        }
    }

    #[test]
    fn processes_that_may_not_be_looked_at_are_counted() {
        let others =
            |count: i32| Others { writers: Vec::new(), unreadable: (0..count).map(|n| i32::MAX - n).collect() };
        assert_eq!(others(0).unreadable(), None);
        assert!(others(1).unreadable().unwrap().starts_with("process 2147483647 (): its mappings"));
        assert!(others(5).unreadable().unwrap().contains(" and 2 more: its mappings"));
    }
}
