//! Deflate, inflate and CRC-32 of Intel's ISA-L, as safe Rust.
//!
//! Only what page packets need: a whole input at once on the way out, a stream with its history on the way in. All
//! `unsafe` of the codecs' ISA-L path is in this crate; the C structures live behind `shim.c` and are opaque here.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod deflate;
#[allow(unsafe_code)]
mod ffi;
#[allow(unsafe_code)]
mod inflate;

pub use deflate::{Deflater, Ending, NoRoom, crc32};
pub use inflate::{Corrupt, Inflater, Step, StoppedAt};
