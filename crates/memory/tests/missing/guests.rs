//! Guests that run before their memory is there.
use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use transship_memory::{Access, Missing, PageNumber, PageRange};

use super::missing;
use crate::common::{
    HUGE, PAGE, contents, file, huge_file, map, page_of,
    process::{Guest, Stop},
};

/// What a saved guest was, and who brings it.
struct Restore<'a> {
    missing: Missing,
    bytes: &'a [u8],
}

impl Restore<'_> {
    /// Brings `count` pages from `first`, in whole units.
    fn bring(&self, first: u64, count: u64) -> u64 {
        let bytes = &self.bytes[(first * PAGE) as usize..][..(count * PAGE) as usize];
        if bytes.iter().all(|&byte| byte == 0) {
            return (self.missing.fill_zero(0, PageRange::new(first, count)).unwrap()).get();
        }
        (self.missing.fill(0, PageNumber::new(first), bytes).unwrap()).get()
    }
}

/// The law of lazy restores: threads read and add all over, pages are brought to who waits and unasked, and each page
/// is what was saved, and what was added to it.
fn a_guest_runs_before_its_memory_is_there(file: impl Fn() -> OwnedFd, bytes: u64) {
    const THREADS: u64 = 3;
    let pages = bytes / PAGE;
    let mut saved = vec![0; bytes as usize];
    for page in (0..pages).filter(|page| page / 16 % 3 != 0) {
        saved[(page * PAGE) as usize..][..PAGE as usize].copy_from_slice(&page_of(page));
    }
    let saved = &saved;
    let word = |page: u64| u64::from_ne_bytes(saved[(page * PAGE) as usize..][..8].try_into().unwrap());
    for round in 0..3_u64 {
        let file = file();
        let (region, guest) = (map(&file, bytes, Access::Read), Guest::map(&file, bytes));
        let added: Vec<_> = (0..pages).map(|_| AtomicU64::new(0)).collect();
        let (stop, brought) = (Stop(AtomicBool::new(false)), AtomicU64::new(0));
        let (guest, stop, brought, added, word) = (&guest, &stop, &brought, &added, &word);
        thread::scope(|scope| {
            let _stop_on_panic = stop.on_drop();
            let restore = Arc::new(Restore { missing: missing(guest), bytes: saved });
            let unit = restore.missing.unit_pages(0);
            let touchers = (0..THREADS).map(|thread| {
                scope.spawn(move || {
                    let mut random = 1000 * round + thread;
                    for _ in 0..3000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let page = (random >> 33) % pages;
                        if random >> 63 == 1 {
                            guest.word(page).fetch_add(1 << 32, Ordering::Relaxed);
                            added[page as usize].fetch_add(1 << 32, Ordering::Relaxed);
                        } else {
                            assert_eq!(guest.read(page) as u32, word(page) as u32, "page {page}");
                        }
                    }
                })
            });
            let touchers: Vec<_> = touchers.collect();
            for _ in 0..2 {
                let restore = restore.clone();
                scope.spawn(move || {
                    let mut faults = Vec::new();
                    while !stop.0.load(Ordering::Relaxed) {
                        restore.missing.next_faults(Duration::from_millis(10), &mut faults).unwrap();
                        for fault in faults.drain(..) {
                            brought.fetch_add(restore.bring(fault.page.get(), unit.get()), Ordering::Relaxed);
                        }
                    }
                });
            }
            // Unasked: all, in stretches that overlap, so that pages are found that are there.
            for first in (0..pages).step_by((8 * unit.get()) as usize) {
                brought.fetch_add(restore.bring(first, (16 * unit.get()).min(pages - first)), Ordering::Relaxed);
                thread::yield_now();
            }
            restore.missing.release(0, PageRange::new(0, pages)).unwrap();
            touchers.into_iter().for_each(|toucher| toucher.join().unwrap());
        });
        assert_eq!(brought.load(Ordering::Relaxed), pages, "each page was put once");
        let bytes = contents(&region);
        for page in 0..pages {
            let mut expected = saved[(page * PAGE) as usize..][..PAGE as usize].to_vec();
            let first = word(page).wrapping_add(added[page as usize].load(Ordering::Relaxed));
            expected[..8].copy_from_slice(&first.to_ne_bytes());
            assert!(bytes[(page * PAGE) as usize..][..PAGE as usize] == expected, "round {round}, page {page}");
        }
    }
}

#[test]
fn a_guest_of_small_pages_runs_before_its_memory_is_there() {
    a_guest_runs_before_its_memory_is_there(|| file(1000 * PAGE), 1000 * PAGE);
}

#[test]
fn a_guest_of_huge_pages_runs_before_its_memory_is_there() {
    let Some(first) = huge_file(8 * HUGE) else { return };
    let again = || {
        // The same file, made holes again: there may not be enough huge pages for three.
        map(&first, 8 * HUGE, Access::ReadWrite).empty().unwrap();
        rustix::io::dup(&first).unwrap()
    };
    a_guest_runs_before_its_memory_is_there(again, 8 * HUGE);
}
