//! The engine's view of a guest. Adapters implement these traits; the engine never asks which VMM it is.
//!
//! ```text
//!   source        a guest that is to be moved away, or saved
//!   destination   a guest that waits for its memory and state
//!   guard         who puts a guest back as it was if whoever holds it dies
//!   hints         memory that a guest says it does not need
//!   disks         the files that its disks are in
//!   error         why an adapter could not do something
//! ```
#![forbid(unsafe_code)]
mod destination;
mod disks;
mod error;
mod guard;
mod hints;
mod source;

use transship_memory::PageRange;

pub use destination::{DestinationGuest, StateMade};
pub use disks::{DiskFile, DiskSnapshot, NO_DISK_SNAPSHOT};
pub use error::GuestError;
pub use guard::{Duty, Guard, LastWill};
pub use hints::{Hint, Hints};
pub use source::{AskOthers, AskToHold, Found, Hold, SourceGuest, Watch};

/// What a guest's device state is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateFormat {
    /// Bytes that only the VMM knows.
    Opaque,
    /// QEMU's migration stream, made with the capability `x-ignore-shared`.
    Qemu {
        /// Names of the RAM blocks of the regions, in the order of the description.
        blocks: Vec<String>,
        /// All other RAM blocks (ROMs, video memory), where they are known.
        others: Vec<DeviceBlock>,
    },
}

/// Memory of a guest that is part of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBlock {
    /// Its name in QEMU's stream.
    pub name: String,
    /// Its maximum length, because some can grow.
    pub max_bytes: u64,
}

/// Pages of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPages {
    /// Number of the region in the guest's memory.
    pub region: usize,
    /// Its pages.
    pub pages: PageRange,
}
