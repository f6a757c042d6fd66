//! What we send to a waiting QEMU, taken apart by a model of one that is as strict as the rules: barriers, zero pages,
//! what comes when. And what becomes of the guest if that QEMU says no, or nothing.
//!
//! - `guest`: what is sent; `wires`: what both are told; `model`: the QEMU that waits, and how one sends to it
//! - `arrives`: what arrives is what the guest held; `verdicts`: whatever the QEMU says, the guest runs in one place at
//!   most
#![allow(clippy::unwrap_used)]
mod arrives;
mod guest;
mod model;
mod verdicts;
mod wires;
