//! How threads hand packets to each other without a lock.
//!
//! ```text
//!               spsc ring a worker, 4 places                one mpmc ring
//!   Submitter ──► ▢▢▢▢ ──► Worker 0 ──┐
//!             ──► ▢▢▢▢ ──► Worker 1 ──┼──► ▢▢▢▢▢▢▢▢▢▢▢▢ ──► Results, Results, …
//!             ──► ▢▢▢▢ ──► Worker 2 ──┘
//! ```
//!
//! - [`spsc`]: a bounded ring from one thread to one other.
//! - [`mpmc`]: a bounded ring from any threads to any threads.
//! - [`Parker`]: where a thread without work sleeps, and how it is woken without a lost wake-up.
//! - [`pool`]: the picture above, made of the three.
//!
//! No operation takes a mutex; only a thread that has nothing to do makes a system call, and only a thread that finds
//! another asleep makes one to wake it. Every ring is bounded and says when it is full.
//!
//! The interleavings are checked with loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p transship-ring --release`
#![deny(unsafe_code)]
mod parker;
mod pool;
mod sync;

#[allow(unsafe_code)]
pub mod mpmc;
#[allow(unsafe_code)]
pub mod spsc;

pub use parker::Parker;
pub use pool::{NextError, Results, Submitter, TrySubmitError, Worker, pool};

#[cfg(all(test, loom))]
mod models;
