//! Guest memory from outside, on real files and against the real kernel.
#![allow(clippy::unwrap_used)]
mod common;
mod file_io;
mod given_back;
mod keep;
mod lent;
mod missing;
mod possible;
mod private;
mod protect;
mod region;
mod send;
mod slots;
mod sync_tracker;
mod tracker;
