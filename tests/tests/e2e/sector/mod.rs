//! A guest that fits into the boot sector of its disk: it counts in its memory, and goes to sleep when it is told to.
use std::{
    fs::{self, File, OpenOptions},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rustix::{fs::FallocateFlags, process::Signal};
use serde_json::json;
use transship_lab::{
    Finished, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, lines::Mark, transship::TransshipBuilder,
    wait_until,
};

/// What the guest is to do next: 0 is to count on.
const COMMAND: u64 = 0x8000;
pub(crate) const SLEEP: u8 = 1;
pub(crate) const WRITE: u8 = 2;
pub(crate) const PANIC: u8 = 3;
pub(crate) const POWER_OFF: u8 = 4;
/// How far it has counted.
const COUNT: u64 = 0x8004;
/// Sectors of the disk that are written by `write_to_disk`.
const DISK_BYTES: u64 = 1 << 20;

/// In 16-bit mode. (Its listing is in the comments; there is no assembler to rely on.)
#[rustfmt::skip]
const CODE: [u8; 88] = [
    0xfa, //                                cli
    0x31, 0xc0, //                          xor ax, ax
    0x8e, 0xd8, //                          mov ds, ax
    0x8e, 0xc0, //                          mov es, ax
    0x8e, 0xd0, //                          mov ss, ax
    0xbc, 0x00, 0x7c, //                    mov sp, 0x7c00
    0xc6, 0x06, 0x00, 0x80, 0x00, // done:  mov byte [0x8000], 0
    0x66, 0xff, 0x06, 0x04, 0x80, // next:  inc dword [0x8004]
    0xa0, 0x00, 0x80, //                    mov al, [0x8000]
    0x3c, 0x01, //                          cmp al, 1
    0x74, 0x10, //                          je sleep
    0x3c, 0x02, //                          cmp al, 2
    0x74, 0x1a, //                          je write
    0x3c, 0x03, //                          cmp al, 3
    0x75, 0x26, //                          jne off
    0xba, 0x05, 0x05, //                    mov dx, 0x505   ; the device that tells of a panic
    0xb0, 0x01, //                          mov al, 1
    0xee, //                                out dx, al
    0xeb, 0xdf, //                          jmp done
    0xc6, 0x06, 0x00, 0x80, 0x00, // sleep: mov byte [0x8000], 0
    0xba, 0x04, 0x06, //                    mov dx, 0x604   ; the power management, as the firmware places it
    0xb8, 0x00, 0x24, //                    mov ax, 0x2400  ; S3, now
    0xef, //                                out dx, ax
    0xeb, 0xd6, //                          jmp next
    0xb8, 0x01, 0x03, //             write: mov ax, 0x0301  ; one sector
    0xb9, 0x02, 0x00, //                    mov cx, 2       ; to the second of the disk
    0xba, 0x80, 0x00, //                    mov dx, 0x80    ; that is the first one
    0xbb, 0x00, 0x7c, //                    mov bx, 0x7c00  ; from where this code is
    0xcd, 0x13, //                          int 0x13        ; by the firmware
    0xeb, 0xc1, //                          jmp done
    0x3c, 0x04, //                   off:   cmp al, 4
    0x75, 0xc2, //                          jne next
    0xba, 0x04, 0x06, //                    mov dx, 0x604
    0xb8, 0x00, 0x20, //                    mov ax, 0x2000  ; S5, now
    0xef, //                                out dx, ax
    0xeb, 0xb4, //                          jmp done
];

/// What a firmware starts.
pub(crate) fn boot_sector(code: &[u8]) -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..code.len()].copy_from_slice(code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// A disk that several QEMUs may be given, as on shared storage.
pub(crate) struct SharedDisk(Scratch);

impl SharedDisk {
    pub(crate) fn new() -> Result<Self> {
        let folder = Scratch::on_disk()?;
        let sector = boot_sector(&CODE);
        let disk = File::create(folder.join("disk"))?;
        disk.set_len(DISK_BYTES).and_then(|()| disk.write_all_at(&sector, 0))?;
        Ok(Self(folder))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.join("disk")
    }

    /// A QEMU with this disk, which locks it.
    pub(crate) fn guest(&self) -> QemuBuilder {
        let drive = format!("if=none,id=disk,format=raw,file.locking=on,file={}", self.path().display());
        Qemu::firmware().memory(32).args(["-drive", &drive, "-device", "ide-hd,drive=disk"])
    }

    /// As `guest`, but that the disk has no room for what the guest writes, so that QEMU stops it.
    pub(crate) fn full(&self) -> QemuBuilder {
        let failing = "file.driver=blkdebug,file.inject-error.0.event=none,file.inject-error.0.iotype=write,file.inject-error.0.errno=28,file.inject-error.0.once=on";
        let image =
            format!("file.image.driver=file,file.image.locking=on,file.image.filename={}", self.path().display());
        let drive = format!("if=none,id=disk,format=raw,{failing},{image}");
        Qemu::firmware().memory(32).args(["-drive", &drive, "-device", "ide-hd,drive=disk"])
    }

    /// Whether the guest has written to it.
    pub(crate) fn is_written(&self) -> Result<bool> {
        let mut sector = [0; CODE.len()];
        File::open(self.path()).and_then(|disk| disk.read_exact_at(&mut sector, 512))?;
        Ok(sector == CODE)
    }

    /// One whose guest runs.
    pub(crate) fn booted(&self, builder: QemuBuilder) -> Result<Qemu> {
        let guest = builder.start()?;
        wait_counting(&guest)?;
        Ok(guest)
    }

    /// Makes this QEMU write to the disk, as its guest would, and checks whether the data has arrived.
    pub(crate) fn assert_writes(&self, qemu: &Qemu, byte: u8, story: &str) -> Result<()> {
        let line = format!("qemu-io disk \"write -P {byte} 4096 512\"");
        let said = qemu.qmp("human-monitor-command", json!({ "command-line": line }))?;
        let mut sector = [0; 512];
        fs::File::open(self.path()).and_then(|disk| disk.read_exact_at(&mut sector, 4096))?;
        assert_eq!(sector, [byte; 512], "{story}: {said}");
        Ok(())
    }
}

fn memory(guest: &Qemu) -> &Path {
    &guest.memory_files()[0]
}

pub(crate) fn count(guest: &Qemu) -> Result<u32> {
    let mut bytes = [0; 4];
    File::open(memory(guest)).and_then(|memory| memory.read_exact_at(&mut bytes, COUNT))?;
    Ok(u32::from_le_bytes(bytes))
}

/// Waits until it has counted on: it runs, past its firmware.
pub(crate) fn wait_counting(guest: &Qemu) -> Result<()> {
    let mut sector = [0; CODE.len()];
    wait_until("the guest to boot", || {
        File::open(memory(guest)).and_then(|memory| memory.read_exact_at(&mut sector, 0x7c00))?;
        Ok(sector == CODE)
    })?;
    let from = count(guest)?;
    wait_until("the guest to count", || Ok(count(guest)?.wrapping_sub(from) > 1000))
}

/// Tells the guest to do something, at once or as soon as it runs.
pub(crate) fn order(guest: &Qemu, command: u8) -> Result<()> {
    let memory = OpenOptions::new().write(true).open(memory(guest))?;
    Ok(memory.write_all_at(&[command], COMMAND)?)
}

/// Tells the guest, which counts, to do something, and waits for the state that QEMU is in then.
fn tell(guest: &Qemu, command: u8, state: &str) -> Result<()> {
    order(guest, command)?;
    guest.wait_status(state)
}

/// Has the guest go to sleep, and waits until it does.
pub(crate) fn go_to_sleep(guest: &Qemu) -> Result<()> {
    tell(guest, SLEEP, "suspended")
}

/// Has the guest, whose disk is [`SharedDisk::full`], write to it, and waits until QEMU stops it for that.
pub(crate) fn fill_the_disk(guest: &Qemu) -> Result<()> {
    tell(guest, WRITE, "io-error")
}

/// Has the guest panic, and waits until QEMU stops it for that.
pub(crate) fn panic(guest: &Qemu) -> Result<()> {
    tell(guest, PANIC, "guest-panicked")
}

/// Where QEMU has the first byte of this file's memory.
fn address(guest: &Qemu) -> Result<u64> {
    let path = memory(guest).display().to_string();
    let maps = fs::read_to_string(format!("/proc/{}/maps", guest.pid()))?;
    let line = maps.lines().find(|line| line.ends_with(&path)).expect("it is mapped");
    Ok(u64::from_str_radix(line.split_once('-').expect("a range").0, 16).expect("a number"))
}

/// Writes to the guest's memory as QEMU and its guest do.
pub(crate) fn poke(guest: &Qemu, at: u64, bytes: &[u8]) -> Result<()> {
    let memory = OpenOptions::new().write(true).open(format!("/proc/{}/mem", guest.pid()));
    let at = address(guest)? + at;
    Ok(memory.and_then(|memory| memory.write_all_at(bytes, at))?)
}

/// Gives a part of the guest's memory back, as its balloon does.
pub(crate) fn give_back(guest: &Qemu, part: Range<u64>) -> Result<()> {
    let memory = OpenOptions::new().write(true).open(memory(guest))?;
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(&memory, punch, part.start, part.end - part.start)?)
}

/// Reads the guest's memory as QEMU and its guest do: where it is a hole, it becomes pages of zeros.
pub(crate) fn read_as_guest(guest: &Qemu, at: u64, bytes: &mut [u8]) -> Result<()> {
    let memory = File::open(format!("/proc/{}/mem", guest.pid()));
    let at = address(guest)? + at;
    Ok(memory.and_then(|memory| memory.read_exact_at(bytes, at))?)
}

pub(crate) fn peek(guest: &Qemu, at: u64, bytes: &mut [u8]) -> Result<()> {
    Ok(File::open(memory(guest)).and_then(|memory| memory.read_exact_at(bytes, at))?)
}

/// A step at which a command stands until it is told to go on.
pub(crate) struct Gate {
    step: &'static str,
    folder: Scratch,
}

impl Gate {
    pub(crate) fn new(step: &'static str) -> Result<Self> {
        Ok(Self { step, folder: Scratch::new()? })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join("gate")
    }

    /// Has the command stand there, if the step is one of its `side`.
    pub(crate) fn arm(&self, side: &str, command: TransshipBuilder) -> TransshipBuilder {
        if !self.step.starts_with(side) {
            return command;
        }
        command.env("TRANSSHIP_FAIL_POINT", format!("{}=stall", self.step)).env("TRANSSHIP_FAIL_FILE", self.path())
    }

    /// Waits until it stands there. `command`: that or its other end.
    pub(crate) fn wait(&self, command: &mut Transship) -> Result<()> {
        wait_until(self.step, || {
            if let Some(status) = command.process().ended()? {
                return Err(LabError(format!("ended before {}, {status}: {}", self.step, command.stderr().tail())));
            }
            Ok(self.path().exists())
        })
    }

    /// It goes on, unless it is gone.
    pub(crate) fn open(&self) {
        let _ = fs::remove_file(self.path());
    }
}

/// Both ends of a move, and a socket between them.
pub(crate) struct Move {
    pub(crate) source: Transship,
    pub(crate) destination: Transship,
    pub(crate) gate: Gate,
    _folder: Scratch,
}

impl Move {
    /// Returns when it stands at the step.
    pub(crate) fn at(step: &'static str, source: &Qemu, destination: &Qemu, flags: &[&str]) -> Result<Self> {
        let folder = Scratch::new()?;
        let uri = format!("unix:{}", folder.join("s").display());
        Self::over(step, source, destination, flags, folder, [&uri, &uri])
    }

    /// `uris`: where the source connects to, and where the destination listens.
    pub(crate) fn over(
        step: &'static str,
        source: &Qemu,
        destination: &Qemu,
        flags: &[&str],
        folder: Scratch,
        [to, listen]: [&str; 2],
    ) -> Result<Self> {
        let gate = Gate::new(step)?;
        let destination = gate.arm("destination", Transship::receiving(&destination.vm(), listen)).start()?;
        destination.listening()?;
        let moving = Transship::moving(&source.vm(), to).args(["--downtime", "5s"]).args(flags.iter().copied());
        let mut source = gate.arm("source", moving).start()?;
        gate.wait(&mut source)?;
        Ok(Self { source, destination, gate, _folder: folder })
    }

    /// Lets it go on, and waits for both ends.
    pub(crate) fn finish(self) -> Result<(Finished, Finished)> {
        self.gate.open();
        Ok((self.source.wait()?, self.destination.wait()?))
    }
}

/// By Ctrl-C, which it has heard then.
pub(crate) fn cancel(command: &Transship) -> Result<()> {
    command.signal(Signal::INT)?;
    let heard = |line: &str| line.contains("cancel").then_some(());
    command.stderr().wait(Mark::START, "that it was heard", heard).map(drop)
}
