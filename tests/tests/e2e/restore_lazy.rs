//! Guests that run before their memory is there, whoever dies and whatever fails meanwhile.
use std::{fs, time::Duration};

use crate::restoring::{
    assert_goes_on,
    lazy::{Stalled, stand_ins},
    make_dirty, restoring, saved_by_stock,
};
use crate::stock::StockSave;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use transship_lab::{Count, Disk, Qemu, QemuBuilder, Result, Scratch, lines::Mark, process, wait_until};

/// The guest runs first. Under KVM the processor itself waits for pages.
#[test]
fn a_lazy_guest_finds_all_its_memory() -> Result<()> {
    let folder = Scratch::on_disk()?;
    for (name, guest) in [("kvm", Qemu::multiboot as fn() -> QemuBuilder), ("linux", Qemu::linux)] {
        let path = folder.join(name);
        saved_by_stock(guest(), StockSave::default(), &path)?;
        for flags in [["--direct-io=on", "--channels=2"], ["--direct-io=off", "--channels=1"]] {
            let destination = guest().incoming().start()?;
            make_dirty(&destination)?;
            let stalled = Stalled::start_with(&destination.vm(), &path, &flags)?;
            // It runs by what it waits for alone.
            destination.next_count()?;
            let report = stalled.go_on()?.wait()?.expect_code(0)?.report()?;
            assert!(report["lazy"]["faults"].as_u64() > Some(0), "nobody ever waited: {report}");
            assert!(report["started_ms"].as_f64() < report["lazy"]["filled_ms"].as_f64(), "{report}");
            assert_goes_on(&destination)?;
            // Nothing of ours stays.
            assert!(!destination.open_files()?.iter().any(|file| file.contains("userfaultfd")));
            assert!(stand_ins(&destination)?.is_empty());
        }
    }
    Ok(())
}

/// The disk fails under a guest that runs already.
#[test]
#[ignore = "long: make test-long"]
fn a_lazy_guest_whose_disk_fails_is_stopped() -> Result<()> {
    let disk = Disk::new(700, 512)?;
    let path = disk.join("snapshot");
    saved_by_stock(Qemu::linux(), StockSave::default(), &path)?;
    let mut destination = Qemu::linux().incoming().start()?;
    let stalled = Stalled::start_with(&destination.vm(), &path, &["--direct-io=on"])?;
    disk.cut(30)?;
    let ended = stalled.go_on()?.wait()?.expect_code(3)?;
    assert!(
        ended.stderr.contains("Input/output error") && ended.stderr.contains("was stopped where it was"),
        "{ended}"
    );
    let frozen = process::status_field(destination.pid(), "State")?.starts_with('T');
    assert!(frozen || destination.status()? == "paused");
    destination.kill9();
    wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))
}

/// Whoever is killed, the guest gets its memory.
#[test]
fn a_lazy_guest_survives_the_death_of_its_restore() -> Result<()> {
    let folder = Scratch::on_disk()?;
    for (name, guest) in [("kvm", Qemu::multiboot as fn() -> QemuBuilder), ("linux", Qemu::linux)] {
        let path = folder.join(name);
        saved_by_stock(guest(), StockSave::default(), &path)?;
        let destination = guest().incoming().start()?;
        let mut stalled = Stalled::start(&destination.vm(), &path)?;
        assert_eq!(stand_ins(&destination)?.len(), 1);
        stalled.restore.kill9();
        assert_goes_on(&destination)?;
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
        assert_goes_on(&destination)?;
    }
    Ok(())
}

/// It dies when the guest was loaded and not started: whoever starts it by hand has all of its memory.
#[test]
fn a_lazy_guest_that_nobody_started_is_whole() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot_with_kvm(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot_with_kvm().incoming().start()?;
    make_dirty(&destination)?;
    let kill = ("TRANSSHIP_FAIL_POINT", "restore.loaded=kill");
    let ended = restoring(&destination.vm(), &path).args(["--lazy"]).env(kill.0, kill.1).run()?;
    assert_eq!(ended.code(), None, "{ended}");
    assert!(ended.stderr.contains("this process brings the rest"), "{ended}");
    destination.qmp("cont", json!({}))?;
    assert_goes_on(&destination)?;
    wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))
}

/// It dies while QEMU loads, with what that needs set: left on, a later migration of QEMU's own would leave out the
/// guest's memory.
#[test]
fn a_lazy_restore_that_dies_leaves_no_settings_behind() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot_with_kvm(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot_with_kvm().incoming().start()?;
    let settings = || destination.qmp("query-migrate-capabilities", json!({}));
    let before = settings()?;
    let kill = ("TRANSSHIP_FAIL_POINT", "restore.loading=kill");
    let ended = restoring(&destination.vm(), &path).args(["--lazy"]).env(kill.0, kill.1).run()?;
    assert_eq!(ended.code(), None, "{ended}");
    wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
    assert_eq!(settings()?, before, "{ended}");
    assert_eq!(destination.status()?, "inmigrate");
    Ok(())
}

#[test]
fn a_lazy_guest_survives_the_death_of_the_second_process() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot().incoming().start()?;
    let stalled = Stalled::start(&destination.vm(), &path)?;
    for pid in stand_ins(&destination)? {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(pid, Signal::KILL)?;
    }
    stalled.go_on()?.wait()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// At whatever moment it is killed: the guest either never ran and never will, or has all of its memory.
#[test]
fn a_lazy_restore_may_be_killed_at_any_moment() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let mut started = 0;
    for attempt in 0..12 {
        let destination = Qemu::multiboot().incoming().start()?;
        make_dirty(&destination)?;
        let settings = || destination.qmp("query-migrate-capabilities", json!({}));
        let before = settings()?;
        let mut restore = restoring(&destination.vm(), &path).args(["--lazy", "--channels=1"]).start()?;
        // Any moment is good.
        std::thread::sleep(Duration::from_millis(attempt * attempt / 2 + 7 * attempt));
        restore.kill9();
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
        assert_eq!(settings()?, before, "attempt {attempt}");
        match destination.status()?.as_str() {
            "inmigrate" => continue,
            "paused" => {
                destination.qmp("cont", json!({}))?;
            }
            _ => {}
        }
        started += 1;
        assert_goes_on(&destination)?;
    }
    eprintln!("{started} of 12 had been loaded");
    Ok(())
}

/// The file fails under a guest that runs: it is stopped where it is, and pages that are missing stay so.
#[test]
#[ignore = "long: make test-long"]
fn a_lazy_guest_whose_file_fails_is_stopped() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("cut");
    saved_by_stock(Qemu::linux(), StockSave::default(), &path)?;
    for killed in [false, true] {
        let copy = folder.join("copy");
        fs::copy(&path, &copy)?;
        let mut destination = Qemu::linux().incoming().start()?;
        let mut stalled = Stalled::start(&destination.vm(), &copy)?;
        let file = fs::OpenOptions::new().write(true).open(&copy)?;
        file.set_len(8 << 20)?;
        let said = stalled.restore.stderr().clone();
        if killed {
            stalled.restore.kill9();
        } else {
            let ended = stalled.go_on()?.wait()?.expect_code(3)?;
            assert!(ended.stderr.contains("cut short") && ended.stderr.contains("kill "), "{ended}");
            assert_eq!(ended.report()?["status"], "unknown");
        }
        said.wait(Mark::START, "the word that it was stopped", |line| {
            line.contains("was stopped where it was").then_some(())
        })?;
        // A QEMU that hangs on a page does not answer: it was frozen.
        let frozen = process::status_field(destination.pid(), "State")?.starts_with('T');
        assert!(frozen || destination.status()? == "paused");
        assert_eq!(stand_ins(&destination)?.len(), 1, "somebody holds the missing pages");
        // No count that the guest has ever told has an error in it.
        let lines = destination.serial().lines().all();
        let wrong = lines.iter().filter_map(|line| Count::read(line)).find(|count| count.errors > 0);
        assert_eq!(wrong, None);
        destination.kill9();
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
    }
    Ok(())
}
