//! Images, and guests that share their memory.
use std::{collections::HashSet, path::Path};

use serde_json::{Value, json};
use transship_lab::{
    Backend, LabError, Qemu, QemuBuilder, Result, Scratch, Transship, Workload, lacks, lines::Mark, other_qemu,
};

use crate::restoring::assert_goes_on;

/// Debian 12's usual one does not know the device.
const NEW_KERNEL: &str = "linux/vmlinuz-new";

pub(crate) fn guest() -> QemuBuilder {
    Qemu::multiboot()
}

/// An image of the guest, which goes on.
pub(crate) fn image(of: &Qemu, to: &Path, way: &str) -> Result<Value> {
    let to = to.to_string_lossy();
    let save = ["save", way, "--format", "raw", "--vm", &of.vm(), "--to", &*to, "--json"];
    Transship::command(save).run()?.expect_code(0)?.report()
}

pub(crate) fn cloning(vm: &str, from: &Path) -> transship_lab::transship::TransshipBuilder {
    Transship::command(["clone", "--vm", vm, "--from", &*from.to_string_lossy(), "--json"])
}

/// All bytes of the image are those that it was completed with.
pub(crate) fn assert_unchanged(image: &Path) -> Result<()> {
    Transship::command(["info", "--check", &*image.to_string_lossy()]).run()?.expect_code(0).map(drop)
}

/// Saved in each way, from memory of each kind. Two clones of it run beside the guest, and it can be saved again.
#[test]
#[ignore = "takes a minute: make test-long"]
fn an_image_of_any_guest_has_clones() -> Result<()> {
    let folder = Scratch::new()?;
    for (way, backend) in
        [("--background", Backend::SharedFile), ("--live", Backend::Ram), ("--paused", Backend::Memfd)]
    {
        let (path, source) = (folder.join(way), guest().backend(backend).booted()?);
        image(&source, &path, way)?;
        let first = guest().clone_of(&path).start()?;
        let report = cloning(&first.vm(), &path).run()?.expect_code(0)?.report()?;
        assert_eq!(report["clone"]["memory"], "mapped", "{report}");
        let second = guest().clone_of(&path).start()?;
        cloning(&second.vm(), &path).run()?.expect_code(0)?;
        [&source, &first, &second].into_iter().try_for_each(assert_goes_on)?;
        assert_unchanged(&path)?;
        // A clone is a guest like any other, also for another image.
        let again = folder.join(&format!("{way}-again"));
        image(&first, &again, way)?;
        drop(first);
        let third = guest().clone_of(&again).start()?;
        cloning(&third.vm(), &again).run()?.expect_code(0)?;
        [&source, &second, &third].into_iter().try_for_each(assert_goes_on)?;
    }
    Ok(())
}

/// On a disk, in several parts; clones share what they do not write.
#[test]
fn clones_take_little_memory() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let nodes = |backend| Qemu::multiboot_with_kvm().memory(128).backend(backend).backends(2);
    let (path, source) = (folder.join("image"), nodes(Backend::Ram).booted()?);
    image(&source, &path, "--background")?;
    let clones: Vec<Qemu> = (0..3).map(|_| nodes(Backend::Ram).clone_of(&path).start()).collect::<Result<_>>()?;
    for clone in &clones {
        cloning(&clone.vm(), &path).run()?.expect_code(0)?;
    }
    clones.iter().try_for_each(assert_goes_on)?;
    for clone in &clones {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", clone.pid()))?;
        let of_memory = smaps.split("/image/memory").skip(1);
        let anonymous = |part: &str| {
            let line = part.lines().find_map(|line| line.strip_prefix("Anonymous:"))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        };
        let own: u64 = of_memory.filter_map(anonymous).sum();
        assert!(own < 16 << 10, "{own} KiB of 128 MiB are the clone's own");
    }
    assert_unchanged(&path)
}

/// There and back, by other layouts; also of what a stock QEMU has saved.
#[test]
#[ignore = "long: make test-long"]
fn images_are_made_of_other_snapshots_and_back() -> Result<()> {
    let folder = Scratch::new()?;
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let source = guest().booted()?;
    Transship::command(["save", "--paused", "--vm", &source.vm(), "--to", &at("mapped")]).run()?.expect_code(0)?;
    let convert = |from: &str, to: &str, format: &str| {
        Transship::command(["convert", &at(from), &at(to), "--format", format]).run()?.expect_code(0).map(drop)
    };
    convert("mapped", "stream", "stream")?;
    convert("mapped", "one", "raw")?;
    convert("stream", "two", "raw")?;
    convert("two", "three", "raw")?;
    convert("three", "mapped-again", "mapped-ram")?;
    convert("three", "stream-again", "stream")?;
    for name in ["one", "two", "three"] {
        assert_unchanged(&folder.join(name))?;
        let clone = guest().clone_of(folder.join(name)).start()?;
        cloning(&clone.vm(), &folder.join(name)).run()?.expect_code(0)?;
        assert_goes_on(&clone).map_err(|e| LabError(format!("{name}: {e}")))?;
    }
    for name in ["mapped-again", "stream-again", "three"] {
        let restored = guest().incoming().start()?;
        Transship::command(["restore", "--vm", &restored.vm(), "--from", &at(name)]).run()?.expect_code(0)?;
        assert_goes_on(&restored).map_err(|e| LabError(format!("{name}: {e}")))?;
    }
    Ok(())
}

/// Memory that is no mapping of the image gets the guest all the same, and the report says in which way.
#[test]
fn memory_of_its_own_is_filled() -> Result<()> {
    let (folder, guest) = (Scratch::new()?, Qemu::multiboot_with_kvm);
    let (path, source) = (folder.join("image"), guest().booted()?);
    image(&source, &path, "--background")?;
    let promised = "prealloc=on";
    let all = [(Backend::SharedFile, "", "lazy"), (Backend::Ram, "", "lazy"), (Backend::Ram, promised, "copied")];
    for (backend, options, way) in all {
        let other = guest().backend(backend).memory_options(options).incoming().start()?;
        let report = cloning(&other.vm(), &path).run()?.expect_code(0)?.report()?;
        assert_eq!(report["clone"]["memory"], way, "{report}");
        assert_goes_on(&other)?;
    }
    Ok(())
}

/// What the QEMU of a clone has written to its memory by itself is put back.
#[test]
fn pages_that_qemu_has_written_are_those_of_the_image() -> Result<()> {
    let folder = Scratch::new()?;
    let (path, source) = (folder.join("image"), guest().booted()?);
    image(&source, &path, "--background")?;
    let clone = guest().clone_of(&path).start()?;
    // As firmware would: at pages of the workload, and in a hole.
    let memory = std::fs::OpenOptions::new().write(true).open(format!("/proc/{}/mem", clone.pid()))?;
    let blocks = clone.qmp("human-monitor-command", json!({ "command-line": "info ramblock" }))?;
    let line = blocks.as_str().and_then(|text| text.lines().find(|line| line.contains("mem0")).map(str::to_owned));
    let line = line.ok_or_else(|| LabError("no mem0".into()))?;
    let address = line
        .split_whitespace()
        .rfind(|word| word.starts_with("0x"))
        .and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    let address = address.ok_or(LabError(line))?;
    for at in (0..64 << 20).step_by(1 << 20) {
        std::os::unix::fs::FileExt::write_all_at(&memory, &[0xa5; 8192], address + at)?;
    }
    let report = cloning(&clone.vm(), &path).run()?.expect_code(0)?.report()?;
    assert!(report["clone"]["pages_written"].as_u64() >= Some(128), "{report}");
    assert_goes_on(&clone)?;
    assert_unchanged(&path)
}

/// A clone that is killed on the way leaves a QEMU that runs nothing. One that waits takes the next attempt.
#[test]
fn a_clone_that_is_killed_leaves_nothing_running() -> Result<()> {
    let folder = Scratch::new()?;
    let (path, source) = (folder.join("image"), guest().booted()?);
    image(&source, &path, "--background")?;
    for (point, waits) in [("clone.memory", true), ("restore.loading", false), ("clone.loaded", false)] {
        let clone = guest().clone_of(&path).start()?;
        let killed = cloning(&clone.vm(), &path).env("TRANSSHIP_FAIL_POINT", format!("{point}=kill")).run()?;
        assert_ne!(killed.code(), Some(0), "{point}: {killed}");
        assert_ne!(clone.status()?, "running", "{point}");
        if waits {
            assert_eq!(clone.status()?, "inmigrate", "{point}");
            cloning(&clone.vm(), &path).run()?.expect_code(0)?;
            assert_goes_on(&clone)?;
        }
    }
    // After that it runs, whatever becomes of the command.
    let clone = guest().clone_of(&path).start()?;
    cloning(&clone.vm(), &path).env("TRANSSHIP_FAIL_POINT", "clone.started=kill").run()?;
    assert_goes_on(&clone)?;
    assert_goes_on(&source)?;
    assert_unchanged(&path)
}

/// Each has a disk of its own, over that of the guest; and whoever is told to does what only the operator knows.
#[test]
fn clones_have_overlays_and_a_command_after() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let (raw, overlay, path) = (folder.join("disk"), folder.join("overlay"), folder.join("image"));
    std::fs::File::create(&raw).and_then(|file| file.set_len(1 << 20))?;
    let with = |builder: QemuBuilder, file: &Path, format: &str| {
        let drive = format!("file={},format={format},if=none,id=disk", file.display());
        builder.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"])
    };
    let source = with(guest(), &raw, "raw").booted()?;
    // From this moment on the guest writes to a file of its own, and its disk stays as it is.
    source.qmp("stop", json!({}))?;
    let theirs = folder.join("theirs").to_string_lossy().into_owned();
    source.qmp("blockdev-snapshot-sync", json!({ "device": "disk", "snapshot-file": theirs, "format": "qcow2" }))?;
    image(&source, &path, "--background")?;
    source.qmp("cont", json!({}))?;
    let same = with(guest(), &raw, "raw").clone_of(&path).start()?;
    let refused = cloning(&same.vm(), &path).run()?.expect_code(1)?.to_string();
    assert!(refused.contains("a disk of the guest") && refused.contains("qemu-img create -f qcow2"), "{refused}");
    assert_eq!(same.status()?, "inmigrate");
    let mut create = std::process::Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).args([&raw, &overlay]);
    assert!(create.status()?.success());
    let clone = with(guest(), &overlay, "qcow2").clone_of(&path).start()?;
    let told = folder.join("told");
    let after = format!("echo $TRANSSHIP_NUMBER $TRANSSHIP_SOCKET > {}", told.display());
    cloning(&clone.vm(), &path).args(["--run", "--number", "7", "--after", &after]).run()?.expect_code(0)?;
    assert_eq!(std::fs::read_to_string(told)?.trim(), format!("7 {}", clone.qmp_path().display()));
    [&clone, &source].into_iter().try_for_each(assert_goes_on)
}

/// A snapshot in QEMU's layout has no disks in it. What is made of it knows none, and what is made of an image knows
/// those of the image.
#[test]
fn clones_of_what_knows_no_disks_are_kept_from_those_that_others_write_to() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    std::fs::File::create(at("disk")).and_then(|file| file.set_len(1 << 20))?;
    // QEMU would lock it, and refuse to run the clone only when it is loaded; not every file system can lock.
    let drive = format!("file={},format=raw,file.locking=off,if=none,id=disk", at("disk"));
    let with = || guest().args(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    let source = with().booted()?;
    Transship::command(["save", "--paused", "--vm", &source.vm(), "--to", &at("mapped")]).run()?.expect_code(0)?;
    image(&source, &folder.join("image"), "--paused")?;
    let disks = |from: &str, to: &str| -> Result<(Value, String)> {
        Transship::command(["convert", &at(from), &at(to), "--format", "raw"]).run()?.expect_code(0)?;
        let info = Transship::command(["info", &at(to), "--json"]).run()?.expect_code(0)?.report()?;
        let text = Transship::command(["info", &at(to)]).run()?.expect_code(0)?.stdout;
        Ok((info["disks"].clone(), text))
    };
    let (known, text) = disks("image", "copy")?;
    assert_eq!(known, json!({ "files": [at("disk")] }), "{text}");
    let (unknown, text) = disks("mapped", "converted")?;
    assert_eq!(unknown, "not-known");
    assert!(text.contains("does not say which its guest had"), "{text}");
    let waiting = with().clone_of(folder.join("copy")).start()?;
    let refused = cloning(&waiting.vm(), &folder.join("copy")).run()?.expect_code(1)?.to_string();
    assert!(refused.contains("is a disk of the guest that the image was made of"), "{refused}");
    let waiting = with().clone_of(folder.join("converted")).start()?;
    let refused = cloning(&waiting.vm(), &folder.join("converted")).run()?.expect_code(1)?.to_string();
    let process = format!("process {} (", source.pid());
    assert!(refused.contains(&process) && refused.contains("qemu-img create -f qcow2"), "{refused}");
    assert_eq!(waiting.status()?, "inmigrate");
    assert_goes_on(&source)?;
    // Nobody else writes to it any more.
    drop(source);
    cloning(&waiting.vm(), &folder.join("converted")).run()?.expect_code(0)?;
    assert_goes_on(&waiting)
}

#[test]
fn clones_run_in_other_versions() -> Result<()> {
    for version in ["11.1"] {
        let Some(binary) = other_qemu(version)? else { continue };
        let guest = || guest().binary(binary.clone());
        let folder = Scratch::new()?;
        let (path, source) = (folder.join("image"), guest().booted()?);
        image(&source, &path, "--background")?;
        let clone = guest().clone_of(&path).start()?;
        cloning(&clone.vm(), &path).run()?.expect_code(0)?;
        assert_goes_on(&clone).map_err(|e| LabError(format!("{version}: {e}")))?;
    }
    Ok(())
}

/// The kernel learns by its vmgenid device that it is another guest now: no two draw the same numbers.
#[test]
#[ignore = "boots a kernel of its own: make test-long"]
fn clones_draw_other_random_numbers() -> Result<()> {
    if transship_lab::image(NEW_KERNEL).is_err() {
        lacks("a kernel that knows vmgenid");
        return Ok(());
    }
    let workload = Workload { mib: 4, rate: 100, ..Workload::LINUX };
    let guest = || {
        let guest = Qemu::linux().kernel(NEW_KERNEL).append("loglevel=6").workload(workload);
        // The firmware that guests have otherwise gives the device no place in their memory.
        guest.args(["-bios", "bios-256k.bin", "-device", "vmgenid,guid=auto"])
    };
    let folder = Scratch::new()?;
    let (path, source) = (folder.join("image"), guest().start()?);
    source.ready()?;
    let mut drawn = vec![source.serial().random()?];
    image(&source, &path, "--background")?;
    drawn.push(source.serial().random()?);
    for _ in 0..2 {
        let clone = guest().clone_of(&path).start()?;
        cloning(&clone.vm(), &path).run()?.expect_code(0)?;
        // Until it has heard, it draws what the guest has drawn.
        let reseeded = |line: &str| line.contains("crng reseeded due to virtual machine fork").then_some(());
        clone.serial().lines().wait(Mark::START, "word that the kernel has drawn anew", reseeded)?;
        drawn.push(clone.serial().random()?);
        assert_goes_on(&clone)?;
    }
    assert_eq!(drawn.iter().collect::<HashSet<_>>().len(), 4, "{drawn:?}");
    Ok(())
}
