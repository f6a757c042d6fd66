//! The command itself, on little memory: every part runs for real, and no time is looked at.
use std::{collections::BTreeMap, path::Path, time::Duration};

use serde_json::Value;
use transship_lab::{Transship, lines::Mark};

use crate::report;

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

    let report = report(&json);
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

/// A method that QEMU has and one that it lacks, on data that shrinks: four moves of 64 MiB.
#[test]
fn each_method_is_moved_beside_qemus() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = [
        "bench",
        "codecs",
        "--mem",
        "64M",
        "--runs",
        "1",
        "--channels",
        "2",
        "--methods",
        "zstd,lz4",
        "--encoders",
        "3",
    ];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.run().unwrap().expect_code(0).unwrap();
    for line in ["2         zstd", "2         QEMU's zstd", "2         lz4", "2         QEMU's none", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let series = report["results"]["series"].as_array().unwrap();
    assert_eq!(series.len(), 4);
    for series in series {
        assert_eq!(series["runs"][0]["equal"], true, "{series}");
        // The method was not only asked for: it was used.
        let ratio = series["ratio"].as_f64().unwrap();
        let wanted = if series["method"] == "none" { 0.9..1.1 } else { 1.5..6.0 };
        assert!(wanted.contains(&ratio), "{series}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

#[test]
fn a_corpus_without_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        ["bench", "codecs", "--mem", "64M", "--methods", "none", "--corpus", folder.path().to_str().unwrap()];
    let finished = Transship::command(arguments).run().unwrap().expect_code(1).unwrap();
    assert!(finished.stderr.contains("no file with content"), "{finished}");
}

/// Guests that write, by two and three encoders; and the same pages by both models in one process.
#[test]
#[ignore = "long: make test-long"]
fn guests_that_write_arrive_with_any_number_of_encoders() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = ["bench", "threads", "--mem", "64M", "--runs", "1", "--encoders", "3", "--write-rate", "2"];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.run().unwrap().expect_code(0).unwrap();
    for line in ["transship's guest  3, raw", "QEMU's guest       QEMU's, 3 channels", "old by rings", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let moves = report["results"]["moves"].as_array().unwrap();
    assert_eq!(moves.len(), 4 + 6);
    for series in moves {
        let run = &series["runs"][0];
        assert_eq!(run["status"], "completed", "{series}");
        if series["when_busy"] == "wait" {
            assert_eq!(run["raw_busy_pages"], 0, "{series}");
            assert!(run["wire_bytes"].as_u64().unwrap() < 48 << 20, "{series}");
        }
    }
    for passes in report["results"]["one_process"].as_array().unwrap() {
        let bytes = |model: &str| passes[model][0]["encoded_bytes"].as_u64().unwrap();
        assert!(bytes("rings") > 0 && bytes("rings") == bytes("old_model"), "{passes}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// Every kind of guest and of file, once by each: 64 MiB at a time.
#[test]
#[ignore = "long: make test-long"]
fn guests_are_saved_and_restored_in_every_way() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let arguments = ["bench", "files", "--mem", "64M", "--runs", "1", "--channels", "2"];
    let bench = Transship::command(arguments).args(["--dir".as_ref(), disk.as_os_str()]).args([
        "--json".as_ref(),
        json.as_os_str(),
        "--svg".as_ref(),
        svg.as_os_str(),
    ]);
    // More than half a hundred QEMUs, one after the other.
    let finished = bench.start().unwrap().wait_for(Duration::from_secs(900)).unwrap().expect_code(0).unwrap();
    for line in ["paused         file  ", "live           mapped, 2 channels  ", "background     mapped  ", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let results = &report["results"];
    let direct_io = !results["disk"].as_array().unwrap().is_empty();
    let series = results["series"].as_array().unwrap();
    assert_eq!(series.len(), if direct_io { 2 + 8 + 8 + 3 } else { 6 + 6 + 2 });
    for series in series {
        let (guest, layout) = (series["guest"].as_str().unwrap(), series["layout"].as_str().unwrap());
        let save = &series["saves"][0];
        if guest == "live" && save["status"] != "completed" {
            // On a busy machine it may write faster than the disk.
            continue;
        }
        assert_eq!(save["status"], "completed", "{series}");
        assert_eq!(series["restores"][0]["right"], true, "{series}");
        let number = |name: &str| save[name].as_f64().unwrap();
        let memory = f64::from(64 << 20);
        if guest == "sparse" {
            assert!(number("allocated_bytes") < memory / 16.0, "{series}");
        } else {
            assert!(number("allocated_bytes") > memory * 0.9, "{series}");
        }
        if layout != "plain" {
            assert!(number("file_bytes") < memory + f64::from(16 << 20), "{series}");
        }
        let runs = guest == "live" || guest == "background";
        assert_eq!(save["pause_ms"].is_number(), runs, "{series}");
        assert_eq!(series["restores"][0]["runs_after_ms"].is_number(), runs, "{series}");
        if (guest, layout, series["by"].as_str().unwrap()) == ("live", "direct", "transship") {
            assert_eq!(series["restores_lazy"][0]["right"], true, "{series}");
        }
    }
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0, "each file goes away");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

#[test]
fn a_folder_that_is_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("nothing");
    let arguments = ["bench", "files", "--mem", "64M", "--dir", missing.to_str().unwrap()];
    let finished = Transship::command(arguments).run().unwrap().expect_code(1).unwrap();
    assert!(finished.stderr.contains(missing.to_str().unwrap()), "{finished}");
}

/// Data on every route by one method, and holes: ten moves of 64 MiB.
#[test]
fn the_same_memory_goes_between_transship_and_qemu_in_every_direction() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let arguments = ["bench", "qemu-wire", "--mem", "64M", "--runs", "1", "--channels", "2", "--methods", "zstd"];
    let bench = Transship::command(arguments).args(["--kinds", "corpus,untouched"]).args([
        "--dir".as_ref(),
        disk.as_os_str(),
        "--json".as_ref(),
        json.as_os_str(),
        "--svg".as_ref(),
        svg.as_os_str(),
    ]);
    let finished = bench.run().unwrap().expect_code(0).unwrap();
    for line in ["2 channels, zstd  ours to QEMU", "2 channels, none  QEMU to file", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let series = report["results"]["series"].as_array().unwrap();
    assert_eq!(series.len(), 10);
    for series in series {
        assert_eq!(series["runs"][0]["equal"], true, "{series}");
        let ratio = series["ratio"].as_f64().unwrap();
        // The method was not only asked for: it was used.
        let least = if series["kind"] == "corpus" { 1.5 } else { 20.0 };
        assert!(ratio > least && (least > 2.0 || ratio < 6.0), "{series}");
    }
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0, "each file goes away");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// A migration over a link, directly and through relays: five migrations of 64 MiB.
#[test]
#[ignore = "long: make test-long"]
fn a_migration_goes_through_relays_and_without() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = ["bench", "relays", "--mem", "64M", "--runs", "1", "--channels", "2", "--links", "500"];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.run().unwrap().expect_code(0).unwrap();
    for line in ["500 Mbit/s  QEMU, multifd zstd", "500 Mbit/s  relays with one connection", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let series = report["results"]["series"].as_array().unwrap();
    assert_eq!(series.len(), 5);
    for series in series {
        assert_eq!(series["runs"][0]["equal"], true, "{series}");
        // Whoever is to compress does, and nobody else.
        let ratio = series["ratio"].as_f64().unwrap();
        assert_eq!(ratio > 1.5, series["route"] != "plain", "{series}");
        let relays = series["runs"][0]["cpu"]["transship"]["source"].as_f64().unwrap();
        assert_eq!(relays > 0.0, series["route"] != "plain" && series["route"] != "zstd", "{series}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// A Linux guest by each way and side, idle and compiling, there and back.
#[test]
#[ignore = "minutes of an emulated guest: make test-long"]
fn a_guest_with_old_data_goes_there_and_back_in_every_way() {
    let Some(peer) = transship_lab::other_qemu("11.1").unwrap() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = ["bench", "free-pages", "--mem", "512M", "--times", "1", "--channels", "2", "--peer", &peer];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.start().unwrap().wait_for(Duration::from_secs(1800)).unwrap().expect_code(0).unwrap();
    for line in ["512 MiB  idle   hints        transship", "512 MiB  busy   reporting    QEMU", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let series = report["results"]["series"].as_array().unwrap();
    assert_eq!(series.len(), 12);
    let memory = f64::from(512 << 20);
    for series in series {
        let runs = series["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2, "{series}");
        for run in runs {
            let (allocated, wire) = (run["allocated_bytes"].as_f64().unwrap(), run["wire_bytes"].as_f64().unwrap());
            // Free memory was full of old data, unless the guest has given it back.
            assert_eq!(allocated < memory / 2.0, series["way"] == "reporting", "{run}");
            assert!(wire > memory / 2.0 || series["way"] != "without", "{run}");
            if series["load"] == "busy" {
                assert!(run["work_during"]["units"].as_u64().unwrap() > 0, "{run}");
            }
        }
        if series["way"] == "reporting" || (series["way"] == "hints" && series["by"] == "transship") {
            assert!(series["wire_bytes"].as_f64().unwrap() < memory / 2.0, "{series}");
        }
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// Clones of a small guest beside the same guest loaded by QEMU, and restored lazily.
#[test]
#[ignore = "long: make test-long"]
fn clones_stand_beside_guests_that_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = ["bench", "clones", "--mem", "128M", "--content", "64M", "--count", "1,2"];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.run().unwrap().expect_code(0).unwrap();
    for line in ["clones                 1", "QEMU, mapped-ram       2", "restore --lazy         2", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let rows = report["results"]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let count = row["count"].as_u64().unwrap() as usize;
        let times = row["each_ms"].as_array().unwrap();
        assert_eq!(times.len(), count, "{row}");
        assert!(times.iter().all(|ms| ms.as_f64().unwrap() > 0.0), "{row}");
        // Those that were loaded have all of their content for themselves.
        let each = row["memory"].as_u64().unwrap() / count as u64;
        assert!(row["way"] == "clones" || each > 64 << 20, "{row}");
        assert_eq!(row["downtime_ms"].is_number(), row["way"] == "clones", "{row}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// What is left in a folder of results when it is killed is taken up: nothing that is done is measured again.
#[test]
#[ignore = "long: make test-long"]
fn all_tables_go_into_one_folder_and_an_interrupted_run_goes_on() {
    let home = tempfile::tempdir().unwrap();
    let (out, disk) = (home.path().join("results"), home.path().join("disk"));
    std::fs::create_dir(&disk).unwrap();
    let bench = |more: &[&str]| {
        let arguments = ["bench", "all", "--quick", "--mem", "64M", "--pairs", "1", "--out"];
        let tables = ["--tables", "limits,zero-pages,codecs", "--dir", disk.to_str().unwrap()];
        Transship::command(arguments).args([out.as_os_str()]).args(tables).args(more.iter().copied())
    };
    let begun = bench(&[]).start().unwrap();
    // The next part is under way when the one before is named as measured.
    let (_, mark) =
        begun.stderr().wait(Mark::START, "a third part", |line| line.contains("[3/").then_some(())).unwrap();
    begun.stderr().wait(mark, "a move of it", |line| line.contains("run 1 of 1").then_some(())).unwrap();
    drop(begun);

    let finished = || -> BTreeMap<String, Vec<u8>> {
        let files = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        let done = files.filter(|path| path.to_str().unwrap().ends_with(".done.json"));
        done.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap()))
            .collect()
    };
    let before = finished();
    assert!(before.contains_key("limits.done.json") && before.contains_key("zero-pages-untouched.done.json"));
    assert!(!before.contains_key("codecs-4.done.json"), "{:?}", before.keys());
    let page = || std::fs::read_to_string(out.join("index.html")).unwrap();
    assert!(page().contains("parts are done so far"), "{}", page());

    let refused = bench(&[]).run().unwrap().expect_code(1).unwrap();
    assert!(refused.stderr.contains("has a run already") && refused.stderr.contains("--resume"), "{refused}");
    let refused = bench(&["--resume", "--corpus", "/etc"]).run().unwrap().expect_code(1).unwrap();
    assert!(refused.stderr.contains("corpus was null and is \"/etc\""), "{refused}");

    let resumed = bench(&["--resume"]).start().unwrap().wait_for(Duration::from_secs(900)).unwrap();
    let resumed = resumed.expect_code(0).unwrap();
    let after = finished();
    for (name, bytes) in &before {
        assert!(after[name] == *bytes, "{name} was measured again");
        let part = name.trim_end_matches(".done.json");
        assert!(resumed.stderr.contains(&format!("{part} is done already")), "{resumed}");
    }
    let parts = ["untouched", "zero", "random", "mixed"].map(|kind| format!("zero-pages-{kind}"));
    for part in parts.iter().map(String::as_str).chain(["limits", "codecs-4"]) {
        assert!(after.contains_key(&format!("{part}.done.json")), "{part}: {:?}", after.keys());
        assert!(page().contains(&format!("<code>transship bench {}", part.split('-').next().unwrap())), "{part}");
        let svg = std::fs::read_to_string(out.join(format!("{part}.svg"))).unwrap();
        assert!(roxmltree::Document::parse(&svg).is_ok(), "{svg}");
        let report: Value =
            serde_json::from_str(&std::fs::read_to_string(out.join(format!("{part}.json"))).unwrap()).unwrap();
        for row in report["rows"].as_array().unwrap() {
            assert!(row["ours"][0].as_f64().unwrap() > 0.0, "{row}");
            assert!(part == "limits" || row["compared"]["verdict"] == "too-few", "one pair says nothing: {row}");
        }
    }
    assert!(!page().contains("parts are done so far") && page().contains("of copy, fresh"), "{}", page());
    assert!(resumed.stdout.contains("rows ahead"), "{resumed}");
}

/// Guests are heard before, during and after a move by each side; and one is tracked by both.
#[test]
#[ignore = "long: make test-long"]
fn guests_are_heard_while_they_are_moved() {
    let folder = tempfile::tempdir().unwrap();
    let (json, svg) = (folder.path().join("table.json"), folder.path().join("table.svg"));
    let arguments = ["bench", "guest-view", "--mem", "64M", "--runs", "1", "--loads", "idle,tracked"];
    let bench =
        Transship::command(arguments).args(["--json".as_ref(), json.as_os_str(), "--svg".as_ref(), svg.as_os_str()]);
    let finished = bench.start().unwrap().wait_for(Duration::from_secs(600)).unwrap().expect_code(0).unwrap();
    for line in ["idle: blackout as the guest is heard", "writing, tracked", "Aims"] {
        assert!(finished.stdout.contains(line), "{line:?} is not in\n{}", finished.stdout);
    }
    let report = report(&json);
    let series = report["results"]["series"].as_array().unwrap();
    for side in ["ours", "qemu"] {
        let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number: {value}"));
        let moved = &series[0][side][0];
        assert!(moved["beats"].as_u64().unwrap() > 100, "{moved}");
        assert!(number(&moved["blackout_ms"]) >= number(&moved["beat_ms"]), "{moved}");
        let tracked = &series[1][side][0]["mib_per_s"];
        assert!(number(&tracked[0]) > 0.0 && number(&tracked[1]) > 0.0, "{tracked}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(roxmltree::Document::parse(&picture).is_ok(), "{picture}");
}

/// Each kind of memory that needs nothing from the host, filled from outside and compared after the move.
#[test]
#[ignore = "long: make test-long"]
fn guest_memory_of_any_kind_is_moved_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("table.json");
    for (backend, memory) in [("ram", "fresh"), ("memfd", "warm"), ("file", "warm")] {
        let arguments = ["bench", "zero-pages", "--mem", "64M", "--runs", "1", "--channels", "2", "--kinds", "mixed"];
        let bench = Transship::command(arguments).args(["--backend", backend, "--memory", memory]);
        bench.args(["--json".as_ref(), json.as_os_str()]).run().unwrap().expect_code(0).unwrap();
        let report = report(&json);
        let row = &report["results"]["rows"][1];
        assert_eq!((&row["ours"][0]["equal"], &row["qemu"][0]["equal"]), (&true.into(), &true.into()), "{row}");
        let wanted = if backend == "file" { memory.to_owned() } else { format!("{memory}, {backend}") };
        assert_eq!(report["rows"][1]["memory"], wanted, "{report}");
    }
    let refused = Transship::command(["bench", "zero-pages", "--mem", "1T", "--backend", "huge"]).run().unwrap();
    let refused = refused.expect_code(1).unwrap();
    assert!(refused.stderr.contains("huge=always") && refused.stderr.contains("vm.nr_hugepages"), "{refused}");
}
