//! Real QEMUs, with a guest that writes its memory and can be looked at through the memory's file.
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::{fs::FileExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use transship_guest::{DestinationGuest, GuestError, SourceGuest};
use transship_memory::{GuestMemory, PageCount, PageNumber, PageRange, PageSet, Region, Tracker, WindowPages};
use transship_vmm::{
    AttachOptions,
    qemu::{QemuDestination, QemuSource},
};

/// Generous: the machine may be busy, and everything is emulated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const RAM_BYTES: u64 = 64 << 20;
/// Where the guest counts, and the pages to which it writes the count in turn.
const COUNTER: u64 = 0x8000;
pub(crate) const WRITTEN: PageRange = PageRange { first: PageNumber::new(0x20), count: PageCount::new(64) };

/// A boot sector for 16-bit mode. (Its listing is in the comments; there is no assembler to rely on.)
const GUEST: [u8; 44] = [
    0xfa, //                                           cli
    0x31, 0xc0, //                                     xor ax, ax
    0x8e, 0xd8, //                                     mov ds, ax
    0x66, 0xc7, 0x06, 0x00, 0x80, 0x00, 0x00, 0x00, 0x00, // mov dword [0x8000], 0
    0x66, 0xff, 0x06, 0x00, 0x80, //             next: inc dword [0x8000]
    0x66, 0xa1, 0x00, 0x80, //                         mov eax, [0x8000]
    0x89, 0xc3, //                                     mov bx, ax
    0x83, 0xe3, 0x3f, //                               and bx, 63
    0xc1, 0xe3, 0x08, //                               shl bx, 8
    0x81, 0xc3, 0x00, 0x20, //                         add bx, 0x2000
    0x8e, 0xc3, //                                     mov es, bx
    0x26, 0x66, 0xa3, 0x00, 0x00, //                   mov [es:0], eax
    0xeb, 0xe0, //                                     jmp next
];

/// A QEMU with its files. Dropping it ends it.
pub(crate) struct Qemu {
    process: Child,
    dir: TempDir,
}

impl Qemu {
    /// A machine with 64 MiB in a shared file; `more` follows on the command line.
    pub(crate) fn start(more: &[&str]) -> Self {
        Self::start_prepared(|_| (), more)
    }

    /// The same; `prepare` is given the command before it is started.
    pub(crate) fn start_prepared(prepare: impl FnOnce(&mut Command), more: &[&str]) -> Self {
        let memory = ["-object", "memory-backend-file,id=mem0,size=64M,mem-path=DIR/ram,share=on"];
        Self::start_any(prepare, &memory, more, &["-machine", "memory-backend=mem0"])
    }

    /// A machine with memory as told. `DIR` becomes the QEMU's own folder.
    pub(crate) fn start_with(memory: &[&str], more: &[&str], machine: &[&str]) -> Self {
        Self::start_any(|_| (), memory, more, machine)
    }

    fn start_any(prepare: impl FnOnce(&mut Command), memory: &[&str], more: &[&str], machine: &[&str]) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("tests need a tmpfs at /dev/shm");
        let mut disk = GUEST.to_vec();
        disk.resize(1 << 20, 0);
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        fs::write(dir.path().join("disk"), disk).unwrap();
        let fixed = [
            "-machine",
            "q35,accel=tcg",
            "-m",
            "64M",
            "-nodefaults",
            "-display",
            "none",
            "-drive",
            "if=none,id=disk,format=raw,file=DIR/disk",
            "-device",
            "ide-hd,drive=disk",
            "-qmp",
            "unix:DIR/qmp,server=on,wait=off",
            "-qmp",
            "unix:DIR/qmp2,server=on,wait=off",
        ];
        let arguments = fixed.iter().chain(machine).chain(memory).chain(more);
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(arguments.map(|argument| argument.replace("DIR", dir.path().to_str().unwrap())))
            .stdin(Stdio::null());
        prepare(&mut command);
        let process = command
            .spawn()
            .expect("qemu-system-x86_64 must be in the PATH: install the package qemu-system-x86 (version 9 or newer)");
        let mut qemu = Self { process, dir };
        let begin = Instant::now();
        while UnixStream::connect(qemu.path("qmp2")).is_err() {
            assert!(begin.elapsed() < PATIENCE, "QEMU does not open its QMP socket");
            assert_eq!(qemu.process.try_wait().unwrap(), None, "QEMU ended at once: its message is above");
            std::thread::sleep(Duration::from_millis(20));
        }
        // The sockets are there before the machine is: the first answer says that it is complete.
        qemu.status();
        qemu
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The QMP socket for the code under test.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path("qmp")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn source(&self) -> QemuSource {
        QemuSource::attach(&self.socket(), AttachOptions::default()).unwrap()
    }

    pub(crate) fn destination(&self) -> QemuDestination {
        QemuDestination::attach(&self.socket()).unwrap()
    }

    pub(crate) fn source_refusal(&self) -> GuestError {
        QemuSource::attach(&self.socket(), AttachOptions::default()).err().expect("a refusal")
    }

    pub(crate) fn destination_refusal(&self) -> GuestError {
        QemuDestination::attach(&self.socket()).err().expect("a refusal")
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// A command on the second QMP socket, by a client that shares no code with the one under test.
    pub(crate) fn qmp(&self, command: &str, arguments: Value) -> Value {
        let mut stream = UnixStream::connect(self.path("qmp2")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        writeln!(stream, "{}", json!({"execute": "qmp_capabilities"})).unwrap();
        writeln!(stream, "{}", json!({"execute": command, "arguments": arguments, "id": 2})).unwrap();
        let answers = lines.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let mut answer = answers.into_iter().find(|answer| answer["id"] == 2).unwrap();
        assert_eq!(answer.get("error"), None, "{command}");
        answer["return"].take()
    }

    pub(crate) fn status(&self) -> String {
        self.qmp("query-status", json!({}))["status"].as_str().unwrap().to_owned()
    }

    /// Everything that we set and must put back.
    pub(crate) fn settings(&self) -> (Value, Value) {
        (self.qmp("query-migrate-capabilities", json!({})), self.qmp("query-migrate-parameters", json!({})))
    }

    /// What QEMU has open, except clients of the sockets, who come and go.
    pub(crate) fn descriptors(&self) -> BTreeSet<String> {
        let list = fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let names = list.filter_map(|entry| Some(fs::read_link(entry.ok()?.path()).ok()?.display().to_string()));
        names.filter(|name| !name.starts_with("socket:")).collect()
    }

    /// How far the guest has counted.
    pub(crate) fn count(&self) -> u32 {
        let mut bytes = [0; 4];
        File::open(self.path("ram")).unwrap().read_exact_at(&mut bytes, COUNTER).unwrap();
        u32::from_le_bytes(bytes)
    }

    /// Waits until the guest has counted on by some.
    pub(crate) fn wait_counting(&self) {
        let (from, begin) = (self.count(), Instant::now());
        while self.count().wrapping_sub(from) < 10_000 {
            assert!(begin.elapsed() < PATIENCE, "the guest does not count on from {from}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the guest is past its firmware.
    pub(crate) fn wait_booted(&self) {
        let boot_sector = |memory: &Path| {
            let mut bytes = [0; GUEST.len()];
            File::open(memory).unwrap().read_exact_at(&mut bytes, 0x7c00).unwrap();
            bytes == GUEST
        };
        let begin = Instant::now();
        while !boot_sector(&self.path("ram")) {
            assert!(begin.elapsed() < PATIENCE, "the guest does not boot");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.wait_counting();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// How QEMU saves the state of its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saves {
    /// By a migration.
    Migrating,
    /// By a command for that.
    Alone,
}

impl Saves {
    pub(crate) const BOTH: [Self; 2] = [Self::Migrating, Self::Alone];

    pub(crate) fn source(self, qemu: &Qemu) -> QemuSource {
        let mut source = qemu.source();
        if self == Self::Alone {
            source.hurry_state();
        }
        source
    }

    /// What QEMU calls its guest then.
    pub(crate) fn status(self) -> &'static str {
        match self {
            Self::Migrating => "postmigrate",
            Self::Alone => "paused",
        }
    }
}

/// Two equal QEMUs, the first booted, the second waiting.
pub(crate) fn pair() -> (Qemu, Qemu) {
    let source = Qemu::start(&[]);
    let destination = Qemu::start(&["-incoming", "defer"]);
    source.wait_booted();
    (source, destination)
}

/// Copies pages from one guest to the other.
pub(crate) fn copy(from: &Region, to: &Region, pages: &PageSet) {
    for WindowPages { first, mask: present } in pages.windows() {
        let mut bytes = Vec::new();
        from.copy_out(first.masked(present), &mut bytes).unwrap();
        to.write_pages(first.masked(present), &bytes).unwrap();
    }
}

pub(crate) fn clear(memory: &GuestMemory) {
    for region in memory.regions() {
        region.clear(PageRange::all(region.pages())).unwrap();
    }
}

/// Moves all memory as the engine does: a first round, another while the guest runs, the last when it stands.
pub(crate) fn move_memory(source: &mut dyn SourceGuest, destination: &dyn DestinationGuest) {
    let (from, to) = (source.memory(), destination.memory());
    clear(&to);
    let mut tracker = source.track().unwrap();
    for _ in 0..3 {
        round(tracker.as_mut(), &from, &to);
    }
    source.stop().unwrap();
    round(tracker.as_mut(), &from, &to);
}

fn round(tracker: &mut dyn Tracker, from: &GuestMemory, to: &GuestMemory) {
    for (index, region) in from.regions().iter().enumerate() {
        let written = tracker.scan(index).unwrap();
        copy(region, &to.regions()[index], &written);
    }
}
