//! Linux guests whose free memory is full of old data, and QEMUs that wait for one.
use std::{
    os::unix::fs::MetadataExt,
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;
use serde_json::json;
use transship_lab::{Balloon, Qemu, QemuBuilder, Workload, balloon::BalloonClient};

use super::cases::{Load, Way};
use crate::{files::By, output::say, pair::text};

/// The workload that checks its memory stands still, so that an idle guest is one. It still says whether all its pages
/// are right.
const WORKLOAD: Workload = Workload { mib: 32, rate: 0, hot_mib: None, idle: true, sweep_ms: 3_600_000 };
/// A driver that has what it takes cleared for it would write to all memory that it names; see docs/free-pages.md.
const KERNEL: &str = "init_on_alloc=0";

/// Linux reports a part of what is free every two seconds.
const SETTLED_AFTER: Duration = Duration::from_secs(5);
const SETTLED_AT_LAST: Duration = Duration::from_secs(120);
const SETTLED_WITHIN: u64 = 8 << 20;
/// How long a compiling guest is watched before it is moved.
const WATCHED_FOR: Duration = Duration::from_secs(2);

/// How to start such guests.
#[derive(Clone, Copy)]
pub(super) struct Recipe<'a> {
    pub(super) peer: &'a str,
    pub(super) guest_bytes: u64,
    pub(super) way: Way,
    /// Whose hints.
    pub(super) by: By,
}

/// A QEMU, with the guest in it or waiting for it.
pub(super) struct QemuWithBalloon {
    // It ends before its balloon does.
    pub(super) qemu: Qemu,
    pub(super) balloon: Option<Balloon>,
}

/// What a compiling guest has done at a moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Done {
    units: u64,
    at: Instant,
}

/// What it did between two moments.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Work {
    pub(crate) units: u64,
    pub(crate) seconds: f64,
}

impl Recipe<'_> {
    /// Starts a guest, and waits until it is ready.
    pub(super) fn start(&self) -> Result<QemuWithBalloon, String> {
        let home = self.with_balloon(|qemu| qemu)?;
        home.qemu.ready().map_err(text)?;
        home.plug()?;
        Ok(home)
    }

    /// Starts a QEMU that waits for the guest.
    pub(super) fn waiting(&self) -> Result<QemuWithBalloon, String> {
        self.with_balloon(QemuBuilder::incoming)
    }

    fn with_balloon(&self, more: impl FnOnce(QemuBuilder) -> QemuBuilder) -> Result<QemuWithBalloon, String> {
        let mib = u32::try_from(self.guest_bytes >> 20).map_err(text)?;
        let qemu = more(Qemu::linux().binary(self.peer).memory(mib).workload(WORKLOAD).append(KERNEL));
        let (qemu, balloon) = match (self.way, self.by) {
            (Way::Without, _) => (qemu, None),
            (Way::Balloon, _) => (qemu.args(["-device", "virtio-balloon-pci"]), None),
            (Way::Reporting, _) => (qemu.args(["-device", "virtio-balloon-pci,free-page-reporting=on"]), None),
            (Way::Hints, By::Qemu) => {
                let device = "virtio-balloon-pci,free-page-hint=on,iothread=hints";
                (qemu.args(["-object", "iothread,id=hints", "-device", device]), None)
            }
            (Way::Hints, By::Transship) => {
                let balloon = Balloon::start().map_err(text)?;
                (balloon.connected(qemu), Some(balloon))
            }
        };
        Ok(QemuWithBalloon { qemu: qemu.start().map_err(text)?, balloon })
    }
}

/// Does this QEMU have the device that our balloon is plugged in as?
pub(super) fn has_hint_device(peer: &str) -> Result<bool, String> {
    let qemu = Qemu::firmware().binary(peer).memory(64).start().map_err(text)?;
    let types = qemu.qmp("qom-list-types", json!({ "implements": "device", "abstract": false })).map_err(text)?;
    Ok(types.as_array().is_some_and(|all| all.iter().any(|kind| kind["name"] == "vhost-user-test-device-pci")))
}

impl QemuWithBalloon {
    /// The guest has arrived.
    pub(super) fn arrived(&self) -> Result<(), String> {
        self.plug()?;
        let swept = self.qemu.sweep().map_err(text)?;
        if swept.errors > 0 {
            return Err(format!("{} of {} pages are not what the guest has written", swept.errors, swept.pages));
        }
        Ok(())
    }

    fn plug(&self) -> Result<(), String> {
        self.balloon.as_ref().map_or(Ok(()), |balloon| balloon.plug(&self.qemu).map_err(text))
    }

    /// Our balloon takes reports, too, which is another case: nothing is given back until this is dropped.
    pub(super) fn keep_memory(&self) -> Result<Option<BalloonClient>, String> {
        let Some(balloon) = &self.balloon else { return Ok(None) };
        let mut client = balloon.client().map_err(text)?;
        client.call("keep", json!({})).map_err(text)?;
        Ok(Some(client))
    }

    /// Fills free memory with old data, lets the guest say what it says of it, and begins the load: so every move
    /// starts alike. Returns what the guest does while nobody moves it, if it does something.
    pub(super) fn prepare(&self, load: Load, way: Way) -> Result<Option<Work>, String> {
        let serial = self.qemu.serial();
        serial.rest().map_err(text)?;
        serial.leave_old_data().map_err(text)?;
        if way == Way::Reporting {
            self.settle()?;
        }
        if load == Load::Idle {
            return Ok(None);
        }
        serial.compile().map_err(text)?;
        let begin = self.done()?;
        thread::sleep(WATCHED_FOR);
        Ok(Some(begin.until(self.done()?)))
    }

    /// Waits until no more memory is given back.
    fn settle(&self) -> Result<(), String> {
        let begin = Instant::now();
        let (mut least, mut since) = (self.allocated()?, begin);
        while since.elapsed() < SETTLED_AFTER {
            if begin.elapsed() > SETTLED_AT_LAST {
                say("the guest is still giving memory back; it is moved all the same");
                break;
            }
            thread::sleep(Duration::from_millis(100));
            let now = self.allocated()?;
            if now + SETTLED_WITHIN < least {
                (least, since) = (now, Instant::now());
            }
        }
        Ok(())
    }

    /// Bytes of guest memory that are not a hole.
    pub(super) fn allocated(&self) -> Result<u64, String> {
        let file = self.qemu.memory_files().first().ok_or("a QEMU without memory")?;
        let about = file.metadata().map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(about.blocks() * 512)
    }

    /// What the guest has compiled by now.
    pub(super) fn done(&self) -> Result<Done, String> {
        let units = self.qemu.serial().next_units().map_err(text)?;
        Ok(Done { units, at: Instant::now() })
    }
}

impl Done {
    pub(super) fn until(self, later: Self) -> Work {
        Work { units: later.units.saturating_sub(self.units), seconds: (later.at - self.at).as_secs_f64() }
    }
}

impl Work {
    pub(crate) fn per_s(self) -> f64 {
        self.units as f64 / self.seconds
    }
}
