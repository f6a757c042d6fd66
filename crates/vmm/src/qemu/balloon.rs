//! The guest's balloon, where a process of ours is that device. QEMU can't save its state: so it is unplugged while the
//! guest runs, and plugged in again if the guest stays. Until then it writes to guest memory past the tracker, but only
//! to the rings of its driver.
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use transship_guest::GuestError;

use super::{
    machine::{self, Device},
    qmp::{self, Qmp, QmpError, Question},
};

/// virtio's number of a balloon.
const VIRTIO_BALLOON: u64 = 5;
/// Where devices are that have a name.
const NAMED: &str = "/machine/peripheral";
/// What a person may have chosen when the device was made; the rest is as the machine type has it.
const PROPERTIES: [&str; 10] = [
    "chardev",
    "virtio-id",
    "num_vqs",
    "config_size",
    "vq_size",
    "addr",
    "acpi-index",
    "iommu_platform",
    "packed",
    "page-per-vq",
];
/// How long a guest may take that was asked to let go of it and is to keep it after all.
const LEAVING_WAIT: Duration = Duration::from_secs(5);
/// How long to rely on an event before looking.
const EVENT_WAIT: Duration = Duration::from_millis(200);

/// The device.
pub(super) struct OwnBalloon {
    /// As it was made.
    made: Made,
    /// The process that is the device; none: it is gone, and writes nothing.
    pid: Option<i32>,
    state: State,
}

/// The arguments of `device_add`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Made(Map<String, Value>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Plugged,
    /// The guest was asked to let go of it.
    Leaving,
    Unplugged,
}

impl OwnBalloon {
    /// The device whose other end listens at `socket`.
    ///
    /// # Errors
    /// There is none; or none that can be unplugged.
    pub(super) fn find(qmp: &mut Qmp, socket: &Path) -> Result<Self, GuestError> {
        let refused = |why: &str| GuestError::Unfit(format!("balloon {}: {why}", socket.display()));
        let mut found = None;
        for device in machine::devices(qmp, machine::may_be_anything)? {
            if connects_to(qmp, &device, socket)? {
                found = Some(device);
            }
        }
        let device = found.ok_or_else(|| {
            refused(
                "no device of this QEMU is connected to it; name the socket as in -chardev socket,…,path=, or leave \
                 out --balloon",
            )
        })?;
        // In one go: each answer takes QEMU's main loop half a millisecond.
        let names = ["hotpluggable", "parent_bus", "type"].into_iter().chain(PROPERTIES);
        let asked: Vec<_> = names.map(|name| question(&device.path, name)).collect();
        qmp.ask_ahead(&asked)?;
        let mut get = |property: &str| property_of(qmp, &device.path, property);
        if get("virtio-id")?.as_u64() != Some(VIRTIO_BALLOON) {
            return Err(refused(&format!("{device} is not a balloon: its virtio-id is not {VIRTIO_BALLOON}")));
        }
        if !device.path.starts_with(NAMED) {
            return Err(refused("QEMU can't save this device and only a named one can be unplugged; give it an id="));
        }
        if get("hotpluggable")? == json!(false) {
            return Err(refused(
                "QEMU can't save this device and it can't be unplugged; give it a port of its own: \
                 -device pcie-root-port,id=port0 -device …,bus=port0",
            ));
        }
        let made = Made::read(&device, get)?;
        // It may be gone the next time.
        qmp.forget_answers_to(&asked);
        made.check_connected(qmp)?;
        if machine::run_state(qmp)? != "running" {
            return Err(refused(
                "QEMU can't save this device, and a stopped guest can't release it; let the guest run, or unplug the \
                 device: device_del",
            ));
        }
        Ok(Self { made, pid: qmp::listener(socket).ok(), state: State::Plugged })
    }

    /// Whether it is this device.
    pub(super) fn is(&self, device: &Device) -> bool {
        self.state != State::Unplugged && device.path == self.made.path()
    }

    /// The process that is the device; none: it is gone.
    pub(super) fn process(&self) -> Option<i32> {
        self.pid
    }

    /// Whether QEMU can't save its guest for this reason because of this device.
    pub(super) fn is_reason(&self, reason: &str) -> bool {
        let kind = self.made.text("driver").trim_end_matches("-pci");
        self.state != State::Unplugged
            && (reason.starts_with("non-migratable device:") && reason.ends_with(&format!("/{kind}"))
                || reason.contains("vhost-user backend lacks"))
    }

    pub(super) fn made(&self) -> &Made {
        &self.made
    }

    /// Asks the guest to let go of it, and waits until `until`. True: it is gone.
    pub(super) fn unplug(&mut self, qmp: &mut Qmp, until: Instant) -> Result<bool, GuestError> {
        if self.state == State::Plugged {
            self.made.check_connected(qmp)?;
            match qmp.execute("device_del", json!({ "id": self.made.text("id") })) {
                // An earlier attempt gave up waiting.
                Err(QmpError::Refused { reason, .. }) if reason.contains("in the process of unplug") => {}
                other => drop(other?),
            }
            self.state = State::Leaving;
        }
        if self.made.wait_gone(qmp, until)? {
            self.state = State::Unplugged;
            return Ok(true);
        }
        let id = json!(self.made.text("id"));
        if qmp.take_events("DEVICE_UNPLUG_GUEST_ERROR")?.iter().any(|event| event.data["device"] == id) {
            self.state = State::Plugged;
            let why = "the guest refuses to release its balloon, which can't go with it; the guest runs on here";
            return Err(GuestError::Unfit(why.to_owned()));
        }
        Ok(false)
    }

    /// Undoes `unplug`, also one that has not come to its end.
    pub(super) fn plug_back(&mut self, qmp: &mut Qmp) -> Result<(), GuestError> {
        if std::mem::replace(&mut self.state, State::Plugged) == State::Plugged {
            return Ok(());
        }
        match self.made.plug_back(qmp)? {
            true => Ok(()),
            false => Err(GuestError::vmm("the guest was asked to release it, but has not done so yet".to_owned())),
        }
    }
}

impl Made {
    fn read(device: &Device, mut get: impl FnMut(&str) -> Result<Value, GuestError>) -> Result<Self, GuestError> {
        let parent = get("parent_bus")?;
        let bus = parent.as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
        let mut made = Map::from_iter([
            ("driver".to_owned(), get("type")?),
            ("id".to_owned(), json!(device.name())),
            ("bus".to_owned(), json!(bus)),
        ]);
        for name in PROPERTIES {
            // Another version may lack it.
            if let Ok(value) = get(name) {
                made.insert(name.to_owned(), value);
            }
        }
        Ok(Self(made))
    }

    fn text(&self, name: &str) -> &str {
        self.0.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    fn path(&self) -> String {
        format!("{NAMED}/{}", self.text("id"))
    }

    /// QEMU 11.1 ends by an assertion when the guest lets go of a device whose other end is gone, or only looks at its
    /// configuration.
    fn check_connected(&self, qmp: &mut Qmp) -> Result<(), GuestError> {
        let all = qmp.execute("query-chardev", json!({}))?;
        let ours = all.as_array().into_iter().flatten().find(|one| one["label"] == self.text("chardev"));
        let is_gone =
            ours.and_then(|one| one["filename"].as_str()).is_none_or(|name| name.starts_with("disconnected:"));
        if !is_gone {
            return Ok(());
        }
        Err(GuestError::Unfit(
            "the process of the guest's balloon is gone; if the device is unplugged now, QEMU may end, and the guest \
             with it. The guest runs on here; shut it down when you can"
                .to_owned(),
        ))
    }

    fn is_there(&self, qmp: &mut Qmp) -> Result<bool, GuestError> {
        match qmp.execute("qom-get", json!({ "path": self.path(), "property": "type" })) {
            Ok(_) => Ok(true),
            Err(QmpError::Refused { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the device is gone; false: at `until` it is still there.
    fn wait_gone(&self, qmp: &mut Qmp, until: Instant) -> Result<bool, GuestError> {
        loop {
            if !self.is_there(qmp)? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= until {
                return Ok(false);
            }
            qmp.wait_event("DEVICE_DELETED", until.min(now + EVENT_WAIT))?;
        }
    }

    /// Plugs it in again when it is gone; false: it is there, and the guest does not let go of it.
    pub(super) fn plug_back(&self, qmp: &mut Qmp) -> Result<bool, GuestError> {
        let until = Instant::now() + LEAVING_WAIT;
        if !self.wait_gone(qmp, until)? {
            return Ok(false);
        }
        loop {
            match qmp.execute("device_add", Value::Object(self.0.clone())) {
                // A device that has gone may hold its chardev for a moment longer, and no event says when it does not.
                Err(QmpError::Refused { .. }) if Instant::now() < until => {
                    qmp.wait_event("DEVICE_DELETED", Instant::now() + EVENT_WAIT)?;
                }
                other => return Ok(other.map(|_| true)?),
            }
        }
    }

    /// How a person plugs it in, as QMP has it.
    pub(super) fn by_hand(&self) -> String {
        json!({ "execute": "device_add", "arguments": self.0 }).to_string()
    }
}

fn property_of(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, GuestError> {
    let (command, arguments) = question(path, property);
    Ok(qmp.execute(command, arguments)?)
}

/// The question that [`property_of`] asks.
fn question(path: &str, property: &str) -> Question {
    ("qom-get", json!({ "path": path, "property": property }))
}

/// Whether the other end of the device listens at this socket.
fn connects_to(qmp: &mut Qmp, device: &Device, socket: &Path) -> Result<bool, GuestError> {
    let chardev = property_of(qmp, &device.path, "chardev")?;
    let Some(chardev) = chardev.as_str() else { return Ok(false) };
    let address = property_of(qmp, &format!("/chardevs/{chardev}"), "addr")?;
    let Some(path) = address["path"].as_str() else { return Ok(false) };
    Ok(is_same(qmp.pid(), path, socket))
}

/// Whether QEMU's `theirs` is the socket that we call `ours`. It may be in another root, or gone.
fn is_same(pid: i32, theirs: &str, ours: &Path) -> bool {
    let base = if theirs.starts_with('/') { format!("/proc/{pid}/root") } else { format!("/proc/{pid}/cwd") };
    let file = |path: PathBuf| fs::metadata(path).ok().map(|about| (about.dev(), about.ino()));
    match (file(Path::new(&base).join(theirs.trim_start_matches('/'))), file(ours.to_owned())) {
        (Some(theirs), Some(ours)) => theirs == ours,
        _ => Path::new(theirs) == ours,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::qemu::qmp::tests::peer;

    const GONE: &str = r#"{"error": {"class": "GenericError", "desc": "Device 'balloon0' not found"}, "id": ID}"#;
    const IN_USE: &str =
        r#"{"error": {"class": "GenericError", "desc": "chardev 'balloon' is already in use"}, "id": ID}"#;
    const YES: &str = r#"{"return": {}, "id": ID}"#;

    fn made() -> Made {
        serde_json::from_value(json!({ "driver": "vhost-user-device-pci", "id": "balloon0" })).unwrap()
    }

    #[test]
    fn a_device_is_plugged_in_again_though_its_chardev_is_still_in_use() {
        let (_dir, path) = peer(&[GONE, IN_USE, IN_USE, YES]);
        assert!(made().plug_back(&mut Qmp::connect(&path).unwrap()).unwrap());
    }

    #[test]
    fn a_refusal_that_stays_is_told() {
        let mut answers = vec![GONE];
        answers.resize(100, IN_USE);
        let (_dir, path) = peer(&answers);
        let error = made().plug_back(&mut Qmp::connect(&path).unwrap()).unwrap_err().to_string();
        assert!(error.contains("already in use"), "{error}");
    }
}
