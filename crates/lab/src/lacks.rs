//! What a test needs and this machine does not have.
use std::{fmt::Display, fs::OpenOptions, io::Write, thread};

/// Says that the running test, or a part of it, is left out since `what` is not to be had; the test then returns. It
/// also becomes a line of the file that `TRANSSHIP_LACKS` names, which `scripts/test.sh` shows at its end: what a test
/// prints is not seen when it passes.
///
/// # Panics
/// `TRANSSHIP_TESTS_COMPLETE` is set: where nothing may be left out, the test fails.
#[track_caller]
pub fn lacks(what: impl Display) {
    // The test runner names its threads so.
    let current = thread::current();
    let test = current.name().unwrap_or("a test");
    let line = format!("{test}: left out: {what}");
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("TRANSSHIP_LACKS") {
        // One write, so that the lines of several tests don't mix.
        let written = OpenOptions::new().append(true).create(true).open(&path);
        let written = written.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        assert!(written.is_ok(), "{}: {written:?}", path.display());
    }
    let complete = std::env::var_os("TRANSSHIP_TESTS_COMPLETE").is_some_and(|value| !value.is_empty());
    assert!(!complete, "{line}; TRANSSHIP_TESTS_COMPLETE is set, so nothing may be");
}
