//! A move by QEMU's own migration.
use std::time::Instant;

use serde_json::{Value, json};
use transship_tests::Qemu;

use crate::{
    pair::{Pair, text},
    results::{Check, Cpu, Mode, QemuRun, Sides},
};

/// Bytes a second, and so no limit.
const BANDWIDTH: u64 = 1 << 40;

/// Moves the guest, and says what it took.
pub(crate) fn run(pair: &Pair, mode: Mode) -> Result<QemuRun, String> {
    prepare(pair, mode)?;
    let uri = format!("unix:{}", pair.destination.folder().join("migration").display());
    pair.destination.qmp("migrate-incoming", json!({ "uri": uri })).map_err(text)?;
    let before = pair.cpu_seconds()?;
    let begin = Instant::now();
    pair.source.qmp("migrate", json!({ "uri": uri })).map_err(text)?;
    completed(&pair.source, "source")?;
    completed(&pair.destination, "destination")?;
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    let after = pair.cpu_seconds()?;
    let info = pair.source.qmp("query-migrate", json!({})).map_err(text)?;
    Ok(QemuRun {
        ms,
        own_total_ms: number(&info, "/total-time")?,
        wire_bytes: number(&info, "/ram/transferred")? as u64,
        cpu: Cpu {
            qemu: Sides { source: after.source - before.source, destination: after.destination - before.destination },
            transship: Sides::default(),
        },
        equal: None,
    })
}

/// The version that a QEMU gives: `10.0.2`.
pub(crate) fn version(qemu: &Qemu) -> Result<String, String> {
    let version = qemu.qmp("query-version", json!({})).map_err(text)?;
    let part = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    Ok(format!("{}.{}.{}", part("major"), part("minor"), part("micro")))
}

fn prepare(pair: &Pair, mode: Mode) -> Result<(), String> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    // Events tell when it's completed; asking again and again would take the main thread's time.
    pair.both("migrate-set-capabilities", &json!({ "capabilities": [on("events"), on("multifd")] }))?;
    let detection = match mode.check {
        Check::Main => "legacy",
        Check::Channels => "multifd",
    };
    let parameters = json!({
        "multifd-channels": mode.channels,
        "zero-page-detection": detection,
        "max-bandwidth": BANDWIDTH,
    });
    pair.both("migrate-set-parameters", &parameters).map_err(|error| format!("{error} (QEMU 9 or newer is needed)"))
}

fn completed(qemu: &Qemu, side: &str) -> Result<(), String> {
    let is_end = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed" | "cancelled"));
    let data = qemu.wait_event("MIGRATION", is_end).map_err(text)?;
    if data["status"] == "completed" {
        return Ok(());
    }
    let info = qemu.qmp("query-migrate", json!({})).map_err(text)?;
    let why = info["error-desc"].as_str().unwrap_or("it does not say why").to_owned();
    Err(format!("QEMU's own migration failed at the {side}: {why}; {}", qemu.stderr().tail()))
}

fn number(info: &Value, path: &str) -> Result<f64, String> {
    info.pointer(path).and_then(Value::as_f64).ok_or_else(|| format!("QEMU's query-migrate has no {path}: {info}"))
}
