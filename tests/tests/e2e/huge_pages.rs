//! Guests on huge pages.

use crate::sector::{Move, SharedDisk, give_back, peek, poke, wait_counting};
use std::{ops::Range, os::unix::fs::MetadataExt};
use transship_lab::{HugePool, MemoryMount, Qemu, Result, Scratch, Transship};

/// Of the guest's 128 pages its firmware touches a few; there are not enough for all.
#[test]
fn pages_that_the_guest_has_not_touched_are_neither_made_nor_kept_nor_sent() -> Result<()> {
    let huge = HugePool::with_mib(32)?;
    let guest = Qemu::firmware().memory(256).memory_folder(huge.path());
    let guest = guest.memory_options("reserve=off").args(["-S"]).start()?;
    let file = &guest.memory_files()[0];
    let allocated = || -> Result<_> { Ok(file.metadata()?.blocks() * 512) };
    let before = allocated()?;
    assert!(before < 16 << 20, "the firmware touched {before} bytes");

    let folder = Scratch::new()?;
    let snapshot = folder.join("snapshot");
    let to = snapshot.display().to_string();
    let saved = Transship::command(["save", "--vm", &guest.vm(), "--to", &to, "--json"]).run()?.expect_code(0)?;
    assert_eq!(allocated()?, before, "{saved}");
    let report = saved.report()?;
    let pages = report.pointer("/pages/hole").and_then(serde_json::Value::as_f64);
    assert_eq!(pages, Some(((256 << 20) - before) as f64 / 4096.0), "{report}");
    Ok(())
}

/// None need be there for that: nobody touches them.
#[test]
fn pages_whose_writes_the_kernel_cannot_track_are_refused_with_their_cure() -> Result<()> {
    let huge = MemoryMount::hugetlbfs("1G")?;
    let file = huge.path().join("big");
    let object = format!("memory-backend-file,id=big,share=on,reserve=off,size=1G,mem-path={}", file.display());
    let guest = Qemu::firmware().args(["-S", "-object", &object]).start()?;
    let refused = Transship::moving(&guest.vm(), "unix:/nobody/listens/here").run()?.expect_code(1)?;
    for part in ["\"big\"", "huge pages of 1024 MiB", "pagesize=2M"] {
        assert!(refused.stderr.contains(part), "{refused}");
    }
    Ok(())
}

/// Of the guest's memory, which nobody else writes to: four huge pages of the destination's.
const FILLED: Range<u64> = 8 << 20..16 << 20;

/// Pages that have gone over with content, and are zeros at the source when the next round begins, or are given back
/// there. The destination's pool has them reserved, so they are not given back here; they must be zeros all the same.
#[test]
fn pages_that_become_zero_meanwhile_are_zero_in_reserved_huge_pages() -> Result<()> {
    const PAGE: u64 = 4096;
    let at = |mib: u64, page: u64| (mib << 20) + page * PAGE;
    // A page, up to the end of a window, over such an end, and all of a huge page.
    let zeroed = [at(8, 3)..at(8, 4), at(8, 120)..at(8, 128), at(9, 100)..at(9, 200), at(10, 0)..at(12, 0)];
    let freed = [at(12, 5)..at(12, 6), at(12, 127)..at(12, 129), at(13, 0)..at(16, 0)];

    let (disk, pool) = (SharedDisk::new()?, HugePool::with_mib(32)?);
    // With a balloon the guest may give memory back at any time.
    let guest = || disk.guest().args(["-device", "virtio-balloon-pci"]);
    let source = disk.booted(guest())?;
    let reserved = guest().memory_folder(pool.path()).memory_options("prealloc=off");
    let destination = reserved.incoming().start()?;
    let before = pool.state()?;
    let mut expected = vec![0xab; (FILLED.end - FILLED.start) as usize];
    poke(&source, FILLED.start, &expected)?;

    let moving = Move::at("source.round", &source, &destination, &["--verify"])?;
    for range in &zeroed {
        poke(&source, range.start, &vec![0; (range.end - range.start) as usize])?;
    }
    for range in &freed {
        give_back(&source, range.clone())?;
    }
    for range in zeroed.iter().chain(&freed) {
        expected[(range.start - FILLED.start) as usize..(range.end - FILLED.start) as usize].fill(0);
    }
    let (here, there) = moving.finish()?;
    here.expect_code(0)?;
    there.expect_code(0)?;
    let mut found = vec![0; expected.len()];
    peek(&destination, FILLED.start, &mut found)?;
    let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(wrong.map(|byte| byte as u64 / PAGE), None, "the first wrong page");
    assert_eq!(pool.state()?.to_be_had(), before.to_be_had());
    wait_counting(&destination)
}
