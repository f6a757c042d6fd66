//! Pages to and from real files: on the disk, by its own hand (O_DIRECT) and through the page cache, on tmpfs, and on a
//! disk of 4 KiB sectors.
//!
//! - `files`: ways, files and pages; `places`: pages go to their places and come back
//! - `windows`: without their zero pages
//! - `failures`: what can't be read or written; `queues`: what is in flight; `uring`: where the kernel lets io_uring be
//!   used
mod failures;
mod files;
mod places;
mod queues;
mod uring;
mod windows;
