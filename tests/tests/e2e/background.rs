//! Background snapshots of real guests: restored, each finds its memory as it was in the moment of the call; and
//! whatever happens, the guest that was saved runs on and is whole.
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use transship_lab::{
    LabError, Qemu, QemuBuilder, Result, Scratch, Synthetic, Transship, Workload, lacks, synthetic::SyntheticState,
    transship::TransshipBuilder, wait_until,
};

/// Writes all the time, as fast as it can.
const BUSY: Workload = Workload { rate: 0, ..Workload::MULTIBOOT };

fn remove(gate: &Path) -> Result<()> {
    Ok(std::fs::remove_file(gate)?)
}

fn saving(vm: &str, to: &Path) -> TransshipBuilder {
    Transship::command(["save", "--background", "--vm", vm, "--to", &*to.to_string_lossy(), "--json"])
}

fn saved(vm: &str, to: &Path) -> Result<Value> {
    let report = saving(vm, to).run()?.expect_code(0)?.report()?;
    assert_eq!(report["status"], "completed", "{report}");
    assert!(report["downtime_ms"].as_f64() > Some(0.0), "{report}");
    Ok(report)
}

fn restored(vm: &str, from: &Path) -> Result<()> {
    let from = from.to_string_lossy();
    Transship::command(["restore", "--vm", vm, "--from", &*from]).run()?.expect_code(0).map(drop)
}

/// It runs, nothing of ours is in it, and every page is what it wrote last.
fn assert_whole(guest: &Qemu) -> Result<()> {
    assert_eq!(guest.status()?, "running");
    let files = guest.open_files()?;
    assert!(!files.iter().any(|file| file.contains("userfaultfd")), "{files:?}");
    let (count, sweep) = (guest.next_count()?, guest.sweep()?);
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    Ok(())
}

/// Saves a guest while the one thread that writes the file stands still, so that it runs into pages that are not saved.
/// Then it and the one in the file are found whole.
fn goes_on_here_and_there(guest: QemuBuilder) -> Result<()> {
    let folder = Scratch::on_disk()?;
    let (path, gate) = (folder.join("snapshot"), folder.join("gate"));
    let source = guest.clone().booted()?;
    let save = stalled(&source.vm(), &path, "save.writing", &gate)?;
    // It finds every page as it left it, and waits for no disk.
    assert_eq!(source.sweep()?.errors, 0);
    source.next_count()?;
    remove(&gate)?;
    let report = save.wait()?.expect_code(0)?.report()?;
    assert!(report["file"]["pages_first"].as_u64() > Some(0), "it never had to wait: {report}");
    assert_whole(&source)?;
    drop(source);
    let destination = guest.incoming().start()?;
    restored(&destination.vm(), &path)?;
    assert_whole(&destination)
}

/// Under KVM it is the processor that has to wait.
#[test]
fn a_guest_that_writes_all_the_time_is_saved_as_it_was() -> Result<()> {
    goes_on_here_and_there(Qemu::multiboot_with_kvm().workload(BUSY))
}

#[test]
fn a_linux_guest_is_saved_as_it_was() -> Result<()> {
    // A balloon that nobody uses is no obstacle. What is written fits the memory for copies.
    let workload = Workload { hot_mib: Some(4), ..Workload::LINUX };
    goes_on_here_and_there(Qemu::linux().workload(workload).args(["-device", "virtio-balloon-pci"]))
}

/// A migration begins by tracking all memory, for which the guest would stand still.
#[test]
fn the_state_of_a_guest_comes_without_a_migration() -> Result<()> {
    let (guest, folder) = (Qemu::multiboot().booted()?, Scratch::on_disk()?);
    saved(&guest.vm(), &folder.join("snapshot"))?;
    let migrated = guest.qmp("query-migrate", json!({}))?;
    assert!(migrated.get("ram").is_none(), "{migrated}");
    assert_whole(&guest)
}

/// As under libvirt: QEMU may not make the userfaultfd that is needed, and we can have it made nevertheless.
#[test]
fn a_qemu_without_rights_is_no_obstacle() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        lacks("root, to take rights away");
        return Ok(());
    }
    let setpriv = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"].map(str::to_owned);
    let guest = Qemu::multiboot().workload(BUSY).prefix(&setpriv);
    let running = guest.clone().booted()?;
    let rights = transship_lab::process::status_field(running.pid(), "CapEff")?;
    assert!(rights.chars().all(|digit| digit == '0'), "it has rights: {rights}");
    drop(running);
    goes_on_here_and_there(guest)
}

#[test]
fn a_guest_that_gives_memory_back_all_the_time_is_refused() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let reporting = "virtio-balloon-pci,free-page-reporting=on,id=b0";
    let guest = Qemu::multiboot().args(["-device", reporting]).booted()?;
    let refused = saving(&guest.vm(), &folder.join("a")).run()?.expect_code(1)?;
    assert!(refused.stderr.contains("device b0") && refused.stderr.contains("--live"), "{refused}");
    assert_whole(&guest)
}

/// Runs a save up to a step, where it waits for the gate to go.
fn stalled(vm: &str, to: &Path, step: &str, gate: &PathBuf) -> Result<Transship> {
    let save = saving(vm, to)
        .args(["--channels", "1"])
        .env("TRANSSHIP_FAIL_POINT", format!("{step}=stall"))
        .env("TRANSSHIP_FAIL_FILE", gate);
    let mut save = save.start()?;
    wait_until(step, || match save.process().ended()? {
        Some(status) => Err(LabError(format!("ended before {step}, {status}: {}", save.stderr().tail()))),
        None => Ok(gate.exists()),
    })?;
    Ok(save)
}

/// What the guest puts into its balloon is gone before it is saved.
#[test]
#[ignore = "long: make test-long"]
fn a_balloon_that_moves_meanwhile_fails_the_snapshot() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let guest = Qemu::linux().args(["-device", "virtio-balloon-pci"]).booted()?;
    let (gate, path) = (folder.join("gate"), folder.join("a"));
    let save = stalled(&guest.vm(), &path, "save.resumed", &gate)?;
    let actual = || -> Result<_> { Ok(guest.qmp("query-balloon", json!({}))?["actual"].as_u64()) };
    let before = actual()?;
    guest.qmp("balloon", json!({ "value": 192 << 20 }))?;
    wait_until("the balloon to move", || Ok(actual()? != before))?;
    remove(&gate)?;
    let failed = save.wait()?.expect_code(1)?;
    assert!(failed.stderr.contains("balloon") && failed.stderr.contains("--live"), "{failed}");
    assert!(!path.exists());
    assert_whole(&guest)
}

/// `kill -9` of the command at each step; then the guest runs on, whole, and is saved by the next one.
#[test]
fn a_guest_whose_saver_dies_runs_on() -> Result<()> {
    for step in ["save.protecting", "save.stopped", "save.state", "save.protected", "save.resumed", "save.background"] {
        let folder = Scratch::on_disk()?;
        let guest = Qemu::multiboot().workload(BUSY).booted()?;
        let settings = || -> Result<_> {
            Ok((guest.qmp("query-migrate-capabilities", json!({}))?, guest.qmp("query-migrate-parameters", json!({}))?))
        };
        let before: (Value, Value) = settings()?;
        let path = folder.join("a");
        let died = saving(&guest.vm(), &path).env("TRANSSHIP_FAIL_POINT", format!("{step}=kill")).run()?;
        assert_eq!(died.status.code(), None, "{step}: {died}");
        guest.wait_status("running")?;
        assert!(!path.exists(), "{step}");
        assert_whole(&guest)?;
        assert_eq!(settings()?, before, "{step}");
        saved(&guest.vm(), &path)?;
        assert_whole(&guest)?;
    }
    Ok(())
}

#[test]
fn a_synthetic_guest_whose_saver_dies_runs_on() -> Result<()> {
    for step in ["save.protecting", "save.protected", "save.resumed", "save.background"] {
        let folder = Scratch::on_disk()?;
        let guest = Synthetic::builder().memory("64M").write_rate("max").start()?;
        let path = folder.join("a");
        let died = saving(&guest.vm(), &path).env("TRANSSHIP_FAIL_POINT", format!("{step}=kill")).run()?;
        assert_eq!(died.status.code(), None, "{step}: {died}");
        // The guard may be talking to it.
        wait_until("the guest to run", || Ok(guest.state().is_ok_and(|state| state == SyntheticState::Running)))?;
        assert_eq!(guest.check()?.wrong, 0, "{step}");
        saved(&guest.vm(), &path)?;
        let destination = Synthetic::builder().memory("64M").incoming().start()?;
        restored(&destination.vm(), &path)?;
        assert_eq!((guest.check()?.wrong, destination.check()?.wrong), (0, 0), "{step}");
    }
    Ok(())
}

/// The one thread that writes the file never gets to it. When there is no more room for copies the guest stands still,
/// and then the snapshot is given up and not the guest.
#[test]
#[ignore = "long: make test-long"]
fn a_disk_that_takes_nothing_does_not_hold_the_guest_for_ever() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let (path, gate) = (folder.join("a"), folder.join("gate"));
    let guest = Qemu::linux().workload(Workload { rate: 0, ..Workload::LINUX }).booted()?;
    let save = stalled(&guest.vm(), &path, "save.writing", &gate)?;
    // More than there is room for, again and again.
    let enough = guest.next_count()?.count + 4 * u64::from(Workload::LINUX.mib) * 256;
    wait_until("the guest to write everything", || Ok(guest.next_count()?.count > enough))?;
    remove(&gate)?;
    let failed = save.wait()?.expect_code(1)?;
    assert!(failed.stderr.contains("the guest runs on") && failed.stderr.contains("has waited for it"), "{failed}");
    assert!(!path.exists());
    assert_whole(&guest)
}

/// The guest is worth more than its snapshot. (The small disk is in a namespace of its own, and ends with it.)
#[test]
fn a_full_disk_lets_the_guest_run_on() -> Result<()> {
    let guest = Synthetic::builder().memory("64M").content("random").write_rate("max").start()?;
    let script = "mount -t tmpfs -o size=24M none /mnt || exit 99; \"$0\" \"$@\"; code=$?; ls -A /mnt >&2; exit $code";
    let small_disk = ["unshare", "-m", "sh", "-c", script].map(str::to_owned);
    let failed = saving(&guest.vm(), Path::new("/mnt/snapshot")).prefix(&small_disk).run()?.expect_code(1)?;
    assert!(failed.stderr.contains("tmpfs at /mnt has"), "{failed}");
    assert!(!failed.stderr.trim_end().ends_with("snapshot") && !failed.stderr.contains("transship-part"), "{failed}");
    assert_eq!((guest.state()?, guest.check()?.wrong), (SyntheticState::Running, 0));
    Ok(())
}
