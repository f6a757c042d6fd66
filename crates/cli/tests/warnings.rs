//! What a user hears without asking for a log: warnings, and nothing when there is none.

#[allow(dead_code, reason = "each test binary uses a part")]
use std::{io::Write, os::unix::net::UnixStream, process::Command};

use crate::session::{Run, Sockets, transship};
use serde_json::Value;

/// Whoever listens hears of a stranger, on stderr; whoever reads the report on stdout does not.
#[test]
fn a_stranger_who_is_turned_away_shows_at_the_receiver() {
    let session = Sockets::new();
    let source = session.guest("a", &["--mem", "4M"]);
    let destination = session.guest("b", &["--mem", "4M", "--incoming"]);
    let mut receive = session.start(session.receiving(&destination, &["--json"]));
    receive.wait_for_line("listening at");
    let mut stranger = UnixStream::connect(session.uri().strip_prefix("unix:").unwrap()).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").unwrap();
    receive.wait_for_line("away: ");
    let moved = Run::of(session.moving(&source, &["--json"]).output().unwrap());
    let received = receive.wait();
    for run in [&moved, &received] {
        assert_eq!((run.code, run.stdout.lines().count()), (0, 1), "{run:?}");
        let report: Value = serde_json::from_str(&run.stdout).unwrap();
        assert_eq!(report["status"], "completed");
    }
    let told: Vec<_> = received.stderr.lines().filter(|line| line.contains("turned")).collect();
    let [told] = told[..] else { panic!("{received:?}") };
    assert!(
        told.starts_with("transship: turned unix:") && told.contains("the other side is not a transship"),
        "{told}"
    );
    assert!(!moved.stderr.contains("turned"), "{moved:?}");
}

/// Where all goes well nobody warns of anything. With a log of warnings each of them would have a mark; without, they
/// are shown as they are.
#[test]
fn runs_without_trouble_have_no_warnings() {
    let session = Sockets::new();
    let source = session.guest("a", &["--mem", "4M"]);
    let destination = session.guest("b", &["--mem", "4M", "--incoming"]);
    let logging = |mut command: Command| {
        command.env("TRANSSHIP_LOG", "transship=warn");
        command
    };
    let mut receive = session.start(logging(session.receiving(&destination, &[])));
    receive.wait_for_line("listening at");
    let run = |command: Command| Run::of(logging(command).output().unwrap());
    let moved = run(session.moving(&source, &["--channels", "2", "--verify"]));
    let received = receive.wait();
    let file = format!("file:{}", session.path("saved"));
    let saved = run(transship(&["save", "--vm", &destination.vm, "--to", &file]));
    let converted = run(transship(&["convert", &file, &session.path("converted"), "--format", "stream"]));
    let waiting = session.guest("c", &["--mem", "4M", "--incoming"]);
    let restored = run(transship(&["restore", "--vm", &waiting.vm, "--from", &file]));
    let watched = run(transship(&["watch", "--vm", &waiting.vm, "--count", "1"]));
    let planned = run(transship(&["plan", "--vm", &waiting.vm, "--time", "1s"]));
    for run in [&moved, &received, &saved, &converted, &restored, &watched, &planned] {
        assert!(run.code == 0 && !run.stderr.contains("WARN"), "{run:?}");
    }
    let info = Run::of(transship(&["info", &file]).output().unwrap());
    assert_eq!((info.code, info.stderr.as_str()), (0, ""), "{info:?}");
}
