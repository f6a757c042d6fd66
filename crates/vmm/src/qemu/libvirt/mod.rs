//! Domains of libvirt, which keeps QEMU's QMP socket to itself: QEMU is spoken to by libvirt's monitor passthrough, and
//! whatever changes the state of the domain is done by libvirt's own calls, so that libvirt always knows it.
//!
//! ```text
//!   address    how a user names a domain
//!   library    libvirt's client library, loaded when it is needed
//!   connection a connection and a domain, as safe Rust
//!   carrier    QMP by passthrough
//!   domains    those of a host
//!   definition what libvirt must know of a domain to restore it
//!   disks      those in a definition, and a snapshot of them
//!   process    which process is the domain's QEMU
//!   claim      one transship a domain
//!   jobs       what libvirt itself has under way
//! ```
mod address;
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
mod process;

pub use address::Address;

/// A domain that runs, or is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActiveDomain {
    /// How a user names it.
    pub address: Address,
    /// The most memory that it may have.
    pub memory_bytes: u64,
}

/// Why a domain is not moved away.
pub const NO_MOVES: &str =
    "libvirt would not know that its domain has moved; move it by virsh migrate through transship relay";

#[cfg(not(feature = "libvirt"))]
mod absent;
#[cfg(not(feature = "libvirt"))]
pub use absent::active;
#[cfg(not(feature = "libvirt"))]
pub(crate) use absent::settle;
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
pub use domains::active;
