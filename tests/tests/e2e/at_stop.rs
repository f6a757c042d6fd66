//! A command that runs while the guest stands still: what it says decides where the guest runs.
use std::{
    fs,
    path::{Path, PathBuf},
};

use transship_lab::{Qemu, QemuBuilder, Result, Scratch, Transship, transship::TransshipBuilder, wait_until};

use crate::peer::{PLAIN, assert_moved, assert_never_ran, assert_runs_on};
use crate::restoring::{assert_goes_on, restoring};

/// Ways to fail, and the kind of error that each is.
const FAILURES: [(&str, &str); 3] = [("exit 7", "command"), ("sleep 600", "command_time"), ("kill -9 $$", "command")];

fn guest() -> QemuBuilder {
    Qemu::multiboot()
}

/// Notes each call, and ends like this when the guest stands still.
fn noting(folder: &Scratch, end: &str) -> (PathBuf, String) {
    let notes = folder.join("notes");
    let note = format!("echo $TRANSSHIP_PHASE $TRANSSHIP_COMMAND $TRANSSHIP_VM $TRANSSHIP_TO >> {}", notes.display());
    (notes, format!("{note}; if [ $TRANSSHIP_PHASE = stopped ]; then {end}; fi"))
}

fn with(builder: TransshipBuilder, command: &str) -> TransshipBuilder {
    builder.args(["--at-stop", command, "--at-stop-timeout", "1s"])
}

/// What it was called with, without the rest of the line.
fn phases(notes: &Path) -> Result<Vec<String>> {
    let notes = fs::read_to_string(notes)?;
    Ok(notes.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect())
}

#[test]
fn it_runs_once_while_the_guest_stands_still_and_before_it_runs_there() -> Result<()> {
    let (source, destination, folder) = (guest().booted()?, guest().incoming().start()?, Scratch::new()?);
    let left = source.next_count()?.count;
    let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
    let (go, to) = (folder.join("go"), receive.listening()?);
    let (notes, command) = noting(&folder, &format!("while [ ! -e {} ]; do sleep 0.02; done", go.display()));
    let moving = Transship::moving(&source.vm(), &to).args(["--at-stop", &command]).start()?;
    wait_until("the command", || Ok(notes.exists()))?;
    assert_ne!(source.status()?, "running");
    assert_ne!(destination.status()?, "running");
    fs::write(&go, "")?;
    let report = moving.wait()?.expect_code(0)?.report()?;
    assert!(report["at_stop_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{report}");
    receive.wait()?.expect_code(0)?;
    assert_eq!(fs::read_to_string(&notes)?, format!("stopped move {} {to}\n", source.vm()));
    assert_moved(&source, &destination, left)
}

#[test]
fn a_guest_whose_command_fails_runs_on_and_what_was_done_can_be_taken_back() -> Result<()> {
    let source = guest().booted()?;
    for (end, kind) in FAILURES {
        let (mut destination, folder) = (guest().incoming().start()?, Scratch::new()?);
        let (notes, command) = noting(&folder, end);
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?);
        let ended = with(moving, &command).run()?;
        assert_eq!(ended.report()?["error_kind"], kind, "{end}: {ended}");
        assert_runs_on(&source, &ended, end)?;
        assert_eq!(phases(&notes)?, ["stopped", "back"], "{end}");
        receive.wait()?.expect_code(1)?;
        assert_ne!(destination.status()?, "running", "{end}");
        destination.kill9();
    }
    Ok(())
}

#[test]
fn a_stock_qemu_does_not_run_a_guest_whose_command_fails() -> Result<()> {
    let (source, folder) = (guest().booted()?, Scratch::new()?);
    let (notes, command) = noting(&folder, "exit 7");
    let mut destination = guest().incoming().start()?;
    let to = PLAIN.wait_for_a_guest(&destination)?;
    let ended = with(PLAIN.moving(&source, &to), &command).run()?;
    assert_runs_on(&source, &ended, "the command has failed")?;
    assert_eq!(phases(&notes)?, ["stopped", "back"]);
    assert_never_ran(&mut destination, "the command has failed")?;

    let left = source.next_count()?.count;
    let destination = guest().incoming().start()?;
    let to = PLAIN.wait_for_a_guest(&destination)?;
    with(PLAIN.moving(&source, &to), "true").run()?.expect_code(0)?;
    assert_moved(&source, &destination, left)
}

/// After a command that has succeeded: whoever is killed, the guest runs on.
#[test]
fn a_guest_runs_on_when_the_move_is_killed_or_fails_after_the_command() -> Result<()> {
    let source = guest().booted()?;
    for (step, back) in [("at-stop.done=kill", false), ("at-stop.done=error", true)] {
        let (destination, folder) = (guest().incoming().start()?, Scratch::new()?);
        let (notes, command) = noting(&folder, "true");
        let receive = Transship::receiving(&destination.vm(), "tcp:127.0.0.1:0").start()?;
        let moving = Transship::moving(&source.vm(), &receive.listening()?).env("TRANSSHIP_FAIL_POINT", step);
        with(moving, &command).run()?;
        source.wait_status("running")?;
        assert_goes_on(&source)?;
        assert_eq!(phases(&notes)?.len(), 1 + usize::from(back), "{step}");
        receive.wait()?.expect_code(1)?;
    }
    Ok(())
}

#[test]
fn every_way_to_save_has_its_command() -> Result<()> {
    let (folder, source) = (Scratch::on_disk()?, guest().booted()?);
    let path = folder.join("guest");
    let to = path.to_string_lossy().into_owned();
    for way in ["--live", "--paused", "--background"] {
        let notes_folder = Scratch::new()?;
        let saving = || Transship::command(["save", way, "--vm", &source.vm(), "--to", &to, "--json"]);
        let (notes, command) = noting(&notes_folder, "exit 7");
        let ended = with(saving(), &command).run()?;
        assert_eq!(ended.report()?["error_kind"], "command", "{way}: {ended}");
        assert_runs_on(&source, &ended, way)?;
        assert_eq!(phases(&notes)?, ["stopped", "back"], "{way}");
        assert!(!path.exists(), "{way}");

        fs::remove_file(&notes)?;
        let (notes, command) = noting(&notes_folder, "true");
        with(saving(), &command).run()?.expect_code(0)?;
        assert_eq!(phases(&notes)?, ["stopped"], "{way}");
        assert_goes_on(&source)?;
        let destination = guest().incoming().start()?;
        restoring(&destination.vm(), &path).run()?.expect_code(0)?;
        assert_goes_on(&destination)?;
        fs::remove_file(&path)?;
    }
    Ok(())
}
