//! Lazy restores into memory that is short: before anything runs, and when somebody else takes it while pages come.
use std::{path::Path, process::Command, thread};

use rustix::process::Signal;

use crate::restoring::{
    assert_goes_on,
    lazy::{Stalled, stand_ins},
    restoring, saved_by_stock,
};
use crate::stock::StockSave;
use transship_lab::{
    Accel, HugePool, LabError, MemoryMount, Qemu, QemuBuilder, Result, Scratch, lines::Mark, process, wait_until,
};

const GUEST_MIB: u64 = 64;
const REST_MIB: u64 = 32;

fn guest() -> QemuBuilder {
    Qemu::multiboot_under(Accel::Tcg)
}

/// A guest's snapshot.
fn saved() -> Result<Scratch> {
    let folder = Scratch::on_disk()?;
    saved_by_stock(guest(), StockSave::default(), &folder.join("snapshot"))?;
    Ok(folder)
}

fn waiting(folder: &Path, options: &str) -> Result<Qemu> {
    guest().incoming().memory_folder(folder).memory_options(options).start()
}

/// A file of this size in a file system of memory.
fn take(folder: &Path, mib: u64) -> Result<()> {
    let mut command = Command::new("fallocate");
    let output = command.args(["-l", &format!("{mib}M")]).arg(folder.join("taken")).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(LabError(format!("can't take {mib} MiB: {}", String::from_utf8_lossy(&output.stderr)))),
    }
}

/// With room it can be tried again.
fn assert_waits_for_room(snapshot: &Path, waits: &Qemu, cure: &str, room: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = std::fs::read(snapshot)?;
    let refused = restoring(&waits.vm(), snapshot).args(["--lazy"]).run()?;
    assert!(refused.stderr.contains("\"mem0\"") && refused.stderr.contains(cure), "{refused}");
    refused.expect_code(1)?;
    assert_eq!(waits.status()?, "inmigrate");
    assert!(stand_ins(waits)?.is_empty() && !waits.open_files()?.iter().any(|file| file.contains("userfaultfd")));
    assert!(std::fs::read(snapshot)? == before, "the file has changed");
    room()?;
    restoring(&waits.vm(), snapshot).args(["--lazy"]).run()?.expect_code(0)?;
    assert_goes_on(waits)
}

#[test]
fn a_lazy_guest_that_has_no_room_in_its_pool_is_not_started() -> Result<()> {
    let (folder, mut pool) = (saved()?, HugePool::with_mib(2)?);
    let mount = pool.path().to_owned();
    let waits = waiting(&mount, "reserve=off")?;
    assert_waits_for_room(&folder.join("snapshot"), &waits, "nr_hugepages", || pool.resize(GUEST_MIB))
}

#[test]
fn a_lazy_guest_whose_pool_somebody_else_has_is_not_started() -> Result<()> {
    let (folder, pool) = (saved()?, HugePool::with_mib(GUEST_MIB)?);
    let waits = waiting(pool.path(), "reserve=off")?;
    take(pool.path(), GUEST_MIB - 2)?;
    let give_back = || Ok(std::fs::remove_file(pool.path().join("taken"))?);
    assert_waits_for_room(&folder.join("snapshot"), &waits, "nr_hugepages", give_back)
}

#[test]
fn a_lazy_guest_that_has_no_room_in_its_file_system_is_not_started() -> Result<()> {
    let (folder, room) = (saved()?, MemoryMount::tmpfs(1)?);
    let waits = waiting(room.path(), "prealloc=off")?;
    assert_waits_for_room(&folder.join("snapshot"), &waits, "remount,size=", || {
        let mut mount = Command::new("mount");
        let status = mount.args(["-o", "remount,size=128M"]).arg(room.path()).status()?;
        if status.success() { Ok(()) } else { Err(LabError("can't enlarge it".into())) }
    })
}

/// What it needs is set aside before it runs.
#[test]
fn nobody_gets_the_huge_pages_that_a_lazy_guest_waits_for() -> Result<()> {
    let (folder, pool) = (saved()?, HugePool::with_mib(GUEST_MIB + REST_MIB)?);
    let destination = waiting(pool.path(), "reserve=off")?;
    let stalled = Stalled::at("restore.loaded", &destination.vm(), &folder.join("snapshot"), &[])?;
    let left = pool.state()?.to_be_had() * 2;
    assert!(left < GUEST_MIB + REST_MIB, "nothing is set aside");
    take(pool.path(), left)?;
    assert_eq!(pool.state()?.to_be_had(), 0);
    stalled.go_on()?.wait()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// A tmpfs sets nothing aside: the guest is stopped before it misses a page, whoever is killed.
#[test]
fn a_lazy_guest_whose_room_is_taken_is_stopped() -> Result<()> {
    let (folder, room) = (saved()?, MemoryMount::tmpfs(GUEST_MIB + REST_MIB)?);
    for killed in [false, true] {
        let mut destination = waiting(room.path(), "prealloc=off")?;
        let mut stalled = Stalled::at("restore.loaded", &destination.vm(), &folder.join("snapshot"), &[])?;
        take(room.path(), room.free_mib()?)?;
        let said = stalled.restore.stderr().clone();
        let is_stopped = || -> Result<()> {
            said.wait(Mark::START, "the word that it was stopped", |line| {
                line.contains("was stopped where it was").then_some(())
            })?;
            let frozen = process::status_field(destination.pid(), "State")?.starts_with('T');
            assert!(frozen || destination.status()? == "paused");
            Ok(())
        };
        if killed {
            stalled.restore.kill9();
            thread::scope(|scope| {
                // By hand, as the command would have. QEMU may be frozen before it answers.
                scope.spawn(|| destination.qmp("cont", serde_json::json!({})));
                let stopped = is_stopped();
                process::signal(destination.pid(), Signal::KILL)?;
                stopped
            })?;
        } else {
            let ended = stalled.go_on()?.wait()?.expect_code(3)?;
            assert!(ended.stderr.contains("remount,size="), "{ended}");
            assert!(!ended.stderr.contains("another copy"), "{ended}");
            is_stopped()?;
        }
        destination.kill9();
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
        for name in ["taken", "mem0"] {
            std::fs::remove_file(room.path().join(name))?;
        }
    }
    Ok(())
}
