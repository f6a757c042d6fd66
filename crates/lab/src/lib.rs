//! The lab: starts real guests, transship itself and slow links, for the end-to-end tests and the benchmarks.
//!
//! Everything here is a process of its own, watched from outside. Nothing here trusts what transship says: guests are
//! asked by their serial ports, QEMU by a QMP socket of our own ([`qmp`]), memory through its file.
//!
//! - [`Qemu`]: a stock QEMU with a Linux guest, a 32-bit guest for KVM, or only its firmware
//! - [`Synthetic`]: transship's embedded guest
//! - [`Balloon`]: transship's balloon device
//! - [`Authority`]: certificates for hosts that trust each other by them
//! - [`LibvirtHost`], [`Domain`]: a libvirtd of our own, as on a host of its own, and a domain for it
//! - [`beats`]: how long a guest was not heard
//! - [`Initrd`]: another kernel that is booted, with programs of this machine
//! - [`Transship`]: one run of the command
//! - [`Proxy`]: a link that can be cut or held
//! - [`SlowLink`]: two network namespaces with a limited link between them
//! - [`Disk`]: a file system on a disk with sectors of a chosen size
//! - [`SlowDisk`]: a guest's disk that is read straight into guest memory, and slowly
//! - [`HugePool`], [`MemoryMount`]: huge pages and file systems for guest memory, as many and as large as a test says
//! - [`Scratch`]: a folder that goes away
//! - [`lacks()`]: what a test says that has not got what it needs
//!
//! Whatever is started ends when its handle is dropped, and when the test process is killed.
use std::path::PathBuf;
use std::time::Duration;

pub mod back_end;
pub mod balloon;
pub mod beats;
mod booted;
pub mod certificates;
pub mod disk;
pub mod domain;
pub mod initrd;
pub mod lacks;
pub mod launch;
pub mod libvirt;
pub mod lines;
pub mod link;
pub mod net_back_end;
mod place;
pub mod pool;
pub mod probe;
pub mod process;
pub mod proxy;
pub mod qemu;
pub mod qmp;
pub mod scratch;
pub mod serial;
mod shared_folder;
pub mod slow_disk;
pub mod synthetic;
pub mod transship;
pub mod versions;
pub mod workload;

pub use back_end::BlockBackEnd;
pub use balloon::Balloon;
pub use certificates::{Authority, Holder};
pub use disk::Disk;
pub use domain::{DiskFormat, Domain};
pub use initrd::Initrd;
pub use lacks::lacks;
pub use launch::{Accel, Backend, Kind, QemuBuilder};
pub use libvirt::{LibvirtHost, QemuLike};
pub use link::SlowLink;
pub use net_back_end::{Echo, NetBackEnd, Network};
pub use place::CONTAINED;
pub use pool::{HugePool, MemoryMount, keep_huge_pages};
pub use probe::kvm_works;
pub use process::Process;
pub use proxy::Proxy;
pub use qemu::Qemu;
pub use scratch::Scratch;
pub use shared_folder::{FileBackEnd, SharedFolder};
pub use slow_disk::SlowDisk;
pub use synthetic::{Synthetic, SyntheticBuilder};
pub use transship::{Finished, Transship, binary};
pub use versions::other_qemu;
pub use workload::{Count, Sweep, Workload};

/// How long anything may take before it is taken for stuck. Generous: the machine may be busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What went wrong in the lab, in words.
#[derive(thiserror::Error)]
#[error("{0}")]
pub struct LabError(pub String);

/// As text: it is read in the panic message of a test.
impl std::fmt::Debug for LabError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<std::io::Error> for LabError {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<rustix::io::Errno> for LabError {
    fn from(error: rustix::io::Errno) -> Self {
        Self(std::io::Error::from(error).to_string())
    }
}

impl From<serde_json::Error> for LabError {
    fn from(error: serde_json::Error) -> Self {
        Self(error.to_string())
    }
}

/// The lab's results.
pub type Result<T> = std::result::Result<T, LabError>;

/// Waits until `holds` says yes.
///
/// # Errors
/// It says no for [`PATIENCE`], or fails itself.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !holds()? {
        if std::time::Instant::now() > deadline {
            return Err(LabError(format!("waited in vain for {what}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Makes a [`LabError`] that says what was being done.
pub(crate) fn failed<E: std::fmt::Display>(doing: impl std::fmt::Display) -> impl FnOnce(E) -> LabError {
    move |error| LabError(format!("{doing}: {error}"))
}

/// The project's root folder.
pub fn root() -> PathBuf {
    let lab = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    lab.ancestors().nth(2).expect("crates/lab lies in the project's root").to_path_buf()
}

/// A guest image that `scripts/setup.sh` has made, such as `linux/vmlinuz` or `kvm.elf`.
///
/// # Errors
/// It is not there.
pub fn image(name: &str) -> Result<PathBuf> {
    let path = root().join(".guest").join(name);
    match path.exists() {
        true => Ok(path),
        false => Err(LabError(format!("{} is missing: run scripts/setup.sh (make setup)", path.display()))),
    }
}
