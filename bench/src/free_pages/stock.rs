//! A move by QEMU's own migration.
use std::{
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Value, json};
use transship_lab::Qemu;

use super::{DOWNTIME_MS, guests::QemuWithBalloon, results::Run};
use crate::{
    pair::text,
    stock::{BANDWIDTH, failure, number},
};

/// After this a move is taken for one that never ends.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often one is looked at. When it ended is what its events say.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Moves the guest.
pub(super) fn run(source: &QemuWithBalloon, destination: &QemuWithBalloon, channels: u8) -> Result<Run, String> {
    let (source, destination) = (&source.qemu, &destination.qemu);
    for qemu in [destination, source] {
        prepare(qemu, channels)?;
    }
    let uri = format!("unix:{}", destination.folder().join("migration").display());
    destination.qmp("migrate-incoming", json!({ "uri": uri })).map_err(text)?;
    let (begin, since) = (Instant::now(), SystemTime::now());
    source.qmp("migrate", json!({ "uri": uri })).map_err(text)?;
    let info = loop {
        let info = source.qmp("query-migrate", json!({})).map_err(text)?;
        match info["status"].as_str() {
            Some("completed") => break info,
            Some("failed") => return Err(failure(source, "source", &info)),
            _ if begin.elapsed() > PATIENCE => {
                let seconds = PATIENCE.as_secs();
                return Err(format!("QEMU's own migration has not ended after {seconds} s: {info}"));
            }
            _ => thread::sleep(LOOK_EVERY),
        }
    };
    let mut ended = since;
    for qemu in [source, destination] {
        let is_end = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed"));
        let at = qemu.wait_event_time("MIGRATION", since, is_end).map_err(text)?;
        ended = ended.max(at);
    }
    if destination.status().map_err(text)? != "running" {
        let info = destination.qmp("query-migrate", json!({})).map_err(text)?;
        return Err(failure(destination, "destination", &info));
    }
    Ok(Run {
        ms: ended.duration_since(since).unwrap_or_default().as_secs_f64() * 1e3,
        own_total_ms: Some(number(&info, "/total-time")?),
        downtime_ms: number(&info, "/downtime")?,
        wire_bytes: number(&info, "/ram/transferred")? as u64,
        rounds: number(&info, "/ram/dirty-sync-count")? as u64,
        ..Run::default()
    })
}

fn prepare(qemu: &Qemu, channels: u8) -> Result<(), String> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    let capabilities = json!({ "capabilities": [on("events"), on("multifd")] });
    let parameters = json!({
        "max-bandwidth": BANDWIDTH,
        "downtime-limit": DOWNTIME_MS,
        "multifd-channels": channels,
        "zero-page-detection": "multifd",
    });
    qemu.qmp("migrate-set-capabilities", capabilities)
        .and_then(|_| qemu.qmp("migrate-set-parameters", parameters))
        .map_err(|error| format!("{error} (QEMU 9 or newer is needed)"))?;
    Ok(())
}
