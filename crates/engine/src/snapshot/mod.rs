//! Snapshots: a guest's memory and device state as a file in QEMU's own formats.
//!
//! - `uri`, `options`: what a user says
//! - `target`: the file while it is made: a temporary name, locks, what becomes of it
mod descriptors;
mod filesystem;
mod options;
mod uri;

pub use options::{DirectIo, FileIo, Format, RestoreOptions, SaveOptions, Then, Way};
pub use uri::{FilePlace, FileUri};
