//! Guests that give memory back: what they have freed is not sent, and what they use again is.
#![allow(clippy::unwrap_used)]
use crate::ends::{move_between, number};
use std::path::Path;
use transship_lab::{Qemu, QemuBuilder, Workload, wait_until};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 512 * MIB;

/// A Linux guest with QEMU's own balloon, which gives back what the guest reports.
fn guest() -> QemuBuilder {
    let workload = Workload { mib: 32, ..Workload::LINUX };
    let balloon = ["-device", "virtio-balloon-pci,free-page-reporting=on"];
    Qemu::linux().memory((MEMORY / MIB) as u32).workload(workload).args(balloon)
}

fn allocated(memory: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&memory.metadata().unwrap()) * 512
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
