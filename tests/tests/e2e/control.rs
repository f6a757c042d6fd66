//! Moves that run are seen and ended from other processes.
use std::{fs, os::unix::net::UnixStream, path::Path};

use transship_lab::{Qemu, Result, Scratch, Synthetic, Transship, transship::TransshipBuilder, wait_until};

use crate::ends::{assert_whole, in_the_middle, synthetic_pair};
use crate::peer::assert_runs_on;
use crate::steering::{cancel, status, which};

fn small() -> transship_lab::synthetic::SyntheticBuilder {
    Synthetic::builder().memory("16M").write_rate("10M").hot_set("1M")
}

/// A move that waits at this step, until the file `gate` is removed.
fn stalled(moving: TransshipBuilder, step: &str, folder: &Scratch) -> Result<Transship> {
    let gate = folder.join("gate");
    let armed = moving.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", &gate);
    let moving = armed.start()?;
    wait_until(step, || Ok(gate.exists()))?;
    Ok(moving)
}

#[test]
fn a_move_is_seen_and_cancelled_in_the_middle_and_the_guest_runs_on() -> Result<()> {
    let (source, destination) = (Qemu::multiboot().start()?, Qemu::multiboot().incoming().start()?);
    source.ready()?;
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let to = receive.listening()?;
    let moving = in_the_middle(Transship::moving(&source.vm(), &to), &folder)?;
    // By its process, by its VM as it was given, and by its socket.
    let state = status(&which(&moving))?.unwrap_or_default();
    assert_eq!((&state["vm"], &state["to"]), (&source.vm().into(), &to.into()), "{state}");
    assert_eq!((state["phase"].as_str(), state["hold"].as_str()), (Some("rounds"), Some("never")), "{state}");
    assert!(state["wire_bytes"].as_u64() > Some(0) && state["round"] == 1, "{state}");
    let socket = state["socket"].as_str().unwrap_or_default().to_owned();
    for name in [&source.vm(), &socket] {
        assert_eq!(status(name)?.unwrap_or_default()["pid"], moving.pid(), "{name}");
    }
    let shown = Transship::command(["status"]).run()?.expect_code(0)?;
    assert!(shown.stdout.lines().any(|line| line.starts_with(&which(&moving)) && line.contains("rounds")), "{shown}");

    let cancelled = cancel(&source.vm())?.expect_code(0)?;
    assert!(cancelled.stdout.contains("the guest runs on here"), "{cancelled}");
    fs::remove_file(folder.join("gate"))?;
    let ended = moving.wait()?;
    assert_eq!(ended.report()?["status"], "cancelled", "{ended}");
    assert_runs_on(&source, &ended, "it was cancelled")?;
    receive.wait()?.expect_code(1)?;
    assert!(!Path::new(&socket).exists());
    let gone = cancel(&source.vm())?.expect_code(1)?;
    assert!(gone.stderr.contains("no move or save of"), "{gone}");
    Ok(())
}

#[test]
fn a_guest_that_was_given_up_can_not_be_cancelled() -> Result<()> {
    let (source, destination) = synthetic_pair(small())?;
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let socket = folder.join("control").display().to_string();
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(["--control", &socket]);
    let moving = stalled(moving, "source.go-sent", &folder)?;
    let refused = cancel(&socket)?.expect_code(1)?;
    assert!(refused.stderr.contains("too late to cancel"), "{refused}");
    assert_eq!(status(&socket)?.unwrap_or_default()["phase"], "handed-over");
    fs::remove_file(folder.join("gate"))?;
    moving.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// Nobody removes the socket of a process that was killed, until somebody looks.
#[test]
fn a_socket_that_was_left_behind_is_removed() -> Result<()> {
    let (source, destination) = synthetic_pair(small())?;
    let folder = Scratch::new()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let to = receive.listening()?;
    let named = folder.join("control").display().to_string();
    let mut moving = in_the_middle(Transship::moving(&source.vm(), &to), &folder)?;
    let socket = status(&which(&moving))?.unwrap_or_default()["socket"].as_str().unwrap_or_default().to_owned();
    moving.kill9();
    assert!(Path::new(&socket).exists(), "{socket}");
    assert!(status(&which(&moving))?.is_none());
    assert!(!Path::new(&socket).exists());
    receive.wait()?.expect_code(1)?;

    // One that was asked for is taken over.
    drop(std::os::unix::net::UnixListener::bind(&named)?);
    let destination = small().incoming().start()?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let moving = Transship::moving(&source.vm(), &receive.listening()?).args(["--control", &named]);
    fs::remove_file(folder.join("gate"))?;
    let moving = stalled(moving, "source.round", &folder)?;
    UnixStream::connect(&named)?;
    // One that is listened at is not, and the guest is not touched.
    let refused = Transship::moving(&source.vm(), "unix:/none").args(["--control", &named]).run()?.expect_code(1)?;
    assert!(refused.stderr.contains("another process listens there"), "{refused}");
    fs::remove_file(folder.join("gate"))?;
    moving.wait()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}

/// A move goes on without its socket, if nobody has asked for that.
#[test]
fn a_move_goes_on_without_a_socket() -> Result<()> {
    let (source, destination) = synthetic_pair(small())?;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let to = receive.listening()?;
    let nobody = ["setpriv", "--reuid=65534", "--clear-groups", "env", "-u", "XDG_RUNTIME_DIR"].map(str::to_owned);
    let held = Transship::command(["move", "--vm", "qemu:/none", "--to", &to, "--hold"]).prefix(&nobody).run()?;
    assert!(held.code() == Some(1) && held.stderr.contains("--control"), "{held}");
    let not_held = Transship::command(["move", "--vm", "qemu:/none", "--to", &to]).prefix(&nobody).run()?;
    assert!(not_held.code() == Some(1) && not_held.stderr.contains("/none"), "{not_held}");
    assert!(not_held.stderr.contains("won't find this"), "{not_held}");
    Transship::moving(&source.vm(), &to).run()?.expect_code(0)?;
    receive.wait()?.expect_code(0)?;
    assert_whole(&destination)
}
