//! What the results of all commands have in common.
use std::fmt::Write as _;

use transship_engine::{
    ByteCounts, Error, FileReport, ForecastReport, HoldReport, ReleasedBy, Report, RoundReport, Status, TrackerName,
    TrackerReport,
};

use crate::{
    failure::Failure,
    output,
    units::{Bytes, Count, Rate, Time},
};

/// Prints the result and yields how the command ends. `done`: what is true although the result could not be printed.
pub(super) fn end(
    outcome: Result<(), Error>,
    mut report: Report,
    json: bool,
    done: &str,
    table: fn(&Report) -> String,
) -> Result<(), Failure> {
    // The engine knows nothing of what failed before it had its turn.
    report.set_error(outcome.as_ref().err());
    report.error = report.error.as_deref().map(output::one_line);
    let printed = match json {
        true => output::json(&report),
        // Without a round there are no numbers to show; the reason is on stderr.
        false if report.status != Status::Completed && report.rounds.is_empty() => Ok(()),
        false => output::result(&table(&report)),
    };
    outcome?;
    match printed.map_err(Failure::from) {
        // The exit code tells what became of the guest or the file, not of what was to be printed.
        Err(Failure::Failed(line)) => output::complain(&format!("{done}, but {line}")),
        Err(closed) => return Err(closed),
        Ok(()) => {}
    }
    Ok(())
}

/// The way that pages took into a file.
pub(super) fn written(file: &FileReport) -> String {
    match (file.direct_io, file.io_uring) {
        (true, true) => "by direct I/O (io_uring)".to_owned(),
        (true, false) => "by direct I/O".to_owned(),
        (false, _) => match &file.direct_io_refused {
            Some(why) => format!("through the page cache: {why}"),
            None => "through the page cache".to_owned(),
        },
    }
}

/// Lines of a name and what there is to say.
pub(super) struct Rows(String);

impl Rows {
    /// The first line.
    pub(super) fn new(report: &Report) -> Self {
        let mut rows = Self(String::new());
        rows.add("status", format!("{} in {}", status_name(report.status), Time::from_ms(report.total_ms)));
        rows
    }

    pub(super) fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{name:<12}{value}");
    }

    /// How rounds went, whose pages were `done`; a page can be so `again`.
    pub(super) fn add_rounds(&mut self, report: &Report, done: &str, again: &str) {
        if report.downtime_ms > 0.0 {
            self.add("downtime", Time::from_ms(report.downtime_ms));
        }
        if !report.rounds.is_empty() {
            self.add("rounds", rounds(report, done));
        }
        if let Some(tracker) = report.tracker.filter(|tracker| tracker.name == TrackerName::Sync) {
            self.add("tracker", waited(&tracker));
        }
        if report.tracker.is_some_and(|tracker| tracker.held > 0) {
            self.add("held", held(report));
        }
        if let Some(forecast) = report.forecast {
            self.add("forecast", foretold(&forecast));
        }
        if let Some(hold) = report.hold {
            self.add("hold", kept_ready(&hold));
        }
        if report.drains.count > 0 {
            let (count, longest) = (Count(report.drains.count), Time::from_ms(report.drains.longest_ms));
            self.add("disks", format!("waited for {count} times before pages were read, {longest} at most"));
        }
        if report.late_pages > 0 {
            let count = Count(report.late_pages);
            self.add("late", format!("{count} pages were written when the guest stood still, and {done} as well"));
        }
        let pages = report.pages;
        let kinds = [
            ("normal", pages.normal),
            ("zero", pages.zero),
            ("hole", pages.hole),
            ("free", pages.free),
            (again, pages.resent),
        ];
        self.add("pages", kinds.map(|(kind, count)| format!("{} {kind}", Count(count))).join(", "));
    }

    pub(super) fn add_bytes(&mut self, report: &Report, moved: &str) {
        let ByteCounts { guest, wire, lent, .. } = report.bytes;
        let mut text = format!("{} guest, {} {moved}", Bytes(guest), Bytes(wire));
        if lent > 0 {
            let _ = write!(text, ", {} read by the destination from memory that it was lent", Bytes(lent));
        }
        self.add("bytes", text);
    }

    /// The last lines of all.
    pub(super) fn add_speed(&mut self, report: &Report) {
        self.add("throughput", Rate(report.throughput));
        self.add("cpu", cpu(report));
    }

    pub(super) fn into_text(self) -> String {
        self.0
    }
}

fn cpu(report: &Report) -> String {
    let cpu = report.cpu;
    let roles =
        [("main", cpu.main), ("encoders", cpu.encoders), ("decoders", cpu.decoders), ("channels", cpu.channels)];
    let roles = roles.iter().filter(|(role, seconds)| matches!(*role, "main" | "channels") || *seconds > 0.0);
    let roles: Vec<_> = roles.map(|(role, seconds)| format!("{role} {seconds:.2} s")).collect();
    format!("{:.2} s ({})", cpu.total, roles.join(", "))
}

/// What was thought of it after its first round, to be compared with the lines around.
fn foretold(forecast: &ForecastReport) -> String {
    let (time, stop) = (Time::from_ms(forecast.total_ms), Time::from_ms(forecast.downtime_ms));
    let ForecastReport { converges, bytes, rounds, .. } = *forecast;
    match converges {
        true => format!("after round 1: {time}, {stop} of downtime, {rounds} rounds, {}", Bytes(bytes)),
        false => format!("after round 1: no end; the rest would stop it for {stop}"),
    }
}

/// How long it was held ready, what that cost, and what ended it.
fn kept_ready(hold: &HoldReport) -> String {
    let by = match hold.released_by {
        Some(ReleasedBy::Go) => ", until it was told to go on",
        Some(ReleasedBy::Time) => ", as long as it should be",
        Some(ReleasedBy::Command) => ", until the command had succeeded",
        None => ", and not released",
    };
    let (rounds, bytes) = (Count(hold.rounds), Bytes(hold.bytes));
    format!("kept ready for {} with {rounds} rounds of {bytes}{by}", Time::from_ms(hold.ms))
}

/// What a tracker that has writers wait has cost.
fn waited(tracker: &TrackerReport) -> String {
    let held = match tracker.held {
        0 => String::new(),
        held => format!("; {} of them were held", Count(held)),
    };
    format!("sync: {} writes waited until they were let through{held}", Count(tracker.waits))
}

/// How long writers were held because of the pace, by round.
fn held(report: &Report) -> String {
    let tracker = report.tracker.unwrap_or_default();
    let (time, longest) = (Time::from_ms(tracker.held_ms), Time::from_ms(tracker.longest_ms));
    let rounds = list(report, |round| Time::from_ms(round.held_ms).to_string());
    format!("{time} together, {longest} at most at a time ({rounds} by round)")
}

/// Something of the first rounds.
fn list(report: &Report, what: impl Fn(&RoundReport) -> String) -> String {
    const SHOWN: usize = 5;
    let (first, rest) = report.rounds.split_at(report.rounds.len().min(SHOWN));
    let more = if rest.is_empty() { "" } else { ", …" };
    format!("{}{more}", first.iter().map(what).collect::<Vec<_>>().join(", "))
}

fn rounds(report: &Report, done: &str) -> String {
    let sent = list(report, |round| Bytes(round.bytes).to_string());
    format!("{} ({sent} {done})", report.rounds.len())
}

fn status_name(status: Status) -> &'static str {
    match status {
        Status::Completed => "completed",
        Status::Failed => "failed",
        Status::Cancelled => "cancelled",
        Status::NotConverging => "not converging",
        Status::TooLate => "too late",
        Status::Unknown => "unknown",
    }
}
