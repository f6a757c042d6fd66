//! A stock QEMU, started as the README tells users to start theirs.
use crate::lines::Lines;
use crate::process::{open_files, status_field};
use crate::qmp::Qmp;
use crate::serial::Serial;
use crate::{Count, LabError, PATIENCE, Process, Result, Scratch, Sweep, Workload, failed, image, kvm_works};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What executes the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// QEMU's own emulation: works everywhere.
    Tcg,
    /// The kernel's: see [`kvm_works`].
    Kvm,
}

/// What runs in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// The distribution's kernel with guest/workload.rs.
    Linux(Workload),
    /// guest/kvm.c, without an operating system.
    Multiboot(Workload),
    /// Only QEMU's own firmware.
    Firmware,
}

/// Where guest memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A shared named file: what transship needs.
    SharedFile,
    /// A named file that is not shared.
    PrivateFile,
    /// A memfd: shared, and without a name.
    Memfd,
    /// QEMU's own memory.
    Ram,
}

/// How to start a QEMU.
#[derive(Debug, Clone)]
pub struct QemuBuilder {
    binary: String,
    kind: Kind,
    memory_mib: u32,
    backends: u32,
    backend: Backend,
    memory_folder: Option<PathBuf>,
    accel: Accel,
    machine: String,
    incoming: bool,
    more: Vec<String>,
}

/// A running QEMU.
#[derive(Debug)]
pub struct Qemu {
    process: Process,
    serial: Serial,
    qmp: Mutex<Qmp>,
    memory_files: Vec<PathBuf>,
    folder: Scratch,
}

impl QemuBuilder {
    fn new(kind: Kind, memory_mib: u32, accel: Accel) -> Self {
        Self {
            binary: std::env::var("TRANSSHIP_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into()),
            kind,
            memory_mib,
            backends: 1,
            backend: Backend::SharedFile,
            memory_folder: None,
            accel,
            machine: "q35".into(),
            incoming: false,
            more: Vec::new(),
        }
    }

    /// Another QEMU than the one in the path.
    pub fn binary(mut self, binary: impl Into<String>) -> Self {
        self.binary = binary.into();
        self
    }

    /// Guest memory in MiB.
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// How many memory backends (NUMA nodes) share the memory evenly.
    pub fn backends(mut self, count: u32) -> Self {
        self.backends = count;
        self
    }

    /// Where guest memory lies.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// The folder of the memory files `mem0`, `mem1`, ...; one of the lab's own otherwise. Files in it are used as they are.
    pub fn memory_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.memory_folder = Some(folder.into());
        self
    }

    /// What executes the guest.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = accel;
        self
    }

    /// The machine type.
    pub fn machine(mut self, machine: impl Into<String>) -> Self {
        self.machine = machine.into();
        self
    }

    /// What the guest does with its memory.
    pub fn workload(mut self, workload: Workload) -> Self {
        match &mut self.kind {
            Kind::Linux(w) | Kind::Multiboot(w) => *w = workload,
            Kind::Firmware => {}
        }
        self
    }

    /// It waits for a guest to come (`-incoming defer`).
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// More arguments, at the end.
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.more.extend(args.into_iter().map(Into::into));
        self
    }

    /// Starts it, and waits until it answers on QMP. The guest need not have booted yet.
    ///
    /// # Errors
    /// It ends at once; the error has what it said.
    pub fn start(self) -> Result<Qemu> {
        let folder = Scratch::new()?;
        let memory_folder = self.memory_folder.clone().unwrap_or_else(|| folder.path().to_path_buf());
        let memory_files: Vec<_> = (0..self.backends).map(|n| memory_folder.join(format!("mem{n}"))).collect();
        let listen = |name: &str| UnixListener::bind(folder.join(name)).map_err(failed(format!("can't bind {name}")));
        let (serial, monitor) = (listen("serial")?, listen("monitor")?);

        let mut command = Command::new(&self.binary);
        command.args(self.common_args(folder.path())).args(self.memory_args(&memory_files)).args(self.guest_args()?);
        command.args(&self.more);
        let mut process = Process::start(command)?;
        let serial = Serial::new(accept(&serial, &mut process)?)?;
        let qmp = Mutex::new(Qmp::new(accept(&monitor, &mut process)?)?);
        Ok(Qemu { process, serial, qmp, memory_files, folder })
    }

    fn common_args(&self, folder: &Path) -> Vec<String> {
        let memory = if self.backends == 1 { ",memory-backend=mem0" } else { "" };
        let folder = folder.display();
        let accel = match self.accel {
            Accel::Tcg => "tcg",
            Accel::Kvm => "kvm",
        };
        // QEMU connects to our two sockets and so can't say anything before we listen; transship connects to its own.
        let text = format!(
            "-nodefaults -no-user-config -display none -accel {accel} -machine {}{memory} -m {}M \
             -chardev socket,id=qmp,path={folder}/qmp,server=on,wait=off -mon chardev=qmp,mode=control \
             -chardev socket,id=serial,path={folder}/serial -serial chardev:serial \
             -chardev socket,id=monitor,path={folder}/monitor -mon chardev=monitor,mode=control",
            self.machine, self.memory_mib
        );
        let incoming = if self.incoming { ["-incoming", "defer"].as_slice() } else { &[] };
        text.split_whitespace().chain(incoming.iter().copied()).map(str::to_owned).collect()
    }

    fn memory_args(&self, files: &[PathBuf]) -> Vec<String> {
        let size = self.memory_mib / self.backends;
        let mut args = Vec::new();
        for (n, file) in files.iter().enumerate() {
            let kind = match self.backend {
                Backend::SharedFile => format!("memory-backend-file,share=on,mem-path={}", file.display()),
                Backend::PrivateFile => format!("memory-backend-file,share=off,mem-path={}", file.display()),
                Backend::Memfd => "memory-backend-memfd,share=on".into(),
                Backend::Ram => "memory-backend-ram".into(),
            };
            args.extend(["-object".into(), format!("{kind},id=mem{n},size={size}M")]);
            if files.len() > 1 {
                args.extend(["-numa".into(), format!("node,nodeid={n},memdev=mem{n}")]);
            }
        }
        args
    }

    fn guest_args(&self) -> Result<Vec<String>> {
        let path = |name| image(name).map(|path| path.display().to_string());
        let mut args = match &self.kind {
            Kind::Linux(_) => {
                vec!["-kernel".into(), path("linux/vmlinuz")?, "-initrd".into(), path("linux/initrd.img")?]
            }
            Kind::Multiboot(_) => vec!["-kernel".into(), path("kvm.elf")?],
            Kind::Firmware => vec![],
        };
        if let Kind::Linux(workload) | Kind::Multiboot(workload) = &self.kind {
            // A panic ends QEMU, so that a test that waits learns of it at once.
            let kernel = "console=ttyS0 quiet panic=-1 mitigations=off";
            args.extend(["-append".into(), format!("{kernel} {}", workload.arguments()), "-no-reboot".into()]);
        }
        Ok(args)
    }
}

/// The other end's connection, or why there is none.
fn accept(listener: &UnixListener, process: &mut Process) -> Result<UnixStream> {
    listener.set_nonblocking(true).map_err(failed("socket"))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false).map_err(failed("socket"))?;
            return Ok(stream);
        }
        if let Some(status) = process.ended()? {
            let said = process.stderr().to_the_end()?.join("\n");
            return Err(LabError(format!("QEMU ended at once ({}): {said}", crate::process::in_words(status))));
        }
        if Instant::now() > deadline {
            return Err(LabError(format!("QEMU does not connect: {}", process.stderr().tail())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Qemu {
    /// A Linux guest with the workload, 256 MiB, emulated.
    pub fn linux() -> QemuBuilder {
        QemuBuilder::new(Kind::Linux(Workload::LINUX), 256, Accel::Tcg)
    }

    /// The 32-bit guest, 64 MiB, under KVM where that works and emulated elsewhere.
    pub fn multiboot() -> QemuBuilder {
        Self::multiboot_under(if kvm_works() { Accel::Kvm } else { Accel::Tcg })
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
        self.process.pid()
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
                return Err(LabError(format!("waiting for the state {wanted}: it is {status}")));
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
