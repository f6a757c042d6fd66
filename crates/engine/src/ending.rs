//! The end of every operation (move, save, restore, relay): its result in the report, and a guest that goes on here.
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

use crate::{
    Cancelled, Error, Phase, Progress, Report, Status, cpu,
    guarded::Guarded,
    shortfall::{Reached, TooLate},
};

/// What has ended because its deadline has passed says so.
pub(crate) fn too_late(error: Error, progress: &Progress) -> Error {
    let (Error::Cancelled(Cancelled::Move | Cancelled::Look), Some(after)) = (&error, progress.passed_deadline())
    else {
        return error;
    };
    let reached = match progress.phase() {
        Phase::Rounds => {
            Reached::Round { number: progress.round.load(Relaxed), left_bytes: progress.round_left.load(Relaxed) }
        }
        Phase::Held => Reached::Held,
        Phase::Switchover => Reached::Switchover,
        Phase::Completing => Reached::Completing,
        _ => Reached::Beginning,
    };
    Error::TooLate(TooLate::Passed { after, reached })
}

/// What was cancelled is this, whatever it was doing.
pub(crate) fn cancelled_as(what: Cancelled) -> impl FnOnce(Error) -> Error {
    move |error| if matches!(error, Error::Cancelled(_)) { Error::Cancelled(what) } else { error }
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
    report.set_error(result.as_ref().err());
    let seconds = begin.elapsed().as_secs_f64();
    report.total_ms = seconds * 1e3;
    report.throughput = (report.bytes.wire + report.bytes.lent) as f64 / seconds;
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
        Err(resume) => Error::unknown(error, |error| {
            format!(
                "{error}; and the guest can't be resumed here: {resume}. It is stopped and whole, and runs nowhere \
                 else: resume it with: {}",
                guest.resume_hint()
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        Actor, Converge,
        shortfall::{Medium, Shortfall},
    };

    fn text() -> String {
        "why".into()
    }

    fn shortfall() -> Shortfall {
        Shortfall {
            rounds: 1,
            medium: Medium::Link,
            written_bytes_per_s: 1e9,
            carried_bytes_per_s: 1e8,
            rest_bytes: 1_000_000_000,
            stop: Duration::from_secs(10),
            state: Duration::from_millis(5),
            downtime: Duration::from_millis(300),
            max_downtime: Duration::from_millis(300),
            converge: Converge::Never,
        }
    }

    #[test]
    fn every_result_has_its_status() {
        for (result, status) in [
            (Ok(()), Status::Completed),
            (Err(Error::CANCELLED), Status::Cancelled),
            (Err(Error::RESTORE_CANCELLED), Status::Cancelled),
            (Err(Error::NotConverging(Box::new(shortfall()))), Status::NotConverging),
            (Err(Error::TooLate(TooLate::NoTimeForARound(Box::new(shortfall())))), Status::TooLate),
            (Err(Error::Unknown(text().into())), Status::Unknown),
            (Err(Error::unfit(text())), Status::Failed),
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
        let reached = Reached::Round { number: 3, left_bytes: 2_500_000 };
        let error = too_late(Error::CANCELLED, &progress);
        let passed = TooLate::Passed { after: Duration::ZERO, reached };
        assert!(matches!(&error, Error::TooLate(found) if *found == passed), "{error}");
        let words = "0 s after the start, has passed in round 3, with 2.5 MB of it left";
        assert!(error.to_string().contains(words), "the text says the same: {error}");
        assert!(matches!(too_late(Error::unfit(text()), &progress), Error::Unfit { .. }), "it failed by itself");
        progress.cancel();
        assert!(matches!(too_late(Error::CANCELLED, &progress), Error::Cancelled(_)), "the user was first");
    }

    #[test]
    fn the_report_has_the_time_and_the_speed() {
        let begin = Instant::now();
        let mut report = Report::default();
        report.bytes.wire = 1_000_000;
        std::thread::sleep(Duration::from_millis(5));
        let result = finish(Err(Error::unfit(text())), begin, &Progress::new(), &mut report);
        assert!(result.is_err() && report.error.is_some_and(|error| error.contains("why")));
        assert_eq!((report.error_by, report.error_kind), (Some(Actor::User), Some("unfit")));
        let until_now_ms = begin.elapsed().as_secs_f64() * 1e3;
        assert!((5.0..=until_now_ms).contains(&report.total_ms), "{} of {until_now_ms}", report.total_ms);
        assert!((report.throughput * report.total_ms / 1e9 - 1.0).abs() < 1e-9, "{}", report.throughput);
    }
}
