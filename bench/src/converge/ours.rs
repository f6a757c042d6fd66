//! A move by transship, in one of its ways.
use serde_json::Value;

use super::{
    Way,
    results::{Run, Waits},
};
use crate::{ours, pair::Pair};

/// Moves the guest, or tries to. `limit`: bytes a second, where the link has none of its own.
pub(super) fn moved(pair: &Pair<'_>, way: Way, channels: u8, limit: Option<u64>) -> Result<Run, String> {
    let converge = match way {
        Way::Pace => "pace",
        Way::Postcopy => "postcopy",
        _ => "never",
    };
    let mut arguments = ["--converge", converge, "--channels", &channels.to_string()].map(str::to_owned).to_vec();
    if let Some(limit) = limit {
        arguments.extend(["--bandwidth".to_owned(), format!("{limit}B/s")]);
    }
    let receiving = if way == Way::Postcopy { vec!["--postcopy".to_owned()] } else { Vec::new() };
    let moved = ours::transfer_to(&pair.ends(), &receiving, &arguments)?;
    // A verdict is an outcome, too.
    let moved = if moved.report["status"] == "not-converging" { moved } else { moved.arrived()? };
    let number = |path: &str| moved.number(path);
    let forecast_ms = moved.report.pointer("/forecast/total_ms").and_then(Value::as_f64);
    Ok(Run {
        status: moved.report["status"].as_str().unwrap_or("without a status").to_owned(),
        ms: number("/total_ms")?,
        downtime_ms: number("/downtime_ms")?,
        wire_bytes: number("/bytes/wire")? as u64,
        waits: waits(&moved.received()?)?,
        // It is about a move without post-copy.
        forecast_ms: forecast_ms.filter(|_| way != Way::Postcopy),
        ..Run::default()
    })
}

fn waits(report: &Value) -> Result<Option<Waits>, String> {
    let number = |path: &str| ours::number(report, path);
    if report.get("postcopy").is_none() {
        return Ok(None);
    }
    let count = number("/postcopy/faults")? as u64;
    let (median_ms, p99_ms) = (number("/postcopy/fault_median_ms")?, number("/postcopy/fault_p99_ms")?);
    Ok(Some(Waits { count, median_ms, p99_ms }))
}
