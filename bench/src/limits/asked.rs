//! How long QEMU takes to say what whoever attaches from outside has to know at least: whether its guest runs, whether
//! somebody migrates it, and what memory it has.
use std::{os::unix::net::UnixStream, time::Instant};

use serde_json::json;
use transship_lab::{Qemu, qmp::Qmp};

use crate::{pair::text, units::millis};

/// Milliseconds from the call until all is said. Nobody else may be connected to where others attach.
pub(crate) fn asked(qemu: &Qemu) -> Result<f64, String> {
    let path = qemu.qmp_path();
    let none = || json!({});
    let blocks = json!({ "command-line": "info ramblock" });
    let questions = [
        ("query-status", none()),
        ("query-migrate", none()),
        ("query-memdev", none()),
        ("human-monitor-command", blocks),
    ];
    let begin = Instant::now();
    let socket = UnixStream::connect(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Qmp::new(socket).and_then(|mut qmp| qmp.execute_together(&questions)).map_err(text)?;
    Ok(millis(begin.elapsed()))
}
