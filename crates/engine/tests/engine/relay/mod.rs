//! Two relays between models of QEMUs: sockets and threads that say what stock ones do, in order, at their own pace, or
//! not at all.
//!
//! - `qemus`: what a source and a waiting QEMU say; `relays`: both relays, and a link between them that can be cut
//! - `whole`: migrations that end well; `broken`: what breaks on the way; `hostile`: who speaks otherwise than the
//!   rules have it; `strangers`: who says too little (`crowd`)
#![allow(clippy::unwrap_used)]
mod broken;
mod hostile;
mod qemus;
mod relays;
mod strangers;
mod whole;
