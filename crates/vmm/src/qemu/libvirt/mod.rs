//! Domains of libvirt, which keeps QEMU's QMP socket to itself: QEMU is spoken to by libvirt's monitor passthrough, and
//! whatever changes the state of the domain is done by libvirt's own calls, so that libvirt always knows it.
//!
//! ```text
//!   address    how a user names a domain
//!   library    libvirt's client library, loaded when it is needed
//!   connection a connection and a domain, as safe Rust
//!   carrier    QMP by passthrough, for a process that may have given up its rights
//!   calls      what is asked of whoever makes libvirt's calls; serving: that one; permitted: what it does of QEMU's
//!   domains    those of a host
//!   definition what libvirt must know of a domain to restore it
//!   disks      those in a definition, and a snapshot of them
//!   overlays   the files that the domain writes to from then on
//!   process    which process is the domain's QEMU
//!   claim      one transship a domain
//!   jobs       what libvirt itself has under way
//! ```
mod address;
#[cfg(feature = "libvirt")]
mod calls;
#[cfg(feature = "libvirt")]
mod carrier;
#[cfg(feature = "libvirt")]
mod claim;
#[cfg(feature = "libvirt")]
#[allow(unsafe_code)]
mod connection;
#[cfg(feature = "libvirt")]
mod definition;
#[cfg(feature = "libvirt")]
mod disks;
#[cfg(feature = "libvirt")]
mod jobs;
#[cfg(feature = "libvirt")]
#[allow(unsafe_code)]
mod library;
#[cfg(feature = "libvirt")]
mod overlays;
#[cfg(feature = "libvirt")]
mod permitted;
#[cfg(feature = "libvirt")]
mod process;
#[cfg(feature = "libvirt")]
mod serving;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use address::Address;

/// A domain that runs, or is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActiveDomain {
    /// How a user names it.
    pub address: Address,
    /// The most memory that it may have.
    pub memory_bytes: u64,
}

/// What a process that has given up its rights will want of its domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Whatever there is: it has given up nothing.
    Anything,
    /// To look which memory is written.
    Watch,
    /// To save it.
    Save {
        /// Where its overlays may be.
        overlays: OverlayFolder,
        /// The file begins with its definition, in which its passwords are.
        definition: bool,
    },
    /// To put it back as it was, if who saves it dies.
    Settle,
}

/// Where overlays of a domain's disks may be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OverlayFolder {
    /// There are to be none.
    Nowhere,
    /// Each beside its disk.
    BesideDisks,
    /// All of them here.
    In(PathBuf),
}

/// Why a domain is not moved away.
pub const NO_MOVES: &str =
    "libvirt would not know that its domain has moved; move it by virsh migrate through transship relay";

#[cfg(not(feature = "libvirt"))]
mod absent;
#[cfg(not(feature = "libvirt"))]
pub(crate) use absent::settle;
#[cfg(not(feature = "libvirt"))]
pub use absent::{active, reach_domain_by, serve_domain};
#[cfg(not(feature = "libvirt"))]
pub(super) use absent::{attach, will};

#[cfg(feature = "libvirt")]
mod attach;
#[cfg(feature = "libvirt")]
mod domains;
#[cfg(feature = "libvirt")]
pub(crate) use attach::settle;
#[cfg(feature = "libvirt")]
pub(super) use attach::{attach, will};
#[cfg(feature = "libvirt")]
pub use calls::by as reach_domain_by;
#[cfg(feature = "libvirt")]
pub use domains::active;
#[cfg(feature = "libvirt")]
pub use serving::serve as serve_domain;
