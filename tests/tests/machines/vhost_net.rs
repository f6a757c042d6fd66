//! A guest whose network card is a thread of the kernel (vhost-net), which writes to its memory as QEMU would. In a
//! virtual machine, since the kernel here may have none.
use std::{fs, path::Path};

use serde_json::{Value, json};
use transship_lab::{Initrd, LabError, Qemu, Result, Workload, binary, image, lacks, root};

use crate::{are_lacking, folder, run};

/// Drivers of its kernel, by number.
const MODULES: &str = ".guest/linux/modules-new";

/// The card of the guest, as init in guest/vhost-net has it.
const CARD: &str = "virtio-net-pci,netdev=net,mac=52:54:00:12:34:56,romfile=";

/// The guest of that machine, booted here and saved by its QEMU: to boot while it is emulated twice takes it minutes.
/// Nobody is at the other end of its card yet.
fn save_booted(qemu: &Path, file: &Path) -> Result<()> {
    let workload = Workload { mib: 8, rate: 50, sweep_ms: 5000, ..Workload::LINUX };
    let guest = Qemu::linux().binary(qemu.to_string_lossy()).memory(128).workload(workload).append("workload.net=20");
    let guest = guest.args(["-netdev", "hubport,id=net,hubid=0", "-device", CARD]).start()?;
    guest.ready()?;
    guest.qmp("migrate", json!({ "uri": format!("file:{}", file.display()) }))?;
    guest.wait_status("postmigrate")
}

#[test]
#[ignore = "minutes: a guest runs in a machine that is emulated itself"]
fn a_guest_whose_network_card_is_the_kernels_is_moved() -> Result<()> {
    let (perl, qemu) = (Path::new("/usr/bin/perl"), Path::new("/usr/bin/qemu-system-x86_64"));
    if are_lacking(&[&root().join(MODULES), perl, qemu], "scripts/guests.sh makes the drivers' folder") {
        return Ok(());
    }
    let folder = folder()?;
    let files = Initrd::new(folder.path())?;
    files.program(&binary()?, "bin/transship")?;
    files.program(perl, "bin/perl")?;
    files.emulator(qemu)?;
    files.file(&image("linux/busybox")?, "bin/busybox")?;
    let booted = folder.path().join("booted");
    save_booted(qemu, &booted)?;
    files.file(&booted, "guest/booted")?;
    for part in ["vmlinuz", "initrd.img"] {
        files.file(&image(&format!("linux/{part}"))?, &format!("guest/{part}"))?;
    }
    let drivers = fs::read_dir(root().join(MODULES))?;
    for driver in drivers.flatten() {
        files.file(&driver.path(), &format!("modules/{}", driver.file_name().display()))?;
    }
    files.init(include_str!("../../../guest/vhost-net/init"))?;
    let said = run(&files, &image("linux/vmlinuz-new")?, "", "net")?;
    let end = said.of("end:")?;
    if end != "all" {
        lacks(format_args!("vhost-net in .guest/linux/vmlinuz-new: {end}"));
        return Ok(());
    }
    assert_eq!((said.of("move")?, said.of("receive")?), ("0", "0"), "{said}");
    let report: Value = serde_json::from_str(said.of("report")?)?;
    assert_eq!((&report["verified"], &report["tracker"]["name"]), (&true.into(), &"async".into()), "{report}");
    let heard = |when: &str| Ok::<u64, LabError>(said.of(when)?.parse().unwrap_or(0));
    assert!(heard("before")? > 0 && heard("after")? > heard("before")? + 100, "{said}");
    for whole in ["datagrams", "pages"] {
        assert!(said.of(whole)?.ends_with("errors=0"), "{said}");
    }
    Ok(())
}
