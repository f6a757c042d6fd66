//! What reads snapshot files, as scripts see it: exit codes, what goes to stdout and what to stderr.
#[allow(dead_code, reason = "each test binary uses a part")]
use std::{
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::session::{Run, transship};
use serde_json::Value;
use transship_wire::qemu::{Block, Configuration, Name, StreamWriter};

fn run(arguments: &[&str]) -> Run {
    Run::of(transship(arguments).output().unwrap())
}

/// A stream of one block, whose second page is full.
fn stream() -> Vec<u8> {
    let name = |name: &str| Name::new(name).unwrap();
    let block = Block { name: name("pc.ram"), used_bytes: 4 * 4096, gpa: None, mapped: None };
    let mut writer = StreamWriter::new(0, 1);
    writer.header().configuration(&Configuration::new(name("pc-q35-10.0")));
    writer.ram_start(block.used_bytes).block(&block).end_of_section();
    writer.end().page(&block.name, 4096, &[7; 4096]).zero_page(&block.name, 0).end_of_section();
    let state = [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat();
    writer.full(3, &name("globalstate"), 0, 1, &state).eof();
    writer.take_bytes()
}

fn saved() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stream");
    std::fs::write(&path, stream()).unwrap();
    (folder, path)
}

/// With bytes on its standard input.
fn fed(mut command: Command, bytes: &[u8]) -> Run {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    Run::of(child.wait_with_output().unwrap())
}

#[test]
fn info_shows_a_file_and_what_comes_by_a_pipe() {
    let (_folder, path) = saved();
    for run in [run(&["info", path.to_str().unwrap(), "--json"]), fed(transship(&["info", "-", "--json"]), &stream())] {
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
        let info: Value = serde_json::from_str(&run.stdout).unwrap();
        assert_eq!(info["format"], "stream");
        assert_eq!((&info["machine"], &info["state"]), (&"pc-q35-10.0".into(), &"running".into()));
        assert_eq!(info["bytes"], stream().len());
        let block = &info["blocks"][0];
        assert_eq!((&block["name"], &block["stored"], &block["zero"]), (&"pc.ram".into(), &1.into(), &1.into()));
    }
    let text = run(&["info", path.to_str().unwrap()]);
    assert_eq!((text.code, text.stderr.as_str()), (0, ""));
    for part in ["format       stream", "guest        running", "pc.ram"] {
        assert!(text.stdout.contains(part), "{text:?}");
    }
}

#[test]
fn what_is_no_snapshot_is_one_line_that_names_it() {
    let (folder, path) = saved();
    let cut = folder.path().join("cut");
    std::fs::write(&cut, &stream()[..stream().len() - 20]).unwrap();
    let missing = folder.path().join("missing");
    let no_image = (&folder.path().to_path_buf(), "it is a folder without manifest.json");
    for (file, why) in [(&cut, "cut"), (&missing, "No such file"), no_image] {
        let run = run(&["info", file.to_str().unwrap()]);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
        assert!(run.stderr.contains(file.to_str().unwrap()) && run.stderr.contains(why), "{run:?}");
    }
    let run = fed(transship(&["info", "-"]), b"something else");
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("stream magic at offset 0"), "{run:?}");
    assert!(path.exists());
}

#[test]
fn every_wrong_value_of_a_restore_is_named_in_one_attempt() {
    let wrong = ["restore", "--vm", "vm1", "--from", "fd:x", "--channels", "0", "--direct-io=maybe"];
    let run = run(&wrong);
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{run:?}");
    let expected = [
        ("--vm", "qemu:/path"),
        ("--from", "the number of a descriptor"),
        ("--channels", "1 to 255"),
        ("--direct-io", "auto"),
    ];
    assert_eq!(run.stderr.lines().count(), expected.len(), "{run:?}");
    for (line, (flag, part)) in run.stderr.lines().zip(expected) {
        assert!(line.starts_with(&format!("transship: {flag} ")) && line.contains(part), "{line}");
    }
}

#[test]
fn a_restore_can_not_both_run_and_stand() {
    let both = run(&["restore", "--vm", "qemu:/x", "--from", "/x", "--run", "--stopped"]);
    assert_eq!(both.code, 2, "{both:?}");
    let no_vm = run(&["restore", "--vm", "qemu:/no/such.sock", "--from", "/x", "--lazy", "--json"]);
    assert_eq!(no_vm.code, 1, "{no_vm:?}");
    let report: Value = serde_json::from_str(&no_vm.stdout).unwrap();
    assert!(report["error"].as_str().unwrap().contains("/no/such.sock"), "{report}");
    assert_eq!((&report["status"], &report["error_by"]), (&"failed".into(), &"user".into()));
}

#[test]
fn a_stream_is_converted_to_a_file_and_back() {
    let (folder, path) = saved();
    let [file, back] = ["file", "back"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let made = run(&["convert", path.to_str().unwrap(), &file, "--json"]);
    assert_eq!((made.code, made.stderr.contains("rror")), (0, false), "{made:?}");
    let report: Value = serde_json::from_str(&made.stdout).unwrap();
    assert_eq!((&report["status"], &report["file"]["format"]), (&"completed".into(), &"mapped-ram".into()));
    assert_eq!((&report["pages"]["normal"], &report["pages"]["zero"]), (&1.into(), &1.into()));
    assert_eq!(run(&["convert", &file, &back]).code, 0);
    let info: Value = serde_json::from_str(&run(&["info", &back, "--json"]).stdout).unwrap();
    assert_eq!((&info["format"], &info["blocks"][0]["stored"]), (&"stream".into(), &1.into()));
    // From a pipe; to what can't be.
    assert_eq!(fed(transship(&["convert", "-", &file]), &stream()).code, 0);
    let run = run(&["convert", &file, "/no/such/folder/file"]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
    assert!(run.stderr.contains("/no/such/folder/file"), "{run:?}");
}

/// What goes where must be said, and what only a stock QEMU's migration has is no option of a move.
#[test]
fn a_reception_has_one_place_to_go() {
    let listen = ["--listen", "unix:/no/such/folder/socket"];
    for (arguments, why) in [
        (&[][..], "--vm"),
        (&["--vm", "qemu:/x", "--to", "/x", "--peer", "qemu"], "--to"),
        (&["--to", "/x"], "--peer qemu"),
        (&["--vm", "qemu:/x", "--channels", "2"], "--channels"),
        (&["--vm", "qemu:/x", "--format", "stream"], "--to"),
        (&["--to", "/x", "--peer", "qemu", "--channels", "256"], "0 to 255"),
        (&["--to", "fd:x", "--peer", "qemu"], "the number of a descriptor"),
    ] {
        let run = run(&[&["receive"], &listen[..], arguments].concat());
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{arguments:?}: {run:?}");
        assert!(run.stderr.contains(why), "{arguments:?}: {run:?}");
    }
    // The file can't be made: known before anybody connects.
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("socket").display());
    let run = run(&["receive", "--peer", "qemu", "--to", "/no/such/folder/file", "--listen", &socket]);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("/no/such/folder/file") && !run.stderr.contains("listening"), "{run:?}");
}

/// Nobody but a restore starts it.
#[test]
fn a_stand_in_without_a_restore_ends_at_once() {
    let run = fed(transship(&["stand-in", "--vm", "qemu:/x"]), b"");
    assert_eq!(run.code, 1, "{run:?}");
}

/// What can't be said of keys is said before any VM is touched, all of it, and never shows a secret.
#[test]
fn mistakes_about_keys_are_told_at_once() {
    let (folder, path) = saved();
    let secret = "AGE-SECRET-KEY-1YKQ5WJNTF49ARTESWZA9VKA69VZFHDT7SFRPW3DFSS0RRYLPF85QKM8PK0";
    let public = "age17zkmx7n3zaa7453pas6q2qusxz8qqvdl9235nnnx92y9z7zu94xsdj2g0u";
    let file = |name: &str, text: &str, mode: u32| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, shared) = (file("good", secret, 0o600), file("shared", secret, 0o604));
    let (bad, theirs) = (file("bad", &format!("# x\n{secret}X"), 0o600), file("theirs", public, 0o644));
    let save = |format: &'static str, who: &str| {
        run(&["save", "--vm", "qemu:/nowhere", "--to", "/nowhere/f", "--format", format, "--encrypt-to", who])
    };
    let info = |key: &str| run(&["info", path.to_str().unwrap(), "--identity", key]);
    for (run, why) in [
        (save("mapped-ram", public), "--encrypt-to: with --format mapped-ram its pages have fixed places"),
        (save("raw", &good), "fixed places"),
        (save("libvirt", public), "encrypt the finished file with age"),
        (save("stream", "age1x"), "age1x is no public X25519 key"),
        (save("stream", &bad), "line 2 is no X25519 key"),
        (save("stream", "/nowhere/key"), "can't read /nowhere/key"),
        (info(&shared), "chmod o-rwx"),
        (info(&theirs), "line 1 is a public key of age, which opens nothing"),
        (info(&bad), "line 2 is no X25519 key"),
    ] {
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{why}: {run:?}");
        assert!(run.stderr.contains(why) && !run.stderr.contains("SECRET-KEY-1"), "{why:?} is not in {run:?}");
    }
    let run = info(&good);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("it is not encrypted, though a key for it was given"), "{run:?}");
    // A whole file of public keys, and the two forms of a key, are no mistake: there is only no such VM.
    for who in [&theirs, &good, public] {
        assert_eq!(save("stream", who).code, 1, "{who}");
    }
}
