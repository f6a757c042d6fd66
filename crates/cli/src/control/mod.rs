//! Moves and saves that run listen on a socket, by which they are asked how they do, cancelled, and told to go on.
//!
//! ```text
//!   transship move ── /run/transship/control/1234-vm1.qmp ◄── {"call":"status"} ── transship status
//!                                                         ──► {"ok":{…}} ────────►
//! ```
//!
//! One object a line, both ways; docs/protocol.md describes them.
mod client;
mod message;
mod name;
mod server;

pub(crate) use client::{Found, all, one};
pub(crate) use message::{Call, Hold, Request, State};
pub(crate) use server::{About, ControlSocket, Listening};
