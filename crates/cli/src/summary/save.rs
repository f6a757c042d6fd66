//! The result of a save.
use std::fmt::Write as _;

use transship_engine::{Error, FileReport, Report, Status};

use super::{cpu, rounds, status_name};
use crate::{
    failure::Failure,
    output,
    units::{Bytes, Count, Rate, Time},
};

/// Prints the result and yields how the command ends.
pub(crate) fn saved(outcome: Result<(), Error>, mut report: Report, json: bool) -> Result<(), Failure> {
    // The engine knows nothing of what failed before it had its turn.
    report.error = outcome.as_ref().err().map(|error| output::one_line(&error.to_string()));
    let printed = match json {
        true => output::json(&report),
        // Without a round there are no numbers to show; the reason is on stderr.
        false if report.status != Status::Completed && report.rounds.is_empty() => Ok(()),
        false => output::result(&table(&report)),
    };
    outcome?;
    match printed.map_err(Failure::from) {
        // The exit code tells what became of the snapshot, and it is there.
        Err(Failure::Failed(line)) => output::complain(&format!("the guest was saved, but {line}")),
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
    if report.downtime_ms > 0.0 {
        row("downtime", Time::from_ms(report.downtime_ms).to_string());
    }
    if !report.rounds.is_empty() {
        row("rounds", rounds(report, "written"));
    }
    let pages = report.pages;
    let kinds = [
        ("normal", pages.normal),
        ("zero", pages.zero),
        ("hole", pages.hole),
        ("free", pages.free),
        ("rewritten", pages.resent),
    ];
    let kinds = kinds.map(|(kind, count)| format!("{} {kind}", Count(count)));
    row("pages", kinds.join(", "));
    row("bytes", format!("{} guest, {} written", Bytes(report.bytes.guest), Bytes(report.bytes.wire)));
    if let Some(file) = report.file.as_ref().filter(|_| report.status == Status::Completed) {
        row("file", file_line(file));
    }
    row("throughput", Rate(report.throughput).to_string());
    row("cpu", cpu(report));
    text
}

fn file_line(file: &FileReport) -> String {
    let how = match (file.direct_io, file.io_uring) {
        (true, true) => "by direct I/O (io_uring)".to_owned(),
        (true, false) => "by direct I/O".to_owned(),
        (false, _) => match &file.direct_io_refused {
            Some(why) => format!("through the page cache: {why}"),
            None => "through the page cache".to_owned(),
        },
    };
    format!("{}, {} on the disk, {}, {how}", file.format, Bytes(file.allocated), Bytes(file.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, PageCounts, RoundReport};

    #[test]
    fn the_table_says_what_a_person_wants_to_know() {
        let file = FileReport {
            format: "mapped-ram".into(),
            bytes: 4 << 30,
            allocated: 812 << 20,
            direct_io_refused: Some("the ramfs at /mnt refuses it".into()),
            ..FileReport::default()
        };
        let mut report = Report {
            status: Status::Completed,
            total_ms: 3210.0,
            downtime_ms: 41.0,
            rounds: vec![RoundReport { bytes: 1 << 20, ..Default::default() }; 2],
            pages: PageCounts { normal: 12_345, zero: 7, resent: 5, ..Default::default() },
            bytes: ByteCounts { guest: 4 << 30, wire: 812 << 20, ..Default::default() },
            file: Some(file),
            ..Report::default()
        };
        let text = table(&report);
        for part in [
            "completed in 3.21 s",
            "downtime    41 ms",
            "2 (1.0 MiB, 1.0 MiB written)",
            "12,345 normal, 7 zero, 0 hole, 0 free, 5 rewritten",
            "4.0 GiB guest, 812 MiB written",
            "mapped-ram, 812 MiB on the disk, 4.0 GiB, through the page cache: the ramfs at /mnt refuses it",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        report.status = Status::NotConverging;
        assert!(!table(&report).contains("on the disk"), "there is no file");
    }
}
