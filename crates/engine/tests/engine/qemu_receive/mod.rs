//! What stock QEMUs have sent, sent again to us: into files and into a guest; whole, cut, and changed.
//!
//! - `captured`: what they sent, and how it is sent again
//! - `files`: into files; `guests`: into a guest that waits
//! - `refused`: what can't be received, and who gives up; `changed`: anything; `hostile`: who wants to fill our memory
#![allow(clippy::unwrap_used)]
mod captured;
mod changed;
mod files;
mod guests;
mod hostile;
mod refused;
