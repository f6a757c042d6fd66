//! The command itself, on little memory: every part runs for real, and no time is looked at.
#![allow(clippy::unwrap_used)]
use std::path::Path;

use serde_json::Value;
use transship_tests::Transship;

/// Two kinds of memory in two modes: eight moves of 64 MiB.
#[test]
fn both_sides_move_the_same_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments =
        ["bench", "zero-pages", "--mem", "64M", "--runs", "1", "--channels", "2", "--kinds", "untouched,mixed"];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.run().unwrap().expect_code(0).unwrap();
    for line in ["never touched  main, 2 channels", "never touched  2 channels", "mixed          2 channels", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }

    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let rows = report["results"]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let (ours, qemu) = (&row["ours"][0], &row["qemu"][0]);
        for run in [ours, qemu] {
            assert_eq!(run["equal"], true, "{row}");
            assert!(run["ms"].as_f64().unwrap() > 0.0, "{row}");
        }
        // Half of the mixed memory is random, but for each eighth page: nobody moves it in fewer bytes.
        let least = if row["content"] == "mixed" { (64 << 20) / 2 / 8 * 7 } else { 0 };
        assert!(ours["wire_bytes"].as_u64().unwrap() > least, "{row}");
        assert!(qemu["wire_bytes"].as_u64().unwrap() > least, "{row}");
        let read = ours["pages_read"].as_u64().unwrap();
        if row["content"] == "untouched" {
            assert!(read < 100, "memory that was never touched is not read: {row}");
        } else {
            assert!(read >= (64 << 20) / 4096 / 4 * 3, "{row}");
        }
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("table.json");
    let bench = Transship::command(["bench", "zero-pages", "--mem", "1T", "--json", json.to_str().unwrap()]);
    let finished = bench.run().unwrap().expect_code(1).unwrap();
    assert!(finished.stderr.contains("two guests of 1 TiB"), "{finished}");
    assert!(!Path::new(&json).exists());
}

#[test]
fn a_peer_that_is_no_qemu_is_named() {
    let arguments =
        ["bench", "zero-pages", "--mem", "64M", "--kinds", "untouched", "--channels", "1", "--peer", "/bin/false"];
    let finished = Transship::command(arguments).run().unwrap().expect_code(1).unwrap();
    assert!(finished.stderr.contains("QEMU ended at once"), "{finished}");
}
