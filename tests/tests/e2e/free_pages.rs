//! Guests that give memory back: what they have freed is not sent, and what they use again is.
#![allow(clippy::unwrap_used)]
use crate::{
    ends::{move_between, number},
    sector::{Move, SharedDisk, give_back, peek, poke, read_as_guest, wait_counting},
};
use serde_json::json;
use std::{os::unix::fs::MetadataExt, path::Path};
use transship_lab::{Qemu, QemuBuilder, Result, Workload, wait_until};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 512 * MIB;

/// A Linux guest with this balloon.
fn guest_with(balloon: &str) -> QemuBuilder {
    let workload = Workload { mib: 32, ..Workload::LINUX };
    Qemu::linux().memory((MEMORY / MIB) as u32).workload(workload).args(["-device", balloon])
}

/// One with QEMU's own, which gives back what the guest reports.
fn guest() -> QemuBuilder {
    guest_with("virtio-balloon-pci,free-page-reporting=on")
}

fn allocated(memory: &Path) -> u64 {
    memory.metadata().unwrap().blocks() * 512
}

#[test]
fn what_a_guest_has_freed_and_reported_is_not_sent() {
    let source = guest().append("workload.stale=300").start().unwrap();
    source.ready().unwrap();
    let memory = &source.memory_files()[0];
    wait_until("holes", || Ok(allocated(memory) < 200 * MIB)).unwrap();
    let destination = guest().incoming().start().unwrap();
    let moved = move_between(&source.vm(), &destination.vm(), &["--verify"]).unwrap();
    let report = moved.source.report().unwrap();
    assert!(number(&report, "/bytes/wire") < (220 * MIB) as f64, "{report}");
    assert!(number(&report, "/rounds/0/hole") > (280 * MIB / 4096) as f64, "{report}");
    assert!(allocated(&destination.memory_files()[0]) < 220 * MIB);
    assert_eq!(destination.sweep().unwrap().errors, 0);
}

/// Nobody writes such a page, and it is no hole.
#[test]
fn what_is_given_back_and_read_again_is_zero_there() -> Result<()> {
    let disk = SharedDisk::new()?;
    let guest = || disk.guest().args(["-device", "virtio-balloon-pci"]);
    let (source, destination) = (disk.booted(guest())?, guest().incoming().start()?);
    let (at, mut bytes) = (8 * MIB, vec![0xab; MIB as usize]);
    poke(&source, at, &bytes)?;
    let moving = Move::at("source.round", &source, &destination, &["--verify"])?;
    let memory = &source.memory_files()[0];
    let before = allocated(memory);
    give_back(&source, at..at + MIB / 2)?;
    read_as_guest(&source, at, &mut bytes)?;
    assert!(bytes[..bytes.len() / 2].iter().all(|byte| *byte == 0));
    assert_eq!(allocated(memory), before, "it has these pages again");
    let (here, there) = moving.finish()?;
    here.expect_code(0)?;
    there.expect_code(0)?;
    let mut arrived = vec![0xcd; bytes.len()];
    peek(&destination, at, &mut arrived)?;
    assert!(arrived == bytes);
    wait_counting(&destination)
}

fn inflate(guest: &Qemu, left: u64) -> Result<()> {
    guest.qmp("balloon", json!({ "value": left }))?;
    wait_until("the balloon", || Ok(guest.qmp("query-balloon", json!({}))?["actual"] == json!(left)))
}

/// By a balloon that takes what its host asks for, and says so.
#[test]
fn what_a_balloon_takes_during_a_move_is_taken_at_the_destination() -> Result<()> {
    let guest = || guest_with("virtio-balloon-pci");
    let (source, destination) = (guest().append("workload.stale=300").start()?, guest().incoming().start()?);
    source.ready()?;
    let moving = Move::at("source.round", &source, &destination, &[])?;
    let memory = source.memory_files()[0].clone();
    let before = allocated(&memory);
    inflate(&source, MEMORY / 2)?;
    let after = allocated(&memory);
    assert!(after + 150 * MIB < before, "{before} and {after}");
    let (here, there) = moving.finish()?;
    here.expect_code(0)?;
    there.expect_code(0)?;
    let arrived = allocated(&destination.memory_files()[0]);
    assert!(arrived < after + 32 * MIB, "{after} and {arrived}");
    assert_eq!(destination.sweep()?.errors, 0);
    inflate(&destination, MEMORY)?;
    assert_eq!(destination.sweep()?.errors, 0);
    Ok(())
}

/// Blocks are freed, reported and taken away, taken again and written while rounds run.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_frees_and_takes_memory_all_the_time_arrives_whole() {
    // Linux reports a part of what is free every two seconds, so it goes on reporting the first for a while.
    let source = guest().append("workload.stale=300 workload.churn=64").start().unwrap();
    source.ready().unwrap();
    let destination = guest().incoming().start().unwrap();
    // So slow that it reports meanwhile; it would never write as little as fits a short downtime.
    let flags = ["--verify", "--bandwidth", "25MB", "--downtime", "60s"];
    let report = move_between(&source.vm(), &destination.vm(), &flags).unwrap().source.report().unwrap();
    assert_eq!(report["verified"], true);
    assert!(number(&report, "/pages/hole") > 0.0, "{report}");
    let sweep = destination.sweep().unwrap();
    assert_eq!(sweep.errors, 0, "{}", destination.serial().lines().tail());
    // And it goes on taking and freeing there.
    assert_eq!(destination.sweep().unwrap().errors, 0);
}
