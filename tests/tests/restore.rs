//! Guests from files: of stock QEMU and of our own, eager and lazy; asked afterwards whether every page is theirs.
mod stock;

use std::{fs, os::unix::fs::FileExt, path::Path, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use stock::StockSave;
use transship_tests::{
    Count, Disk, LabError, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship, lines::Mark, process,
    synthetic::SyntheticState, transship::TransshipBuilder, versions::other_qemu, wait_until,
};

/// On a real disk: memory takes direct I/O in its own way.
fn disk() -> Result<Scratch> {
    Scratch::within(&std::env::temp_dir())
}

fn io<T>(result: std::io::Result<T>) -> Result<T> {
    result.map_err(|e| LabError(e.to_string()))
}

fn restoring(vm: &str, from: impl AsRef<Path>) -> TransshipBuilder {
    let from = from.as_ref().to_string_lossy();
    Transship::command(["restore", "--vm", vm, "--from", &*from, "--json"])
}

/// A guest that runs where it was saved: it goes on counting, and finds all its pages.
fn assert_goes_on(guest: &Qemu) -> Result<()> {
    assert_eq!(guest.status()?, "running");
    let count = guest.next_count()?;
    let sweep = guest.sweep()?;
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    assert!(sweep.pages > 0, "{sweep:?}");
    Ok(())
}

/// Fills the memory files of a waiting guest with what must not be seen afterwards.
fn make_dirty(guest: &Qemu) -> Result<()> {
    let junk = vec![0xa5; 1 << 20];
    for file in guest.memory_files() {
        let length = io(fs::metadata(file))?.len();
        let file = io(fs::OpenOptions::new().write(true).open(file))?;
        (0..length).step_by(junk.len()).try_for_each(|at| io(file.write_all_at(&junk, at)))?;
    }
    Ok(())
}

/// Has stock QEMU save such a guest, which then is gone.
fn saved_by_stock(guest: QemuBuilder, way: StockSave<'_>, path: &Path) -> Result<()> {
    let source = guest.start()?;
    source.ready()?;
    way.save(&source, path)
}

/// What stock QEMU saves we restore into a stock QEMU, whatever way it was written and is read, and whatever the memory held before.
#[test]
fn a_linux_guest_that_stock_qemu_saved_goes_on() -> Result<()> {
    let folder = disk()?;
    let ways: [(&str, StockSave<'_>, &[&str]); 4] = [
        ("plain", StockSave::default(), &["--direct-io=off"]),
        ("multifd", StockSave { multifd: 2, ..StockSave::default() }, &["--direct-io=on", "--channels", "3"]),
        (
            "direct",
            StockSave { multifd: 3, direct_io: true, ..StockSave::default() },
            &["--direct-io=auto", "--io", "plain"],
        ),
        ("offset", StockSave { offset: 0x1234, ..StockSave::default() }, &["--channels", "1"]),
    ];
    for (name, way, flags) in ways {
        let path = folder.join(name);
        io(fs::write(&path, vec![7; way.offset as usize]))?;
        saved_by_stock(Qemu::linux(), way, &path)?;
        let destination = Qemu::linux().incoming().start()?;
        make_dirty(&destination)?;
        let from = format!("file:{},offset={}", path.display(), way.offset);
        let report = restoring(&destination.vm(), from).args(flags.iter().copied()).run()?.expect_code(0)?.report()?;
        assert_eq!(report["status"], "completed", "{name}: {report}");
        assert_eq!(report["file"]["direct_io"], flags[0] != "--direct-io=off", "{name}: {report}");
        assert!(report["pages"]["normal"].as_u64() > Some(16384), "{name}: {report}");
        assert_goes_on(&destination)?;
        io(fs::remove_file(&path))?;
    }
    Ok(())
}

/// A stream has no places: its pages are sorted as they come.
#[test]
fn a_plain_stream_is_restored_from_a_file_and_from_a_pipe() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("stream");
    saved_by_stock(Qemu::linux(), StockSave { stream: true, ..StockSave::default() }, &path)?;
    let destination = Qemu::linux().incoming().start()?;
    make_dirty(&destination)?;
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)?;
    drop(destination);

    let destination = Qemu::linux().incoming().start()?;
    // The program and its arguments come behind these words.
    let shell = ["sh", "-c", r#"file=$1; shift; cat "$file" | "$@""#, "sh"].map(str::to_owned);
    let prefix = [&shell[..], &[path.display().to_string()]].concat();
    restoring(&destination.vm(), "fd:0").prefix(&prefix).run()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// Whether it runs afterwards is as it was, unless somebody says otherwise.
#[test]
fn a_guest_that_stood_still_does_so_again() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("stopped");
    let source = Qemu::multiboot().start()?;
    source.ready()?;
    source.qmp("stop", json!({}))?;
    StockSave::default().save(&source, &path)?;
    drop(source);
    for (flag, status) in [(None, "paused"), (Some("--run"), "running")] {
        let destination = Qemu::multiboot().incoming().start()?;
        restoring(&destination.vm(), &path).args(flag).run()?.expect_code(0)?;
        assert_eq!(destination.status()?, status);
        destination.qmp("cont", json!({}))?;
        assert_goes_on(&destination)?;
    }
    Ok(())
}

#[test]
fn a_guest_that_ran_can_be_left_standing() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("ran");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot().incoming().start()?;
    restoring(&destination.vm(), &path).args(["--stopped"]).run()?.expect_code(0)?;
    assert_eq!(destination.status()?, "paused");
    destination.qmp("cont", json!({}))?;
    assert_goes_on(&destination)
}

/// The guest runs first. Under KVM the processor itself waits for pages.
#[test]
fn a_lazy_guest_finds_all_its_memory() -> Result<()> {
    let folder = disk()?;
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

/// A QEMU of another version than the one that saved; 7.2 knows nothing of such files itself.
#[test]
fn other_qemus_take_it_eagerly_and_lazily() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("snapshot");
    let guest = || Qemu::multiboot().machine("pc-q35-7.2");
    saved_by_stock(guest(), StockSave { multifd: 2, ..StockSave::default() }, &path)?;
    for version in ["7.2", "11.1"] {
        let Some(binary) = other_qemu(version)? else { continue };
        for flags in [&[][..], &["--lazy"]] {
            let destination = guest().binary(&binary).incoming().start()?;
            make_dirty(&destination)?;
            restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
            assert_goes_on(&destination)?;
        }
    }
    Ok(())
}

/// What stock QEMU 11.1 saves, too; and what it leaves out of a file is told.
#[test]
fn files_of_a_newer_qemu_are_restored() -> Result<()> {
    let Some(binary) = other_qemu("11.1")? else { return Ok(()) };
    let folder = disk()?;
    let guest = || Qemu::multiboot().binary(&binary);
    let path = folder.join("snapshot");
    saved_by_stock(guest(), StockSave::default(), &path)?;
    let destination = guest().incoming().start()?;
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)?;
    drop(destination);

    saved_by_stock(guest(), StockSave { capabilities: &["x-ignore-shared"], ..StockSave::default() }, &path)?;
    let destination = guest().incoming().start()?;
    let ended = restoring(&destination.vm(), &path).run()?.expect_code(1)?;
    assert!(ended.stderr.contains("it has no pages of \"mem0\""), "{ended}");
    assert_eq!(destination.status()?, "inmigrate");
    Ok(())
}

/// A disk with sectors of 4 KiB takes only what is aligned to that.
#[test]
fn a_disk_with_large_sectors_is_read_past_the_page_cache() -> Result<()> {
    let disk = Disk::new(400, 4096)?;
    let path = disk.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave { offset: 0x1234, ..StockSave::default() }, &path)?;
    let from = format!("file:{},offset=0x1234", path.display());
    for flags in [&["--direct-io=on"][..], &["--direct-io=on", "--io=plain"], &["--direct-io=on", "--lazy"]] {
        let destination = Qemu::multiboot().incoming().start()?;
        make_dirty(&destination)?;
        let report = restoring(&destination.vm(), &from).args(flags.iter().copied()).run()?.expect_code(0)?.report()?;
        assert_eq!(report["file"]["direct_io"], true, "{report}");
        assert_goes_on(&destination)?;
    }
    Ok(())
}

#[test]
fn a_disk_that_fails_starts_nothing() -> Result<()> {
    let disk = Disk::new(700, 512)?;
    let path = disk.join("snapshot");
    saved_by_stock(Qemu::linux(), StockSave::default(), &path)?;
    disk.cut(30)?;
    for channels in ["1", "4"] {
        let destination = Qemu::linux().incoming().start()?;
        let flags = ["--direct-io=on", "--channels", channels];
        let ended = restoring(&destination.vm(), &path).args(flags).run()?.expect_code(1)?;
        assert!(ended.stderr.contains("Input/output error") && ended.stderr.contains("snapshot: "), "{ended}");
        assert_eq!(destination.status()?, "inmigrate");
    }
    Ok(())
}

/// The disk fails under a guest that runs already.
#[test]
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

/// A restore that waits right after the guest has been started: only pages that somebody waits for come.
struct Stalled {
    folder: Scratch,
    restore: Transship,
}

impl Stalled {
    fn start(vm: &str, path: &Path) -> Result<Self> {
        Self::start_with(vm, path, &[])
    }

    fn start_with(vm: &str, path: &Path, flags: &[&str]) -> Result<Self> {
        let folder = Scratch::new()?;
        let gate = folder.join("gate");
        let armed = restoring(vm, path)
            .args(["--lazy"])
            .args(flags.iter().copied())
            .env("TRANSSHIP_FAIL_POINT", "restore.started=stall")
            .env("TRANSSHIP_FAIL_FILE", &gate);
        let mut restore = armed.start()?;
        wait_until("the guest to be started", || {
            if let Some(status) = restore.process().ended()? {
                return Err(LabError(format!("the restore ended early, {status}: {}", restore.stderr().tail())));
            }
            Ok(gate.exists())
        })?;
        Ok(Self { folder, restore })
    }

    fn go_on(self) -> Result<Transship> {
        io(fs::remove_file(self.folder.join("gate")))?;
        Ok(self.restore)
    }
}

/// The processes that stand by for the restore of this guest.
fn stand_ins(guest: &Qemu) -> Result<Vec<u32>> {
    let vm = guest.vm();
    let is_one = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains("stand-in") && line.contains(&vm)
    };
    let entries = io(fs::read_dir("/proc"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter(is_one).collect())
}

/// Whoever is killed, the guest gets its memory.
#[test]
fn a_lazy_guest_survives_the_death_of_its_restore() -> Result<()> {
    let folder = disk()?;
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
    let folder = disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot().incoming().start()?;
    make_dirty(&destination)?;
    let kill = ("TRANSSHIP_FAIL_POINT", "restore.loaded=kill");
    let ended = restoring(&destination.vm(), &path).args(["--lazy"]).env(kill.0, kill.1).run()?;
    assert_eq!(ended.code(), None, "{ended}");
    assert!(ended.stderr.contains("this process brings the rest"), "{ended}");
    destination.qmp("cont", json!({}))?;
    assert_goes_on(&destination)?;
    wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))
}

#[test]
fn a_lazy_guest_survives_the_death_of_the_second_process() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let destination = Qemu::multiboot().incoming().start()?;
    let stalled = Stalled::start(&destination.vm(), &path)?;
    for pid in stand_ins(&destination)? {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(pid, Signal::KILL).map_err(|e| LabError(e.to_string()))?;
    }
    stalled.go_on()?.wait()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// At whatever moment it is killed: the guest either never ran and never will, or has all of its memory.
#[test]
fn a_lazy_restore_may_be_killed_at_any_moment() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("snapshot");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let mut started = 0;
    for attempt in 0..12 {
        let destination = Qemu::multiboot().incoming().start()?;
        make_dirty(&destination)?;
        let mut restore = restoring(&destination.vm(), &path).args(["--lazy", "--channels=1"]).start()?;
        // Any moment is good.
        std::thread::sleep(Duration::from_millis(attempt * attempt / 2 + 7 * attempt));
        restore.kill9();
        wait_until("the second process to end", || Ok(stand_ins(&destination)?.is_empty()))?;
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
fn a_lazy_guest_whose_file_fails_is_stopped() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("cut");
    saved_by_stock(Qemu::linux(), StockSave::default(), &path)?;
    for killed in [false, true] {
        let copy = folder.join("copy");
        io(fs::copy(&path, &copy))?;
        let mut destination = Qemu::linux().incoming().start()?;
        let mut stalled = Stalled::start(&destination.vm(), &copy)?;
        let file = io(fs::OpenOptions::new().write(true).open(&copy))?;
        io(file.set_len(8 << 20))?;
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

/// A file that does not fit, or is broken, is refused before anything is touched; and the guest that waits can still be used.
#[test]
fn what_can_not_be_restored_leaves_the_guest_as_it_was() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("good");
    saved_by_stock(Qemu::multiboot(), StockSave::default(), &path)?;
    let cut = folder.join("cut");
    let whole = io(fs::read(&path))?;
    io(fs::write(&cut, &whole[..whole.len() / 2]))?;
    let foreign = folder.join("foreign");
    io(fs::write(&foreign, "not a snapshot"))?;
    let destination = Qemu::multiboot().incoming().start()?;
    make_dirty(&destination)?;
    let other_memory = Qemu::multiboot().memory(128).incoming().start()?;
    let other_machine = Qemu::multiboot().machine("pc").incoming().start()?;
    let with_vga = folder.join("vga");
    saved_by_stock(Qemu::multiboot().args(["-device", "VGA"]), StockSave::default(), &with_vga)?;
    for (guest, file, why) in [
        (&destination, &cut, "the file was cut short"),
        (&destination, &foreign, "no QEMU migration stream begins here"),
        (&destination, &folder.join("none"), "No such file"),
        (&other_memory, &path, "has 67108864 bytes, that of the waiting guest 134217728"),
        (&other_machine, &path, "its machine is \"pc-q35"),
        (&destination, &with_vga, "vga.vram\", which the waiting guest has not"),
    ] {
        for lazy in [&["--lazy"][..], &[]] {
            let ended = restoring(&guest.vm(), file).args(lazy.iter().copied()).run()?.expect_code(1)?;
            assert!(ended.stderr.contains(why), "{ended}");
            assert_eq!(guest.status()?, "inmigrate");
        }
    }
    for file in destination.memory_files() {
        assert!(io(fs::read(file))?.iter().all(|&byte| byte == 0xa5), "its memory was touched");
    }
    restoring(&destination.vm(), &path).run()?.expect_code(0)?;
    assert_goes_on(&destination)
}

/// There and back without stock QEMU's own saving: live, in both formats; and `info` finds nothing wrong with what was saved.
#[test]
fn a_linux_guest_that_we_saved_comes_back() -> Result<()> {
    let folder = disk()?;
    let source = Qemu::linux().start()?;
    source.ready()?;
    let ways: [(&str, &[&[&str]]); 2] = [("mapped-ram", &[&[], &["--lazy"]]), ("stream", &[&[]])];
    for (format, restores) in ways {
        let path = folder.join(format);
        let to = path.to_string_lossy();
        let save = ["save", "--vm", &source.vm(), "--to", &*to, "--format", format, "--json"];
        Transship::command(save).run()?.expect_code(0)?;
        let info = Transship::command(["info", &*to, "--check", "--json"]).run()?.expect_code(0)?.report()?;
        assert_eq!(
            (&info["format"], &info["state"], &info["checked"]),
            (&json!(format), &json!("running"), &json!(true))
        );
        for flags in restores {
            let destination = Qemu::linux().incoming().start()?;
            make_dirty(&destination)?;
            restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
            assert_goes_on(&destination)?;
        }
    }
    Ok(())
}

/// A guest that is no QEMU, by files of our own.
#[test]
fn a_synthetic_guest_comes_back_whole() -> Result<()> {
    let folder = disk()?;
    let path = folder.join("synthetic");
    let source = Synthetic::builder().memory("64M").touched("60%").content("mixed").set("--regions", "2").start()?;
    let to = path.to_string_lossy();
    Transship::command(["save", "--vm", &source.vm(), "--to", &*to, "--paused", "--json"]).run()?.expect_code(0)?;
    drop(source);
    for flags in [&[][..], &["--lazy"]] {
        let destination = Synthetic::builder().memory("64M").set("--regions", "2").incoming().start()?;
        restoring(&destination.vm(), &path).args(flags.iter().copied()).run()?.expect_code(0)?;
        assert_eq!(destination.state()?, SyntheticState::Running);
        let check = destination.check()?;
        assert!(check.wrong == 0 && check.pages > 0, "{check:?}");
    }
    Ok(())
}
