//! The result of a move: one JSON object, or a short table for people.
mod clones;
mod common;
mod convert;
mod relay;
mod restore;
mod save;

use std::fmt::Write as _;

use transship_engine::{Error, PostCopyReport, Report};

use self::common::Rows;
use crate::{
    failure::Failure,
    units::{Bytes, Count, Time},
};

pub(crate) use clones::{cloned, forked};
pub(crate) use convert::{converted, received};
pub(crate) use relay::{relayed, relayed_in_a_line};
pub(crate) use restore::restored;
pub(crate) use save::saved;

/// Prints the result and yields how the command ends.
pub(crate) fn finish(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the guest was moved", table)
}

/// The same where a killed move was gone on with.
pub(crate) fn recovered(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the destination has all pages of the guest", rest)
}

/// The report of the rest of a move.
fn rest(report: &Report) -> String {
    let mut rows = Rows::new(report);
    if let Some(postcopy) = &report.postcopy {
        rows.add("post-copy", followed(postcopy));
    }
    rows.add_bytes(report, "on the wire");
    rows.into_text()
}

/// The report for people.
fn table(report: &Report) -> String {
    let mut rows = Rows::new(report);
    rows.add_rounds(report, "sent", "resent");
    if let Some(postcopy) = &report.postcopy {
        rows.add("post-copy", followed(postcopy));
    }
    rows.add_bytes(report, "on the wire");
    if report.bytes.encoder_in > 0 || report.pages.raw_busy > 0 {
        rows.add("encoding", encoding(report));
    }
    rows.add_speed(report);
    let verified = match report.verified {
        Some(true) => "yes, the memory is equal on both sides",
        Some(false) => "NO, the memory differs",
        None => "not asked for (--verify)",
    };
    rows.add("verified", verified);
    rows.into_text()
}

/// How the pages came that followed the guest.
fn followed(report: &PostCopyReport) -> String {
    let PostCopyReport { owed, by_fault, by_push, faults, fault_median_ms, fault_p99_ms, filled_ms, reconnects } =
        report;
    let (owed, by_fault, by_push) = (Count(*owed), Count(*by_fault), Count(*by_push));
    let mut text = format!(
        "{owed} pages followed in {}, {by_fault} because they were waited for, {by_push} in order",
        Time::from_ms(*filled_ms)
    );
    if *faults > 0 {
        let (median, most) = (Time::from_ms(*fault_median_ms), Time::from_ms(*fault_p99_ms));
        let _ = write!(text, "; {} waits, {median} at the median, 99 % within {most}", Count(*faults));
    }
    if *reconnects > 0 {
        let _ = write!(text, "; the link was made again {} times", Count(*reconnects));
    }
    text
}

/// What the encoders made of what they were given, and how often there was none for a packet.
fn encoding(report: &Report) -> String {
    let (given, made) = (report.bytes.encoder_in, report.bytes.encoder_out);
    let mut text = format!("{} to {}", Bytes(given), Bytes(made));
    if made > 0 {
        let _ = write!(text, " (ratio {:.2})", given as f64 / made as f64);
    }
    let _ = write!(text, ", all busy for {:.0} % of the packets", report.busy_ratio * 100.0);
    if report.pages.raw_busy > 0 {
        let _ = write!(text, ", {} pages raw for that", Count(report.pages.raw_busy));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, CpuSeconds, PageCounts, RoundReport, Status, TrackerName, TrackerReport};

    #[test]
    fn the_table_says_what_a_person_wants_to_know() {
        let report = Report {
            status: Status::Completed,
            total_ms: 3210.0,
            downtime_ms: 41.0,
            rounds: (1..=7).map(|number| RoundReport { number, bytes: 1 << 20, ..Default::default() }).collect(),
            pages: PageCounts { normal: 12_345, zero: 7, ..Default::default() },
            bytes: ByteCounts { guest: 4 << 30, wire: 812 << 20, ..Default::default() },
            throughput: 2.0 * 1024.0 * 1024.0 * 1024.0,
            verified: Some(true),
            ..Default::default()
        };
        let text = table(&report);
        for part in [
            "completed in 3.21 s",
            "downtime    41 ms",
            "7 (1.0 MiB, 1.0 MiB, 1.0 MiB, 1.0 MiB, 1.0 MiB, … sent)",
            "12,345 normal, 7 zero, 0 hole",
            "4.0 GiB guest, 812 MiB on the wire",
            "2.0 GiB/s",
            "yes, the memory is equal",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    /// Over a socket they did not go.
    #[test]
    fn bytes_that_were_lent_are_told_where_there_are_any() {
        let bytes = ByteCounts { guest: 4 << 30, wire: 70_000, ..Default::default() };
        let mut report = Report { status: Status::Completed, bytes, ..Default::default() };
        assert!(!table(&report).contains("lent"), "{}", table(&report));
        report.bytes.lent = 3 << 30;
        let line = "68.4 KiB on the wire, 3.0 GiB read by the destination from memory that it was lent\n";
        assert!(table(&report).contains(line), "{}", table(&report));
    }

    /// Some device was not at rest.
    #[test]
    fn pages_that_were_written_after_the_last_round_are_told_where_there_are_any() {
        let mut report = Report { status: Status::Completed, ..Default::default() };
        assert!(!table(&report).contains("late"), "{}", table(&report));
        report.late_pages = 1234;
        let line = "late        1,234 pages were written when the guest stood still, and sent as well\n";
        assert!(table(&report).contains(line), "{}", table(&report));
    }

    #[test]
    fn encoders_have_their_line_where_there_are_any() {
        let mut report = Report { status: Status::Completed, busy_ratio: 0.834, ..Default::default() };
        report.cpu = CpuSeconds { total: 1.5, main: 0.25, channels: 0.5, ..Default::default() };
        let text = table(&report);
        assert!(!text.contains("encod") && text.contains("1.50 s (main 0.25 s, channels 0.50 s)"), "{text}");

        (report.bytes.encoder_in, report.bytes.encoder_out) = (640 << 20, 160 << 20);
        report.pages.raw_busy = 1234;
        report.cpu.encoders = 0.75;
        let text = table(&report);
        let line = "640 MiB to 160 MiB (ratio 4.00), all busy for 83 % of the packets, 1,234 pages raw for that";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("(main 0.25 s, encoders 0.75 s, channels 0.50 s)"), "{text}");

        report.cpu.decoders = 1.0;
        assert!(table(&report).contains("encoders 0.75 s, decoders 1.00 s, channels"), "{}", table(&report));

        // Every packet found all of them busy.
        (report.bytes.encoder_in, report.bytes.encoder_out) = (0, 0);
        assert!(table(&report).contains("0 B to 0 B, all busy"), "{}", table(&report));
    }

    #[test]
    fn how_long_writers_were_held_is_said_by_round() {
        let rounds = [0.0, 1300.0, 250.0].map(|held_ms| RoundReport { held_ms, ..Default::default() });
        let mut tracker =
            TrackerReport { name: TrackerName::Sync, waits: 5000, held: 1234, held_ms: 1550.0, longest_ms: 4.2 };
        let mut report = Report { rounds: rounds.into(), tracker: Some(tracker), ..Default::default() };
        let text = table(&report);
        for part in [
            "sync: 5,000 writes waited until they were let through; 1,234 of them were held",
            "held        1.55 s together, 4.2 ms at most at a time (0.0 ms, 1.30 s, 250 ms by round)",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        tracker.held = 0;
        report.tracker = Some(tracker);
        assert!(!table(&report).contains("held"), "{}", table(&report));
    }

    #[test]
    fn what_followed_the_guest_is_said() {
        let mut postcopy = PostCopyReport { owed: 4000, by_fault: 300, by_push: 3700, ..Default::default() };
        postcopy.filled_ms = 1500.0;
        let report = |postcopy| Report { postcopy: Some(postcopy), ..Default::default() };
        let text = table(&report(postcopy));
        assert!(
            text.contains("4,000 pages followed in 1.50 s, 300 because they were waited for, 3,700 in order"),
            "{text}"
        );
        assert!(!text.contains("waits") && !text.contains("made again"), "{text}");
        (postcopy.faults, postcopy.fault_median_ms, postcopy.fault_p99_ms, postcopy.reconnects) = (17, 0.4, 3.0, 2);
        let text = table(&report(postcopy));
        assert!(
            text.contains("17 waits, 0.4 ms at the median, 99 % within 3.0 ms; the link was made again 2 times"),
            "{text}"
        );
    }

    #[test]
    fn a_failed_move_yields_the_failure_of_the_move() {
        let failure = finish(Err(Error::Refused("no".into())), Report::default(), false).expect_err("it failed");
        assert_eq!(failure.code(), 1);
        let failure =
            finish(Err(Error::Unknown(String::from("look").into())), Report::default(), false).expect_err("it failed");
        assert_eq!(failure.code(), 3);
    }
}
