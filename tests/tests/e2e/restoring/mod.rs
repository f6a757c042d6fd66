//! Restores, and guests that went through one.
pub(crate) mod lazy;

use std::{fs, os::unix::fs::FileExt, path::Path};

use serde_json::json;
use transship_lab::{LabError, Qemu, QemuBuilder, Result, Transship, transship::TransshipBuilder};

use crate::stock::StockSave;

pub(crate) fn restoring(vm: &str, from: impl AsRef<Path>) -> TransshipBuilder {
    let from = from.as_ref().to_string_lossy();
    Transship::command(["restore", "--vm", vm, "--from", &*from, "--json"])
}

/// A guest that runs where it was saved: it goes on counting, and finds all its pages.
pub(crate) fn assert_goes_on(guest: &Qemu) -> Result<()> {
    assert_eq!(guest.status()?, "running");
    let count = guest.next_count()?;
    let sweep = guest.sweep()?;
    assert_eq!((count.errors, sweep.errors), (0, 0), "{count:?} {sweep:?}");
    assert!(sweep.pages > 0, "{sweep:?}");
    Ok(())
}

/// Fills the memory files of a waiting guest with what must not be seen afterwards.
pub(crate) fn make_dirty(guest: &Qemu) -> Result<()> {
    let junk = vec![0xa5; 1 << 20];
    for file in guest.memory_files() {
        let length = fs::metadata(file)?.len();
        let file = fs::OpenOptions::new().write(true).open(file)?;
        (0..length).step_by(junk.len()).try_for_each(|at| file.write_all_at(&junk, at))?;
    }
    Ok(())
}

/// Where QEMU has the guest's first memory, and how much.
pub(crate) fn place(guest: &Qemu) -> Result<(u64, u64)> {
    let blocks = guest.qmp("human-monitor-command", json!({ "command-line": "info ramblock" }))?;
    let line = blocks.as_str().and_then(|text| text.lines().find(|line| line.trim().starts_with("pc.ram")));
    let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
    let hex = |word: &&str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let numbers: Vec<u64> = words.iter().filter_map(hex).collect();
    match numbers.as_slice() {
        [_, used, _, address] => Ok((*address, *used)),
        _ => Err(LabError(format!("no place of its memory: {blocks}"))),
    }
}

/// Has stock QEMU save such a guest, which then is gone.
pub(crate) fn saved_by_stock(guest: QemuBuilder, way: StockSave<'_>, path: &Path) -> Result<()> {
    let source = guest.booted()?;
    way.save(&source, path)
}
