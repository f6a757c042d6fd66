//! Snapshots: a guest's memory and device state as a file in QEMU's own formats.
//!
//! - `options`: what a user says
//! - `file`: the file itself, while it is made or read, whatever is in it
//! - `mapped`: one in which each page has its place; `stream_store`: one record after the other, in the form that
//!   [`crate::stream`] knows
//! - `image`: a folder of files, of which guests are clones
//! - `save_image`: what libvirt puts around it
//! - `open`: what a file holds, checked; `info`: shown; `read_stream`: into a store
//! - `save`, `restore`, `convert`: what is done with it
pub(crate) mod convert;
pub(crate) mod file;
mod image;
mod info;
mod mapped;
mod open;
mod options;
mod read_stream;
mod restore;
mod save;
mod save_image;
mod stream_store;

pub use convert::convert;
pub use file::uri::{FilePlace, FileUri};
pub use image::arguments::arguments;
pub use info::{BlockInfo, DisksInfo, LibvirtInfo, SectionInfo, SnapshotInfo, inspect};
pub use options::{DirectIo, FileIo, Format, OverlayPlace, RestoreOptions, SaveOptions, Then, Way};
pub use restore::{CloneSource, clone_guest, restore_guest, stand_in::TakeOver};
pub use save::save_guest;
