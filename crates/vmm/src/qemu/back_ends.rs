//! The back ends of vhost-user devices: processes that write to guest memory through mappings of their own.
//!
//! ```text
//!   device ──► chardev ──► unix socket of QEMU's ──► who is at its other end ──► where that one maps the memory
//! ```
//!
//! What a back end writes is tracked in its own process, as what QEMU writes is in QEMU's.
//!
//! Disks and file systems get requests. When the guest is stopped, QEMU stops the device, and the back end takes no
//! more requests. `qemu-storage-daemon` may still be at work on some that it has taken: it writes their data later, and
//! some versions then find that nobody can be told, and drop the device. So the guest is stopped when no request is
//! under way ([`rest`]).
//!
//! A back end may map memory anew when QEMU tells it again where that is: when its device is started, or QEMU has
//! connected again. Nobody tracks the new mapping, even if it lies where the old one was. Then a scan fails, and the
//! guest stays. Mappings that came beside the tracked ones are found when the guest stands still.
//!
//! Two kinds of writes leave no trace in a process's page table: those of devices that a back end drives by itself, and
//! of the disk, where a file is read past the page cache and a scan comes between. (QEMU's own disks can be waited
//! for.) A back end that has such a file or device open is refused.
mod own_state;
mod peers;
mod rest;

use std::{fs, os::fd::OwnedFd};

use rustix::fs::OFlags;
use transship_guest::GuestError;
use transship_memory::Area;

use super::{
    faults,
    machine::{Device, devices},
    memory::{self, Backend},
    networks::{self, Network},
    opened::Opened,
    qmp::Qmp,
    vcpus::Processors,
    writers,
};

const NOT_FOUND: &str = "the process at the other end of its socket is unknown";
const NOT_MAPPED: &str = "its back end has not mapped guest memory, as it does once the guest's driver uses the device";
const CRASHES: &str =
    "QEMU 11.1 crashes where such a guest arrives; start passt yourself, and name its socket (-netdev vhost-user)";
const PAST_THE_CACHE: &str = "its back end reads files past the page cache for guests that ask for it (O_DIRECT); start virtiofsd \
     without --allow-direct-io";
const UNKNOWN_QUEUES: &str = "when it is at rest is unknown (packed queues, a virtual IOMMU, or a QEMU older than 7.2)";

/// What all of a VM's vhost-user devices have behind them, as far as it can be tracked.
#[derive(Default)]
pub(super) struct BackEnds {
    /// Disks and file systems, by their paths in QEMU's tree of objects: nobody else writes for these.
    asked: Vec<String>,
    /// By their ids; the same.
    networks: Vec<String>,
    /// Disks, file systems and networks that are none of these.
    left_out: Vec<(String, &'static str)>,
    processes: Vec<BackEnd>,
    /// The processors that give devices requests; none: there is no such device.
    processors: Option<Processors>,
    /// Networks whose back ends are asked for a state of their own when the guest's devices are saved.
    with_state: Vec<WithState>,
    /// They were asked, and may have ended since.
    state_was_asked: bool,
}

/// A network whose back end may have a state of its own.
struct WithState {
    network: String,
    /// In words.
    process: String,
    /// When it has given it.
    ends: bool,
}

/// A process.
struct BackEnd {
    pid: i32,
    opened: Opened,
    /// Where it had the memory when the tracking began.
    tracked: Option<Vec<Area>>,
}

/// What tracking one takes.
pub(super) struct Acquired {
    pub(super) uffd: OwnedFd,
    pub(super) pagemap: OwnedFd,
}

impl BackEnds {
    /// Those that map the memory now. Devices of which that is not certain are left out; they can't be tracked.
    pub(super) fn find(qmp: &mut Qmp, backends: &[Backend]) -> Result<Self, GuestError> {
        let mut found = Self::default();
        for device in devices_of_others(qmp)? {
            let peers = peers::of_device(qmp, &device);
            let known = match rest::can_be_known(qmp, &device) {
                true if peers.iter().any(|&pid| obeys_o_direct(pid)) => Err(PAST_THE_CACHE),
                true => found.add(peers, backends)?,
                false => Err(UNKNOWN_QUEUES),
            };
            match known {
                Ok(()) => found.asked.push(device.path),
                Err(why) => found.left_out.push((device.path, why)),
            }
        }
        for network in networks::shared(qmp)? {
            let name = network.name().to_owned();
            if network.is_started_by_qemu() {
                found.left_out.push((name, CRASHES));
                continue;
            }
            let Some(chardev) = network.chardev() else { continue };
            let peers = peers::of_chardev(qmp, chardev);
            match found.add(peers.clone(), backends)? {
                Ok(()) => {
                    found.note_state(qmp, &name, &peers);
                    found.networks.push(name);
                }
                Err(why) => found.left_out.push((name, why)),
            }
        }
        if !found.asked.is_empty() {
            // Opened while that is allowed: its queues are in it.
            qmp.process().memory().map_err(GuestError::system("open the memory of QEMU"))?;
            found.processors = Some(Processors::of(qmp)?);
        }
        Ok(found)
    }

    /// Those of these processes that map the memory: at least one does, or the error says what is missing.
    fn add(&mut self, peers: Vec<i32>, backends: &[Backend]) -> Result<Result<(), &'static str>, GuestError> {
        let mut result = Err(if peers.is_empty() { NOT_FOUND } else { NOT_MAPPED });
        for pid in peers {
            if self.processes.iter().any(|process| process.pid == pid) {
                result = Ok(());
                continue;
            }
            let mut process = BackEnd { pid, opened: Opened::of(pid), tracked: None };
            if !process.areas(backends)?.is_empty() {
                self.processes.push(process);
                result = Ok(());
            }
        }
        Ok(result)
    }

    fn note_state(&mut self, qmp: &Qmp, network: &str, peers: &[i32]) {
        if qmp.version() >= own_state::ASKS {
            let one = |&pid: &i32| WithState {
                network: network.to_owned(),
                process: writers::Process::named(pid).to_string(),
                ends: own_state::ends(pid),
            };
            self.with_state.extend(peers.iter().map(one));
        }
    }

    /// Refuses a guest that is to go on after its devices were saved, and would do so without a network.
    pub(super) fn check_going_on(&self) -> Result<(), GuestError> {
        match self.with_state.iter().find(|one| one.ends) {
            None => Ok(()),
            Some(WithState { network, process, .. }) => Err(GuestError::Unfit(format!(
                "{process}, the back end of network {network}, is asked for its own state when the guest is saved, and may end \
                 then, as passt does that has no option --migrate-exit; the guest would go on without that network. \
                 Move the guest, or start it with a newer passt"
            ))),
        }
    }

    /// There is none, be it one that is not tracked.
    pub(super) fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.networks.is_empty() && self.left_out.is_empty()
    }

    /// Whether some may end when the devices' state is saved.
    pub(super) fn may_end_with_state(&self) -> bool {
        !self.with_state.is_empty()
    }

    /// That is done from now on.
    pub(super) fn state_is_asked(&mut self) {
        self.state_was_asked = self.may_end_with_state();
    }

    /// Whether what this device's back end writes can be tracked.
    pub(super) fn stand_behind(&self, device: &Device) -> bool {
        self.asked.contains(&device.path)
    }

    /// The same of a network.
    pub(super) fn serve(&self, network: &Network) -> bool {
        self.networks.iter().any(|name| name == network.name()) && self.why_not(network.name()).is_none()
    }

    /// Why it can't, by the device's path or the network's id.
    pub(super) fn why_not(&self, of: &str) -> Option<&'static str> {
        self.left_out.iter().find(|(name, _)| name == of).map(|(_, why)| *why)
    }

    /// Disks and file systems, which get requests, by their paths in QEMU's tree of objects.
    pub(super) fn asked(&self) -> &[String] {
        &self.asked
    }

    /// The processors that give these requests; none: there is no such device.
    pub(super) fn processors(&self) -> Option<&Processors> {
        self.processors.as_ref()
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = i32> {
        self.processes.iter().map(|process| process.pid)
    }

    /// Whether they can be had to make what tracking takes. Changes nothing there.
    pub(super) fn may_track(&self) -> Result<(), GuestError> {
        self.pids().try_for_each(faults::may_track)
    }

    /// What takes a right.
    pub(super) fn acquire(&self) -> Result<Vec<Acquired>, GuestError> {
        let one = |pid| Ok(Acquired { uffd: faults::for_users(pid)?, pagemap: super::tracking::pagemap(pid)? });
        self.pids().map(one).collect()
    }

    /// Where each of them has the memory; they are tracked there from now on.
    pub(super) fn begin(&mut self, backends: &[Backend]) -> Result<Vec<Vec<Area>>, GuestError> {
        let begin = |process: &mut BackEnd| {
            let areas = process.areas(backends)?;
            process.tracked = Some(areas.clone());
            Ok(areas)
        };
        self.processes.iter_mut().map(begin).collect()
    }

    /// The tracker knows nothing of memory that was mapped elsewhere meanwhile.
    pub(super) fn check_unchanged(&mut self, backends: &[Backend]) -> Result<(), GuestError> {
        for process in &mut self.processes {
            // Its device was stopped, and what it had written was found, before it could end.
            if self.state_was_asked && process.has_ended() {
                continue;
            }
            let areas = process.areas(backends)?;
            if process.tracked.as_ref().is_some_and(|tracked| *tracked != areas) {
                return Err(GuestError::Unfit(format!(
                    "{}, the back end of a vhost-user device, has mapped guest memory anew meanwhile; start again",
                    writers::Process::named(process.pid)
                )));
            }
        }
        Ok(())
    }

    /// That nobody need wait for, since it can't be done with these.
    pub(super) fn refuse(&self, what: &str, cure: &str) -> Result<(), GuestError> {
        let Some(pid) = self.pids().next() else { return Ok(()) };
        Err(GuestError::Unfit(format!(
            "{}, the back end of a vhost-user device, writes to guest memory, and can't be made to wait, as {what} \
             needs; {cure}",
            writers::Process::named(pid)
        )))
    }
}

impl BackEnd {
    fn areas(&mut self, backends: &[Backend]) -> Result<Vec<Area>, GuestError> {
        Ok(memory::shared_areas(&self.opened.mappings()?, backends))
    }

    /// Of one that was seen alive: nothing is said of its memory any more.
    fn has_ended(&mut self) -> bool {
        self.opened.mappings().map_or(true, |mappings| mappings.is_empty())
    }
}

/// Devices of a kind that other processes are, with the guest's memory. Networks may be, too.
pub(super) fn devices_of_others(qmp: &mut Qmp) -> Result<Vec<Device>, GuestError> {
    devices(qmp, |kind| ["vhost-user-blk", "vhost-user-fs"].iter().any(|asked| kind.starts_with(asked)))
}

/// Why what this process writes to guest memory can't all be tracked, if it can't: a device that writes by itself, or a
/// file that is read past the page cache.
pub(super) fn writes_unseen(pid: i32) -> Option<String> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let why = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        if ["/dev/vfio/", "/dev/uio", "/dev/infiniband/", "/dev/dsa/"]
            .iter()
            .any(|device| target.to_string_lossy().starts_with(device))
        {
            return Some(format!("drives a device by itself ({})", target.display()));
        }
        // Of a pipe the flag says something else.
        if !target.is_absolute() {
            return None;
        }
        let about = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", entry.file_name().to_str()?)).ok()?;
        is_direct(&about).then(|| {
            format!(
                "reads {} past the page cache (O_DIRECT); have it opened without (cache.direct=off)",
                target.display()
            )
        })
    };
    descriptors.filter_map(why).next()
}

/// Whether this process, such as virtiofsd, opens files past the page cache at any time if a guest says so.
fn obeys_o_direct(pid: i32) -> bool {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments.split(|&byte| byte == 0).any(|argument| argument == b"--allow-direct-io")
}

/// `flags:\t0140002`, in octal.
fn is_direct(fdinfo: &str) -> bool {
    let flags = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & OFlags::DIRECT.bits() != 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;

    use rustix::fs::Mode;

    use super::*;

    fn ourselves() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn files_that_are_read_past_the_page_cache_are_known() {
        assert!(is_direct("pos:\t0\nflags:\t0140002\nmnt_id:\t1\n"));
        assert!(!is_direct("pos:\t0\nflags:\t02100002\nmnt_id:\t1\n") && !is_direct(""));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        drop(File::create(&path).unwrap());
        let direct = rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty());
        let Ok(_direct) = direct else { return };
        let why = writes_unseen(ourselves()).unwrap();
        assert!(why.contains("past the page cache"), "{why}");
    }
}
