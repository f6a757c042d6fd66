//! `transship bench converge` itself, on little memory: every way runs for real, and no time is looked at.
use std::time::Duration;

use rustix::process::Signal;
use transship_lab::{Transship, lines::Mark};

use crate::report;

/// A guest that writes as fast as it can, moved in each way once.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_writes_is_moved_in_every_way() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = [
        "bench", "converge", "--mem", "64M", "--link", "400", "--wires", "loopback", "--guests", "emulated", "--times",
        "20", "--hot", "all", "--runs", "1",
    ];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.start().unwrap().wait_for(Duration::from_secs(900)).unwrap().expect_code(0).unwrap();
    for line in
        ["QEMU, auto-converge", "not possible", "pace by QEMU, auto-converge, time", "forecasts of time", "Aims"]
    {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let series = report["results"]["series"].as_array().unwrap();
    assert_eq!(series.len(), 7);
    for series in series {
        if series["way"] == "dirty-limit" {
            assert!(series["not_possible"].as_str().unwrap().contains("KVM"), "{series}");
            continue;
        }
        let run = &series["runs"][0];
        let number = |name: &str| run[name].as_f64().unwrap_or_else(|| panic!("no {name}: {run}"));
        assert!(number("writes_mib_per_s") > 0.0 && number("work") > 0.0, "{run}");
        assert!(number("blackout_ms") >= number("beat_ms"), "{run}");
        let follows = series["way"] == "postcopy";
        assert!(!follows || run["status"] == "completed", "{series}");
        assert_eq!(run["waits"].is_object(), follows, "{series}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// Who has measured for hours and stops has what was measured until then.
#[test]
#[ignore = "long: make test-long"]
fn what_was_measured_before_a_signal_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("table.json");
    let arguments = [
        "bench",
        "converge",
        "--mem",
        "64M",
        "--link",
        "400",
        "--wires",
        "loopback",
        "--guests",
        "emulated",
        "--times",
        "0.5",
        "--hot",
        "all",
        "--ways",
        "never,pace",
        "--runs",
        "1000",
    ];
    let bench = Transship::command(arguments).args(["--json".as_ref(), json.as_os_str()]).start().unwrap();
    let is_told = |line: &str| line.contains("run 1 of 1000: completed").then_some(());
    bench.stderr().wait_for(Duration::from_secs(120), Mark::START, "a move", is_told).unwrap();
    bench.signal(Signal::TERM).unwrap();
    let finished = bench.wait_for(Duration::from_secs(60)).unwrap().expect_code(128 + 15).unwrap();
    assert!(finished.stdout.contains("emulated"), "{}", finished.stdout);
    let report = report(&json);
    let runs: Vec<_> = report["results"]["series"].as_array().unwrap().iter().map(|series| &series["runs"]).collect();
    assert!(!runs.is_empty() && runs.iter().all(|runs| runs[0]["status"] == "completed"), "{runs:?}");
}
