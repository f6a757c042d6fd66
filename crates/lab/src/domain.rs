//! Domains of libvirt, with the guests of the lab in them.
use crate::launch::KERNEL_WORDS;
use crate::serial::Serial;
use crate::{Accel, Kind, LabError, LibvirtHost, PATIENCE, Result, Scratch, Workload, failed, image};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// A domain as virt-install makes it: private memory, a raw disk past the page cache, a network card. Its serial port
/// comes to us, wherever it runs.
#[derive(Debug)]
pub struct Domain {
    name: String,
    xml: PathBuf,
    disk: PathBuf,
    listener: UnixListener,
    folder: Scratch,
}

/// What a domain's disk is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    /// As it is.
    Raw,
    /// QEMU's own.
    Qcow2,
}

impl DiskFormat {
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    fn make(self, path: &Path) -> Result<PathBuf> {
        let path = path.with_extension(self.name());
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", self.name()]).arg(&path).arg("16M");
        match command.status().map_err(failed("qemu-img"))?.success() {
            true => Ok(path),
            false => Err(LabError("qemu-img makes no disk".into())),
        }
    }
}

struct DomainDisk {
    path: PathBuf,
    format: DiskFormat,
    /// The guest writes and checks so much of it.
    checked_mib: u32,
}

impl Domain {
    /// A Linux guest with the workload, 256 MiB, emulated.
    ///
    /// # Errors
    /// No room.
    pub fn linux(name: &str) -> Result<Self> {
        Self::new(name, &Kind::Linux(Workload::LINUX), 256, Accel::Tcg)
    }

    /// The 32-bit guest, 64 MiB, which is there at once: under KVM where that works, else emulated.
    ///
    /// # Errors
    /// No room.
    pub fn multiboot(name: &str) -> Result<Self> {
        let accel = Accel::best();
        Self::new(name, &Kind::Multiboot(Workload::MULTIBOOT), 64, accel)
    }

    /// The Linux guest, which writes and checks its disk, too.
    ///
    /// # Errors
    /// No room.
    pub fn with_disk(name: &str, format: DiskFormat) -> Result<Self> {
        Self::made(name, &Kind::Linux(Workload::LINUX), 256, Accel::Tcg, (format, 8))
    }

    /// A guest that writes as this says.
    ///
    /// # Errors
    /// No room.
    pub fn new(name: &str, kind: &Kind, mib: u32, accel: Accel) -> Result<Self> {
        Self::made(name, kind, mib, accel, (DiskFormat::Raw, 0))
    }

    fn made(name: &str, kind: &Kind, mib: u32, accel: Accel, disk: (DiskFormat, u32)) -> Result<Self> {
        // A disk is opened past the page cache, for which it is seldom on a tmpfs.
        let folder = Scratch::within(Path::new("/var/tmp"))?;
        let (serial, xml) = (folder.join("serial"), folder.join("domain.xml"));
        let (format, checked_mib) = disk;
        let disk = DomainDisk { path: format.make(&folder.join("disk"))?, format, checked_mib };
        let listener = UnixListener::bind(&serial).map_err(failed("a serial port"))?;
        listener.set_nonblocking(true).map_err(failed("a serial port"))?;
        let mut file = std::fs::File::create(&xml).map_err(failed("a domain"))?;
        file.write_all(definition(name, kind, mib, accel, &disk, &serial)?.as_bytes()).map_err(failed("a domain"))?;
        Ok(Self { name: name.into(), xml, disk: disk.path, listener, folder })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where its disk is; also a place for what is saved of it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The file that its disk was in when it was made.
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// Its definition.
    pub fn xml(&self) -> &Path {
        &self.xml
    }

    /// Starts it on a host, and waits until its workload has filled its memory.
    ///
    /// # Errors
    /// libvirt refuses; it does not boot.
    pub fn start(&self, host: &LibvirtHost) -> Result<Serial> {
        host.virsh(&["create", &self.xml.to_string_lossy()])?;
        let serial = self.serial()?;
        serial.ready()?;
        Ok(serial)
    }

    /// The serial port of the QEMU that was started last.
    ///
    /// # Errors
    /// None comes in time.
    pub fn serial(&self) -> Result<Serial> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok((stream, _)) = self.listener.accept() {
                stream.set_nonblocking(false).map_err(failed("serial port"))?;
                return Serial::new(stream);
            }
            if Instant::now() > deadline {
                return Err(LabError(format!("domain {} opens no serial port", self.name)));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

fn definition(name: &str, kind: &Kind, mib: u32, accel: Accel, disk: &DomainDisk, serial: &Path) -> Result<String> {
    let path = |name| image(name).map(|path| path.display().to_string());
    let DomainDisk { path: disk, format, checked_mib } = disk;
    let (disk, format, serial) = (disk.display(), format.name(), serial.display());
    // As where QEMU is started without libvirt.
    let firmware = "<loader type='rom'>/usr/share/qemu/qboot.rom</loader>";
    let os = match kind {
        Kind::Linux(workload) => format!(
            "{firmware}<kernel>{}</kernel><initrd>{}</initrd><cmdline>{KERNEL_WORDS} workload.disk={checked_mib} {}</cmdline>",
            path("linux/vmlinuz")?,
            path("linux/initrd.img")?,
            workload.arguments()
        ),
        Kind::Multiboot(workload) => {
            let kernel = path("kvm.elf")?;
            format!("{firmware}<kernel>{kernel}</kernel><cmdline>{KERNEL_WORDS} {}</cmdline>", workload.arguments())
        }
        Kind::Firmware => String::new(),
    };
    let kind = match accel {
        Accel::Tcg => "qemu",
        Accel::Kvm => "kvm",
    };
    Ok(format!(
        "<domain type='{kind}'><name>{name}</name><memory unit='MiB'>{mib}</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type>{os}</os><features><acpi/></features><on_reboot>destroy</on_reboot>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file' device='disk'><driver name='qemu' type='{format}' cache='none'/><source file='{disk}'/><target dev='vda' bus='virtio'/></disk>
<interface type='user'><model type='virtio'/></interface>
<serial type='unix'><source mode='connect' path='{serial}'/></serial></devices></domain>\n"
    ))
}
