//! The codecs from outside: pages there and back, packets of a peer that lies, and other implementations.
#![allow(clippy::unwrap_used)]
mod common;
mod hostile;
mod roundtrip;
mod stock;
