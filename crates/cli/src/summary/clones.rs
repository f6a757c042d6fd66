//! The result of a clone, and of a fork.
use transship_engine::{CloneMemory, CloneReport, Error, Report};

use super::common::{self, Rows};
use crate::{
    commands::fork::ForkReport,
    failure::Failure,
    output,
    units::{Bytes, Count, Time},
};

/// Prints the result of a clone and yields how the command ends.
pub(crate) fn cloned(outcome: Result<(), Error>, report: Report, json: bool) -> Result<(), Failure> {
    common::end(outcome, report, json, "the clone is there", clone)
}

/// The same of a fork.
pub(crate) fn forked(outcome: Result<(), Error>, mut report: ForkReport, json: bool) -> Result<(), Failure> {
    report.error = outcome.as_ref().err().map(|error| output::one_line(&error.to_string()));
    let printed = match json {
        true => output::json(&report),
        false if report.image.rounds.is_empty() => Ok(()),
        false => output::result(&fork(&report)),
    };
    outcome?;
    Ok(printed?)
}

fn clone(report: &Report) -> String {
    let mut rows = Rows::new(report);
    if let Some(clone) = &report.clone {
        rows.add("runs", format!("after {}", Time::from_ms(clone.runs_ms)));
        rows.add("memory", memory(clone));
    }
    if let Some(file) = &report.file {
        rows.add("image", format!("{}, {} stored", Bytes(file.bytes), Bytes(file.allocated)));
    }
    rows.into_text()
}

fn memory(clone: &CloneReport) -> String {
    match clone.memory {
        CloneMemory::Mapped => format!("shared with the image; {} pages put back", Count(clone.pages_written)),
        CloneMemory::Lazy => "its own, not a mapping of the image: pages came when they were touched".into(),
        CloneMemory::Copied => "its own, not a mapping of the image: all of it was copied".into(),
    }
}

fn fork(report: &ForkReport) -> String {
    let mut rows = Rows::new(&report.image);
    rows.add("downtime", Time::from_ms(report.image.downtime_ms));
    if let Some(file) = &report.image.file {
        rows.add("image", format!("{}, {} stored", Bytes(file.bytes), Bytes(file.allocated)));
    }
    let run: Vec<&CloneReport> = report.clones.iter().filter_map(|clone| clone.clone.as_ref()).collect();
    if !report.clones.is_empty() {
        let text = format!("{} of {} in {}", run.len(), report.clones.len(), Time::from_ms(report.clones_ms));
        rows.add("clones", text);
    }
    let slowest = run.iter().map(|clone| clone.runs_ms).fold(0.0, f64::max);
    if !run.is_empty() {
        let mean = run.iter().map(|clone| clone.runs_ms).sum::<f64>() / run.len() as f64;
        rows.add(
            "each",
            format!("{} from waiting to running, {} at most", Time::from_ms(mean), Time::from_ms(slowest)),
        );
    }
    if let Some(other) = run.iter().find(|clone| clone.memory != CloneMemory::Mapped) {
        rows.add("memory", memory(other));
    }
    rows.into_text()
}
