//! Bytes and types, from outside: samples, properties, and what is refused.
#![allow(clippy::unwrap_used)]
mod common;
mod golden;
mod libvirt;
mod properties;
mod qemu_golden;
mod qemu_properties;
mod qemu_refused;
mod qemu_tail;
mod refused;
mod relay;
mod streams;
