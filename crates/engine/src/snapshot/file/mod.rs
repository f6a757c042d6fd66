//! The file of a snapshot, whatever is in it.
//!
//! - `uri`: what a user calls it; `descriptors`: a file that was passed to us open
//! - `target`: while it is made, and what becomes of it; `temporary`: its name until then; `filesystem`: where it lies
//! - `origin`: while it is read
mod descriptors;
mod filesystem;
pub(crate) mod origin;
pub(crate) mod target;
mod temporary;
pub(crate) mod uri;
