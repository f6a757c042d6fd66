//! A stock QEMU at the other end: it speaks its own migration protocol, and nothing of ours is there.
mod receive;

pub use receive::{FileSink, Sink, receive_from_qemu};
