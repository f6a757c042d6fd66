//! A stock QEMU at the other end: it speaks its own migration protocol, and nothing of ours is there.
//!
//! - `lobby`: accepts connections; `end`: where a stream ends; both for everything to which a QEMU migrates
//! - `receive`: it migrates to us; `send`: we migrate to it; `relay`: two of them, with a link of ours between
mod end;
mod lobby;
mod receive;
mod relay;
mod send;

pub use receive::{FileSink, FileSinkOptions, Sink, receive_from_qemu};
pub use relay::{RelayOptions, Relayed, relay_from_qemu, relay_many, relay_to_qemu};
pub use send::{QemuSendOptions, send_to_qemu};
