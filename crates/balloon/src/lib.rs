//! virtio-balloon as a vhost-user back end: a device that the guest tells which of its memory is free.
//!
//! A stock QEMU (11.1 has a generic vhost-user device) gives the device to the guest and connects to this process; the
//! guest's own, unmodified driver does the rest. A program that moves or saves the guest connects to the same socket
//! and requests *hints*: which memory the guest does not need. docs/free-pages.md says when a hint may be believed.
//!
//! | module | holds |
//! | --- | --- |
//! | `hinting` | the command ids by which hints are asked for: what makes them safe |
//! | `config`, `features`, `buffers` | the device's bytes to types and back |
//! | `table` | where guest memory lies in its files, and giving parts of it back |
//! | `device` | the queues |
//! | `notifier` | telling QEMU, and through it the driver, that the configuration has changed |
//! | `outbox` | what waits to be sent to a client |
//! | `door`, `relay` | the socket, and a QEMU behind it; `end`: how they end |
//! | `session`, `message` | a client behind it: the control protocol |
//! | `client` | the other end of that |
//!
//! Nothing that the guest writes is believed: a bad address or length only costs the guest its own memory, and hints
//! that make no sense are dropped, which is always safe.
#![forbid(unsafe_code)]

mod buffers;
mod client;
mod config;
mod device;
mod door;
mod end;
mod features;
mod hinting;
mod message;
#[cfg(test)]
mod model;
mod notifier;
mod outbox;
mod relay;
mod session;
mod table;

pub use client::{Client, Error};
pub use door::serve;
pub use end::End;
pub use message::{Description, FileRange, Statistics};
