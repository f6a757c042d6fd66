//! A stock QEMU at the other end: it speaks its own migration protocol, and nothing of ours is there.
mod receive;
mod relay;
mod send;

pub use receive::{FileSink, FileSinkOptions, Sink, receive_from_qemu};
pub use relay::{RelayOptions, relay_from_qemu, relay_to_qemu};
pub use send::{QemuSendOptions, send_to_qemu};
