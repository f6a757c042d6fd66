//! What the second process makes of a guest whose command has died: what it was told last.

#[allow(dead_code, reason = "each test binary uses a part")]
use std::{
    io::{BufRead, BufReader, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use crate::session::{Guest, Run, Sockets, transship};
use serde_json::{Value, json};

/// A call of the hand-off protocol on a connection of its own. The guest listens to one client at a time, and may not
/// have noticed yet that the last one has gone.
fn call(guest: &Guest, call: &str) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "{call}: somebody else is connected");
        let mut stream = UnixStream::connect(guest.vm.strip_prefix("handoff:").unwrap()).unwrap();
        let mut line = String::new();
        let sent = stream.write_all(format!("{}\n", json!({ "id": 1, "call": call })).as_bytes());
        if sent.is_ok() && BufReader::new(stream).read_line(&mut line).is_ok() {
            let answer: Value = serde_json::from_str(&line).unwrap();
            if answer["id"] == 1 {
                assert!(answer.get("ok").is_some(), "{call}: {answer}");
                return answer["ok"].clone();
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
}

const BEGIN: &str = r#"{"begin":""}"#;
const AGAIN: &str = r#""run-again""#;
const LEAVE: &str = r#""leave-it""#;
const END: &str = r#""end""#;

/// The second process, and the words that it hears before its socket ends.
fn guard(vm: &str, words: &[&str]) -> Run {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut command = transship(&["guard", "--vm", vm]);
    command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let process = command.spawn().unwrap();
    // Else there would be one more of its end, and its own would not count.
    drop(command);
    // Who is refused at once does not listen.
    words.iter().for_each(|word| drop(ours.write_all(format!("{word}\n").as_bytes())));
    drop(ours);
    Run::of(process.wait_with_output().unwrap())
}

#[test]
fn the_last_word_says_what_becomes_of_the_guest() {
    let session = Sockets::new();
    let guest = session.guest("a", &["--mem", "1M"]);
    for (words, runs, said) in [
        (&[BEGIN, AGAIN][..], true, "the guest runs on here"),
        (&[BEGIN, LEAVE, AGAIN], true, "the guest runs on here"),
        (&[BEGIN], false, "the guest is left as it was"),
        (&[BEGIN, AGAIN, LEAVE], false, "the guest is left as it was"),
        (&[BEGIN, AGAIN, END], false, ""),
        (&[], false, ""),
    ] {
        call(&guest, "stop");
        let run = guard(&guest.vm, words);
        assert_eq!(run.code, 0, "{words:?}: {run:?}");
        assert!(run.stderr.contains(said) && said.is_empty() == run.stderr.is_empty(), "{words:?}: {run:?}");
        assert_eq!(call(&guest, "describe")["running"], runs, "{words:?}");
    }
}

#[test]
fn a_guest_that_can_not_be_put_back_is_for_a_person() {
    let session = Sockets::new();
    let run = guard(&format!("handoff:{}", session.path("nobody")), &[BEGIN, AGAIN]);
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.contains("the guest is stopped"), "{run:?}");
    // Nothing is done where nothing was changed, whoever is there.
    assert_eq!(guard(&format!("handoff:{}", session.path("nobody")), &[BEGIN, AGAIN, END]).code, 0);
    assert_eq!(guard("nobody", &[BEGIN, AGAIN]).code, 2);
}
