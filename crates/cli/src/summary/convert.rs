//! The result where a file is made without a guest here: of a conversion, or of what a stock QEMU has sent.
use transship_engine::{Error, FileReport, Report, Status};

use super::common::{self, Rows, written};
use crate::{
    failure::Failure,
    units::{Bytes, Count, Rate},
};

/// Prints the result of a conversion and yields how the command ends.
pub(crate) fn converted(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the file is complete", conversion)
}

/// The same of a reception.
pub(crate) fn received(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the guest was received", reception)
}

fn conversion(report: &Report) -> String {
    let mut rows = Rows::new(report);
    rows.add("pages", format!("{} normal, {} zero", Count(report.pages.normal), Count(report.pages.zero)));
    add_file(&mut rows, report);
    rows.add("throughput", Rate(report.throughput));
    rows.into_text()
}

fn reception(report: &Report) -> String {
    let mut rows = Rows::new(report);
    rows.add_rounds(report, "received", "again");
    rows.add_bytes(report, "on the wire");
    add_file(&mut rows, report);
    rows.add_speed(report);
    rows.into_text()
}

fn add_file(rows: &mut Rows, report: &Report) {
    if let Some(file) = report.file.as_ref().filter(|_| report.status == Status::Completed) {
        let FileReport { format, bytes, allocated, .. } = file;
        rows.add("file", format!("{format}, {}, {} on the disk, {}", Bytes(*bytes), Bytes(*allocated), written(file)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::PageCounts;

    #[test]
    fn the_tables_say_what_a_person_wants_to_know() {
        let file = FileReport { format: "stream".into(), bytes: 4 << 30, allocated: 1 << 20, ..FileReport::default() };
        let mut report = Report {
            status: Status::Completed,
            pages: PageCounts { normal: 12_345, zero: 7, ..PageCounts::default() },
            file: Some(file),
            ..Report::default()
        };
        for text in [conversion(&report), reception(&report)] {
            for part in [
                "completed in",
                "12,345 normal, 7 zero",
                "stream, 4.0 GiB, 1.0 MiB on the disk, through the page cache",
            ] {
                assert!(text.contains(part), "{part:?} is not in\n{text}");
            }
        }
        report.status = Status::Failed;
        assert!(!reception(&report).contains("on the disk"), "there is no file");
    }
}
