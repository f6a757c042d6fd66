//! The back ends of vhost-user devices: processes that write to guest memory through mappings of their own.
//!
//! ```text
//!   device ──► chardev ──► unix socket of QEMU's ──► who is at its other end ──► where that one maps the memory
//! ```
//!
//! What a back end writes is tracked in its own process, as what QEMU writes is in QEMU's.
//!
//! When the guest is stopped, QEMU stops the device, and the back end takes no more requests. `qemu-storage-daemon` may
//! still be at work on some that it has taken: it writes their data later, and some versions then find that nobody can
//! be told, and drop the device. So the guest is stopped when no request is under way ([`rest`]).
//!
//! A back end may map memory anew when QEMU tells it again where that is: when its device is started, or QEMU has
//! connected again. Nobody tracks the new mapping, even if it lies where the old one was. Then a scan fails, and the
//! guest stays. Mappings that came beside the tracked ones are found when the guest stands still.
//!
//! Two kinds of writes leave no trace in a process's page table: those of devices that a back end drives by itself, and
//! of the disk, where a file is read past the page cache and a scan comes between. (QEMU's own disks can be waited
//! for.) A back end that has such a file or device open is refused.
mod rest;

use std::{
    fs,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
};

use rustix::{
    fs::OFlags,
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
};
use serde_json::json;
use transship_guest::GuestError;
use transship_memory::Area;

use super::{
    faults,
    machine::{Device, devices},
    memory::{self, Backend},
    opened::Opened,
    qmp::{Qmp, peer_of},
    vcpus::Processors,
    writers,
};

/// What all of a VM's vhost-user devices have behind them, as far as it can be tracked.
#[derive(Default)]
pub(super) struct BackEnds {
    /// By their paths in QEMU's tree of objects: nobody else writes for these.
    devices: Vec<String>,
    processes: Vec<BackEnd>,
    /// The processors that give them requests; none: there is no back end.
    processors: Option<Processors>,
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
        // Of these each request has an end. Queues of others hold what the guest waits for.
        for device in devices(qmp, |kind| kind.starts_with("vhost-user-blk"))? {
            if !rest::can_be_known(qmp, &device) {
                continue;
            }
            let Some(pid) = behind(qmp, &device) else { continue };
            let known = found.processes.iter().any(|process| process.pid == pid);
            let mut process = BackEnd { pid, opened: Opened::of(pid), tracked: None };
            if !known && process.areas(backends)?.is_empty() {
                continue;
            }
            found.devices.push(device.path);
            if !known {
                found.processes.push(process);
            }
        }
        if !found.devices.is_empty() {
            // Opened while that is allowed: its queues are in it.
            qmp.process().memory().map_err(GuestError::system("open the memory of QEMU"))?;
            found.processors = Some(Processors::of(qmp)?);
        }
        Ok(found)
    }

    /// Whether what this device's back end writes can be tracked.
    pub(super) fn stand_behind(&self, device: &Device) -> bool {
        self.devices.contains(&device.path)
    }

    /// By their paths in QEMU's tree of objects.
    pub(super) fn devices(&self) -> &[String] {
        &self.devices
    }

    /// The processors that give them requests; none: there is no back end.
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
}

/// The process at the other end of the device's socket.
fn behind(qmp: &mut Qmp, device: &Device) -> Option<i32> {
    let mut get =
        |path: &str, property: &str| qmp.execute("qom-get", json!({ "path": path, "property": property })).ok();
    let chardev = get(&device.path, "chardev")?;
    let address = get(&format!("/chardevs/{}", chardev.as_str()?), "addr")?;
    let path = address["path"].as_str()?;
    connected(qmp.pid(), Path::new(path))
}

/// The process at the other end of the connection that process `pid` has by this socket, whichever of them listens.
fn connected(pid: i32, path: &Path) -> Option<i32> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    let is_socket = |link: &Path| link.to_str().is_some_and(|target| target.starts_with("socket:["));
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let sockets = descriptors.filter(|entry| fs::read_link(entry.path()).is_ok_and(|link| is_socket(&link)));
    let numbers = sockets.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut copies =
        numbers.filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()).map(UnixStream::from);
    // One that listens has no other end; sockets of other families have addresses that are none of these.
    let is_it = |socket: &UnixStream| {
        let ends = socket.peer_addr().and_then(|peer| Ok([peer, socket.local_addr()?]));
        ends.is_ok_and(|ends| ends.iter().any(|end| end.as_pathname() == Some(path)))
    };
    copies.find(is_it).and_then(|socket| peer_of(&socket).ok())
}

/// Why what this process writes to guest memory can't all be tracked, if it can't: a device that writes by itself, or a
/// file that is read past the page cache.
pub(super) fn writes_unseen(pid: i32) -> Option<String> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let why = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        if ["/dev/vfio/", "/dev/uio", "/dev/infiniband/"]
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
            format!("reads {} past the page cache (O_DIRECT); have it opened with cache.direct=off", target.display())
        })
    };
    descriptors.filter_map(why).next()
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
    use std::{fs::File, os::unix::net::UnixListener};

    use rustix::fs::Mode;

    use super::*;

    fn ourselves() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn the_other_end_is_found_whoever_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(connected(ourselves(), &path), None);
        let _ours = UnixStream::connect(&path).unwrap();
        assert_eq!(connected(ourselves(), &path), Some(ourselves()));
        let served = listener.accept().unwrap();
        drop(listener);
        assert_eq!(connected(ourselves(), &path), Some(ourselves()));
        drop(served);
        assert_eq!(connected(ourselves(), &folder.path().join("other")), None);
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
