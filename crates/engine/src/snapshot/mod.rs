//! Snapshots: a guest's memory and device state as a file in QEMU's own formats.
//!
//! - `uri`, `options`: what a user says
//! - `target`: the file while it is made, and what becomes of it; `temporary`: its name until then; `descriptors`,
//!   `filesystem`
//! - `regions`: what is saved; `output`: what is done with its pages: `mapped`, with its `layout` and the threads that
//!   write in `writer`; `stream`
//! - `state`: the part that is the VMM's; `live`: rounds of a guest that runs
//! - `background`: a save while the guest runs on; `moment`: the memory that it saves, region by region in `unsaved`
//! - `save`: the life of a save, made of these
//! - `origin`: the file that is read; `records`, `open`: what it holds, checked; `info`: shown; `fit`: whether it is
//!   the waiting guest's
//! - `plan`: where in it everything is that the guest needs; `restoring`: the steps of every way
//! - `eager`, with `pages`: into place; `recompose`, `devices`, `opaque`: the rest, as the VMM takes it; `sequential`:
//!   both from a plain stream
//! - `filling`: pages that come when they are touched; `lazy`: such a restore; `stand_in`: the process that could go on
//!   with it
//! - `restore`: the life of a restore, made of these
//! - `feed`: records on their way into a `store`, which is a file: `mapped_store`, with its `mapped_file`, whose
//!   `content` is known, and a `mapped_writer` for each thread, or `stream_store`; `convert`
mod background;
mod content;
pub(crate) mod convert;
mod descriptors;
pub(crate) mod devices;
mod eager;
pub(crate) mod feed;
mod filesystem;
mod filling;
pub(crate) mod fit;
pub(crate) mod info;
mod layout;
mod lazy;
mod live;
mod mapped;
mod mapped_file;
mod mapped_store;
mod mapped_writer;
mod moment;
mod opaque;
mod open;
mod options;
pub(crate) mod origin;
mod output;
mod pages;
pub(crate) mod pieces;
mod plan;
pub(crate) mod recompose;
pub(crate) mod records;
mod regions;
mod restore;
mod restoring;
mod save;
mod sequential;
mod stand_in;
mod standing;
mod state;
pub(crate) mod store;
mod stored;
mod stream;
mod stream_store;
pub(crate) mod target;
mod temporary;
mod unsaved;
mod uri;
mod writer;

pub(crate) use regions::{RegionBlock, region_blocks};
pub(crate) use standing::keep_from_running;
pub(crate) use state::{DeviceState, machine_name};

pub use convert::convert;
pub use info::{BlockInfo, SectionInfo, SnapshotInfo, inspect};
pub use options::{DirectIo, FileIo, Format, RestoreOptions, SaveOptions, Then, Way};
pub use restore::restore_guest;
pub use save::save_guest;
pub use stand_in::{Ending, StandIn, TakeOver};
pub use uri::{FilePlace, FileUri};
