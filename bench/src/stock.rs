//! A move by QEMU's own migration.
use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use transship_lab::Qemu;

use crate::{
    pair::{Pair, text},
    results::{Cpu, QemuRun, Sides},
};

/// Bytes a second, and so no limit.
pub(crate) const BANDWIDTH: u64 = 1 << 40;
/// In a network namespace of its own, where every port is free.
const PORT: u16 = 4444;
/// How often a move that may never end is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Moves the guest, which has to arrive, and says what it took.
pub(crate) fn run(pair: &Pair<'_>, parameters: Value) -> Result<QemuRun, String> {
    prepare(pair, parameters)?;
    run_prepared(pair, start)
}

/// As [`run`], of two that know their parameters already, and that are started so.
pub(crate) fn run_prepared<'a>(
    pair: &Pair<'a>,
    start: impl FnOnce(&Pair<'a>) -> Result<Instant, String>,
) -> Result<QemuRun, String> {
    let before = pair.cpu_seconds()?;
    let begin = start(pair)?;
    completed(&pair.source, "source")?;
    completed(&pair.destination, "destination")?;
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    let info = pair.source.qmp("query-migrate", json!({})).map_err(text)?;
    ran(pair, before, ms, &info)
}

/// As [`run`], but a guest that writes may stay where it is: no run then. The second is QEMU's own word at the end.
pub(crate) fn run_within(
    pair: &Pair<'_>,
    parameters: Value,
    patience: Duration,
) -> Result<(Option<QemuRun>, Value), String> {
    prepare(pair, parameters)?;
    follow(pair, patience, |_| Ok(()))
}

/// As [`run_within`], of two that know their parameters already; `look` is shown QEMU's word now and then.
pub(crate) fn follow(
    pair: &Pair<'_>,
    patience: Duration,
    mut look: impl FnMut(&Value) -> Result<(), String>,
) -> Result<(Option<QemuRun>, Value), String> {
    let before = pair.cpu_seconds()?;
    let begin = start(pair)?;
    loop {
        let info = pair.source.qmp("query-migrate", json!({})).map_err(text)?;
        look(&info)?;
        match info["status"].as_str() {
            Some("completed") => {
                completed(&pair.destination, "destination")?;
                return Ok((Some(ran(pair, before, number(&info, "/total-time")?, &info)?), info));
            }
            Some("failed") => return Err(failure(&pair.source, "source", &info)),
            _ if begin.elapsed() > patience => {
                pair.source.qmp("migrate_cancel", json!({})).map_err(text)?;
                return Ok((None, info));
            }
            _ => thread::sleep(LOOK_EVERY),
        }
    }
}

/// The version that a QEMU gives: `10.0.2`.
pub(crate) fn version(qemu: &Qemu) -> Result<String, String> {
    let version = qemu.qmp("query-version", json!({})).map_err(text)?;
    let part = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    Ok(format!("{}.{}.{}", part("major"), part("minor"), part("micro")))
}

/// Tells both what they need to know before.
pub(crate) fn prepare(pair: &Pair<'_>, parameters: Value) -> Result<(), String> {
    [&pair.destination, &pair.source].into_iter().try_for_each(|qemu| set(qemu, &parameters))
}

/// Has a QEMU send or receive by channels with these parameters, as fast as it can, and say when it is done.
pub(crate) fn set(qemu: &Qemu, parameters: &Value) -> Result<(), String> {
    let on = |name: &str| json!({ "capability": name, "state": true });
    // Events tell when it's completed; asking again and again would take the main thread's time.
    let capabilities = json!({ "capabilities": [on("events"), on("multifd")] });
    qemu.qmp("migrate-set-capabilities", capabilities).map_err(text)?;
    let mut parameters = parameters.clone();
    parameters["max-bandwidth"] = BANDWIDTH.into();
    let set = qemu.qmp("migrate-set-parameters", parameters);
    set.map(drop).map_err(|error| format!("{error} (QEMU 9 or newer is needed)"))
}

/// Where both find each other, on one host.
pub(crate) fn socket(pair: &Pair<'_>) -> String {
    format!("unix:{}", pair.destination.folder().join("migration").display())
}

/// A source that waits for the last word says later that it is done.
pub(crate) fn with_return_path(source: &Qemu) -> Result<(), String> {
    switch(source, "return-path", true)
}

/// Switches one of the capabilities of a migration.
pub(crate) fn switch(qemu: &Qemu, capability: &str, state: bool) -> Result<(), String> {
    let wanted = json!({ "capabilities": [{ "capability": capability, "state": state }] });
    qemu.qmp("migrate-set-capabilities", wanted).map_err(text).map(drop)
}

/// From here on it takes time.
pub(crate) fn start(pair: &Pair<'_>) -> Result<Instant, String> {
    let (listen, to) = match pair.link {
        None => (socket(pair), socket(pair)),
        Some(link) => (format!("tcp:0.0.0.0:{PORT}"), link.destination_uri(PORT)),
    };
    pair.destination.qmp("migrate-incoming", json!({ "uri": listen })).map_err(text)?;
    let begin = Instant::now();
    pair.source.qmp("migrate", json!({ "uri": to })).map_err(text)?;
    Ok(begin)
}

fn ran(pair: &Pair<'_>, before: Sides<f64>, ms: f64, info: &Value) -> Result<QemuRun, String> {
    Ok(QemuRun {
        ms,
        own_total_ms: number(info, "/total-time")?,
        downtime_ms: number(info, "/downtime")?,
        wire_bytes: number(info, "/ram/transferred")? as u64,
        cpu: Cpu { qemu: pair.cpu_seconds()?.less(before), transship: Sides::default() },
        equal: None,
    })
}

/// Waits for its end, which is an error if it is not a good one.
pub(crate) fn completed(qemu: &Qemu, side: &str) -> Result<(), String> {
    let is_end = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed" | "cancelled"));
    let data = qemu.wait_event("MIGRATION", is_end).map_err(text)?;
    if data["status"] == "completed" {
        return Ok(());
    }
    let info = qemu.qmp("query-migrate", json!({})).map_err(text)?;
    Err(failure(qemu, side, &info))
}

/// Why it failed, as far as QEMU says.
pub(crate) fn failure(qemu: &Qemu, side: &str, info: &Value) -> String {
    let why = info["error-desc"].as_str().unwrap_or("it does not say why");
    format!("QEMU's own migration failed at the {side}: {why}; {}", qemu.stderr().tail())
}

/// A number of the answer to `query-migrate`.
pub(crate) fn number(info: &Value, path: &str) -> Result<f64, String> {
    info.pointer(path).and_then(Value::as_f64).ok_or_else(|| format!("QEMU's query-migrate has no {path}: {info}"))
}
