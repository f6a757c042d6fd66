//! Moves, snapshots and relays, with guests that are a list of what they do, and peers that say what a test wants. One
//! program: each would be linked by itself.
//!
//! - Moves: `model`, `meanwhile`, `held`, `hints`, `ends`; peers that speak otherwise than the rules have it, or too
//!   little: `hostile`, `strangers`; those who measure the link before: `probed`
//! - Snapshots: `snapshot_save`, `snapshot_restore`, `snapshot_qemu`, `snapshot_convert`
//! - Stock QEMUs at the other end: `qemu_send`, `qemu_receive`; between two of them: `relay`
//! - What several of them need: `common`, `crowd`
mod common;
mod crowd;
mod ends;
mod held;
mod hints;
mod hostile;
mod meanwhile;
mod model;
mod probed;
mod qemu_receive;
mod qemu_send;
mod relay;
mod snapshot_convert;
mod snapshot_qemu;
mod snapshot_restore;
mod snapshot_save;
mod strangers;
