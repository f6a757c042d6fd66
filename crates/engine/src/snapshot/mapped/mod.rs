//! A mapped-ram file: each page has its place.
//!
//! - `layout`: these places
//! - `store`: one whose pages come from a stream, with its `file`, whose `content` is known, and a `writer` for each
//!   thread
//! - `plan`: where in one everything is that the guest needs; `pages`: into place; `devices`: the rest, as the VMM
//!   takes it
mod content;
pub(crate) mod devices;
mod file;
pub(crate) mod layout;
pub(crate) mod pages;
pub(crate) mod plan;
pub(crate) mod store;
mod writer;
