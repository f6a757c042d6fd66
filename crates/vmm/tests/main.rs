//! The adapters, on real VMMs.
#![allow(clippy::unwrap_used, missing_docs)]
mod background;
mod qemu;
