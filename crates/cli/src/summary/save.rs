//! The result of a save.
use transship_engine::{Error, FileReport, Report, Status, guest::DiskSnapshot};

use super::common::{self, Rows, written};
use crate::{failure::Failure, output, units::Bytes};

/// Prints the result and yields how the command ends.
pub(crate) fn saved(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    if outcome.is_err() {
        let left = report.disks.iter().map(|disk| {
            let (name, overlay) = (&disk.disk, disk.overlay.display());
            format!("the guest writes disk {name} to {overlay} all the same; to merge it: virsh blockcommit")
        });
        left.for_each(|line| output::complain(&line));
    }
    common::end(outcome, report, json, "the guest was saved", table)
}

fn table(report: &Report) -> String {
    let mut rows = Rows::new(report);
    rows.add_rounds(report, "written", "rewritten");
    rows.add_bytes(report, "written");
    if let Some(file) = report.file.as_ref().filter(|_| report.status == Status::Completed) {
        let FileReport { format, bytes, allocated, .. } = file;
        rows.add("file", format!("{format}, {} on the disk, {}, {}", Bytes(*allocated), Bytes(*bytes), written(file)));
    }
    for disk in &report.disks {
        rows.add(&disk.disk, overlay(disk));
    }
    rows.add_speed(report);
    rows.into_text()
}

fn overlay(disk: &DiskSnapshot) -> String {
    format!("{} is as it was saved; the guest writes to {}", disk.kept.display(), disk.overlay.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, Drains, PageCounts, RoundReport};

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
            drains: Drains { count: 3, longest_ms: 12.0 },
            late_pages: 6,
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
            "disks       waited for 3 times before pages were read, 12 ms at most",
            "late        6 pages were written when the guest stood still, and written as well",
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
