//! Domains saved together with a snapshot of their disks: the guest knows what must be in its memory and on its disk,
//! and is restored from both.
use crate::{
    libvirt::{old_libvirt, saving, stalled},
    libvirt_images::{assert_whole, is_restored},
};
use std::path::{Path, PathBuf};
use std::process::Command;
use transship_lab::{DiskFormat, Domain, LabError, LibvirtHost, Result, wait_until};

/// The file that the domain writes its disk to, as libvirt knows.
fn written_to(host: &LibvirtHost, domain: &Domain) -> Result<PathBuf> {
    let list = host.virsh(&["domblklist", domain.name()])?;
    let line = list.lines().find_map(|line| line.trim().strip_prefix("vda"));
    Ok(PathBuf::from(line.ok_or_else(|| LabError(list.clone()))?.trim()))
}

/// Files beside the disk that are neither it nor what a test put there.
fn overlays(domain: &Domain) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(domain.folder())?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.to_string_lossy().contains("disk-vda-")).collect())
}

fn qemu_img(args: &[&str]) -> Result<String> {
    let output = Command::new("qemu-img").args(args).output()?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(LabError(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

/// Saved while it writes, it runs on with an overlay; what was saved is the guest with its disk of that moment.
#[test]
#[ignore = "long: make test-long"]
fn memory_and_disk_are_of_one_moment() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    are_of_one_moment(&host, DiskFormat::Raw)
}

#[test]
#[ignore = "takes minutes"]
fn an_older_libvirt_takes_them_of_one_moment_as_well() -> Result<()> {
    let Some(host) = old_libvirt("h1")? else { return Ok(()) };
    [DiskFormat::Raw, DiskFormat::Qcow2].into_iter().try_for_each(|format| are_of_one_moment(&host, format))
}

fn are_of_one_moment(host: &LibvirtHost, format: DiskFormat) -> Result<()> {
    let domain = Domain::with_disk("g1", format)?;
    let serial = domain.start(host)?;
    let image = domain.folder().join("image");
    let save = saving(&host.vm("g1"), &image, &["--background", "--format", "libvirt", "--disks"]);
    let report = save.run()?.expect_code(0)?.report()?;
    let overlay = written_to(host, &domain)?;
    assert_eq!(overlays(&domain)?, [overlay.as_path()]);
    let disk = &report["disks"][0];
    assert_eq!(disk["disk"], "vda", "{report}");
    assert_eq!((disk["kept"].as_str(), disk["overlay"].as_str()), (domain.disk().to_str(), overlay.to_str()));
    assert_whole(host, &domain, &serial)?;
    // libvirt has no record of it that would keep the domain from being migrated.
    assert_eq!(host.virsh(&["snapshot-list", "g1", "--name"])?, "");
    drop(serial);
    host.virsh(&["destroy", "g1"])?;
    is_restored(host, &domain, &image)
}

/// What is refused, fails at the stop, or dies there leaves the domain with its disk, and no file.
#[test]
#[ignore = "long: make test-long"]
fn what_fails_leaves_the_disk_as_it_was() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::with_disk("g1", DiskFormat::Raw)?;
    let serial = domain.start(&host)?;
    let (image, gate) = (domain.folder().join("image"), domain.folder().join("gate"));
    let vm = host.vm("g1");
    let disks = ["--background", "--format", "libvirt", "--disks"];
    let is_as_before = || {
        assert_eq!(written_to(&host, &domain)?, domain.disk());
        assert_eq!(overlays(&domain)?, [] as [PathBuf; 0]);
        assert!(!image.exists());
        assert_whole(&host, &domain, &serial)
    };
    // libvirt does not find the overlay that it is to use.
    let save = stalled(saving(&vm, &image, &disks), "save.stopped", &gate)?;
    let made = overlays(&domain)?;
    assert_eq!(made.len(), 1, "{made:?}");
    std::fs::remove_file(&made[0])?;
    std::fs::remove_file(&gate)?;
    let ended = save.wait()?.expect_code(1)?;
    assert!(ended.stderr.contains("a snapshot of the disks"), "{ended}");
    is_as_before()?;
    // The command of the user's comes before the snapshot.
    let more = [&disks[..], &["--at-stop", "test $TRANSSHIP_PHASE = back"]].concat();
    saving(&vm, &image, &more).run()?.expect_code(1)?;
    is_as_before()?;
    // The guard removes what nobody uses.
    let killed = saving(&vm, &image, &disks).env("TRANSSHIP_FAIL_POINT", "save.state=kill").run()?;
    assert_eq!(killed.code(), None, "{killed}");
    wait_until("the guard", || Ok(overlays(&domain)?.is_empty() && host.state("g1")? == "running"))?;
    is_as_before()?;
    for refused in [saving(&vm, &image, &["--disks=/no/such/folder"]), saving("qemu:/none", &image, &["--disks"])] {
        let refused = refused.run()?;
        assert!(matches!(refused.code(), Some(1 | 2)), "{refused}");
    }
    is_as_before()
}

/// Once the disks are changed over, the domain runs on with them, whatever becomes of the save; and it is said.
#[test]
#[ignore = "takes minutes"]
fn what_fails_after_the_snapshot_is_said() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let domain = Domain::with_disk("g1", DiskFormat::Qcow2)?;
    let serial = domain.start(&host)?;
    let (image, vm) = (domain.folder().join("image"), host.vm("g1"));
    let save = |action: &str| {
        let save = saving(&vm, &image, &["--background", "--format", "libvirt", "--disks"]);
        save.env("TRANSSHIP_FAIL_POINT", format!("save.disks={action}")).run()
    };
    let failed = save("error")?.expect_code(1)?;
    let overlay = written_to(&host, &domain)?;
    assert!(failed.stderr.contains(&format!("disk vda to {} all the same", overlay.display())), "{failed}");
    assert_whole(&host, &domain, &serial)?;
    merge(&host, &domain, &overlay)?;
    let killed = save("kill")?;
    assert_eq!(killed.code(), None, "{killed}");
    wait_until("the guard", || Ok(host.state("g1")? == "running"))?;
    let overlay = written_to(&host, &domain)?;
    assert!(killed.stderr.contains(&format!("writes to {} now", overlay.display())), "{killed}");
    assert_eq!(overlays(&domain)?, [overlay.as_path()]);
    assert_whole(&host, &domain, &serial)?;
    merge(&host, &domain, &overlay)?;
    assert_whole(&host, &domain, &serial)
}

/// As docs/libvirt.md says it: what was written since goes into the file below, and the overlay is no longer needed.
fn merge(host: &LibvirtHost, domain: &Domain, overlay: &Path) -> Result<()> {
    host.virsh(&["blockcommit", domain.name(), "vda", "--active", "--pivot", "--shallow"])?;
    std::fs::remove_file(overlay)?;
    assert_eq!(written_to(host, domain)?, domain.disk());
    Ok(())
}

/// All ways, both formats, as docs/libvirt.md says it: the pair is taken away to another place while the domain runs
/// on, which then merges its overlay; restored from there, its disk in an overlay of its own. A suspended domain stays
/// so.
#[test]
#[ignore = "takes minutes"]
fn the_pair_is_restored_at_another_place() -> Result<()> {
    let Some(host) = LibvirtHost::start("h1")? else { return Ok(()) };
    let Some(other) = LibvirtHost::start("h2")? else { return Ok(()) };
    for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
        let domain = Domain::with_disk("g1", format)?;
        let serial = domain.start(&host)?;
        for way in ["--live", "--paused", "--background", "suspended"] {
            let image = domain.folder().join("image");
            let options = if way == "suspended" { "--live" } else { way };
            if way == "suspended" {
                host.virsh(&["suspend", "g1"])?;
            }
            saving(&host.vm("g1"), &image, &[options, "--format", "libvirt", "--disks"]).run()?.expect_code(0)?;
            let overlay = written_to(&host, &domain)?;
            let copy = domain.folder().join("copy");
            std::fs::copy(domain.disk(), &copy)?;
            if way == "suspended" {
                assert_eq!(host.state("g1")?, "paused");
                host.virsh(&["resume", "g1"])?;
            }
            assert_whole(&host, &domain, &serial)?;
            merge(&host, &domain, &overlay)?;
            assert_whole(&host, &domain, &serial)?;
            restore_elsewhere(&other, &domain, &image, &copy, way == "suspended")?;
            assert_whole(&host, &domain, &serial)?;
        }
        // Another one than libvirt copies the disk in that moment.
        let (image, copy) = (domain.folder().join("image"), domain.folder().join("copied"));
        let copying = format!("test $TRANSSHIP_PHASE = back || cp {} {}", domain.disk().display(), copy.display());
        let options = ["--background", "--format", "libvirt", "--at-stop", &copying];
        saving(&host.vm("g1"), &image, &options).run()?.expect_code(0)?;
        assert_whole(&host, &domain, &serial)?;
        restore_elsewhere(&other, &domain, &image, &copy, false)?;
        drop(serial);
        host.virsh(&["destroy", "g1"])?;
    }
    Ok(())
}

/// With the disk in an overlay over the copy, which stays as it is.
fn restore_elsewhere(
    other: &LibvirtHost,
    domain: &Domain,
    image: &Path,
    copy: &Path,
    is_suspended: bool,
) -> Result<()> {
    let (image, before) = (image.to_string_lossy(), std::fs::read(copy)?);
    let (overlay, edited) = (domain.folder().join("restored.qcow2"), domain.folder().join("edited.xml"));
    let format = domain.disk().extension().unwrap_or_default().to_string_lossy();
    let (backing, file) = (copy.to_string_lossy(), overlay.to_string_lossy());
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", &format, "-b", &backing, &file])?;
    let xml = other.virsh(&["save-image-dumpxml", "--security-info", &image])?;
    let of_disk = |text: &str| text.replace(&*domain.disk().to_string_lossy(), &file);
    let xml = of_disk(&xml).replace(&format!("type='{format}'"), "type='qcow2'");
    std::fs::write(&edited, xml)?;
    other.virsh(&["restore", &image, "--xml", &edited.to_string_lossy()])?;
    let serial = domain.serial()?;
    if is_suspended {
        assert_eq!(other.state("g1")?, "paused");
        other.virsh(&["resume", "g1"])?;
    }
    assert_whole(other, domain, &serial)?;
    assert_eq!(written_to(other, domain)?, overlay);
    other.virsh(&["destroy", "g1"])?;
    assert!(std::fs::read(copy)? == before, "the copy was written to");
    Ok(std::fs::remove_file(overlay)?)
}
