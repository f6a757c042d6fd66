//! The result of a move: one JSON object, or a short table for people.
mod restore;
mod save;

use std::{fmt::Write as _, io};

use transship_engine::{Error, Report, Status};

use crate::{
    failure::Failure,
    output,
    units::{Bytes, Count, Rate, Time},
};

pub(crate) use restore::restored;
pub(crate) use save::saved;

/// Prints the result and yields how the command ends.
pub(crate) fn finish(outcome: Result<(), Error>, mut report: Report, json: bool) -> Result<(), Failure> {
    // The engine knows nothing of what failed before it had its turn.
    report.error = outcome.as_ref().err().map(|error| output::one_line(&error.to_string()));
    let printed = print(&report, json);
    outcome?;
    match printed.map_err(Failure::from) {
        // The exit code tells what became of the guest, and it was moved.
        Err(Failure::Failed(line)) => output::complain(&format!("the guest was moved, but {line}")),
        Err(closed) => return Err(closed),
        Ok(()) => {}
    }
    Ok(())
}

fn print(report: &Report, json: bool) -> io::Result<()> {
    if json {
        return output::json(report);
    }
    // Without a round there are no numbers to show; the reason is on stderr.
    if report.status != Status::Completed && report.rounds.is_empty() { Ok(()) } else { output::result(&table(report)) }
}

/// The report for people.
fn table(report: &Report) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<12}{value}");
    };
    row("status", format!("{} in {}", status_name(report.status), Time::from_ms(report.total_ms)));
    if report.downtime_ms > 0.0 {
        row("downtime", Time::from_ms(report.downtime_ms).to_string());
    }
    if !report.rounds.is_empty() {
        row("rounds", rounds(report, "sent"));
    }
    let pages = report.pages;
    let kinds = [
        ("normal", pages.normal),
        ("zero", pages.zero),
        ("hole", pages.hole),
        ("free", pages.free),
        ("resent", pages.resent),
    ];
    let kinds = kinds.map(|(kind, count)| format!("{} {kind}", Count(count)));
    row("pages", kinds.join(", "));
    row("bytes", format!("{} guest, {} on the wire", Bytes(report.bytes.guest), Bytes(report.bytes.wire)));
    if report.bytes.encoder_in > 0 || pages.raw_busy > 0 {
        row("encoding", encoding(report));
    }
    row("throughput", Rate(report.throughput).to_string());
    row("cpu", cpu(report));
    let verified = match report.verified {
        Some(true) => "yes, the memory is equal on both sides",
        Some(false) => "NO, the memory differs",
        None => "not asked for (--verify)",
    };
    row("verified", verified.into());
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

fn cpu(report: &Report) -> String {
    let cpu = report.cpu;
    let roles =
        [("main", cpu.main), ("encoders", cpu.encoders), ("decoders", cpu.decoders), ("channels", cpu.channels)];
    let roles = roles.iter().filter(|(role, seconds)| matches!(*role, "main" | "channels") || *seconds > 0.0);
    let roles: Vec<_> = roles.map(|(role, seconds)| format!("{role} {seconds:.2} s")).collect();
    format!("{:.2} s ({})", cpu.total, roles.join(", "))
}

fn rounds(report: &Report, done: &str) -> String {
    const SHOWN: usize = 5;
    let (first, rest) = report.rounds.split_at(report.rounds.len().min(SHOWN));
    let sent: Vec<_> = first.iter().map(|round| Bytes(round.bytes).to_string()).collect();
    let more = if rest.is_empty() { "" } else { ", …" };
    format!("{} ({}{more} {done})", report.rounds.len(), sent.join(", "))
}

fn status_name(status: Status) -> &'static str {
    match status {
        Status::Completed => "completed",
        Status::Failed => "failed",
        Status::Cancelled => "cancelled",
        Status::NotConverging => "not converging",
        Status::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_engine::{ByteCounts, CpuSeconds, PageCounts, RoundReport};

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
    fn a_failed_move_yields_the_failure_of_the_move() {
        let failure = finish(Err(Error::Refused("no".into())), Report::default(), false).expect_err("it failed");
        assert_eq!(failure.code(), 1);
        let failure = finish(Err(Error::Unknown("look".into())), Report::default(), false).expect_err("it failed");
        assert_eq!(failure.code(), 3);
    }
}
