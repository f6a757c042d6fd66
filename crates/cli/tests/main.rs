//! The command, as a user starts it.
#![allow(clippy::unwrap_used)]
mod balloon_user;
mod cli;
mod control_user;
mod guard;
mod session;
mod snapshots;
mod warnings;
