//! A running QEMU, with the guest in it.
use crate::lines::Lines;
use crate::process::{open_files, status_field};
use crate::qmp::Qmp;
use crate::serial::Serial;
use crate::{Accel, Count, Kind, LabError, PATIENCE, Process, QemuBuilder, Result, Scratch, Sweep, Workload, failed};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

/// A running QEMU.
#[derive(Debug)]
pub struct Qemu {
    process: Process,
    /// Its own, where `process` is what has started it.
    pid: u32,
    serial: Serial,
    qmp: Mutex<Qmp>,
    memory_files: Vec<PathBuf>,
    folder: Scratch,
}

impl Qemu {
    pub(crate) fn new(
        (process, pid): (Process, u32),
        serial: Serial,
        qmp: Qmp,
        memory_files: Vec<PathBuf>,
        folder: Scratch,
    ) -> Self {
        Self { process, pid, serial, qmp: Mutex::new(qmp), memory_files, folder }
    }

    /// A Linux guest with the workload, 256 MiB, emulated.
    pub fn linux() -> QemuBuilder {
        QemuBuilder::new(Kind::Linux(Workload::LINUX), 256, Accel::Tcg)
    }

    /// The 32-bit guest, 64 MiB, emulated. A host whose KVM emulates instructions takes a millisecond for each page
    /// that a guest fills, which is seventy times as long.
    pub fn multiboot() -> QemuBuilder {
        Self::multiboot_under(Accel::Tcg)
    }

    /// The same under KVM where that works: for what KVM's own writes and faults may make different.
    pub fn multiboot_with_kvm() -> QemuBuilder {
        Self::multiboot_under(Accel::best())
    }

    /// The 32-bit guest, 64 MiB.
    pub fn multiboot_under(accel: Accel) -> QemuBuilder {
        QemuBuilder::new(Kind::Multiboot(Workload::MULTIBOOT), 64, accel)
    }

    /// No guest but the firmware, 256 MiB: for memory that the caller has filled.
    pub fn firmware() -> QemuBuilder {
        QemuBuilder::new(Kind::Firmware, 256, Accel::Tcg)
    }

    /// How the command names it: `qemu:/path/to/its/qmp`.
    pub fn vm(&self) -> String {
        format!("qemu:{}", self.qmp_path().display())
    }

    /// The QMP socket for transship.
    pub fn qmp_path(&self) -> PathBuf {
        self.folder.join("qmp")
    }

    /// A folder that lives as long as this QEMU, for more sockets.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The files that are its memory, by NUMA node.
    pub fn memory_files(&self) -> &[PathBuf] {
        &self.memory_files
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its process, to signal or kill it or to wait for its end.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// What QEMU itself said.
    pub fn stderr(&self) -> &Lines {
        self.process.stderr()
    }

    /// The guest's serial port.
    pub fn serial(&self) -> &Serial {
        &self.serial
    }

    /// Runs a QMP command on the lab's own socket.
    ///
    /// # Errors
    /// QEMU refuses or is gone.
    pub fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        self.monitor().execute(command, arguments)
    }

    /// Runs several, sent in one piece.
    ///
    /// # Errors
    /// QEMU refuses one, or is gone.
    pub fn qmp_together(&self, commands: &[(&str, Value)]) -> Result<()> {
        self.monitor().execute_together(commands)
    }

    /// The data of the first event of this name that is `wanted`, of those that were not waited for yet.
    ///
    /// # Errors
    /// None comes in time, or QEMU is gone.
    pub fn wait_event(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        self.monitor().wait_event(name, wanted)
    }

    /// The same for so long at most; none: it did not come.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn wait_event_within(
        &self,
        time: Duration,
        name: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Option<Value>> {
        self.monitor().wait_event_within(time, name, wanted)
    }

    /// When the first such event happened that is not older than `since`. QEMU's clock has microseconds.
    ///
    /// # Errors
    /// None comes in time, or QEMU is gone.
    pub fn wait_event_time(
        &self,
        name: &str,
        since: SystemTime,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<SystemTime> {
        self.monitor().wait_event_time(name, since, wanted)
    }

    fn monitor(&self) -> MutexGuard<'_, Qmp> {
        self.qmp.lock().expect("nobody panics with the lock held")
    }

    /// `running`, `paused`, `inmigrate`, `postmigrate`, ...
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn status(&self) -> Result<String> {
        let status = self.qmp("query-status", json!({}))?;
        status["status"].as_str().map(str::to_owned).ok_or_else(|| LabError(format!("no status in {status}")))
    }

    /// Whether its guest was given to somebody else: by QEMU's own migration, or with the mark that says so.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn has_given_away(&self) -> Result<bool> {
        if self.status()? != "paused" {
            return Ok(self.status()? == "postmigrate");
        }
        let objects = self.qmp("qom-list", json!({ "path": "/objects" }))?;
        let mut names = objects.as_array().into_iter().flatten().map(|object| &object["name"]);
        Ok(names.any(|name| name == "transship-gave-this-guest-away"))
    }

    /// Waits for a [`Qemu::status`].
    ///
    /// # Errors
    /// It does not come in time.
    pub fn wait_status(&self, wanted: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status()?;
            if status == wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(LabError(format!("the VM did not come to the state {wanted}: it is {status}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it as `kill -9` does.
    pub fn kill9(&mut self) {
        self.process.kill9();
    }

    /// Stops the whole process from outside, as if its host were hanging.
    ///
    /// # Errors
    /// It is gone.
    pub fn freeze(&self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// Lets it go on after [`Qemu::freeze`].
    ///
    /// # Errors
    /// It is gone.
    pub fn thaw(&self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// What it holds open, such as `anon_inode:[userfaultfd]`.
    ///
    /// # Errors
    /// It is gone.
    pub fn open_files(&self) -> Result<Vec<String>> {
        open_files(self.pid())
    }

    /// Is a debugger attached to any of its threads?
    ///
    /// # Errors
    /// It is gone.
    pub fn is_traced(&self) -> Result<bool> {
        let folder = format!("/proc/{}/task", self.pid());
        for thread in std::fs::read_dir(&folder).map_err(failed(&folder))?.flatten() {
            let thread = thread.file_name().to_string_lossy().parse().expect("threads have numbers");
            // A thread may end while we look.
            if status_field(thread, "TracerPid").is_ok_and(|tracer| tracer != "0") {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until the workload has filled its memory; gives the number of its pages.
    ///
    /// # Errors
    /// It does not in time.
    pub fn ready(&self) -> Result<u64> {
        self.serial.ready()
    }

    /// The next count that the guest reports: it runs.
    ///
    /// # Errors
    /// It stands still or is gone.
    pub fn next_count(&self) -> Result<Count> {
        self.serial.next_count()
    }

    /// Has the guest check all its pages from now on.
    ///
    /// # Errors
    /// It stands still or is gone.
    pub fn sweep(&self) -> Result<Sweep> {
        self.serial.sweep()
    }
}
