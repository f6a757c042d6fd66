//! Copies of memory that is written, made of what the scans report.
use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use transship_memory::{Access, PageRange, PageSet, Region, Tracker, UffdTracker, WindowPages};

use super::track;
use crate::common::{
    HUGE, PAGE, contents, file, huge_file, map,
    process::{Guest, Stop},
};

/// The law of live migration. Threads write versions all over the memory, of which they use more and more, and another
/// punches holes, while pages are copied as the scans report them. After the last scan the copy is the memory, byte for
/// byte.
fn copies_converge(file: OwnedFd, bytes: u64, unit: u64) {
    const ROUNDS: u64 = 30;
    let pages = bytes / PAGE;
    let source = map(&file, bytes, Access::Read);
    // Free page reporting: the VMM gives pages back behind the tracker, `unit` at a time.
    let puncher = map(&file, bytes, Access::ReadWrite);
    let guest = Guest::map(&file, bytes);
    let copy = map(crate::common::file(bytes), bytes, Access::ReadWrite);
    let mut tracker = track(&guest);
    let (stop, writes, used) = (Stop(AtomicBool::new(false)), AtomicU64::new(0), AtomicU64::new(pages / ROUNDS));
    let (guest, stop, writes, used) = (&guest, &stop, &writes, &used);
    thread::scope(|scope| {
        let _stop_on_panic = stop.on_drop();
        let writers = (1..3_u64).map(|thread| {
            scope.spawn(move || {
                let mut random = thread;
                while !stop.0.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    // Half of the writes go to a few hot pages.
                    let used = if random >> 63 == 1 { 16 } else { used.load(Ordering::Relaxed) };
                    let page = (random >> 33) % used;
                    guest.word(page).fetch_add(1 + thread, Ordering::Relaxed);
                    writes.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let writers: Vec<_> = writers.collect();
        for round in 0..ROUNDS {
            // In steps, so that some blocks are begun and others are not.
            used.store(pages * (round / 3 * 3 + 1) / ROUNDS, Ordering::Relaxed);
            // Something happens between any two scans, however the threads are scheduled.
            let before = writes.load(Ordering::Relaxed);
            while writes.load(Ordering::Relaxed) < before + 500 {
                thread::yield_now();
            }
            puncher.clear(PageRange::new(round % (pages / unit) * unit, unit)).unwrap();
            migrate(&mut tracker, &source, &copy);
        }
        stop.0.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        migrate(&mut tracker, &source, &copy);
    });
    assert!(contents(&source) == contents(&copy));
    assert!(writes.load(Ordering::Relaxed) > 10_000);
}

/// One round: written pages that are not holes are copied; new holes are zero on the other side.
fn migrate(tracker: &mut UffdTracker, source: &Region, copy: &Region) {
    let mut send = tracker.scan(0).unwrap();
    let data = source.data().unwrap();
    send.intersect_with(&data);
    let mut holes = PageSet::full(data.pages());
    holes.subtract(&data);
    holes.ranges().for_each(|range| copy.clear(range).unwrap());
    for WindowPages { first, mask: bits } in send.windows() {
        let mut bytes = Vec::new();
        source.copy_out(first.masked(bits), &mut bytes).unwrap();
        copy.write_pages(first.masked(bits), &bytes).unwrap();
    }
}

#[test]
fn copies_converge_on_the_memory_while_it_is_written() {
    copies_converge(file(2000 * PAGE), 2000 * PAGE, 70);
}

#[test]
fn copies_converge_on_memory_that_is_used_more_and_more() {
    copies_converge(file(64 << 20), 64 << 20, 512);
}

#[test]
fn copies_converge_on_huge_pages_while_they_are_written() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    copies_converge(file, 4 * HUGE, 512);
}

/// Memory in a file on a disk is tracked as well.
#[test]
fn copies_converge_on_a_file_while_it_is_written() {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(1000 * PAGE).unwrap();
    copies_converge(file.into(), 1000 * PAGE, 70);
}
