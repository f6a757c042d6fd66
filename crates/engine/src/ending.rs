//! The end of every operation (move, save, restore, relay): its result in the report, and a guest that goes on here.
use std::time::Instant;

use crate::{Error, Phase, Progress, Report, Status, cpu, guarded::Guarded};

/// The end of either side: fills the report from the result.
pub(crate) fn finish(
    result: Result<(), Error>,
    begin: Instant,
    progress: &Progress,
    report: &mut Report,
) -> Result<(), Error> {
    report.status = status_of(&result);
    report.error = result.as_ref().err().map(ToString::to_string);
    report.error_by = result.as_ref().err().map(Error::actor);
    let seconds = begin.elapsed().as_secs_f64();
    report.total_ms = seconds * 1e3;
    report.throughput = report.bytes.wire as f64 / seconds;
    report.cpu.total = cpu::process_seconds();
    report.cpu.main = cpu::thread_seconds();
    if result.is_ok() {
        progress.set_phase(Phase::Done);
    }
    result
}

fn status_of(result: &Result<(), Error>) -> Status {
    match result {
        Ok(()) => Status::Completed,
        Err(Error::Cancelled(_)) => Status::Cancelled,
        Err(Error::NotConverging(_)) => Status::NotConverging,
        Err(Error::Unknown(_)) => Status::Unknown,
        Err(_) => Status::Failed,
    }
}

/// A failure before the guest was given up: it goes on here.
pub(crate) fn take_back(guest: &mut Guarded<'_>, error: Error) -> Error {
    match guest.resume(true) {
        Ok(()) => error,
        Err(resume) => Error::Unknown(format!(
            "{error}; and the guest can't be resumed here: {resume}. It is stopped and whole, and runs nowhere else: \
             resume it with: {}",
            guest.resume_hint()
        )),
    }
}
