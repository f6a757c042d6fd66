//! Guests saved to files: stock QEMU loads them and the guests check themselves; whatever goes wrong, the guest runs on
//! and the old file is whole.
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::ends::number;
use crate::stock::StockLoad;
use rustix::process::Signal;
use serde_json::json;
use transship_lab::{
    Finished, LabError, Qemu, Result, Scratch, Synthetic, Transship, Workload, synthetic::SyntheticState,
    transship::TransshipBuilder, versions::other_qemu, wait_until,
};

fn saving(vm: &str, to: impl AsRef<Path>) -> TransshipBuilder {
    let to = to.as_ref().to_string_lossy();
    Transship::command(["save", "--vm", vm, "--to", &*to, "--json"])
}

fn names(folder: &Scratch) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder.path())?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// A guest that was loaded runs where it was saved: it goes on counting, and finds all its pages.
pub(crate) fn assert_goes_on(guest: &Qemu, story: &str) -> Result<()> {
    assert_eq!(guest.status()?, "running", "{story}");
    let count = guest.next_count()?;
    let sweep = guest.sweep()?;
    assert_eq!((count.errors, sweep.errors), (0, 0), "{story}: {count:?} {sweep:?}");
    assert!(sweep.pages > 0, "{story}: {sweep:?}");
    Ok(())
}

fn assert_nothing_left_in(guest: &Qemu) -> Result<()> {
    assert_eq!(guest.open_files()?.iter().filter(|file| file.contains("userfaultfd")).count(), 0);
    assert!(!guest.is_traced()?);
    Ok(())
}

/// What we save stock QEMU loads, however it reads; the guest here goes on meanwhile, and so does the one there.
#[test]
fn stock_qemu_loads_what_was_saved() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let source = Qemu::linux().booted()?;
    for (flags, loads) in [
        (["--live", "--direct-io=on", "--channels=3"], [(false, false), (true, true)].as_slice()),
        (["--live", "--direct-io=off", "--downtime=1s"], &[(true, false)]),
        (["--paused", "--direct-io=auto", "--io=plain"], &[(false, false), (true, true)]),
    ] {
        let path = folder.join("snapshot");
        let report = saving(&source.vm(), &path).args(flags).run()?.expect_code(0)?.report()?;
        assert_eq!(report["status"], "completed", "{report}");
        assert_eq!(report["file"]["direct_io"], flags[1] != "--direct-io=off", "{report}");
        assert!(number(&report, "/downtime_ms") > 0.0 && number(&report, "/pages/hole") > 0.0, "{report}");
        assert!(number(&report, "/file/allocated") < 0.9 * number(&report, "/bytes/guest"), "{report}");
        assert_goes_on(&source, "the source")?;
        assert_nothing_left_in(&source)?;
        for &(multifd, direct_io) in loads {
            let story = format!("{flags:?}, loaded with multifd {multifd}, direct-io {direct_io}");
            let destination = Qemu::linux().incoming().start()?;
            StockLoad { multifd, direct_io, ..StockLoad::default() }.load(&destination, &path)?;
            assert_goes_on(&destination, &story)?;
        }
    }
    assert_eq!(names(&folder)?, ["snapshot"]);
    Ok(())
}

/// Pages change while they are written: the file grows no further, and the last of each page is in it.
#[test]
#[ignore = "long: make test-long"]
fn a_busy_guest_is_saved_in_rounds() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let workload = Workload { rate: 20_000, hot_mib: Some(8), ..Workload::LINUX };
    let source = Qemu::linux().workload(workload).booted()?;
    let path = folder.join("snapshot");
    fs::write(&path, [9; 70_000])?;
    let to = format!("file:{},offset=0x1234", path.display());
    let flags = ["--live", "--downtime=60s", "--stay-stopped"];
    let report = saving(&source.vm(), to).args(flags).run()?.expect_code(0)?.report()?;
    assert_eq!(source.status()?, "paused");
    assert!(number(&report, "/pages/resent") > 0.0, "nothing changed while it was written: {report}");
    assert!(number(&report, "/file/pages_stored") <= number(&report, "/bytes/guest") / 4096.0);
    assert!(fs::read(&path)?[..0x1234].iter().all(|&byte| byte == 9));
    let destination = Qemu::linux().workload(workload).incoming().start()?;
    StockLoad { offset: 0x1234, multifd: true, ..StockLoad::default() }.load(&destination, &path)?;
    assert_goes_on(&destination, "the destination")?;
    // The one that was left standing is whole, too.
    source.qmp("cont", json!({}))?;
    assert_goes_on(&source, "the source")
}

#[test]
#[ignore = "long: make test-long"]
fn a_stream_is_loaded_by_qemus_of_all_ages() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("stream");
    let guest = Qemu::linux().machine("pc-q35-7.2").args(["-device", "VGA"]);
    let source = guest.clone().booted()?;
    let report = saving(&source.vm(), &path).args(["--format", "stream"]).run()?.expect_code(0)?.report()?;
    assert_eq!(report["file"]["format"], "stream");
    let (bytes, allocated) = (number(&report, "/file/bytes"), number(&report, "/file/allocated"));
    assert!(allocated < bytes + 1e6, "space was asked for ahead, and not given back: {allocated} for {bytes}");
    assert_goes_on(&source, "the source")?;
    drop(source);
    let load = StockLoad { stream: true, ..StockLoad::default() };
    let mut loaders = vec![guest.clone()];
    loaders.extend(other_qemu("7.2")?.map(|binary| guest.clone().binary(binary)));
    for loader in loaders {
        let destination = loader.incoming().start()?;
        load.load(&destination, &path)?;
        assert_goes_on(&destination, "the destination")?;
    }
    Ok(())
}

/// Video memory and ROMs are blocks of their own, and two NUMA nodes are two regions.
#[test]
fn a_guest_of_many_blocks_is_saved() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let guest = Qemu::multiboot().backends(2).args(["-device", "VGA", "-device", "virtio-rng-pci"]);
    let source = guest.clone().booted()?;
    source.qmp("stop", json!({}))?;
    let path = folder.join("snapshot");
    saving(&source.vm(), &path).run()?.expect_code(0)?;
    assert_eq!(source.status()?, "paused", "it stood before");
    // It can be saved again, and moved.
    let report = saving(&source.vm(), &path).args(["--paused"]).run()?.expect_code(0)?.report()?;
    assert_eq!(number(&report, "/downtime_ms"), 0.0);
    let destination = guest.incoming().start()?;
    StockLoad::default().load(&destination, &path)?;
    destination.wait_status("paused")?;
    for guest in [&source, &destination] {
        guest.qmp("cont", json!({}))?;
        assert_goes_on(guest, "one of the two")?;
    }
    Ok(())
}

/// Waits until the guest runs, whoever lets it.
fn wait_running(source: &Synthetic) -> Result<()> {
    wait_until("the guest to run", || Ok(source.state()? == SyntheticState::Running))
}

/// Every page is as it was written last.
fn assert_source_whole(source: &Synthetic, story: &str) -> Result<()> {
    let check = source.check()?;
    assert!(check.wrong == 0 && check.pages > 0, "{story}: {check:?}");
    Ok(())
}

/// Everything that a failed save must leave: the guest running and whole, the old file, and nothing else.
fn assert_as_before(source: &Synthetic, folder: &Scratch, story: &str) -> Result<()> {
    wait_running(source)?;
    assert_source_whole(source, story)?;
    assert_eq!(names(folder)?, ["snapshot"], "{story}");
    assert_eq!(fs::read(folder.join("snapshot"))?, b"old", "{story}");
    Ok(())
}

fn busy_synthetic() -> Result<Synthetic> {
    Synthetic::builder().memory("64M").touched("60%").content("mixed").write_rate("20M").hot_set("4M").start()
}

/// Each step in turn fails, or is the last that a `kill -9` lets happen.
#[test]
fn a_save_that_fails_at_any_step_leaves_everything_as_it_was() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let source = busy_synthetic()?;
    let path = folder.join("snapshot");
    let steps = [
        "created",
        "tracking",
        "round-written",
        "round",
        "stopped",
        "last-round",
        "state",
        "resumed",
        "tail",
        "synced",
    ];
    for (step, action) in steps.iter().flat_map(|step| [(step, "error"), (step, "kill")]) {
        for way in [["--live", "--resume"], ["--paused", "--stay-stopped"]] {
            if way[0] == "--paused" && ["tracking", "round", "resumed"].contains(step) {
                continue;
            }
            let story = format!("{action} at {step}, {way:?}");
            fs::write(&path, b"old")?;
            let armed = saving(&source.vm(), &path).args(way).args(["--downtime", "10s"]);
            let ended = armed.env("TRANSSHIP_FAIL_POINT", format!("save.{step}={action}")).run()?;
            if action == "error" {
                let report = ended.expect_code(1)?.report()?;
                assert_eq!(report["status"], "failed", "{story}");
            } else {
                assert_eq!(ended.code(), None, "{story}: {ended}");
                // It left its file, which the next one removes.
                assert_eq!(names(&folder)?, [".snapshot.transship-part", "snapshot"], "{story}");
                wait_running(&source)?;
                let attempt = || saving(&source.vm(), &path).env("TRANSSHIP_FAIL_POINT", "save.created=error").run();
                let mut ended = attempt()?;
                wait_until("the guard to end", || {
                    let busy = ended.stderr.contains("another client");
                    if busy {
                        ended = attempt()?;
                    }
                    Ok(!busy)
                })?;
                ended.expect_code(1)?;
            }
            assert_as_before(&source, &folder, &story)?;
        }
    }
    saving(&source.vm(), &path).args(["--downtime", "10s"]).run()?.expect_code(0)?;
    assert_restores(&path, "after all that")
}

/// The capabilities of QEMU's own migration that are on.
fn capabilities(guest: &Qemu) -> Result<Vec<String>> {
    let all = guest.qmp("query-migrate-capabilities", json!({}))?;
    let on = all.as_array().into_iter().flatten().filter(|one| one["state"] == true);
    Ok(on.filter_map(|one| one["capability"].as_str().map(str::to_owned)).collect())
}

/// QEMU itself is in another state at each of these steps. It is put back with the settings that it had, and can be
/// saved.
#[test]
fn a_qemu_whose_save_died_is_as_it_was() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let source = Qemu::multiboot().booted()?;
    let on = json!({ "capabilities": [{ "capability": "events", "state": true }] });
    source.qmp("migrate-set-capabilities", on)?;
    let path = folder.join("snapshot");
    for (status, way) in [("running", "--live"), ("running", "--paused"), ("paused", "--live")] {
        source.qmp(if status == "running" { "cont" } else { "stop" }, json!({}))?;
        for step in ["stopped", "last-round", "state", "tail"] {
            let story = format!("{status} {way}, killed at {step}");
            let armed = saving(&source.vm(), &path).args([way, "--downtime=10s"]);
            let ended = armed.env("TRANSSHIP_FAIL_POINT", format!("save.{step}=kill")).run()?;
            assert_eq!(ended.code(), None, "{story}: {ended}");
            source.wait_status(status)?;
            wait_until("its settings", || Ok(capabilities(&source)? == ["events"]))?;
            assert_nothing_left_in(&source)?;
            assert!(!path.exists(), "{story}");
        }
        saving(&source.vm(), &path).args([way, "--downtime=10s"]).run()?.expect_code(0)?;
        assert_eq!((source.status()?, capabilities(&source)?), (status.to_owned(), vec!["events".to_owned()]));
        let destination = Qemu::multiboot().incoming().start()?;
        StockLoad::default().load(&destination, &path)?;
        destination.wait_status(status)?;
        fs::remove_file(&path)?;
    }
    source.qmp("cont", json!({}))?;
    assert_goes_on(&source, "after all that")
}

/// Dead at any moment: the file at the name is the old one or the new one, whole, and the guest runs.
#[test]
#[ignore = "long: make test-long"]
fn kill_9_at_random_moments() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let source = busy_synthetic()?;
    let path = folder.join("snapshot");
    let mut whole = 0;
    for attempt in 0..50u64 {
        fs::write(&path, b"old")?;
        let way = if attempt % 2 == 0 { "--live" } else { "--paused" };
        let mut save = saving(&source.vm(), &path).args([way, "--downtime", "10s"]).start()?;
        // Different moments of a run that takes about as long as the longest of these; which ones does not matter.
        std::thread::sleep(Duration::from_millis(attempt * 37 % 400));
        save.kill9();
        wait_running(&source)?;
        let left = names(&folder)?;
        assert!(left.iter().all(|name| name == "snapshot" || name == ".snapshot.transship-part"), "{left:?}");
        if fs::metadata(&path)?.len() != 3 {
            whole += 1;
            assert_restores(&path, &format!("attempt {attempt}"))?;
        }
    }
    assert_source_whole(&source, "after all that")?;
    eprintln!("{whole} of 50 were complete before they were killed");
    saving(&source.vm(), &path).args(["--downtime", "10s"]).run()?.expect_code(0)?;
    assert_eq!(names(&folder)?, ["snapshot"]);
    assert_restores(&path, "the last one")
}

/// A guest that is made of the file finds every page as it was written last.
fn assert_restores(path: &Path, story: &str) -> Result<()> {
    let destination = Synthetic::builder().memory("64M").incoming().start()?;
    let from = path.to_string_lossy();
    Transship::command(["restore", "--vm", &destination.vm(), "--from", &*from]).run()?.expect_code(0)?;
    assert_eq!(destination.state()?, SyntheticState::Running, "{story}");
    let check = destination.check()?;
    assert!(check.wrong == 0 && check.pages > 0, "{story}: {check:?}");
    Ok(())
}

/// Starts a save that waits at a step until the file `gate` of the folder is removed.
fn stalled(builder: TransshipBuilder, step: &str, gate: &PathBuf) -> Result<Transship> {
    let armed = builder.env("TRANSSHIP_FAIL_POINT", format!("{step}=stall")).env("TRANSSHIP_FAIL_FILE", gate);
    let mut save = armed.start()?;
    wait_until(step, || {
        if let Some(status) = save.process().ended()? {
            return Err(LabError(format!("it ended early, {status}: {}", save.stderr().tail())));
        }
        Ok(gate.exists())
    })?;
    Ok(save)
}

#[test]
fn ctrl_c_cancels_at_any_time() -> Result<()> {
    let (folder, gates) = (Scratch::on_disk()?, Scratch::new()?);
    let source = busy_synthetic()?;
    let (path, gate) = (folder.join("snapshot"), gates.join("gate"));
    for (step, way) in
        [("save.round", "--live"), ("save.stopped", "--paused"), ("save.tail", "--live"), ("save.tail", "--paused")]
    {
        fs::write(&path, b"old")?;
        let save = stalled(saving(&source.vm(), &path).args([way, "--downtime=10s"]), step, &gate)?;
        save.signal(Signal::INT)?;
        save.stderr().wait(transship_lab::lines::Mark::START, "\"cancelling\"", |line| {
            line.contains("cancelling").then_some(())
        })?;
        fs::remove_file(&gate)?;
        let ended = save.wait()?.expect_code(1)?;
        assert_eq!(ended.report()?["status"], "cancelled", "{step} {way}: {ended}");
        assert_as_before(&source, &folder, step)?;
    }
    Ok(())
}

#[test]
fn a_second_save_to_the_same_file_is_refused() -> Result<()> {
    let (folder, gates) = (Scratch::on_disk()?, Scratch::new()?);
    let (one, other) = (busy_synthetic()?, busy_synthetic()?);
    let (path, gate) = (folder.join("snapshot"), gates.join("gate"));
    let first = stalled(saving(&one.vm(), &path).args(["--downtime=10s"]), "save.round", &gate)?;
    saving(&other.vm(), &path).run()?.expect_error(1, "busy")?;
    assert_eq!(other.state()?, SyntheticState::Running);
    fs::remove_file(&gate)?;
    first.wait()?.expect_code(0)?;
    assert_restores(&path, "the first one")
}

/// Runs a save on file systems of its own, with `setup` done before and `look` after it; $d is a folder.
fn within(setup: &str, look: &str, builder: TransshipBuilder) -> Result<Finished> {
    let script = format!("d=$(mktemp -d) && {setup} || exit 99; \"$0\" \"$@\"; code=$?; {look}; exit $code");
    builder.prefix(&["unshare", "-m", "sh", "-c", &script].map(str::to_owned)).run()
}

/// A disk that says yes to everything and can't keep it, as thin ones do: the pages fail, or only the sync does.
#[test]
fn a_disk_that_fails_leaves_everything_as_it_was() -> Result<()> {
    let source = Synthetic::builder().memory("64M").touched("60%").content("random").start()?;
    let thin = "mount -t tmpfs -o size=30M none $d && truncate -s 200M $d/disk && loop=$(losetup -f --show $d/disk) && \
        trap 'umount /mnt; losetup -d $loop; umount $d; rmdir $d' EXIT && mkfs.ext4 -q -O ^has_journal $loop && \
        mount $loop /mnt && printf old >/mnt/snapshot && sync /mnt/snapshot";
    for (direct_io, words) in [("on", "write file:/mnt/snapshot"), ("off", "sync file:/mnt/snapshot")] {
        for way in ["--live", "--paused"] {
            let flags = [way.to_owned(), format!("--direct-io={direct_io}")];
            let ended =
                within(thin, "ls -A /mnt >&2; head -c 3 /mnt/snapshot >&2", saving(&source.vm(), MOUNTED).args(flags))?;
            let story = format!("{way} --direct-io={direct_io}: {ended}");
            assert_eq!(ended.code(), Some(1), "{story}");
            assert!(ended.stderr.contains(words) && ended.stderr.contains("\nsnapshot\nold"), "{story}");
            assert!(!ended.stderr.contains("transship-part"), "{story}");
            assert_eq!(source.state()?, SyntheticState::Running, "{story}");
        }
    }
    assert_source_whole(&source, "after all that")
}

/// For direct I/O everything has to begin and end where the disk's sectors do, and they are larger than usual here; or
/// the file system has no direct I/O at all.
#[test]
fn file_systems_differ_in_what_they_let_us_do() -> Result<()> {
    let source = busy_synthetic()?;
    let sectors = "truncate -s 200M $d/disk && loop=$(losetup -f --show --direct-io=off --sector-size 4096 $d/disk) && \
        trap 'umount /mnt; losetup -d $loop; rm -r $d' EXIT && mkfs.ext4 -q -b 4096 $loop && mount $loop /mnt";
    let look = "\"$0\" info --check /mnt/snapshot >&2 || code=98";
    let save = |to: &str, direct_io: &str| {
        let flags = [format!("--direct-io={direct_io}"), "--downtime=10s".into()];
        saving(&source.vm(), to).args(flags)
    };
    let ended = within(sectors, look, save(MOUNTED, "on"))?.expect_code(0)?;
    assert_eq!(ended.report()?["file"]["direct_io"], true, "{ended}");
    let to = format!("file:{MOUNTED},offset=0x1235");
    let ended = within(sectors, "true", save(&to, "on"))?.expect_code(0)?;
    assert_eq!(ended.report()?["file"]["direct_io"], true, "{ended}");

    let without = "mount -t ramfs none /mnt";
    let ended = within(without, look, save(MOUNTED, "auto"))?.expect_code(0)?;
    let report = ended.report()?;
    assert_eq!(report["file"]["direct_io"], false);
    assert!(report["file"]["direct_io_refused"].as_str().is_some_and(|why| why.contains("ramfs at /mnt")), "{report}");
    let ended = within(without, "ls -A /mnt >&2", save(MOUNTED, "on"))?.expect_code(1)?;
    assert!(ended.stderr.contains("ramfs at /mnt refuses it") && ended.stderr.contains("--direct-io=auto"), "{ended}");
    assert_eq!(source.state()?, SyntheticState::Running);
    Ok(())
}

/// What is made in place has no beginning until its end is on the disk.
#[test]
fn a_passed_file_that_is_not_complete_is_no_snapshot() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let source = busy_synthetic()?;
    let path = folder.join("snapshot");
    let passing = |flag: &str| {
        let script = format!("exec \"$0\" \"$@\" 3{flag}'{}'", path.display());
        saving(&source.vm(), "fd:3").args(["--downtime", "10s"]).prefix(&["sh", "-c", &script].map(str::to_owned))
    };
    for step in ["round", "tail", "synced"] {
        let ended = passing(">").env("TRANSSHIP_FAIL_POINT", format!("save.{step}=kill")).run()?;
        assert_eq!(ended.code(), None, "{step}: {ended}");
        let bytes = fs::read(&path)?;
        assert!(bytes.len() > 1 << 20 && bytes[..8] == [0; 8], "{step}");
        let info = Transship::command(["info", &*path.to_string_lossy()]).run()?;
        assert_eq!(info.code(), Some(1), "{step}: {info}");
        wait_running(&source)?;
        assert_source_whole(&source, step)?;
    }
    let ended = passing("<").run()?.expect_code(1)?;
    assert!(ended.stderr.contains("descriptor 3 must be open for writing only (O_WRONLY); it is"), "{ended}");
    passing(">").run()?.expect_code(0)?;
    assert_restores(&path, "the last one")
}

/// Where no file of the test is left: it ends with the namespace.
const MOUNTED: &str = "/mnt/snapshot";

#[test]
fn a_full_disk_leaves_everything_as_it_was() -> Result<()> {
    let source =
        Synthetic::builder().memory("64M").touched("60%").content("random").write_rate("5M").hot_set("1M").start()?;
    let look = "ls -A /mnt >&2; head -c 3 /mnt/snapshot >&2";
    for (setup, words) in [
        ("mount -t tmpfs -o size=16M none /mnt && printf old >/mnt/snapshot", "tmpfs at /mnt has 16."),
        // Room for the pages, and not for all that follows.
        ("mount -t tmpfs -o size=36M none /mnt && printf old >/mnt/snapshot", "tmpfs at /mnt has 37."),
        ("mount -t tmpfs none /mnt && printf old >/mnt/snapshot && ulimit -f 20000", "File too large"),
        // The pages fit, and what follows them does not.
        ("mount -t tmpfs none /mnt && printf old >/mnt/snapshot && ulimit -f 133121", "File too large"),
    ] {
        for way in ["--live", "--paused"] {
            let ended = within(setup, look, saving(&source.vm(), MOUNTED).args([way, "--downtime", "10s"]))?;
            let story = format!("{way} {setup}: {ended}");
            assert_eq!(ended.code(), Some(1), "{story}");
            assert!(ended.stderr.contains(words) && ended.stderr.contains("needs up to"), "{story}");
            assert!(ended.stderr.contains("snapshot\nold") && !ended.stderr.contains("transship-part"), "{story}");
            assert_eq!(source.state()?, SyntheticState::Running, "{story}");
        }
    }
    assert_source_whole(&source, "after all that")
}
