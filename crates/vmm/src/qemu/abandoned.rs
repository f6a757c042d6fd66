//! A source that somebody stopped and then left, by dying: it is let run again.
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use transship_engine::guest::GuestError;

use super::{checks, migration, qmp::Qmp};

/// The dead process's connection is closed by the kernel, but QEMU takes a moment to notice before it serves the next.
const CONNECT_WAIT: Duration = Duration::from_secs(30);
const CANCEL_WAIT: Duration = Duration::from_secs(30);

/// Ends what is left of saving the device state, and lets the guest run.
pub(crate) fn resume(socket: &Path) -> Result<(), GuestError> {
    let deadline = Instant::now() + CONNECT_WAIT;
    let mut qmp = loop {
        match Qmp::connect(socket) {
            Ok(qmp) => break qmp,
            Err(error) if Instant::now() > deadline || crate::is_gone(socket) => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    };
    migration::cancel(&mut qmp, CANCEL_WAIT)?;
    migration::forget_settings(&mut qmp)?;
    if checks::run_state(&mut qmp)? != "running" {
        qmp.execute("cont", json!({}))?;
    }
    Ok(())
}
