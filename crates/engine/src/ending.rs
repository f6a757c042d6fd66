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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn text() -> String {
        "why".into()
    }

    #[test]
    fn every_result_has_its_status() {
        for (result, status) in [
            (Ok(()), Status::Completed),
            (Err(Error::CANCELLED), Status::Cancelled),
            (Err(Error::RESTORE_CANCELLED), Status::Cancelled),
            (Err(Error::NotConverging(text())), Status::NotConverging),
            (Err(Error::Unknown(text())), Status::Unknown),
            (Err(Error::Unfit(text())), Status::Failed),
        ] {
            assert_eq!(status_of(&result), status, "{result:?}");
        }
    }

    #[test]
    fn the_report_has_the_time_and_the_speed() {
        let begin = Instant::now();
        let mut report = Report::default();
        report.bytes.wire = 1_000_000;
        std::thread::sleep(Duration::from_millis(5));
        let result = finish(Err(Error::Unfit(text())), begin, &Progress::new(), &mut report);
        assert!(result.is_err() && report.error.is_some_and(|error| error.contains("why")));
        let until_now_ms = begin.elapsed().as_secs_f64() * 1e3;
        assert!((5.0..=until_now_ms).contains(&report.total_ms), "{} of {until_now_ms}", report.total_ms);
        assert!((report.throughput * report.total_ms / 1e9 - 1.0).abs() < 1e-9, "{}", report.throughput);
    }
}
