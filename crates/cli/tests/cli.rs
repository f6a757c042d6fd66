//! The command as scripts see it: exit codes, what goes to stdout and what to stderr, and real moves of small guests.

use std::{
    iter,
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    process::{Command, Stdio},
};

use crate::session::{Run, Sockets, transship};
use serde_json::Value;

/// Runs to the end: exit code, stdout, stderr.
fn run(arguments: &[&str]) -> Run {
    Run::of(transship(arguments).output().unwrap())
}

#[test]
fn wrong_usage_is_exit_code_2_and_nothing_on_stdout() {
    let cases: [&[&str]; 8] = [
        &[],
        &["sail"],
        &["move"],
        &["move", "--vm", "qemu:/x"],
        &["move", "--vm", "qemu:/x", "--to", "unix:/x", "--speed", "1"],
        &["move", "--vm", "qemu:/x", "--to", "unix:/x", "--peer", "qemu", "--verify"],
        &["receive", "--vm", "/x", "--listen", "unix:/x"],
        &["guest", "--listen", "/x", "--content", "zero", "--corpus", "/x"],
    ];
    for arguments in cases {
        let run = run(arguments);
        assert_eq!(run.code, 2, "{arguments:?}: {run:?}");
        assert_eq!(run.stdout, "", "{arguments:?}");
        assert_ne!(run.stderr, "", "{arguments:?}");
    }
}

#[test]
fn every_wrong_value_is_named_with_its_bounds_in_one_attempt() {
    let run = run(&[
        "move",
        "--vm",
        "vm1",
        "--to",
        "udp:x",
        "--channels",
        "256",
        "--bandwidth",
        "fast",
        "--downtime",
        "61s",
        "--max-rounds",
        "0",
        "--compress",
        "zstd:21",
        "--encoders",
        "0",
    ]);
    assert_eq!(run.code, 2, "{run:?}");
    let expected = [
        ("--vm", "qemu:/path/to/qmp.sock"),
        ("--to", "tcp:HOST:PORT"),
        ("--channels", "1 to 255"),
        ("--compress", "-7 to 20"),
        ("--encoders", "1 to 255"),
        ("--bandwidth", "1Gbit"),
        ("--downtime", "60s"),
        ("--max-rounds", "1 to"),
    ];
    let lines: Vec<_> = run.stderr.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{run:?}");
    for (line, (flag, bound)) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("transship: {flag} ")) && line.contains(bound), "{line}");
    }
}

#[test]
fn the_bounds_of_the_downtime_are_as_promised() {
    for (text, good) in [("0s", false), ("0ms", false), ("300", false), ("1ms", true), ("60s", true), ("1m", true)] {
        // A good value comes as far as the VM, which is not there.
        let code = if good { 1 } else { 2 };
        let run = run(&["move", "--vm", "qemu:/no/such.sock", "--to", "unix:/x", "--downtime", text]);
        assert_eq!(run.code, code, "{text}: {run:?}");
    }
}

#[test]
fn what_compresses_is_read_by_its_own_rules() {
    let cases = [
        ("none", 1),
        ("auto", 1),
        ("zlib:0", 1),
        ("zstd:-7", 1),
        ("qatzip", 1),
        ("lz4:12", 1),
        ("gzip", 2),
        ("none:1", 2),
        ("auto:1", 2),
        ("lz4:0", 2),
        ("zlib:", 2),
        ("", 2),
    ];
    for (text, code) in cases {
        // A good value comes as far as the VM, which is not there.
        let run = run(&["move", "--vm", "qemu:/no/such.sock", "--to", "unix:/x", "--compress", text]);
        assert_eq!(run.code, code, "{text}: {run:?}");
        let says_who = run.stderr.lines().filter(|line| line.starts_with("transship: qatzip is made ")).count();
        assert_eq!(says_who, usize::from(text == "qatzip"), "{run:?}");
        assert_eq!(run.stderr.lines().count(), 1 + says_who, "{run:?}");
    }
    let methods = run(&["move", "--vm", "qemu:/x", "--to", "unix:/x", "--compress", "gzip"]).stderr;
    assert!(methods.contains("none, zlib, zstd, qatzip, lz4, or auto"), "{methods}");
}

/// A stock QEMU can't do all that a transship can; every option that makes no sense is named, with what would.
#[test]
fn what_a_stock_qemu_can_not_do_is_refused() {
    let base = ["move", "--vm", "qemu:/nowhere/q", "--to", "unix:/x", "--peer", "qemu"];
    for (flags, words) in [
        (["--verify"].as_slice(), ["--verify", "no hash"]),
        (&["--channels", "2", "--compress", "lz4"], ["--compress \"lz4\"", "multifd-compression"]),
        (&["--channels", "2", "--compress", "qatzip"], ["--compress \"qatzip\"", "none, zlib or zstd"]),
        (&["--channels", "2", "--compress", "auto"], ["--compress \"auto\"", "name it"]),
        (&["--channels", "2", "--compress", "zstd:21"], ["--compress \"zstd:21\"", "-7 to 20"]),
        (&["--compress", "zstd"], ["--compress", "add --channels N"]),
        (&["--channels", "2", "--compress", "zlib", "--encoders", "0"], ["--encoders \"0\"", "1 to 255"]),
        (&["--channels", "256"], ["--channels \"256\"", "0 to 255"]),
        (&["--bandwidth", "1"], ["--bandwidth", "1MiB/s"]),
    ] {
        let run = run(&[&base, flags].concat());
        assert_eq!(run.code, 2, "{flags:?}: {run:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{flags:?}: {run:?}");
        assert!(words.iter().all(|word| run.stderr.contains(word)), "{flags:?}: {run:?}");
    }
    for flags in [
        [].as_slice(),
        &["--channels", "0"],
        &["--channels", "255", "--compress", "zlib:0", "--zero-pages", "main"],
        &["--channels", "2", "--compress", "zstd", "--encoders", "3", "--when-busy", "raw"],
    ] {
        let run = run(&[&base, flags].concat());
        assert!(run.code == 1 && run.stderr.contains("/nowhere/q"), "{flags:?}: {run:?}");
    }
    // Without a peer to say so, 0 channels are none.
    assert_eq!(run(&["move", "--vm", "qemu:/nowhere/q", "--to", "unix:/x", "--channels", "0"]).code, 2);
}

#[test]
fn what_a_save_is_told_is_checked_before_anything_is_touched() {
    let wrong: [(&[&str], &[&str]); 7] = [
        (&["--to", "fd:x"], &["--to \"fd:x\"", "descriptor"]),
        (&["--to", "file:a,offset=4x"], &["--to ", "4096, 0x1000 or 4k"]),
        (&["--to", "a", "--direct-io=maybe"], &["--direct-io \"maybe\"", "on, off or auto"]),
        (&["--to", "a", "--format", "stream", "--direct-io"], &["--direct-io=on", "mapped-ram"]),
        (&["--to", "a", "--format", "libvirt"], &["--format libvirt", "libvirt:DOMAIN"]),
        (&["--to", "a", "--paused", "--live"], &["--paused", "--live"]),
        (&["--to", "a", "--background", "--stay-stopped"], &["--background", "--stay-stopped"]),
    ];
    for (arguments, parts) in wrong {
        let run = run(&[&["save", "--vm", "qemu:/no/such.sock"], arguments].concat());
        assert_eq!((run.code, run.stdout.as_str(), run.stderr.lines().count()), (2, "", 1), "{run:?}");
        assert!(parts.iter().all(|part| run.stderr.contains(part)), "{run:?}");
    }
    let all = ["--to", "", "--channels", "0", "--downtime", "2m", "--max-rounds", "0", "--direct-io=1"];
    let run_all = run(&[&["save", "--vm", "vm"][..], &all].concat());
    assert_eq!((run_all.code, run_all.stderr.lines().count()), (2, 6), "{run_all:?}");
    for direct_io in ["--direct-io", "--direct-io=auto", "--direct-io=off"] {
        // Good values come as far as the VM, which is not there.
        let run =
            run(&["save", "--vm", "qemu:/no/such.sock", "--to", "fdset:3,4,offset=1M", "--background", direct_io]);
        assert_eq!(run.code, 1, "{run:?}");
    }
}

#[test]
fn how_a_received_file_is_written_is_checked_before_anybody_can_connect() {
    let base = ["receive", "--peer", "qemu", "--listen", "unix:/no/such/socket"];
    let wrong: [(&[&str], &[&str]); 4] = [
        (&["--to", "a", "--direct-io=maybe"], &["--direct-io \"maybe\"", "on, off or auto"]),
        (&["--to", "a", "--format", "stream", "--direct-io"], &["--direct-io=on", "mapped-ram"]),
        (&["--vm", "qemu:/no/such.sock", "--direct-io=off"], &["--direct-io: ", "--to"]),
        (&["--vm", "qemu:/no/such.sock", "--io", "plain"], &["--io: ", "--to"]),
    ];
    for (arguments, parts) in wrong {
        let run = run(&[&base, arguments].concat());
        assert_eq!((run.code, run.stdout.as_str(), run.stderr.lines().count()), (2, "", 1), "{run:?}");
        assert!(parts.iter().all(|part| run.stderr.contains(part)), "{run:?}");
    }
    for flags in
        [["--direct-io", "--io=uring"], ["--direct-io=auto", "--io=auto"], ["--format=stream", "--direct-io=off"]]
    {
        // Good values come as far as the address, which can't be.
        let run = run(&[&base[..], &["--to", "/no/such/file"], &flags].concat());
        assert!(run.code == 1 && run.stderr.contains("/no/such/socket"), "{run:?}");
    }
}

#[test]
fn a_vm_that_is_not_there_is_exit_code_1_and_one_line_that_names_it() {
    for arguments in [&["move", "--to", "unix:/no/such"][..], &["watch"], &["save", "--to", "/no/such/file"]] {
        for vm in ["qemu:/no/such.sock", "handoff:/no/such.sock"] {
            let run = run(&[arguments, &["--vm", vm]].concat());
            assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
            assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
            assert!(run.stderr.starts_with("transship: ") && run.stderr.contains("/no/such.sock"), "{run:?}");
        }
    }
}

#[test]
fn help_version_manual_and_completions_go_to_stdout() {
    let cases: [(&[&str], &str); 7] = [
        (&["--version"], env!("CARGO_PKG_VERSION")),
        (&["-h"], "receive"),
        (&["--help"], "Exit codes"),
        (&["move", "--help"], "Examples:"),
        (&["man"], ".TH"),
        (&["man", "move"], "downtime"),
        (&["completions", "bash"], "_transship"),
    ];
    for (arguments, part) in cases {
        let run = run(arguments);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{arguments:?}");
        assert!(run.stdout.contains(part), "{arguments:?}: {run:?}");
    }
}

#[test]
fn a_wrong_log_filter_is_refused_before_anything_is_touched() {
    let mut command = transship(&["watch", "--vm", "qemu:/no/such.sock"]);
    let run = Run::of(command.env("TRANSSHIP_LOG", "engine=loud").output().unwrap());
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("TRANSSHIP_LOG"), "{run:?}");
}

#[test]
fn a_reader_that_has_enough_is_no_error() {
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let run_closed = |mut command: Command| {
        let output = command.stdout(closed()).stdin(Stdio::null()).stderr(Stdio::piped()).output().unwrap();
        Run::of(output)
    };
    let session = Sockets::new();
    let guest = session.guest("a", &["--mem", "4M"]);
    for arguments in [&["--help"][..], &["man"], &["watch", "--interval", "10ms", "--vm", &guest.vm]] {
        let run = run_closed(transship(arguments));
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{arguments:?}");
    }
}

/// The processes of a command share stderr: a line in pieces would be torn by a line of another.
#[test]
fn each_line_is_written_in_one_piece() {
    let (stderr, heard) = UnixDatagram::pair().unwrap();
    let mut command = transship(&["move", "--vm", "qemu:/no/such.sock", "--to", "unix:/no/such"]);
    let status = command.stderr(OwnedFd::from(stderr)).status().unwrap();
    // Ours is the only other end.
    drop(command);
    heard.set_nonblocking(true).unwrap();
    let mut piece = [0; 4096];
    let pieces: Vec<_> = iter::from_fn(|| heard.recv(&mut piece).ok().map(|length| piece[..length].to_vec())).collect();
    assert!(status.code() == Some(1) && !pieces.is_empty(), "{status}");
    for piece in &pieces {
        let piece = String::from_utf8_lossy(piece);
        assert!(piece.starts_with("transship: ") && piece.ends_with('\n'), "{piece:?} of {}", pieces.len());
    }
}

#[test]
fn a_closed_stderr_does_not_disturb_a_move() {
    let session = Sockets::new();
    let source = session.guest("a", &["--mem", "8M"]);
    let destination = session.guest("b", &["--mem", "8M", "--incoming"]);
    let receive = session.receive(&destination);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let run = Run::of(session.moving(&source, &["--json"]).stderr(writer).output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(receive.wait().code, 0);
}

#[test]
fn watch_counts_its_lines_and_shows_the_working_set() {
    let session = Sockets::new();
    let flags = ["--mem", "32M", "--touched", "50%", "--write-rate", "max", "--hot-set", "1M"];
    let guest = session.guest("a", &flags);
    let run = run(&["watch", "--vm", &guest.vm, "--interval", "200ms", "--count", "3", "--json"]);
    assert_eq!(run.code, 0, "{run:?}");
    let looks: Vec<Value> = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(looks.len(), 3, "{run:?}");
    let last = &looks[2];
    assert_eq!(last["memory"]["bytes"], 32 << 20);
    assert_eq!(last["memory"]["data_bytes"], 16 << 20, "half of it was touched");
    assert_eq!(last["memory"]["hole_bytes"], 16 << 20);
    let written = last["working_set"]["since_start_bytes"].as_u64().unwrap();
    assert!((4096..=1 << 20).contains(&written), "it writes in its hot set only: {last}");
    assert_eq!(last["working_set"]["window_bytes"], written, "the window is longer than this watch");
    assert!(looks.iter().any(|look| look["dirty_pages_per_s"].as_f64().unwrap() > 0.0), "{run:?}");
    assert_eq!(guest.check().wrong, 0);
}

#[test]
fn a_guest_is_moved_and_the_report_has_every_field() {
    let session = Sockets::new();
    let flags = ["--mem", "64M", "--regions", "2"];
    let source = session.guest("a", &[&flags[..], &["--write-rate", "20M", "--hot-set", "4M"]].concat());
    let destination = session.guest("b", &[&flags[..], &["--incoming"]].concat());
    let receive = session.receive(&destination);
    let run = Run::of(session.moving(&source, &["--json", "--verify", "--channels", "2"]).output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.stdout.lines().count(), 1, "one object on one line");

    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    for field in ["total_ms", "setup_ms", "downtime_ms", "throughput", "busy_ratio"] {
        assert!(report[field].is_number(), "{field} in {report}");
    }
    let round = &report["rounds"][0];
    for field in ["scanned", "written", "zero", "hole", "free", "bytes", "ms", "dirty_pages_per_s"] {
        assert!(round[field].is_number(), "rounds[0].{field} in {report}");
    }
    for field in ["normal", "zero", "hole", "free", "raw_busy", "resent"] {
        assert!(report["pages"][field].is_u64(), "pages.{field} in {report}");
    }
    assert_eq!(report["status"], "completed");
    assert_eq!(report["verified"], true);
    assert_eq!(report["bytes"]["guest"], 64 << 20);
    assert!(report["bytes"]["wire"].as_u64().unwrap() > 0);
    assert!(report["cpu"]["total"].as_f64().unwrap() > 0.0);
    assert!(report["pages"]["hole"].as_u64().unwrap() >= (32 << 20) / 4096, "half of it was never touched: {report}");

    let received = receive.wait();
    assert_eq!(received.code, 0, "{received:?}");
    assert!(received.stdout.starts_with("status      completed in "), "{received:?}");
    let check = destination.check();
    assert_eq!((check.pages, check.wrong), (16_384, 0));
    assert!(check.writes > 0);
}

#[test]
fn a_move_that_is_cancelled_leaves_the_guest_and_a_second_one_succeeds() {
    let session = Sockets::new();
    let source = session.guest("a", &["--mem", "64M", "--content", "random", "--write-rate", "10M"]);
    let destination = session.guest("b", &["--mem", "64M", "--incoming"]);
    let receive = session.receive(&destination);
    // 32 MiB at 1 MiB/s: there's time to change one's mind.
    let mut slow = session.start(session.moving(&source, &["--json", "--bandwidth", "1M"]));
    slow.wait_for_line("round 1");
    slow.terminate();
    let run = slow.wait();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("transship: cancelling; the guest runs on here\n"), "{run:?}");
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&report["status"], report["error"].is_string()), (&"cancelled".into(), true), "{report}");
    assert_eq!((&report["error_by"], &report["error_kind"]), (&"user".into(), &"cancelled".into()), "{report}");
    let received = receive.wait();
    assert_eq!(received.code, 1, "{received:?}");

    let fresh = session.guest("c", &["--mem", "64M", "--incoming"]);
    let receive = session.receive(&fresh);
    let run = Run::of(session.moving(&source, &["--verify"]).output().unwrap());
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("verified    yes"), "{run:?}");
    assert_eq!(receive.wait().code, 0);
    assert_eq!(fresh.check().wrong, 0);
}

#[test]
fn nobody_at_the_other_end_is_exit_code_1_also_in_json() {
    let session = Sockets::new();
    let source = session.guest("a", &["--mem", "4M"]);
    let run = Run::of(session.moving(&source, &["--json"]).output().unwrap());
    assert_eq!(run.code, 1, "{run:?}");
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&report["status"], &report["error_by"]), (&"failed".into(), &"user".into()));
    assert_eq!(report["error_kind"], "no_connection");
    assert!(run.stderr.contains(report["error"].as_str().unwrap()), "the same words in both: {run:?}");
    assert_eq!(source.check().wrong, 0);
}

#[test]
fn receive_ends_cleanly_when_told_to_and_leaves_no_socket() {
    let session = Sockets::new();
    let guest = session.guest("b", &["--mem", "4M", "--incoming"]);
    let receive = session.receive(&guest);
    receive.terminate();
    let run = receive.wait();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("cancelling"), "{run:?}");
    assert!(!session.has_socket(), "its socket is still there");
}
