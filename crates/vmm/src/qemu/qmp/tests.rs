//! A QEMU made of lines.
#![allow(clippy::unwrap_used)]
use super::{socket::LINE_BYTES_MAX, *};
use std::{
    io::{BufRead, BufReader, Write},
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::mpsc::{Receiver, channel},
};

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}}, "capabilities": []}}"#;

/// A peer that answers the n-th command with the n-th list of lines; `ID` in them becomes the command's id. The answer
/// to a command without one has none either.
pub(in crate::qemu) fn peer(answers: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let (dir, path, _) = overheard(GREETING, answers);
    (dir, path)
}

/// The same, with this greeting; and the commands that it is given.
fn overheard(greeting: &'static str, answers: &[&str]) -> (tempfile::TempDir, PathBuf, Receiver<Value>) {
    let (told, heard) = channel();
    let answers: Vec<String> =
        [r#"{"return": {}, "id": ID}"#].iter().chain(answers).map(|answer| (*answer).to_owned()).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut writer = stream.try_clone().unwrap();
        writeln!(writer, "{greeting}\r").unwrap();
        let commands = BufReader::new(stream).lines();
        for (command, answer) in commands.zip(answers) {
            let command: Value = serde_json::from_str(&command.unwrap()).unwrap();
            let answer = match command.get("id") {
                Some(id) => answer.replace("ID", &id.to_string()),
                None => answer.replace(r#", "id": ID"#, ""),
            };
            let _ = told.send(command);
            writeln!(writer, "{answer}").unwrap();
        }
    });
    (dir, path, heard)
}

/// QEMU dies of them at times.
#[test]
fn commands_out_of_band_are_left_off() {
    let able = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}}, "capabilities": ["oob"]}}"#;
    let (_dir, path, heard) = overheard(able, &[]);
    let _qmp = Qmp::connect(&path).unwrap();
    let command = heard.recv().unwrap();
    assert_eq!((&command["execute"], &command["arguments"]), (&json!("qmp_capabilities"), &Value::Null));
}

/// They are given together, and what is asked so is not asked again.
#[test]
fn a_descriptor_is_handed_over_with_questions_behind_it() {
    const YES: &str = r#"{"return": {"fd": 7, "fdset-id": 3}, "id": ID}"#;
    const NO: &str = r#"{"error": {"desc": "no"}, "id": ID}"#;
    for (added, is_taken) in [(YES, true), (NO, false)] {
        let (_dir, path, heard) = overheard(GREETING, &[added, r#"{"return": "a", "id": ID}"#, NO, NO]);
        let mut qmp = Qmp::connect(&path).unwrap();
        let file = tempfile::tempfile().unwrap();
        let result = qmp.add_fd(file.as_fd(), &[("first", json!({})), ("second", json!({}))]);
        let [_, add, first, second] = [0; 4].map(|_| heard.recv().unwrap());
        assert_eq!([add, first, second].map(|it| it["execute"].clone()), ["add-fd", "first", "second"]);
        let added = match result {
            Ok(added) => added,
            Err(QmpError::Refused { command, .. }) => {
                assert!(!is_taken && command == "add-fd");
                continue;
            }
            other => panic!("{other:?}"),
        };
        assert!(is_taken && (added.number, added.set) == (7, 3), "{added:?}");
        assert_eq!(qmp.execute("first", json!({})).unwrap(), "a");
        assert!(matches!(qmp.execute("second", json!({})), Err(QmpError::Refused { .. })));
        qmp.forget_answers_to(&[("second", json!({}))]);
        assert_eq!(qmp.execute("first", json!({})).unwrap(), "a");
        // That it is refused nobody need know.
        qmp.remove_fd(&added);
        let remove = heard.recv().unwrap();
        assert_eq!(remove["execute"], "remove-fd");
        assert_eq!(remove["arguments"], json!({ "fdset-id": 3, "fd": 7 }));
    }
}

/// What was asked with a stop that was refused says nothing: it is asked again, and what was typed is withdrawn.
#[test]
fn a_guest_is_stopped_between_questions_with_a_command_behind_them() {
    const YES: &str = r#"{"return": {}, "id": ID}"#;
    const NO: &str = r#"{"error": {"desc": "no"}, "id": ID}"#;
    for (stopped, is_stopped) in [(YES, true), (NO, false)] {
        let returned = |it| format!(r#"{{"return": "{it}", "id": ID}}"#);
        let [before, early, typed, late] = ["before", "early", "typed", "late"].map(returned);
        let (_dir, path, heard) = overheard(GREETING, &[&before, stopped, &early, &typed, &late, &late]);
        let mut qmp = Qmp::connect(&path).unwrap();
        let ask = |name| vec![(name, json!({}))];
        let with = WithStop { before: ask("zeroth"), questions: ask("first"), next: Some(("second", json!({}))) };
        match qmp.stop_with(&with, COMMAND_WAIT) {
            Ok(()) => assert!(is_stopped),
            Err(QmpError::Refused { command, .. }) => assert!(!is_stopped && command == "stop"),
            other => panic!("{other:?}"),
        }
        for (question, early) in [("first", "early"), ("zeroth", "before")] {
            assert_eq!(qmp.execute(question, json!({})).unwrap(), if is_stopped { early } else { "late" });
        }
        if is_stopped {
            assert_eq!(qmp.execute("second", json!({})).unwrap(), "typed");
        }
        let [_, zeroth, stop, first, second] = [0; 5].map(|_| heard.recv().unwrap());
        assert_eq!([zeroth, stop, first].map(|it| it["execute"].clone()), ["zeroth", "stop", "first"]);
        assert_eq!((&second["execute"], second.get("withdrawn").is_none()), (&json!("second"), is_stopped));
    }
}

/// The guest that is let run is the one that was typed ahead for: one command, of which nothing is withdrawn.
#[test]
fn a_guest_is_let_run_by_the_end_of_what_was_typed() {
    let (_dir, path, heard) = overheard(GREETING, &[r#"{"return": {}, "id": ID}"#]);
    let mut qmp = Qmp::connect(&path).unwrap();
    assert!(qmp.type_cont_ahead().unwrap());
    qmp.cont().unwrap();
    let [_, cont] = [0; 2].map(|_| heard.recv().unwrap());
    assert_eq!(cont, json!({ "execute": "cont", "id": cont["id"] }));
}

/// A command goes in two pieces, also as the first of several, and is one command to QEMU.
#[test]
fn a_command_that_was_typed_ahead_is_given_by_its_end() {
    let yes = r#"{"return": {}, "id": ID}"#;
    let (_dir, path, heard) = overheard(GREETING, &[r#"{"return": {"right": 1}, "id": ID}"#, yes, yes]);
    let mut qmp = Qmp::connect(&path).unwrap();
    heard.recv().unwrap();
    let command = ("first", json!({ "of": { "many": 1 } }));
    assert!(qmp.type_ahead(&command).unwrap());
    assert!(heard.recv_timeout(Duration::from_millis(20)).is_err(), "it is not given yet");
    assert_eq!(qmp.execute(command.0, command.1.clone()).unwrap(), json!({ "right": 1 }));
    qmp.type_ahead(&command).unwrap();
    qmp.execute_all(&[command.clone(), ("second", json!({}))], &[]).unwrap();
    let [alone, first, second] = [0; 3].map(|_| heard.recv().unwrap());
    for whole in [alone, first] {
        assert_eq!(whole, json!({ "execute": "first", "arguments": command.1, "id": whole["id"] }));
    }
    assert_eq!(second["execute"], "second");
}

/// QEMU refuses it then, whichever it is, and what it says to that is not taken for the answer to another.
#[test]
fn a_command_that_was_typed_ahead_is_withdrawn_by_any_other() {
    const NO: &str = r#"{"error": {"class": "GenericError", "desc": "member 'withdrawn' is unexpected"}, "id": ID}"#;
    const YES: &str = r#"{"return": {"right": 1}, "id": ID}"#;
    let file = tempfile::tempfile().unwrap();
    let others: [fn(&mut Qmp, BorrowedFd<'_>); 4] = [
        |qmp, _| drop(qmp.execute("other", json!({ "of": 1 })).unwrap()),
        |qmp, _| drop(qmp.execute("typed", json!({ "of": 2 })).unwrap()),
        |qmp, _| qmp.ask_ahead(&[("other", json!({}))]).unwrap(),
        |qmp, file| qmp.send_fd("typed", file).unwrap(),
    ];
    for other in others {
        let (_dir, path, heard) = overheard(GREETING, &[NO, YES, NO, YES]);
        let mut qmp = Qmp::connect(&path).unwrap();
        heard.recv().unwrap();
        qmp.type_ahead(&("typed", json!({ "of": 1 }))).unwrap();
        other(&mut qmp, file.as_fd());
        let [withdrawn, given] = [0; 2].map(|_| heard.recv().unwrap());
        assert_eq!(withdrawn["withdrawn"], true, "{withdrawn}");
        assert!(given.get("withdrawn").is_none() && given["id"] != withdrawn["id"], "{given}");
        // One that is typed behind another withdraws that.
        qmp.type_ahead(&("typed", json!({ "of": 1 }))).unwrap();
        qmp.type_ahead(&("typed", json!({ "of": 2 }))).unwrap();
        assert_eq!(qmp.execute("typed", json!({ "of": 2 })).unwrap(), json!({ "right": 1 }));
        let [withdrawn, given] = [0; 2].map(|_| heard.recv().unwrap());
        assert_eq!((&withdrawn["withdrawn"], &given["arguments"]), (&json!(true), &json!({ "of": 2 })));
    }
}

#[test]
fn events_between_a_command_and_its_answer_are_kept() {
    let (_dir, path) = peer(&[concat!(
        r#"{"event": "STOP", "timestamp": {}}"#,
        "\r\n",
        r#"{"event": "MIGRATION", "data": {"status": "setup"}}"#,
        "\n",
        r#"{"return": {"a": 1}, "id": ID}"#
    )]);
    let mut qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.version(), (10, 0));
    assert_eq!(qmp.execute("x", json!({})).unwrap(), json!({"a": 1}));
    let event = qmp.wait_event("MIGRATION", Instant::now()).unwrap().unwrap();
    assert_eq!(event.data, json!({"status": "setup"}));
}

#[test]
fn an_answer_to_an_earlier_command_is_not_taken_for_this_ones() {
    let (_dir, path) =
        peer(&[concat!(r#"{"return": {"late": 1}, "id": 999999}"#, "\n", r#"{"return": {"right": 1}, "id": ID}"#)]);
    let mut qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.execute("x", json!({})).unwrap(), json!({"right": 1}));
}

/// Together or not, with events among them. Only the last one is told by its id.
#[test]
fn answers_to_what_was_asked_ahead_come_whenever_they_come() {
    let (_dir, path) = peer(&[
        "",
        concat!(
            r#"{"event": "MIGRATION", "data": {"status": "active"}}"#,
            "\n",
            r#"{"return": {"first": 1}}"#,
            "\n",
            r#"{"error": {"class": "GenericError", "desc": "no such thing"}, "id": ID}"#
        ),
    ]);
    let mut qmp = Qmp::connect(&path).unwrap();
    let questions = [("first", json!({})), ("second", json!({ "of": 2 }))];
    qmp.ask_ahead(&questions).unwrap();
    // Asked once: the peer would have no more answers.
    qmp.ask_ahead(&questions).unwrap();
    assert_eq!(qmp.execute("first", json!({})).unwrap(), json!({"first": 1}));
    let refused = qmp.execute("second", json!({ "of": 2 })).unwrap_err();
    assert!(matches!(&refused, QmpError::Refused { reason, .. } if reason == "no such thing"), "{refused}");
    let event = qmp.wait_event("MIGRATION", Instant::now()).unwrap().unwrap();
    assert_eq!(event.data, json!({"status": "active"}));
    qmp.forget_answers();
    assert!(matches!(qmp.execute("first", json!({})), Err(QmpError::Closed { .. })), "what is forgotten is asked anew");
}

/// What has no id belongs to the first that has not been answered. One that has an id says whether that is so.
#[test]
fn an_answer_that_comes_before_an_earlier_one_is_refused() {
    let (_dir, path, heard) = overheard(GREETING, &["", r#"{"return": 2, "id": ID}"#]);
    let mut qmp = Qmp::connect(&path).unwrap();
    qmp.ask_ahead(&[("first", json!({})), ("second", json!({}))]).unwrap();
    let error = qmp.execute("first", json!({})).unwrap_err().to_string();
    assert!(error.ends_with("sent an answer before an earlier one, which is not QMP"), "{error}");
    let [_, first, second] = [0; 3].map(|_| heard.recv().unwrap());
    assert_eq!((first, second), (json!({ "execute": "first" }), json!({ "execute": "second", "id": 3 })));
}

/// It answers only when what it has written is read. Its answer is then not the next command's.
#[test]
fn a_command_that_writes_need_not_be_answered_before_somebody_reads() {
    let (_dir, path) = peer(&["", concat!(r#"{"return": {"late": 1}, "id": 2}"#, "\n", r#"{"return": 5, "id": ID}"#)]);
    let mut qmp = Qmp::connect(&path).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"state").unwrap();
    qmp.execute_until_written("migrate", json!({}), ours.as_fd()).unwrap();
    assert_eq!(qmp.execute("x", json!({})).unwrap(), json!(5));
}

#[test]
fn a_command_that_is_refused_says_so_although_its_output_is_closed() {
    let (_dir, path) = peer(&[r#"{"error": {"desc": "blocked"}, "id": ID}"#]);
    let mut qmp = Qmp::connect(&path).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = qmp.execute_until_written("migrate", json!({}), ours.as_fd()).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused migrate: blocked");
}

#[test]
fn a_refusal_keeps_qemus_words() {
    let (_dir, path) = peer(&[r#"{"error": {"class": "GenericError", "desc": "no such thing"}, "id": ID}"#]);
    let error = Qmp::connect(&path).unwrap().execute("x", json!({})).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused x: no such thing");
}

#[test]
fn lines_that_are_not_qmp_are_refused() {
    for line in ["garbage", "[1]", r#"{"return": {}}"#] {
        let answers: &'static [&'static str] = Box::leak(Box::new([line]));
        let (_dir, path) = peer(answers);
        let error = Qmp::connect(&path).unwrap().execute("x", json!({})).unwrap_err();
        assert!(matches!(error, QmpError::Protocol { .. }), "{line}: {error}");
    }
}

#[test]
fn an_endless_line_does_not_take_all_memory() {
    let (_dir, path) = peer(&[&"x".repeat(LINE_BYTES_MAX + (1 << 20))]);
    let error = Qmp::connect(&path).unwrap().execute("x", json!({})).unwrap_err();
    assert!(error.to_string().contains("more than 8 MiB"), "{error}");
}

#[test]
fn a_peer_that_ends_is_reported_as_gone() {
    let (_dir, path) = peer(&[]);
    let error = Qmp::connect(&path).unwrap().execute("x", json!({})).unwrap_err();
    assert!(matches!(error, QmpError::Closed { .. }), "{error}");
}

#[test]
fn a_socket_that_another_client_holds_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let _never_accepts = UnixListener::bind(&path).unwrap();
    let error = Qmp::connect(&path).err().unwrap().to_string();
    assert!(error.contains("another client holds this QMP socket"), "{error}");
}
