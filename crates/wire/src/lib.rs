//! The bytes of a move between two transships, as types.
//!
//! A move uses one *control* connection and 1 to 255 *data* connections. Every connection opens with a
//! [`Preamble`]; then the control connection carries framed [`Message`]s both ways, and a data connection carries
//! [`Packet`] headers, each followed by its payload, from the source to the destination.
//!
//! [`relay`] has what two relays say to each other that stand between two QEMUs. [`qemu`] has the other language that
//! transship speaks: QEMU's migration stream and its mapped-ram files; [`libvirt`] what libvirt puts before them.
//!
//! This crate does no I/O and has no unsafe code. What it reads comes from a peer, so nothing is believed: each length,
//! tag and reserved field is checked where it is read, and an [`Error`] names the field and its offset.
#![forbid(unsafe_code)]

mod control;
mod error;
mod frame;
mod guest;
mod kind;
pub mod libvirt;
mod owed;
mod packet;
mod preamble;
mod probe;
pub mod qemu;
mod reader;
pub mod relay;

pub use control::{Message, Refusal};
pub use error::Error;
pub use frame::{FRAME_BYTES, Frame};
pub use guest::{GuestDescription, MAX_NAME_BYTES, MAX_REGION_BYTES, MAX_REGIONS, PAGE_BYTES, RegionDescription};
pub use kind::{MAX_MESSAGE_BYTES, MAX_REASON_BYTES, MAX_STATE_BYTES};
pub use owed::{MAX_OWED_WINDOWS, MAX_PAGES_AT_ONCE, OwedWindow, Pages};
pub use packet::{PACKET_BYTES, PAGES_PER_PACKET, Packet};
pub use preamble::{MAX_CHANNELS, PREAMBLE_BYTES, Preamble, Role, SessionId, VERSION};
pub use probe::{MAX_FILLING_BYTES, PROBE_BYTES, Probe};
