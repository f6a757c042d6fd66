//! The result of a restore.
use std::fmt::Write as _;

use transship_engine::{Error, Report, Status};

use super::{cpu, status_name};
use crate::{
    failure::Failure,
    output,
    units::{Bytes, Count, Rate, Time},
};

/// Prints the result and yields how the command ends.
pub(crate) fn restored(outcome: Result<(), Error>, mut report: Report, json: bool) -> Result<(), Failure> {
    // The engine knows nothing of what failed before it had its turn.
    report.error = outcome.as_ref().err().map(|error| output::one_line(&error.to_string()));
    let printed = match (json, report.status) {
        (true, _) => output::json(&report),
        (false, Status::Completed) => output::result(&table(&report)),
        // The reason is on stderr.
        (false, _) => Ok(()),
    };
    outcome?;
    match printed.map_err(Failure::from) {
        // The exit code tells what became of the guest, and it is there.
        Err(Failure::Failed(line)) => output::complain(&format!("the guest was restored, but {line}")),
        Err(closed) => return Err(closed),
        Ok(()) => {}
    }
    Ok(())
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let mut row = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12}{value}");
    };
    row("status", format!("{} in {}", status_name(report.status), Time::from_ms(report.total_ms)));
    if let Some(ms) = report.started_ms {
        row("started", format!("after {}", Time::from_ms(ms)));
    }
    if let Some(lazy) = &report.lazy {
        row("filled", format!("after {}; {} waits for a page", Time::from_ms(lazy.filled_ms), Count(lazy.faults)));
    }
    let pages = report.pages;
    row("pages", format!("{} read, {} zero", Count(pages.normal), Count(pages.zero + pages.hole)));
    row("bytes", format!("{} guest, {} read", Bytes(report.bytes.guest), Bytes(report.bytes.wire)));
    if let Some(file) = &report.file {
        let how = match (file.direct_io, file.io_uring) {
            (true, true) => "direct I/O by io_uring",
            (true, false) => "direct I/O",
            (false, _) => "the page cache",
        };
        let why = file.direct_io_refused.as_ref().map(|why| format!(", as direct I/O is refused: {why}"));
        row(
            "file",
            format!(
                "{}, {} on the disk; read through {how}{}",
                Bytes(file.bytes),
                Bytes(file.allocated),
                why.unwrap_or_default()
            ),
        );
    }
    row("throughput", Rate(report.throughput).to_string());
    row("cpu", cpu(report));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, FileReport, PageCounts};

    #[test]
    fn the_table_says_what_a_person_wants_to_know() {
        let report = Report {
            status: Status::Completed,
            total_ms: 3210.0,
            started_ms: Some(120.0),
            pages: PageCounts { normal: 12_345, zero: 1, hole: 7, ..Default::default() },
            bytes: ByteCounts { guest: 4 << 30, wire: 812 << 20, ..Default::default() },
            file: Some(FileReport { bytes: 4 << 30, allocated: 813 << 20, direct_io: true, ..Default::default() }),
            ..Default::default()
        };
        let text = table(&report);
        for part in [
            "completed in 3.21 s",
            "started     after 120 ms",
            "12,345 read, 8 zero",
            "4.0 GiB guest, 812 MiB read",
            "4.0 GiB, 813 MiB on the disk; read through direct I/O",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
