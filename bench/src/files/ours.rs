//! Snapshots by transship: a process beside the guest.
use std::{
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use serde_json::Value;
use transship_lab::{Qemu, Transship};

use super::{
    DOWNTIME_MS,
    cases::{Case, Guest, Layout},
    guests::Source,
    results::{COMPLETED, Restored, SaveRun},
    stock::Until,
};
use crate::{ours::number, pair::text, processes, units::millis};

/// A process that has ended well, or with a verdict.
struct Ran {
    report: Value,
    used: processes::Used,
}

/// Saves the guest.
pub(super) fn save(source: &Source, file: &Path, case: Case, channels: u8) -> Result<SaveRun, String> {
    let cpu_before = source.cpu_seconds()?;
    let since = SystemTime::now();
    let ran = run(&save_arguments(&source.qemu.vm(), file, case, channels))?;
    let cpu_seconds = source.cpu_seconds()? - cpu_before + ran.used.cpu_seconds;
    let status = ran.report["status"].as_str().unwrap_or("without a status").to_owned();
    let common = SaveRun {
        ms: number(&ran.report, "/total_ms")?,
        process_ms: Some(millis(ran.used.ended_after)),
        cpu_seconds,
        anonymous_bytes_max: Some(ran.used.anonymous_bytes_max),
        ..SaveRun::default()
    };
    if status != COMPLETED {
        return Ok(SaveRun { status, ..common });
    }
    let pause_ms = match case.guest.runs() {
        true => Some(millis(source.stopped_at(since)?.until(source.resumed_at(since)?))),
        false => None,
    };
    let SaveRun { file_bytes, allocated_bytes, .. } = SaveRun::of_file(file)?;
    let pages_written = Some(number(&ran.report, "/pages/normal")? as u64);
    Ok(SaveRun { status, pause_ms, pages_written, file_bytes, allocated_bytes, ..common })
}

/// Restores the guest into a QEMU that waits for it.
pub(super) fn restore(
    destination: &Qemu,
    file: &Path,
    layout: Layout,
    channels: u8,
    lazy: bool,
) -> Result<Restored, String> {
    let mut arguments = vec!["restore".into(), "--vm".into(), destination.vm(), "--from".into(), name(file)];
    arguments.extend(io_arguments(layout, channels));
    if lazy {
        arguments.push("--lazy".into());
    }
    let ran = run(&arguments)?;
    if ran.report["status"] != COMPLETED {
        return Err(format!("transship did not restore the guest: {}", ran.report));
    }
    Ok(Restored {
        time: Duration::from_secs_f64(number(&ran.report, "/total_ms")?.max(0.0) / 1e3),
        process_time: Some(ran.used.ended_after),
        cpu_seconds: ran.used.cpu_seconds,
    })
}

fn save_arguments(vm: &str, file: &Path, case: Case, channels: u8) -> Vec<String> {
    let way = match case.guest {
        Guest::Sparse | Guest::Paused => "--paused",
        Guest::Live => "--live",
        Guest::Background => "--background",
    };
    let mut arguments: Vec<String> = ["save", "--vm", vm, "--to"].map(str::to_owned).to_vec();
    arguments.extend([name(file), way.into()]);
    if case.guest == Guest::Live {
        arguments.extend(["--downtime".into(), format!("{DOWNTIME_MS}ms")]);
    }
    if case.layout == Layout::Plain {
        arguments.extend(["--format".into(), "stream".into()]);
    }
    arguments.extend(io_arguments(case.layout, channels));
    arguments
}

/// A stream has one channel, and no direct I/O: it is written one piece after the other.
fn io_arguments(layout: Layout, channels: u8) -> Vec<String> {
    if layout == Layout::Plain {
        return Vec::new();
    }
    let direct_io = if layout == Layout::Direct { "on" } else { "off" };
    let channels = layout.threads(channels).to_string();
    vec!["--channels".into(), channels, format!("--direct-io={direct_io}")]
}

fn name(file: &Path) -> String {
    format!("file:{}", file.display())
}

/// A guest that can't be saved in any number of rounds ends with a verdict, which is no error here.
fn run(arguments: &[String]) -> Result<Ran, String> {
    let begin = Instant::now();
    let mut process = Transship::command(arguments).args(["--json"]).start().map_err(text)?;
    let [used] = processes::follow([process.process()], begin)?;
    let finished = process.wait().map_err(text)?;
    match finished.report() {
        Ok(report) if report["status"] == "not-converging" => Ok(Ran { report, used }),
        _ => {
            let finished = finished.expect_code(0).map_err(text)?;
            Ok(Ran { report: finished.report().map_err(text)?, used })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layout_is_asked_for_by_its_flags() {
        let arguments = |guest, layout| {
            save_arguments("qemu:q", Path::new("/d/s"), Case { guest, layout }, 3)
                .join(" ")
                .replace("save --vm qemu:q --to ", "")
        };
        assert_eq!(arguments(Guest::Paused, Layout::Plain), "file:/d/s --paused --format stream");
        assert_eq!(arguments(Guest::Paused, Layout::Mapped), "file:/d/s --paused --channels 1 --direct-io=off");
        assert_eq!(
            arguments(Guest::Live, Layout::Channels),
            "file:/d/s --live --downtime 300ms --channels 3 --direct-io=off"
        );
        assert_eq!(arguments(Guest::Background, Layout::Direct), "file:/d/s --background --channels 3 --direct-io=on");
    }
}
