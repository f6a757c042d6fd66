//! Whether a guest is to run is what it did when it was stopped, not what it did when somebody began to move it.
use std::{
    io::Write,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::Command,
};

use crate::sector::{Gate, Move, SharedDisk, fill_the_disk, go_to_sleep, panic, peek, poke, wait_counting};
use serde_json::json;
use transship_lab::{Qemu, Result, Scratch, Transship, binary, other_qemu, wait_until};

fn pair(disk: &SharedDisk) -> Result<(Qemu, Qemu)> {
    Ok((disk.booted(disk.guest())?, disk.guest().incoming().start()?))
}

/// By another monitor.
fn pause(guest: &Qemu) -> Result<()> {
    guest.qmp("stop", json!({})).map(drop)
}

#[test]
fn a_guest_that_was_paused_meanwhile_arrives_paused() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    let moving = Move::at("source.round", &source, &destination, &[])?;
    pause(&source)?;
    let (here, there) = moving.finish()?;
    here.expect_code(0)?;
    there.expect_code(0)?;
    assert_eq!(destination.status()?, "paused");
    assert!(source.has_given_away()?);
    destination.qmp("cont", json!({}))?;
    wait_counting(&destination)
}

#[test]
fn a_guest_that_was_let_run_meanwhile_arrives_running() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    pause(&source)?;
    let moving = Move::at("source.tracking", &source, &destination, &[])?;
    source.qmp("cont", json!({}))?;
    let (here, there) = moving.finish()?;
    here.expect_code(0)?;
    there.expect_code(0)?;
    wait_counting(&destination)
}

#[test]
fn a_guest_that_was_paused_meanwhile_is_not_let_run_by_a_failure() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    let moving = Move::at("source.round", &source, &destination, &[])?;
    pause(&source)?;
    // It finds the connection closed when it has stopped the guest, or before.
    let Move { source: command, destination: mut other, gate, .. } = moving;
    other.kill9();
    gate.open();
    command.wait()?.expect_code(1)?;
    assert_ne!(source.status()?, "running");
    source.qmp("cont", json!({}))?;
    wait_counting(&source)
}

#[test]
fn a_guest_that_was_paused_meanwhile_is_saved_as_one() -> Result<()> {
    let disk = SharedDisk::new()?;
    let source = disk.booted(disk.guest())?;
    let folder = Scratch::on_disk()?;
    let file = folder.join("snapshot").display().to_string();
    let gate = Gate::new("save.tracking")?;
    let saving = Transship::command(["save", "--vm", &source.vm(), "--to", &file, "--live"]);
    let mut saving = gate.arm("save", saving).start()?;
    gate.wait(&mut saving)?;
    pause(&source)?;
    gate.open();
    saving.wait()?.expect_code(0)?;
    assert_ne!(source.status()?, "running");
    let about = Transship::command(["info", &file, "--json"]).run()?.expect_code(0)?;
    assert!(about.stdout.contains("\"paused\""), "{about}");
    Ok(())
}

/// With a stock QEMU at the other end, which starts it by itself unless it is told that it stands.
#[test]
fn a_guest_that_was_paused_meanwhile_is_not_started_by_a_stock_qemu() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    let uri = format!("unix:{}", destination.folder().join("incoming").display());
    destination.qmp("migrate-incoming", json!({ "uri": uri }))?;
    let gate = Gate::new("peer.round")?;
    let moving = Transship::moving(&source.vm(), &uri).args(["--peer", "qemu", "--downtime", "5s"]);
    let mut moving = gate.arm("peer", moving).start()?;
    gate.wait(&mut moving)?;
    pause(&source)?;
    gate.open();
    moving.wait()?.expect_code(0)?;
    destination.wait_status("paused")
}

/// It can't be moved asleep; it sleeps on, and can be woken.
#[test]
fn a_guest_that_falls_asleep_is_refused_and_sleeps_on() -> Result<()> {
    let disk = SharedDisk::new()?;
    for version in [None, Some("7.2")] {
        let builder = match version.map(other_qemu).transpose()? {
            None => disk.guest(),
            Some(None) => continue,
            Some(Some(binary)) => disk.guest().binary(binary),
        };
        let source = disk.booted(builder.clone())?;
        let destination = builder.incoming().start()?;
        let moving = Move::at("source.round", &source, &destination, &[])?;
        go_to_sleep(&source)?;
        let (here, _) = moving.finish()?;
        assert!(here.stderr.contains("suspended"), "{version:?}: {here}");
        let here = here.expect_code(1)?;
        assert_eq!(source.status()?, "suspended", "{version:?}: {here}");
        assert_ne!(destination.status()?, "running", "{version:?}");
        source.qmp("system_wakeup", json!({}))?;
        source.wait_status("running")?;
    }
    Ok(())
}

#[test]
fn a_guest_that_was_shut_down_meanwhile_is_refused_in_that_word() -> Result<()> {
    let disk = SharedDisk::new()?;
    // A reset ends a guest that must not reboot, and QEMU stays.
    let source = disk.booted(disk.guest().args(["-no-reboot", "-no-shutdown"]))?;
    let destination = disk.guest().incoming().start()?;
    let moving = Move::at("source.round", &source, &destination, &[])?;
    source.qmp("system_reset", json!({}))?;
    source.wait_status("shutdown")?;
    let (here, there) = moving.finish()?;
    assert!(here.stderr.contains("shutdown"), "{here}");
    here.expect_code(1)?;
    there.expect_code(1)?;
    assert_eq!(source.status()?, "shutdown");
    Ok(())
}

/// Its disk is full at the source: there it stands until somebody makes room. Let run at the destination, it writes
/// what it could not.
#[test]
fn a_guest_that_is_stopped_by_its_disk_meanwhile_arrives_as_that() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = (disk.booted(disk.full())?, disk.guest().incoming().start()?);
    let moving = Move::at("source.round", &source, &destination, &["--verify"])?;
    fill_the_disk(&source)?;
    let (here, there) = moving.finish()?;
    here.expect_code(0)?;
    there.expect_code(0)?;
    assert_eq!(destination.status()?, "io-error");
    assert!(!disk.is_written()?);
    destination.qmp("cont", json!({}))?;
    wait_until("the guest to write to its disk", || disk.is_written())?;
    wait_counting(&destination)
}

#[test]
fn a_guest_that_is_stopped_by_its_disk_meanwhile_is_not_let_run_by_a_failure() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = (disk.booted(disk.full())?, disk.guest().incoming().start()?);
    let Move { source: command, destination: mut other, gate, .. } =
        Move::at("source.round", &source, &destination, &[])?;
    fill_the_disk(&source)?;
    other.kill9();
    gate.open();
    command.wait()?.expect_code(1)?;
    // It finds the connection closed when QEMU has saved the guest's devices, or before.
    let status = source.status()?;
    assert!(["io-error", "postmigrate"].contains(&status.as_str()), "{status}");
    Ok(())
}

#[test]
fn a_guest_that_panicked_meanwhile_is_refused_in_that_word() -> Result<()> {
    let disk = SharedDisk::new()?;
    let guest = || disk.guest().args(["-device", "pvpanic", "-action", "panic=pause"]);
    let (source, destination) = (disk.booted(guest())?, guest().incoming().start()?);
    let moving = Move::at("source.round", &source, &destination, &[])?;
    panic(&source)?;
    let (here, there) = moving.finish()?;
    assert!(here.stderr.contains("guest-panicked"), "{here}");
    here.expect_code(1)?;
    there.expect_code(1)?;
    assert_eq!(source.status()?, "guest-panicked");
    assert_ne!(destination.status()?, "running");
    Ok(())
}

/// What is left behind by `kill -9`: only a guest that the command has stopped is let run.
#[test]
fn the_guard_does_what_it_was_told_last() -> Result<()> {
    let disk = SharedDisk::new()?;
    let guest = disk.booted(disk.guest())?;
    let (begin, again, leave, end) = (json!({ "begin": "" }), json!("run-again"), json!("leave-it"), json!("end"));
    for (words, wanted) in [
        (vec![], "paused"),
        (vec![&again], "paused"),
        (vec![&begin], "paused"),
        (vec![&begin, &again, &end], "paused"),
        (vec![&begin, &again, &leave], "paused"),
        (vec![&begin, &leave, &again], "running"),
    ] {
        pause(&guest)?;
        let command = ["guard", "--vm", &guest.vm()];
        let (mut ours, theirs) = UnixStream::pair()?;
        let mut guard = Command::new(binary()?).args(command).stdin(OwnedFd::from(theirs)).spawn()?;
        let said: String = words.iter().map(|word| format!("{word}\n")).collect();
        ours.write_all(said.as_bytes())?;
        drop(ours);
        assert!(guard.wait()?.success(), "{words:?}");
        assert_eq!(guest.status()?, wanted, "{words:?}");
    }
    Ok(())
}

/// A page that nobody else writes to.
const LATE: u64 = 24 << 20;

/// A device that is not at rest when QEMU has stopped its guest.
fn write_late(guest: &Qemu) -> Result<()> {
    poke(guest, LATE, &[0xab; 64])
}

fn read_late(guest: &Qemu) -> Result<[u8; 64]> {
    let mut bytes = [0; 64];
    peek(guest, LATE, &mut bytes)?;
    Ok(bytes)
}

#[test]
fn what_is_written_after_the_last_round_arrives() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    let moving = Move::at("source.last-round", &source, &destination, &["--verify"])?;
    write_late(&source)?;
    let (here, there) = moving.finish()?;
    let (here, _) = (here.expect_code(0)?, there.expect_code(0)?);
    assert_eq!(read_late(&destination)?, [0xab; 64], "{here}");
    assert_eq!(here.report()?["late_pages"], 1, "{here}");
    wait_counting(&destination)
}

#[test]
fn what_is_written_after_the_last_round_arrives_in_a_stock_qemu() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    let uri = format!("unix:{}", destination.folder().join("incoming").display());
    destination.qmp("migrate-incoming", json!({ "uri": uri }))?;
    let gate = Gate::new("peer.last-round")?;
    let moving = Transship::moving(&source.vm(), &uri).args(["--peer", "qemu", "--downtime", "5s"]);
    let mut moving = gate.arm("peer", moving).start()?;
    gate.wait(&mut moving)?;
    write_late(&source)?;
    gate.open();
    let here = moving.wait()?.expect_code(0)?;
    assert_eq!(read_late(&destination)?, [0xab; 64], "{here}");
    assert_eq!(here.report()?["late_pages"], 1, "{here}");
    wait_counting(&destination)
}

#[test]
fn what_is_written_after_the_last_round_is_saved() -> Result<()> {
    let disk = SharedDisk::new()?;
    let (source, destination) = pair(&disk)?;
    let folder = Scratch::on_disk()?;
    let file = folder.join("snapshot").display().to_string();
    let gate = Gate::new("save.last-round")?;
    let saving = ["save", "--vm", &source.vm(), "--to", &file, "--live", "--stay-stopped", "--json"];
    let mut saving = gate.arm("save", Transship::command(saving)).start()?;
    gate.wait(&mut saving)?;
    write_late(&source)?;
    gate.open();
    let saved = saving.wait()?.expect_code(0)?;
    assert_eq!(saved.report()?["late_pages"], 1, "{saved}");
    drop(source);
    Transship::command(["restore", "--vm", &destination.vm(), "--from", &file]).run()?.expect_code(0)?;
    wait_until("the restored guest to run", || Ok(destination.status()? == "running"))?;
    assert_eq!(read_late(&destination)?, [0xab; 64]);
    Ok(())
}
