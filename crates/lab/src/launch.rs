//! How to start a stock QEMU: as the README tells users to start theirs.
use crate::booted::Booted;
use crate::place::Place;
use crate::process::in_words;
use crate::qmp::Qmp;
use crate::serial::Serial;
use crate::{LabError, PATIENCE, Process, Qemu, Result, Workload, failed, image, kvm_works};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// What executes the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// QEMU's own emulation: works everywhere.
    Tcg,
    /// The kernel's: see [`crate::kvm_works`].
    Kvm,
}

impl Accel {
    /// KVM, where that [works](crate::kvm_works).
    pub fn best() -> Self {
        if kvm_works() { Self::Kvm } else { Self::Tcg }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        }
    }
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
    /// A shared named file.
    SharedFile,
    /// A named file that is not shared.
    PrivateFile,
    /// A memfd: shared, and without a name.
    Memfd,
    /// A memfd that is not shared.
    PrivateMemfd,
    /// QEMU's own memory, in a backend.
    Ram,
    /// The same, shared.
    SharedRam,
    /// QEMU's own memory as it comes by default, with `-m` alone.
    Default,
}

/// For the kernel of every guest. A panic ends QEMU, so that a test that waits learns of it at once. Without
/// `no_timer_check` the kernel panics where a busy host gives an emulated one too little time while it counts the
/// timer's interrupts. Its tests of its own ciphers take an emulated one most of a second.
pub(crate) const KERNEL_WORDS: &str = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check cryptomgr.notests";

/// How to start a QEMU.
#[derive(Debug, Clone)]
pub struct QemuBuilder {
    binary: String,
    kind: Kind,
    memory_mib: u32,
    backends: u32,
    backend: Backend,
    memory_folder: Option<PathBuf>,
    memory_options: String,
    is_clone: bool,
    as_by_default: bool,
    accel: Accel,
    accel_options: String,
    machine: String,
    incoming: bool,
    kernel: &'static str,
    kernel_arguments: String,
    more: Vec<String>,
    prefix: Vec<String>,
    place: Place,
    /// What its guest has said before this QEMU was started.
    greeting: String,
}

impl QemuBuilder {
    pub(crate) fn new(kind: Kind, memory_mib: u32, accel: Accel) -> Self {
        Self {
            binary: installed(),
            kind,
            memory_mib,
            backends: 1,
            backend: Backend::SharedFile,
            memory_folder: None,
            memory_options: String::new(),
            is_clone: false,
            as_by_default: false,
            accel,
            accel_options: String::new(),
            machine: "q35".into(),
            incoming: false,
            kernel: "linux/vmlinuz",
            kernel_arguments: String::new(),
            more: Vec::new(),
            prefix: Vec::new(),
            place: Place::default(),
            greeting: String::new(),
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

    /// The folder of the memory files `mem0`, `mem1`, ...; one of the lab's own otherwise. Files in it are used as they
    /// are.
    pub fn memory_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.memory_folder = Some(folder.into());
        self
    }

    /// It waits for a guest whose memory it has as a private mapping of the image in this folder.
    pub fn clone_of(mut self, image: impl Into<PathBuf>) -> Self {
        self.is_clone = true;
        self.backend(Backend::PrivateFile).memory_folder(image).memory_options("readonly=on,rom=off").incoming()
    }

    /// The one backend is called as QEMU calls its own memory, so that guests of all kinds can come from and go to each
    /// other.
    pub fn named_as_by_default(mut self) -> Self {
        self.as_by_default = true;
        self
    }

    /// More options of the memory backends, such as `prealloc=on`.
    pub fn memory_options(mut self, options: impl Into<String>) -> Self {
        self.memory_options = options.into();
        self
    }

    /// What executes the guest.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = accel;
        self
    }

    /// KVM tells of written pages by a ring of so many places for each processor (`dirty-ring-size`).
    pub fn dirty_ring(mut self, places: u32) -> Self {
        self.accel_options = format!(",dirty-ring-size={places}");
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

    /// A Linux guest's kernel, as [`image`] finds it: another one than that of most tests.
    pub fn kernel(mut self, image: &'static str) -> Self {
        self.kernel = image;
        self
    }

    /// More for the guest's kernel, behind the workload's arguments.
    pub fn append(mut self, words: &str) -> Self {
        self.kernel_arguments = words.into();
        self
    }

    /// It waits for a guest to come (`-incoming defer`).
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// Runs it by another command, such as [`crate::SlowLink::source`].
    pub fn prefix(mut self, prefix: &[String]) -> Self {
        self.prefix = prefix.to_vec();
        self
    }

    /// It is of an ordinary user's, as under libvirt. Needs root.
    pub fn of_nobody(mut self) -> Self {
        self.place.of_nobody = true;
        self
    }

    /// It is in namespaces of its own, as in a container: users, processes, networks and mounts. At
    /// [`crate::CONTAINED`] it has a folder in memory that only it sees.
    pub fn contained(mut self) -> Self {
        self.place.contained = true;
        self
    }

    /// More arguments, at the end.
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.more.extend(args.into_iter().map(Into::into));
        self
    }

    /// The program and the arguments of a clone, without its memory, its sockets and that it waits: for whoever starts
    /// clones by a command.
    ///
    /// # Errors
    /// A guest image is missing.
    pub fn words_of_a_clone(&self) -> Result<Vec<String>> {
        let accel = self.accel.name();
        let text = format!(
            "{} -nodefaults -no-user-config -display none -accel {accel} -machine {} -m {}M",
            self.binary, self.machine, self.memory_mib
        );
        let words = text.split_whitespace().map(str::to_owned);
        Ok(words.chain(self.guest_args()?).chain(self.more.iter().cloned()).collect())
    }

    /// Starts it, and waits until it answers on QMP. The guest need not have booted yet.
    ///
    /// # Errors
    /// It ends at once; the error has what it said.
    pub fn start(self) -> Result<Qemu> {
        let folder = self.place.folder()?;
        let memory_folder = self.memory_folder.clone().unwrap_or_else(|| folder.path().to_path_buf());
        let name = |n| match (self.is_clone, n) {
            (true, 0) => "memory".to_owned(),
            (true, n) => format!("memory.{n}"),
            (false, n) => format!("mem{n}"),
        };
        let memory_files: Vec<_> = (0..self.backends).map(|n| memory_folder.join(name(n))).collect();
        let listen = |name: &str| self.place.listen(&folder.join(name));
        let (serial, monitor) = (listen("serial")?, listen("monitor")?);

        let place = self.place.words();
        let mut words = self.prefix.iter().chain(&place).chain([&self.binary]);
        let mut command = Command::new(words.next().expect("at least the program"));
        command.args(words);
        command.args(self.common_args(folder.path())).args(self.memory_args(&memory_files)).args(self.guest_args()?);
        command.args(&self.more);
        let mut process = Process::start(command)?;
        let serial = Serial::behind(self.greeting, accept(&serial, &mut process)?)?;
        let monitor = accept(&monitor, &mut process)?;
        // The process that was started may be one that has started it.
        let peer = rustix::net::sockopt::socket_peercred(&monitor).map_err(failed("QEMU's process"))?;
        let qmp = Qmp::new(monitor)?;
        let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
        Ok(Qemu::new((process, pid), serial, qmp, memory_files, folder))
    }

    /// As `start`, but the guest runs and has filled its memory ([`Qemu::ready`]). That takes the Linux guest many
    /// seconds of CPU time, and the small one a second where KVM emulates it. So only the first of its kind in this
    /// process boots; all are loaded from what it was then, by QEMU's own means. Not those with more arguments, whose
    /// devices may not migrate; nor those with options of their memory, which loading might fill otherwise; nor those
    /// of another QEMU than the one that is installed, which may not know how.
    ///
    /// # Errors
    /// It ends, or does not boot in time.
    pub fn booted(self) -> Result<Qemu> {
        let is_slow = matches!((&self.kind, self.accel), (Kind::Linux(_), _) | (Kind::Multiboot(_), Accel::Kvm));
        let is_memory_plain = self.memory_folder.is_none() && self.memory_options.is_empty();
        let is_here = self.place == Place::default();
        let is_plain = is_memory_plain && self.more.is_empty() && self.binary == installed() && is_here;
        if !(is_slow && is_plain) {
            let guest = self.start()?;
            guest.ready()?;
            return Ok(guest);
        }
        let saved = Booted::of(&self)?;
        let guest = QemuBuilder { greeting: saved.greeting(), ..self.incoming() }.start()?;
        saved.load_into(&guest)?;
        Ok(guest)
    }

    /// What a guest of its kind is known by: all that its boot depends on. Where its memory lies matters only by the
    /// name that QEMU gives it.
    pub(crate) fn kind_of_guest(&self) -> String {
        let backend = if self.backend == Backend::Default { Backend::Default } else { Backend::SharedFile };
        let like_it = Self { backend, prefix: Vec::new(), ..self.clone() };
        format!("{like_it:?}")
    }

    fn common_args(&self, folder: &Path) -> Vec<String> {
        let named = self.backends == 1 && self.backend != Backend::Default;
        let memory = if named { format!(",memory-backend={}", self.block_name(0)) } else { String::new() };
        let folder = folder.display();
        let accel = format!("{}{}", self.accel.name(), self.accel_options);
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

    /// The id of a backend.
    fn block_name(&self, n: usize) -> String {
        if self.as_by_default { "pc.ram".into() } else { format!("mem{n}") }
    }

    fn memory_args(&self, files: &[PathBuf]) -> Vec<String> {
        if self.backend == Backend::Default {
            return Vec::new();
        }
        let size = self.memory_mib / self.backends;
        let mut args = Vec::new();
        for (n, file) in files.iter().enumerate() {
            let kind = match self.backend {
                Backend::SharedFile => format!("memory-backend-file,share=on,mem-path={}", file.display()),
                Backend::PrivateFile => format!("memory-backend-file,share=off,mem-path={}", file.display()),
                Backend::Memfd => "memory-backend-memfd,share=on".into(),
                Backend::PrivateMemfd => "memory-backend-memfd,share=off".into(),
                Backend::Ram => "memory-backend-ram".into(),
                Backend::SharedRam => "memory-backend-ram,share=on".into(),
                Backend::Default => continue,
            };
            let id = self.block_name(n);
            let more = match self.memory_options.as_str() {
                "" => String::new(),
                options => format!(",{options}"),
            };
            args.extend(["-object".into(), format!("{kind},id={id},size={size}M{more}")]);
            if files.len() > 1 {
                args.extend(["-numa".into(), format!("node,nodeid={n},memdev={id}")]);
            }
        }
        args
    }

    fn guest_args(&self) -> Result<Vec<String>> {
        let path = |name: &str| image(name).map(|path| path.display().to_string());
        // The usual firmware takes a second to get to the kernel, and many where KVM has to emulate what it does.
        let boot = |kernel: String| vec!["-bios".into(), "qboot.rom".into(), "-kernel".into(), kernel];
        let mut args = match &self.kind {
            Kind::Linux(_) => boot(path(self.kernel)?),
            Kind::Multiboot(_) => boot(path("kvm.elf")?),
            Kind::Firmware => vec![],
        };
        if let Kind::Linux(_) = &self.kind {
            args.extend(["-initrd".into(), path("linux/initrd.img")?]);
        }
        if let Kind::Linux(workload) | Kind::Multiboot(workload) = &self.kind {
            let words = format!("{KERNEL_WORDS} {} {}", workload.arguments(), self.kernel_arguments);
            args.extend(["-append".into(), words.trim_end().to_owned(), "-no-reboot".into()]);
        }
        Ok(args)
    }
}

fn installed() -> String {
    std::env::var("TRANSSHIP_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into())
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
            return Err(LabError(format!("QEMU ended at once ({}): {said}", in_words(status))));
        }
        if Instant::now() > deadline {
            return Err(LabError(format!("QEMU does not connect: {}", process.stderr().tail())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
