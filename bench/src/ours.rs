//! A move by transship: two processes beside the two QEMUs.
use std::time::Instant;

use serde_json::Value;
use transship_tests::{Finished, Transship};

use crate::{
    pair::{Pair, text},
    processes,
    results::{Check, Cpu, Mode, OurRun, Sides},
};

/// Moves the guest, and says what it took.
pub(crate) fn run(pair: &Pair, mode: Mode) -> Result<OurRun, String> {
    let listen = format!("unix:{}", pair.destination.folder().join("move").display());
    let check = match mode.check {
        Check::Main => "main",
        Check::Channels => "channels",
    };
    let before = pair.cpu_seconds()?;
    let mut receiving = Transship::receiving(&pair.destination.vm(), &listen).start().map_err(text)?;
    let to = receiving.listening().map_err(text)?;
    let begin = Instant::now();
    let moving = Transship::moving(&pair.source.vm(), &to).args([
        "--channels",
        &mode.channels.to_string(),
        "--zero-pages",
        check,
    ]);
    let mut moving = moving.start().map_err(text)?;
    let [source, destination] = processes::follow([moving.process(), receiving.process()], begin)?;
    let after = pair.cpu_seconds()?;
    let report = ended(moving)?;
    ended(receiving)?;
    let number = |path: &str| number(&report, path);
    Ok(OurRun {
        ms: number("/total_ms")?,
        process_ms: source.ended_after.as_secs_f64() * 1e3,
        setup_ms: number("/setup_ms")?,
        rounds_ms: rounds_ms(&report)?,
        pages_read: (number("/pages/normal")? + number("/pages/zero")?) as u64,
        wire_bytes: number("/bytes/wire")? as u64,
        cpu: Cpu {
            qemu: Sides { source: after.source - before.source, destination: after.destination - before.destination },
            transship: Sides { source: source.cpu_seconds, destination: destination.cpu_seconds },
        },
        anonymous_bytes_max: Sides { source: source.anonymous_bytes_max, destination: destination.anonymous_bytes_max },
        equal: None,
    })
}

fn ended(transship: Transship) -> Result<Value, String> {
    transship
        .wait()
        .and_then(|finished: Finished| finished.expect_code(0))
        .and_then(|finished| finished.report())
        .map_err(text)
}

fn rounds_ms(report: &Value) -> Result<f64, String> {
    let rounds = report["rounds"].as_array().ok_or_else(|| format!("transship's report has no rounds: {report}"))?;
    rounds.iter().map(|round| number(round, "/ms")).sum()
}

fn number(report: &Value, path: &str) -> Result<f64, String> {
    report
        .pointer(path)
        .and_then(Value::as_f64)
        .ok_or_else(|| format!("transship's report has no number {path}: {report}"))
}
