//! Guests on huge pages.
use std::os::unix::fs::MetadataExt;
use transship_lab::{HugePool, LabError, MemoryMount, Qemu, Result, Scratch, Transship};

/// Of the guest's 128 pages its firmware touches a few; there are not enough for all.
#[test]
fn pages_that_the_guest_has_not_touched_are_neither_made_nor_kept_nor_sent() -> Result<()> {
    let huge = HugePool::with_mib(32)?;
    let guest = Qemu::firmware().memory(256).memory_folder(huge.path());
    let guest = guest.memory_options("reserve=off").args(["-S"]).start()?;
    let file = &guest.memory_files()[0];
    let allocated = || file.metadata().map(|about| about.blocks() * 512).map_err(|e| LabError(e.to_string()));
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
