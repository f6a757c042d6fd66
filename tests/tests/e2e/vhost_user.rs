//! Guests with a device that is another process: it writes to their memory through a mapping of its own.
use crate::{
    ends::move_between,
    sector::{Move, SharedDisk, boot_sector, count, wait_counting},
};
use serde_json::json;
use std::{fs, path::Path};
use transship_lab::{
    Accel, BlockBackEnd, Qemu, QemuBuilder, Result, Scratch, Transship, Workload, slow_disk::numbered, wait_until,
};

const DISK_MIB: u64 = 16;
/// Reads a second.
const READS: u32 = 200;
/// A guest that waits for each has one under way at any moment.
const SELDOM: u32 = 20;
/// One that was just made is still under way when all else is done.
const SLOWLY: u32 = 1;
const WORKLOAD: Workload = Workload { mib: 16, rate: 500, sweep_ms: 500, ..Workload::LINUX };

/// A boot sector that has the firmware read one sector after the other, over and over, each to another place in 512 KiB
/// of memory, and counts them.
#[rustfmt::skip]
const READER: [u8; 95] = [
    0xfa, //                                cli
    0x31, 0xc0, //                          xor ax, ax
    0x8e, 0xd8, //                          mov ds, ax
    0x8e, 0xc0, //                          mov es, ax
    0x8e, 0xd0, //                          mov ss, ax
    0xbc, 0x00, 0x7c, //                    mov sp, 0x7c00
    0xbf, 0x00, 0x10, //                    mov di, 0x1000     ; the segment to read to
    0xbd, 0x02, 0x00, //                    mov bp, 2          ; the sector
    0xc7, 0x06, 0x00, 0x06, 0x10, 0x00, //  mov word [0x600], 16
    0xc7, 0x06, 0x02, 0x06, 0x01, 0x00, //  mov word [0x602], 1
    0xc7, 0x06, 0x04, 0x06, 0x00, 0x00, //  mov word [0x604], 0
    0xc7, 0x06, 0x0a, 0x06, 0x00, 0x00, //  mov word [0x60a], 0
    0xc7, 0x06, 0x0c, 0x06, 0x00, 0x00, //  mov word [0x60c], 0
    0xc7, 0x06, 0x0e, 0x06, 0x00, 0x00, //  mov word [0x60e], 0
    0x89, 0x3e, 0x06, 0x06, //        next: mov [0x606], di
    0x89, 0x2e, 0x08, 0x06, //              mov [0x608], bp
    0xbe, 0x00, 0x06, //                    mov si, 0x600
    0xb4, 0x42, //                          mov ah, 0x42       ; extended read
    0xb2, 0x80, //                          mov dl, 0x80       ; of the first disk
    0x55, 0x57, //                          push bp, di
    0xcd, 0x13, //                          int 0x13
    0x5f, 0x5d, //                          pop di, bp
    0x66, 0xff, 0x06, 0x04, 0x80, //        inc dword [0x8004]
    0x45, //                                inc bp
    0x83, 0xc7, 0x20, //                    add di, 0x20
    0x81, 0xff, 0x00, 0x90, //              cmp di, 0x9000
    0x72, 0xdc, //                          jb next
    0xbf, 0x00, 0x10, //                    mov di, 0x1000
    0xeb, 0xd7, //                          jmp next
];

/// A disk with it, each of whose other sectors is unlike the others.
fn reader(image: &Path) -> Result<()> {
    let sectors = (0..DISK_MIB << 11).flat_map(|sector: u64| sector.to_le_bytes().repeat(64));
    let mut bytes: Vec<u8> = sectors.collect();
    bytes[..512].copy_from_slice(&boot_sector(&READER));
    Ok(fs::write(image, bytes)?)
}

/// Its guest reads on.
fn assert_reads_on(guest: &Qemu) -> Result<()> {
    assert_reads(guest, 11)
}

fn assert_reads(guest: &Qemu, more: u32) -> Result<()> {
    let from = count(guest)?;
    wait_until("the guest to read", || Ok(count(guest)?.wrapping_sub(from) >= more))
}

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
    let disk = || BlockBackEnd::start(&image, READS, "");
    let (disk0, disk1, disk2) = (disk()?, disk()?, disk()?);
    let source = linux(&disk0).start()?;
    source.ready()?;
    source.serial().read_on(1)?;
    let there = linux(&disk1).incoming().start()?;
    // Slow enough that the disk brings something between two looks.
    move_between(&source.vm(), &there.vm(), &["--verify", "--bandwidth", "100MB"])?;
    assert_right(&there)?;

    saved_and_restored(&there, &linux(&disk2).incoming().start()?, assert_right)
}

/// It goes on when it is saved, and then elsewhere from the file, which can't be lazily.
pub(crate) fn saved_and_restored(guest: &Qemu, other: &Qemu, assert_right: fn(&Qemu) -> Result<()>) -> Result<()> {
    let folder = Scratch::new()?;
    let snapshot = folder.join("snapshot").display().to_string();
    Transship::command(["save", "--live", "--vm", &guest.vm(), "--to", &snapshot]).run()?.expect_code(0)?;
    assert_right(guest)?;
    let restore = ["restore", "--vm", &other.vm(), "--from", &snapshot];
    let lazily = Transship::command(restore).args(["--lazy"]).run()?.expect_code(1)?;
    assert!(lazily.stderr.contains("without --lazy"), "{lazily}");
    Transship::command(restore).run()?.expect_code(0)?;
    assert_right(other)
}

/// There, and on: a processor that KVM runs is held, too. It waits for each request, and looks for its end by itself.
#[test]
fn a_guest_that_waits_for_its_disk_all_the_time_arrives_whole() -> Result<()> {
    let folder = Scratch::new()?;
    let image = folder.join("image");
    reader(&image)?;
    let with = |disk: &BlockBackEnd| small(disk).accel(Accel::best());
    let disk = BlockBackEnd::start(&image, SELDOM, "")?;
    let mut here = (with(&disk).start()?, disk);
    assert_reads_on(&here.0)?;
    for _ in 0..2 {
        let disk = BlockBackEnd::start(&image, SELDOM, "")?;
        let there = (with(&disk).incoming().start()?, disk);
        move_between(&here.0.vm(), &there.0.vm(), &["--verify"])?;
        assert_reads_on(&there.0)?;
        here = there;
    }
    Ok(())
}

/// Stops the guest by QEMU's own means while a request to its disk is under way. `reads`: waits until it has read more.
fn stop_amid_a_request(guest: &Qemu, reads: fn(&Qemu) -> Result<()>) -> Result<()> {
    let queue = json!({ "path": "/machine/peripheral-anon/device[0]/virtio-backend", "queue": 0 });
    wait_until("a request under way", || {
        guest.qmp("stop", json!({}))?;
        // What QEMU has seen when it stopped the device.
        let status = guest.qmp("x-query-virtio-queue-status", queue.clone())?;
        let is_amid = status["last-avail-idx"] != status["used-idx"];
        if !is_amid {
            guest.qmp("cont", json!({}))?;
            reads(guest)?;
        }
        Ok(is_amid)
    })
}

/// QEMU does not wait for the back end when it stops a guest, and the back end brings the data later. This guest looks
/// for it by itself, so the back end need not tell it.
#[test]
fn a_guest_that_was_stopped_amid_a_request_is_saved_with_it() -> Result<()> {
    let folder = Scratch::new()?;
    let image = folder.join("image");
    reader(&image)?;
    let (disk0, disk1) = (BlockBackEnd::start(&image, SLOWLY, "")?, BlockBackEnd::start(&image, SELDOM, "")?);
    let guest = small(&disk0).start()?;
    assert_reads(&guest, 1)?;
    stop_amid_a_request(&guest, |guest| assert_reads(guest, 1))?;
    let snapshot = folder.join("snapshot").display().to_string();
    Transship::command(["save", "--vm", &guest.vm(), "--to", &snapshot]).run()?.expect_code(0)?;
    let restored = small(&disk1).incoming().start()?;
    Transship::command(["restore", "--vm", &restored.vm(), "--from", &snapshot]).run()?.expect_code(0)?;
    assert_eq!(restored.status()?, "paused");
    restored.qmp("cont", json!({}))?;
    assert_reads_on(&restored)?;
    guest.qmp("cont", json!({}))?;
    assert_reads(&guest, 2)
}

/// This guest wants to be told of its data. The back end finds nobody whom it could tell, and drops the device: for it
/// the data never comes.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_whose_requests_were_dropped_when_it_was_stopped_is_refused() -> Result<()> {
    let folder = Scratch::new()?;
    let image = folder.join("image");
    numbered(&image, DISK_MIB)?;
    // So slow that this guest waits for it most of the time, on a busy machine, too.
    let disk = BlockBackEnd::start(&image, SELDOM, "")?;
    let guest = linux(&disk).args(["-global", "vhost-user-blk-pci.event_idx=off"]).start()?;
    guest.ready()?;
    guest.serial().read_on(1)?;
    stop_amid_a_request(&guest, |guest| guest.serial().read_on(1))?;
    let save = ["save", "--vm", &guest.vm(), "--to", &folder.join("snapshot").display().to_string()];
    let said = Transship::command(save).run()?.expect_code(1)?.stderr;
    assert!(said.contains("were under way") && said.contains("leave it to transship to stop it"), "{said}");
    assert_eq!(guest.status()?, "paused");
    Ok(())
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
    let mut disk = BlockBackEnd::start(&image.path(), READS, "")?;
    let other = BlockBackEnd::start(&image.path(), READS, "")?;
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
    let disk = BlockBackEnd::start(&image.path(), READS, "")?;
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
    let direct = BlockBackEnd::start(&image.path(), READS, "cache.direct=on")?;
    let direct = refused(&booted(&direct)?, &["--live"])?;
    assert!(direct.contains("past the page cache") && direct.contains("cache.direct=off"), "{direct}");
    Ok(())
}
