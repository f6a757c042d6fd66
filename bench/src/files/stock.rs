//! Snapshots by QEMU's own migration to and from a file.
use std::{
    fs::{self, File},
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Value, json};
use transship_lab::Qemu;

use super::{
    DOWNTIME_MS,
    cases::{Case, Guest, Layout},
    guests::Source,
    results::{COMPLETED, Restored, SaveRun},
};
use crate::{
    pair::text,
    processes::own_cpu_seconds,
    stock,
    units::{self, millis},
};

/// After this, or with a file so many times as large as memory, a save of a guest that writes is taken for one that
/// never ends.
const PATIENCE: Duration = Duration::from_secs(60);
pub(super) const FILE_TIMES_MAX: u64 = 4;
/// How often a save that may never end is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Saves the guest, and makes its file durable.
pub(super) fn save(source: &Source, file: &Path, case: Case, channels: u8) -> Result<SaveRun, String> {
    let qemu = &source.qemu;
    prepare(qemu, case, channels)?;
    let cpu_before = source.cpu_seconds()?;
    let (begin, since) = (Instant::now(), SystemTime::now());
    qemu.qmp("migrate", json!({ "uri": uri(file) })).map_err(text)?;
    let never_ends = |grown: u64| begin.elapsed() > PATIENCE || grown > FILE_TIMES_MAX * source.bytes;
    let (completed, status) = loop {
        let ended = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed"));
        match qemu.wait_event_within(LOOK_EVERY, "MIGRATION", ended).map_err(text)? {
            Some(data) => break (begin.elapsed(), data["status"].clone()),
            None if case.guest.runs() && never_ends(size(file)?) => {
                return given_up(source, file, begin.elapsed(), cpu_before);
            }
            None => {}
        }
    };
    if status != COMPLETED {
        let info = qemu.qmp("query-migrate", json!({})).map_err(text)?;
        return Err(stock::failure(qemu, "source", &info));
    }
    // At once: QEMU says so before it closes the file, and closing may begin to write it.
    let sync_cpu = sync(file)?;
    let durable = begin.elapsed();
    let info = qemu.qmp("query-migrate", json!({})).map_err(text)?;
    let cpu_after = source.cpu_seconds()?;
    let pause_ms = match case.guest {
        Guest::Live => Some(millis(source.stopped_at(since)?.until(since + completed))),
        Guest::Background => Some(millis(source.stopped_at(since)?.until(source.resumed_at(since)?))),
        Guest::Paused | Guest::Sparse => None,
    };
    Ok(SaveRun {
        status: COMPLETED.into(),
        ms: millis(durable),
        own_total_ms: Some(stock::number(&info, "/total-time")?),
        sync_ms: Some(millis(durable - completed)),
        pause_ms,
        pages_written: Some(stock::number(&info, "/ram/normal")? as u64),
        cpu_seconds: cpu_after - cpu_before + sync_cpu,
        ..SaveRun::of_file(file)?
    })
}

/// Loads the guest.
pub(super) fn restore(destination: &Qemu, file: &Path, case: Case, channels: u8) -> Result<Restored, String> {
    prepare(destination, Case { guest: Guest::Paused, ..case }, channels)?;
    let since = SystemTime::now();
    destination.qmp("migrate-incoming", json!({ "uri": uri(file) })).map_err(text)?;
    let is_end = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed"));
    let ended = destination.wait_event_time("MIGRATION", since, is_end).map_err(|error| {
        let said = destination.stderr().tail();
        format!("QEMU does not load its snapshot: {error}; {said}")
    })?;
    let info = destination.qmp("query-migrate", json!({})).map_err(text)?;
    if info["status"] == COMPLETED {
        Ok(Restored { time: since.until(ended), process_time: None, cpu_seconds: 0.0 })
    } else {
        Err(stock::failure(destination, "destination", &info))
    }
}

fn prepare(qemu: &Qemu, case: Case, channels: u8) -> Result<(), String> {
    let layout = case.layout;
    let mut capabilities = vec!["events"];
    if layout != Layout::Plain {
        capabilities.push("mapped-ram");
    }
    if matches!(layout, Layout::Channels | Layout::Direct) {
        capabilities.push("multifd");
    }
    if case.guest == Guest::Background {
        capabilities.push("background-snapshot");
    }
    let on = |name: &&str| json!({ "capability": name, "state": true });
    let capabilities: Vec<Value> = capabilities.iter().map(on).collect();
    let set = qemu.qmp("migrate-set-capabilities", json!({ "capabilities": capabilities }));
    let mut parameters =
        json!({ "max-bandwidth": stock::BANDWIDTH, "downtime-limit": DOWNTIME_MS, "multifd-channels": channels });
    if layout == Layout::Direct {
        parameters["direct-io"] = true.into();
    }
    set.and_then(|_| qemu.qmp("migrate-set-parameters", parameters))
        .map_err(|error| format!("{error} (QEMU 9.1 or newer is needed)"))?;
    Ok(())
}

fn uri(file: &Path) -> String {
    format!("file:{}", file.display())
}

fn size(file: &Path) -> Result<u64, String> {
    Ok(fs::metadata(file).map_err(|error| format!("{}: {error}", file.display()))?.len())
}

/// Whoever syncs a file, all of it gets to the disk. Gives our own CPU seconds in it.
fn sync(file: &Path) -> Result<f64, String> {
    let cpu = own_cpu_seconds();
    let synced = File::open(file).and_then(|file| file.sync_all());
    synced.map_err(|error| format!("can't sync {}: {error}", file.display()))?;
    Ok(own_cpu_seconds() - cpu)
}

fn given_up(source: &Source, file: &Path, after: Duration, cpu_before: f64) -> Result<SaveRun, String> {
    let cpu_seconds = source.cpu_seconds()? - cpu_before;
    let info = source.qemu.qmp("query-migrate", json!({})).map_err(text)?;
    source.qemu.qmp("migrate_cancel", json!({})).map_err(text)?;
    let is_end = |data: &Value| matches!(data["status"].as_str(), Some("cancelled" | "completed" | "failed"));
    source.qemu.wait_event("MIGRATION", is_end).map_err(text)?;
    let run = SaveRun::of_file(file)?;
    Ok(SaveRun {
        status: format!("no end: {} after {} s", units::bytes(run.file_bytes), after.as_secs()),
        ms: millis(after),
        pages_written: Some(stock::number(&info, "/ram/normal")? as u64),
        cpu_seconds,
        ..run
    })
}

/// From one moment to a later one; nothing, if a clock was set meanwhile.
pub(super) trait Until {
    fn until(self, later: SystemTime) -> Duration;
}

impl Until for SystemTime {
    fn until(self, later: SystemTime) -> Duration {
        later.duration_since(self).unwrap_or_default()
    }
}
