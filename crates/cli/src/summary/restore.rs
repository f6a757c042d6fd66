//! The result of a restore.
use transship_engine::{Error, FileReport, Report};

use super::common::{self, Rows};
use crate::{
    failure::Failure,
    units::{Bytes, Count, Time},
};

/// Prints the result and yields how the command ends.
pub(crate) fn restored(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the guest was restored", table)
}

fn table(report: &Report) -> String {
    let mut rows = Rows::new(report);
    if let Some(ms) = report.started_ms {
        rows.add("started", format!("after {}", Time::from_ms(ms)));
    }
    if let Some(lazy) = &report.lazy {
        rows.add("filled", format!("after {}; {} waits for a page", Time::from_ms(lazy.filled_ms), Count(lazy.faults)));
    }
    let pages = report.pages;
    rows.add("pages", format!("{} read, {} zero", Count(pages.normal), Count(pages.zero + pages.hole)));
    rows.add_bytes(report, "read");
    if let Some(file) = &report.file {
        rows.add("file", file_line(file));
    }
    rows.add_speed(report);
    rows.into_text()
}

fn file_line(file: &FileReport) -> String {
    let how = match (file.direct_io, file.io_uring) {
        (true, true) => "direct I/O by io_uring",
        (true, false) => "direct I/O",
        (false, _) => "the page cache",
    };
    let why = file.direct_io_refused.as_ref().map(|why| format!(", as direct I/O is refused: {why}"));
    let (bytes, allocated) = (Bytes(file.bytes), Bytes(file.allocated));
    format!("{bytes}, {allocated} on the disk; read through {how}{}", why.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, PageCounts, Status};

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
