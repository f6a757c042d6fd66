//! The end of every operation (move, save, restore, relay): its result in the report, and a guest that goes on here.
use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use crate::{Cancelled, Error, Phase, Progress, Report, Status, cpu, guarded::Guarded};

/// What has ended because its deadline has passed says so.
pub(crate) fn too_late(error: Error, progress: &Progress) -> Error {
    let (Error::Cancelled(Cancelled::Move), Some(after)) = (&error, progress.passed_deadline()) else { return error };
    let left = progress.round_left.load(Relaxed) as f64 / 1e6;
    let reached = match progress.phase() {
        Phase::Rounds => format!("in round {}, with {left:.1} MB of it left", progress.round.load(Relaxed)),
        Phase::Held => "while it was held, ready to switch over".to_owned(),
        Phase::Switchover => "while the guest was stopped for the rest".to_owned(),
        Phase::Completing => "while the file was completed".to_owned(),
        _ => "before the first round".to_owned(),
    };
    Error::TooLate(format!(
        "the deadline, {} after the start, has passed {reached}; the guest runs on here. Allow more time, or a longer \
         --downtime, or have it write less; --converge pace makes it",
        in_words(after)
    ))
}

fn in_words(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{} s", time.as_secs()),
        _ => format!("{} ms", time.as_millis()),
    }
}

/// The end of either side: fills the report from the result.
pub(crate) fn finish(
    result: Result<(), Error>,
    begin: Instant,
    progress: &Progress,
    report: &mut Report,
) -> Result<(), Error> {
    let result = result.map_err(|error| too_late(error, progress));
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
        Err(Error::TooLate(_)) => Status::TooLate,
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
            (Err(Error::TooLate(text())), Status::TooLate),
            (Err(Error::Unknown(text())), Status::Unknown),
            (Err(Error::Unfit(text())), Status::Failed),
        ] {
            assert_eq!(status_of(&result), status, "{result:?}");
        }
    }

    #[test]
    fn only_what_nobody_has_cancelled_is_too_late() {
        let progress = Progress::new();
        assert!(matches!(too_late(Error::CANCELLED, &progress), Error::Cancelled(_)), "there is no deadline");
        progress.end_within(Duration::from_secs(600));
        assert!(!progress.is_cancelled() && progress.time_left().is_some_and(|left| !left.is_zero()));
        assert!(matches!(too_late(Error::CANCELLED, &progress), Error::Cancelled(_)), "it is not over");

        let progress = Progress::new();
        progress.end_within(Duration::ZERO);
        progress.set_phase(Phase::Rounds);
        progress.round.store(3, Relaxed);
        progress.round_left.store(2_500_000, Relaxed);
        assert!(progress.is_cancelled());
        let error = too_late(Error::CANCELLED, &progress).to_string();
        assert!(error.contains("0 s after the start, has passed in round 3, with 2.5 MB of it left"), "{error}");
        assert!(matches!(too_late(Error::Unfit(text()), &progress), Error::Unfit(_)), "it failed by itself");
        progress.cancel();
        assert!(matches!(too_late(Error::CANCELLED, &progress), Error::Cancelled(_)), "the user was first");
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
