//! transship's balloon device, and a client of it that speaks its lines by hand.
use crate::{LabError, PATIENCE, Qemu, QemuBuilder, Result, Scratch, Transship, failed, wait_until};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A running `transship balloon`.
#[derive(Debug)]
pub struct Balloon {
    command: Transship,
    path: PathBuf,
    _folder: Scratch,
}

impl Balloon {
    /// Starts one, and waits until it listens.
    ///
    /// # Errors
    /// It does not.
    pub fn start() -> Result<Self> {
        let folder = Scratch::new()?;
        let path = folder.join("balloon");
        let command = Transship::command(["balloon", "--socket", &path.display().to_string()]).start()?;
        command.listening()?;
        Ok(Self { command, path, _folder: folder })
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its process.
    pub fn command(&mut self) -> &mut Transship {
        &mut self.command
    }

    /// A QEMU that is connected with it, with a place to plug the device into.
    pub fn connected(&self, qemu: QemuBuilder) -> QemuBuilder {
        let chardev = format!("socket,id=balloon,path={}", self.path.display());
        qemu.args(["-chardev", &chardev, "-device", "pcie-root-port,id=port0"])
    }

    /// Plugs the device in, and waits until the guest's driver uses it.
    ///
    /// # Errors
    /// QEMU refuses, or the driver does not come.
    pub fn plug(&self, qemu: &Qemu) -> Result<()> {
        let device = json!({
            "driver": "vhost-user-test-device-pci", "id": "balloon", "bus": "port0", "chardev": "balloon",
            "virtio-id": 5, "num_vqs": 5, "config_size": 16, "vq_size": 1024
        });
        qemu.qmp("device_add", device)?;
        self.wait_driver()
    }

    /// Waits until the guest's driver uses the device.
    ///
    /// # Errors
    /// It does not come.
    pub fn wait_driver(&self) -> Result<()> {
        wait_until("the guest's balloon driver", || {
            let mut client = self.client()?;
            Ok(client.call("describe", json!({}))?["hints"] == true)
        })
    }

    /// Unplugs the device.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not let it go.
    pub fn unplug(&self, qemu: &Qemu) -> Result<()> {
        qemu.qmp("device_del", json!({ "id": "balloon" }))?;
        qemu.wait_event("DEVICE_DELETED", |data| data["device"] == "balloon").map(drop)
    }

    /// A connection as a client.
    ///
    /// # Errors
    /// Nobody is there.
    pub fn client(&self) -> Result<BalloonClient> {
        let stream = UnixStream::connect(&self.path).map_err(failed(self.path.display()))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed("timeout"))?;
        Ok(BalloonClient { lines: BufReader::new(stream), id: 0, events: Vec::new() })
    }
}

/// A client that speaks the control protocol by hand.
#[derive(Debug)]
pub struct BalloonClient {
    lines: BufReader<UnixStream>,
    id: u64,
    events: Vec<Value>,
}

impl BalloonClient {
    /// Asks, and gives what is in `ok`.
    ///
    /// # Errors
    /// It answers an error, or is gone.
    pub fn call(&mut self, call: &str, mut fields: Value) -> Result<Value> {
        self.id += 1;
        fields["id"] = self.id.into();
        fields["call"] = call.into();
        let mut stream = self.lines.get_ref();
        stream.write_all(format!("{fields}\n").as_bytes()).map_err(failed("the balloon's connection"))?;
        loop {
            let line = self.line()?;
            if line["error"].is_string() {
                return Err(LabError(format!("{call}: {}", line["error"])));
            }
            if line["id"] == self.id {
                return Ok(line["ok"].clone());
            }
            self.events.push(line);
        }
    }

    /// The next line that is no answer.
    ///
    /// # Errors
    /// None comes.
    pub fn event(&mut self) -> Result<Value> {
        if self.events.is_empty() { self.line() } else { Ok(self.events.remove(0)) }
    }

    /// Asks for hints, and gives all of them: number in the description's table, offset, bytes.
    ///
    /// # Errors
    /// They don't come.
    pub fn hints(&mut self) -> Result<Vec<(u64, u64, u64)>> {
        let command = self.call("start", json!({}))?["command"].clone();
        let mut hints = Vec::new();
        loop {
            let event = self.event()?;
            if event["command"] != command {
                return Err(LabError(format!("unexpected: {event}")));
            }
            if event["named_all"] == true {
                return Ok(hints);
            }
            let some: Vec<(u64, u64, u64)> = serde_json::from_value(event["hints"].clone()).map_err(failed(&event))?;
            hints.extend(some);
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.lines.read_line(&mut line).map_err(failed("can't read a line of the balloon"))?;
        serde_json::from_str(&line).map_err(failed(format!("the balloon sent {line:?}")))
    }
}
