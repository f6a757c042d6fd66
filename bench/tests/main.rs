//! The tables, measured for real on little memory.
#![allow(clippy::unwrap_used)]
mod converge;
mod quick;
