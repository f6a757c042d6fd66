//! The file of a snapshot, whatever is in it.
//!
//! - `uri`: what a user calls it; `descriptors`: a file that was passed to us open
//! - `target`: while it is made, and what becomes of it; `opening`: how it is opened for that; `queues`: pages on their
//!   way to it; `pace`: how fast; `appending`: what has no place, in order; `sealed`: encrypted on its way
//! - `temporary`: its name until then; `folder`: the same of a folder; `filesystem`: where it lies
//! - `origin`: while it is read
pub(crate) mod appending;
pub(super) mod descriptors;
pub(crate) mod filesystem;
mod folder;
mod opening;
pub(crate) mod origin;
pub(crate) mod pace;
pub(crate) mod queues;
pub(crate) mod sealed;
pub(crate) mod target;
mod temporary;
pub(crate) mod uri;
