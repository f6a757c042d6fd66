//! A move by transship.
use super::{DOWNTIME_MS, guests::QemuWithBalloon, results::Run};
use crate::{ends::Ends, ours};

/// Moves the guest.
pub(super) fn run(source: &QemuWithBalloon, destination: &QemuWithBalloon, channels: u8) -> Result<Run, String> {
    let folder = destination.qemu.folder();
    let ends = Ends { source: source.qemu.vm(), destination: destination.qemu.vm(), folder, link: None };
    let moved = ours::transfer(&ends, &arguments(source, channels))?.arrived()?;
    let rounds = moved.report["rounds"].as_array().map_or(0, Vec::len);
    Ok(Run {
        ms: moved.number("/total_ms")?,
        process_ms: Some(moved.used.source.ended_after.as_secs_f64() * 1e3),
        first_round_ms: Some(moved.number("/rounds/0/ms")?),
        downtime_ms: moved.number("/downtime_ms")?,
        wire_bytes: ours::carried_bytes(&moved.report)?,
        rounds: rounds as u64,
        named_pages: Some(moved.number("/pages/free")? as u64),
        ..Run::default()
    })
}

fn arguments(source: &QemuWithBalloon, channels: u8) -> Vec<String> {
    let (channels, downtime) = (channels.to_string(), format!("{DOWNTIME_MS}ms"));
    let mut arguments =
        ["--channels", &channels, "--downtime", &downtime, "--compress", "none"].map(str::to_owned).to_vec();
    if let Some(balloon) = &source.balloon {
        arguments.extend(["--balloon".to_owned(), balloon.path().display().to_string()]);
    }
    arguments
}
