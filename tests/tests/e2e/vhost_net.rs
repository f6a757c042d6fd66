//! A guest whose network card is a thread of the kernel (vhost-net), which writes to its memory as QEMU would. In a
//! virtual machine, since the kernel here may have none.
use crate::restoring::{disk, io};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};
use transship_lab::{Initrd, LabError, Result, binary, image, lacks, root};

/// Everything is emulated twice, and the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(1200);
/// Drivers of its kernel, by number.
const MODULES: &str = ".guest/linux/modules-new";

#[test]
#[ignore = "minutes: boots a guest in a machine that is emulated itself"]
fn a_guest_whose_network_card_is_the_kernels_is_moved() -> Result<()> {
    let (perl, qemu) = (Path::new("/usr/bin/perl"), Path::new("/usr/bin/qemu-system-x86_64"));
    for needed in [&root().join(MODULES), perl, qemu] {
        if !needed.exists() {
            lacks(format_args!("{} (scripts/guests.sh makes the drivers' folder)", needed.display()));
            return Ok(());
        }
    }
    let folder = disk()?;
    let files = Initrd::new(folder.path())?;
    files.program(&binary()?, "bin/transship")?;
    files.program(perl, "bin/perl")?;
    files.emulator(qemu)?;
    files.file(&image("linux/busybox")?, "bin/busybox")?;
    for part in ["vmlinuz", "initrd.img"] {
        files.file(&image(&format!("linux/{part}"))?, &format!("guest/{part}"))?;
    }
    for driver in io(fs::read_dir(root().join(MODULES)))?.flatten() {
        files.file(&driver.path(), &format!("modules/{}", driver.file_name().display()))?;
    }
    files.init(include_str!("../../../guest/vhost-net/init"))?;
    let mut machine = files.boot(&image("linux/vmlinuz-new")?, "")?;
    machine.wait(PATIENCE)?;

    let lines = machine.stdout().to_the_end()?;
    let all = lines.join("\n");
    let said = |what: &str| {
        // A command's progress may stand before it.
        let line = lines.iter().find_map(|line| line.trim_end().split_once("net: ")?.1.strip_prefix(what));
        line.map(str::trim).ok_or_else(|| LabError(format!("no word of {what:?}:\n{all}")))
    };
    let end = said("end: ")?;
    if end != "all" {
        lacks(format_args!("vhost-net in .guest/linux/vmlinuz-new: {end}"));
        return Ok(());
    }
    assert_eq!((said("move ")?, said("receive ")?), ("0", "0"), "{all}");
    let report: Value = serde_json::from_str(said("report ")?).map_err(|e| LabError(e.to_string()))?;
    assert_eq!((&report["verified"], &report["tracker"]["name"]), (&true.into(), &"async".into()), "{report}");
    let heard = |when: &str| Ok::<u64, LabError>(said(when)?.parse().unwrap_or(0));
    assert!(heard("before ")? > 0 && heard("after ")? > heard("before ")? + 100, "{all}");
    for whole in ["datagrams ", "pages "] {
        assert!(said(whole)?.ends_with("errors=0"), "{all}");
    }
    Ok(())
}
