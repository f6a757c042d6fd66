//! What there is to say of a VM before anything is done with it.
use serde::Serialize;

/// A VM, and what would work with it.
#[derive(Debug, Clone, Serialize)]
pub struct Looked {
    /// Name and version of the VMM.
    pub vmm: String,
    /// Its process.
    pub pid: i32,
    /// The machine type; none if it could not be known.
    pub machine: Option<String>,
    /// What its guest does: `running`, `paused`, `inmigrate` (it waits for one), …
    pub state: String,
    /// Version of the kernel.
    pub kernel: String,
    /// Guest memory.
    pub memory: Vec<MemoryFound>,
    /// Disks and what is between them and the guest.
    pub disks: Vec<DiskFound>,
    /// Devices that the VM was given.
    pub devices: Vec<DeviceFound>,
    /// What transship may do with the VMM's process.
    pub rights: Vec<Use>,
    /// What can be done with the VM.
    pub uses: Vec<Use>,
    /// What may be in the way, and can't be known for certain; each with its cure.
    pub doubts: Vec<String>,
}

/// A piece of guest memory.
#[derive(Debug, Clone, Serialize)]
pub struct MemoryFound {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// How the VMM holds it, in words.
    pub kind: String,
    /// Size of its pages.
    pub page_bytes: u64,
}

/// A disk.
#[derive(Debug, Clone, Serialize)]
pub struct DiskFound {
    /// Its name.
    pub name: String,
    /// What reads it.
    pub driver: String,
    /// Past the page cache (O_DIRECT).
    pub direct: bool,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceFound {
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: String,
}

/// Something to be done, and whether it would be.
#[derive(Debug, Clone, Serialize)]
pub struct Use {
    /// What: the command, or the right.
    pub what: String,
    /// Nothing that is known beforehand is in the way.
    pub works: bool,
    /// What is in the way, each with its cure.
    pub why_not: Vec<String>,
}

impl Use {
    /// It works where nothing is in the way.
    pub(crate) fn of(what: &str, why_not: Vec<String>) -> Self {
        Self { what: what.to_owned(), works: why_not.is_empty(), why_not }
    }
}

impl Looked {
    /// Whether the first of what could be done with it would work: to move it away, to save it where it is libvirt's,
    /// or to receive a guest.
    pub fn is_fit(&self) -> bool {
        self.uses.first().is_some_and(|first| first.works)
    }
}
