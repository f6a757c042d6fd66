//! Guests with a device that is another process: it writes to their memory through a mapping of its own.
use crate::{
    ends::move_between,
    sector::{Move, SharedDisk, wait_counting},
};
use transship_lab::{BlockBackEnd, Qemu, QemuBuilder, Result, Scratch, Transship, Workload, slow_disk::numbered};

const DISK_MIB: u64 = 16;
const WORKLOAD: Workload = Workload { mib: 16, rate: 500, sweep_ms: 500, ..Workload::LINUX };

/// A Linux guest that has the disk read into its memory all the time, and knows what each read has to bring.
fn linux(disk: &BlockBackEnd) -> QemuBuilder {
    Qemu::linux().workload(WORKLOAD).append("workload.slots=32").args(disk.args())
}

/// No page of the guest, and nothing that the disk has brought, is wrong since its start; and it goes on.
fn assert_right(guest: &Qemu) -> Result<()> {
    guest.serial().read_on(1)?;
    let errors = guest.sweep()?.errors;
    assert_eq!(errors, 0, "{}", guest.serial().lines().tail());
    Ok(())
}

#[test]
fn a_guest_whose_disk_is_another_process_is_moved_and_saved() -> Result<()> {
    let folder = Scratch::new()?;
    let image = folder.join("image");
    numbered(&image, DISK_MIB)?;
    let disk = || BlockBackEnd::start(&image, "");
    let (disk0, disk1, disk2) = (disk()?, disk()?, disk()?);
    let source = linux(&disk0).start()?;
    source.ready()?;
    source.serial().read_on(1)?;
    let there = linux(&disk1).incoming().start()?;
    // Slow enough that the disk brings something between two looks.
    move_between(&source.vm(), &there.vm(), &["--verify", "--bandwidth", "100MB"])?;
    assert_right(&there)?;

    let snapshot = folder.join("snapshot").display().to_string();
    let save = ["save", "--live", "--vm", &there.vm(), "--to", &snapshot];
    Transship::command(save).run()?.expect_code(0)?;
    assert_right(&there)?;
    let restored = linux(&disk2).incoming().start()?;
    let restore = ["restore", "--vm", &restored.vm(), "--from", &snapshot];
    let lazily = Transship::command(restore).args(["--lazy"]).run()?.expect_code(1)?;
    assert!(lazily.stderr.contains("without --lazy"), "{lazily}");
    Transship::command(restore).run()?.expect_code(0)?;
    assert_right(&restored)
}

/// A small guest that has booted from such a disk.
fn booted(disk: &BlockBackEnd) -> Result<Qemu> {
    let guest = small(disk).start()?;
    wait_counting(&guest)?;
    Ok(guest)
}

fn small(disk: &BlockBackEnd) -> QemuBuilder {
    Qemu::firmware().memory(32).args(disk.args())
}

#[test]
fn a_back_end_that_ends_ends_the_move() -> Result<()> {
    let image = SharedDisk::new()?;
    let mut disk = BlockBackEnd::start(&image.path(), "")?;
    let other = BlockBackEnd::start(&image.path(), "")?;
    let (source, destination) = (booted(&disk)?, small(&other).incoming().start()?);
    let moving = Move::at("source.round", &source, &destination, &[])?;
    disk.process().kill9();
    let (here, there) = moving.finish()?;
    there.expect_code(1)?;
    wait_counting(&source)?;
    let said = here.expect_code(1)?.stderr;
    assert!(said.contains("start again"), "{said}");
    Ok(())
}

#[test]
fn what_can_not_be_done_with_a_back_end_is_refused_with_its_cure() -> Result<()> {
    let image = SharedDisk::new()?;
    let disk = BlockBackEnd::start(&image.path(), "")?;
    let guest = booted(&disk)?;
    let folder = Scratch::new()?;
    let to = folder.join("snapshot").display().to_string();
    let refused = |guest: &Qemu, flags: &[&str]| -> Result<String> {
        let save = ["save", "--vm", &guest.vm(), "--to", &to];
        Ok(Transship::command(save).args(flags.iter().copied()).run()?.expect_code(1)?.stderr)
    };
    let background = refused(&guest, &["--background"])?;
    assert!(background.contains("qemu-storage-da") && background.contains("--live"), "{background}");
    let waiting = refused(&guest, &["--live", "--tracker", "sync"])?;
    assert!(waiting.contains("leave out --tracker sync"), "{waiting}");
    Transship::command(["save", "--vm", &guest.vm(), "--to", &to]).run()?.expect_code(0)?;
    drop(guest);

    // The disk must lie where the page cache can be gone past.
    let direct = BlockBackEnd::start(&image.path(), "cache.direct=on")?;
    let direct = refused(&booted(&direct)?, &["--live"])?;
    assert!(direct.contains("past the page cache") && direct.contains("cache.direct=off"), "{direct}");
    Ok(())
}
