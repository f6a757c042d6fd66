//! What a user can choose about snapshots.
use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

pub use transship_memory::FileIo;
use transship_secure::{Identities, Recipients};
use transship_wire::libvirt::Encoding;

use crate::{AtStopCommand, Converge, HoldOptions};

/// What the guest does while it is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Way {
    /// It stands still from the start to the end.
    Paused,
    /// It runs. Pages that it writes are saved again, in rounds, until the rest can be saved while it stands still for
    /// a moment.
    #[default]
    Live,
    /// It runs, and what is saved is the moment of the call: a page is saved before the first write to it goes through.
    Background,
}

/// What becomes of a guest that ran, once it is saved. After a failure it always runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Then {
    /// It runs on.
    #[default]
    Resume,
    /// It stands still, as it is in the file.
    StayStopped,
}

/// Where the guest writes to after a snapshot of its disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OverlayPlace {
    /// To a file beside each disk.
    BesideDisks,
    /// To files in this folder.
    In(PathBuf),
}

impl OverlayPlace {
    pub(crate) fn folder(&self) -> Option<&Path> {
        match self {
            Self::BesideDisks => None,
            Self::In(folder) => Some(folder),
        }
    }
}

/// Whether pages go past the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectIo {
    /// Through the page cache.
    Off,
    /// Past it; where the file system refuses that, nothing is done.
    On,
    /// Past it where the file system can.
    #[default]
    Auto,
}

/// The layout of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Every page has its place (QEMU's `mapped-ram`): many writers at once, no page twice.
    #[default]
    MappedRam,
    /// One record after the other, as it would go through a socket; what is written again is appended. For QEMU before
    /// 9.0.
    Stream,
    /// A folder with guest memory as it is, a file a region, from which clones run.
    Raw,
    /// A save image of libvirt's, which `virsh restore` loads: the domain's definition, then a stream.
    Libvirt,
    /// The same with a mapped-ram file in it, for libvirt 11.2 and newer.
    LibvirtSparse,
}

impl Format {
    /// One record after the other: pages have no places that a disk could be asked for.
    pub fn is_sequential(self) -> bool {
        matches!(self, Self::Stream | Self::Libvirt)
    }

    /// What libvirt calls the form of the stream, if the file is one of its save images.
    pub(crate) fn libvirts(self) -> Option<Encoding> {
        match self {
            Self::Libvirt => Some(Encoding::Raw),
            Self::LibvirtSparse => Some(Encoding::Sparse),
            Self::MappedRam | Self::Stream | Self::Raw => None,
        }
    }
}

impl FromStr for DirectIo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "auto" => Ok(Self::Auto),
            _ => Err("write on, off or auto".into()),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MappedRam => "mapped-ram",
            Self::Stream => "stream",
            Self::Raw => "raw",
            Self::Libvirt => "libvirt",
            Self::LibvirtSparse => "libvirt-sparse",
        })
    }
}

/// Options of a save.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// What the guest does meanwhile.
    pub way: Way,
    /// What becomes of it afterwards.
    pub then: Then,
    /// 1 to 255 threads that write. A stream has one.
    pub channels: u8,
    /// Whether pages go past the page cache. A stream goes through it, and so does an image unless it is asked for.
    pub direct_io: DirectIo,
    /// The layout of the file.
    pub format: Format,
    /// How long a live guest may stand still.
    pub downtime: Duration,
    /// The same, rather than that the save is given up.
    pub max_downtime: Duration,
    /// Rounds after which a live guest that writes faster than the disk gets its verdict.
    pub max_rounds: u32,
    /// What is done so that the rest of a live guest becomes small enough.
    pub converge: Converge,
    /// Runs while the guest stands still, when its state is saved; a failure ends the save.
    pub at_stop: Option<AtStopCommand>,
    /// A snapshot of the disks is taken in the same moment, by who keeps the guest; none: they are left alone.
    pub disks: Option<OverlayPlace>,
    /// Of a live guest: kept ready, when it has converged, until it is told to go on; none: it goes on by itself.
    pub hold: Option<HoldOptions>,
    /// How the kernel is asked to write pages.
    pub io: FileIo,
    /// Those who can read the file, which is encrypted for them; it is a plain stream. None: it is in clear.
    pub encrypt_to: Option<Recipients>,
    /// The most bytes of pages a second while the guest runs; none: as fast as it goes.
    pub bandwidth: Option<u64>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            way: Way::default(),
            then: Then::default(),
            channels: default_channels(),
            direct_io: DirectIo::default(),
            format: Format::default(),
            downtime: Duration::from_millis(300),
            max_downtime: Duration::ZERO,
            max_rounds: 30,
            converge: Converge::default(),
            at_stop: None,
            disks: None,
            hold: None,
            io: FileIo::default(),
            encrypt_to: None,
            bandwidth: None,
        }
    }
}

/// Options of a restore.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// 1 to 255 threads that read.
    pub channels: u8,
    /// Whether pages go past the page cache.
    pub direct_io: DirectIo,
    /// How the kernel is asked to read pages.
    pub io: FileIo,
    /// Whether it runs afterwards; none: if it ran when it was saved.
    pub run: Option<bool>,
    /// The keys of an encrypted file; none: it is in clear.
    pub identities: Option<Identities>,
}

impl Default for RestoreOptions {
    fn default() -> Self {
        Self {
            channels: default_channels(),
            direct_io: DirectIo::default(),
            io: FileIo::default(),
            run: None,
            identities: None,
        }
    }
}

fn default_channels() -> u8 {
    std::thread::available_parallelism().map_or(2, |n| n.get().min(16) as u8)
}
