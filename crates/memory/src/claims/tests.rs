//! Every page is claimed once, by whichever thread asked first.
#![allow(clippy::unwrap_used)]
use std::sync::Barrier;

use super::*;

fn pairs(runs: Vec<PageRange>) -> Vec<(u64, u64)> {
    runs.into_iter().map(|run| (run.first.get(), run.count.get())).collect()
}

fn counts(pages: &[u64]) -> Vec<PageCount> {
    pages.iter().copied().map(PageCount::new).collect()
}

fn again(claims: &Claims, pages: &[u64]) -> Claims {
    Claims::taken_over(rustix::io::dup(claims.fd()).unwrap(), &counts(pages)).unwrap()
}

#[test]
fn a_page_is_claimed_once() {
    let claims = Claims::new(&[PageCount::new(1000), PageCount::new(70)]).unwrap();
    assert_eq!(pairs(claims.take(0, PageRange::new(60, 140))), [(60, 140)]);
    assert_eq!(pairs(claims.take(0, PageRange::new(0, 1000))), [(0, 60), (200, 800)]);
    assert_eq!(pairs(claims.take(1, PageRange::new(69, 1))), [(69, 1)]);
    assert_eq!(pairs(claims.take(1, PageRange::new(5, 0))), []);
    assert_eq!(
        (claims.window(1, PageNumber::FIRST), claims.window(0, PageNumber::new(896))),
        (1 << 69, (1 << 104) - 1)
    );
    assert!(!claims.is_done(0, PageNumber::new(60)));
    claims.finish(0, PageRange::new(60, 10));
    claims.give_up(0, PageRange::new(55, 20));
    assert_eq!((claims.is_done(0, PageNumber::new(69)), claims.is_done(0, PageNumber::new(70))), (true, false));
    assert_eq!(pairs(claims.take(0, PageRange::new(0, 1000))), [(55, 5), (70, 5)]);
    // What is done beside the pages that are given up stays claimed.
    claims.give_up(0, PageRange::new(80, 5));
    assert_eq!(pairs(claims.take(0, PageRange::new(0, 1000))), [(80, 5)]);
}

/// A part of it can't be put.
#[test]
fn a_huge_page_is_claimed_as_a_whole_by_one_of_several_threads() {
    const UNIT: PageCount = PageCount::new(512);
    let all = PageRange::new(0, 512 * 64);
    for _ in 0..100 {
        let claims = Claims::new(&[all.count]).unwrap();
        let begin = Barrier::new(2);
        let take = || {
            begin.wait();
            claims.take_whole(0, all, UNIT)
        };
        let (one, other) = thread::scope(|scope| {
            let other = scope.spawn(take);
            (take(), other.join().unwrap())
        });
        let runs: Vec<PageRange> = one.iter().chain(&other).copied().collect();
        assert!(runs.iter().all(|run| run.first.get() % 512 == 0 && run.count.get() % 512 == 0), "{runs:?}");
        assert_eq!(runs.iter().map(|run| run.count).sum::<PageCount>(), all.count);
        // One that could not be put may be tried again.
        claims.give_up(0, PageRange::new(512, 1024));
        assert_eq!(pairs(claims.take_whole(0, all, UNIT)), [(512, 1024)]);
        assert!(claims.take_whole(0, all, UNIT).is_empty());
    }
}

#[test]
fn what_is_excluded_is_done_and_the_rest_is_told() {
    let claims = Claims::new(&[PageCount::new(300), PageCount::new(64)]).unwrap();
    claims.exclude(0, PageRange::new(0, 130));
    claims.exclude(1, PageRange::new(0, 64));
    assert_eq!(pairs(claims.not_done(0).ranges().collect()), [(130, 170)]);
    assert!(claims.not_done(1).is_empty() && !claims.are_all_done());
    assert_eq!(pairs(claims.take(0, PageRange::new(0, 300))), [(130, 170)]);
    assert!(!claims.not_done(0).is_empty(), "claimed is not done");
    claims.finish(0, PageRange::new(130, 170));
    assert!(claims.not_done(0).is_empty() && claims.are_all_done());
    // So it is for who takes over.
    assert!(again(&claims, &[300, 64]).are_all_done());
}

#[test]
fn a_page_is_told_to_be_claimed_and_none_beside_it() {
    let claims = Claims::new(&[PageCount::new(1000), PageCount::new(300)]).unwrap();
    for page in [0, 63, 64, 127, 128, 130, 299] {
        claims.take(1, PageRange::new(page, 1));
    }
    let claimed = |region, pages| {
        (0..pages).filter(|page| claims.is_claimed(region, PageNumber::new(*page))).collect::<Vec<u64>>()
    };
    assert_eq!((claimed(1, 300), claimed(0, 1000)), (vec![0, 63, 64, 127, 128, 130, 299], vec![]));
}

#[test]
fn each_region_has_bits_of_its_own_behind_the_slots() {
    let places = |bits: Vec<Bits>| bits.iter().map(|bits| (bits.offset, bits.words)).collect::<Vec<_>>();
    let (bits, bytes) = layout(&[PageCount::new(300), PageCount::new(64), PageCount::new(129)]);
    let next = |words: usize| SLOTS_BYTES + words * WORD_BYTES;
    assert_eq!((places(bits), bytes), (vec![(next(0), 6), (next(12), 2), (next(16), 4)], next(512)));

    // Changed in one of them, nothing changes elsewhere.
    let (pages, untouched) = ([300, 64, 129], |claims: &Claims, region: usize| {
        claims.window(region, PageNumber::FIRST) == 0
            && !PageRange::all(PageCount::new(64)).iter().any(|page| claims.is_done(region, page))
    });
    for region in 0..3 {
        let claims = Claims::new(&counts(&pages)).unwrap();
        let all = PageRange::new(0, pages[region]);
        claims.finish(region, all);
        assert_eq!(pairs(claims.take(region, all)), [(0, pages[region])]);
        assert!((0..3).filter(|other| *other != region).all(|other| untouched(&claims, other)), "{region}");
        assert!(claims.slots().iter().all(|slot| slot.taken.load(Ordering::Relaxed) == 0 && slot.pages().is_zero()));
    }
}

/// By calls in the kernel's place, two of them at a time.
#[test]
fn what_a_call_says_that_it_has_put_is_done() {
    let claims = Claims::new(&[PageCount::new(300), PageCount::new(300)]).unwrap();
    let put = |call: *mut CopyCall, pages: i64| {
        // SAFETY: a part of a slot, which is mapped, and ours for the time of this call; all of it is atomics.
        unsafe { &*call }.copied.store(pages * PAGE_BYTES as i64, Ordering::Relaxed);
    };
    let outer = claims.noted(1, PageNumber::new(10), |outer| {
        let inner = claims.noted(0, PageNumber::new(200), |inner| {
            put(inner, 3);
            put(outer, 2);
            "inner"
        });
        assert_eq!(inner, (3 * PAGE_BYTES as u64, "inner"));
        "outer"
    });
    assert_eq!(outer, (2 * PAGE_BYTES as u64, "outer"));
    let done = |region| (0..300).filter(|page| claims.is_done(region, PageNumber::new(*page))).collect::<Vec<u64>>();
    assert_eq!((done(0), done(1)), (vec![200, 201, 202], vec![10, 11]));
    assert!(claims.slots().iter().all(|slot| slot.taken.load(Ordering::Relaxed) == 0 && slot.pages().is_zero()));
}

#[test]
fn of_a_dead_process_only_what_it_has_put_counts() {
    let pages = [300, 300];
    let dead = Claims::new(&counts(&pages)).unwrap();
    dead.take(1, PageRange::new(0, 200));
    dead.finish(1, PageRange::new(0, 3));
    // It died in a call that had put four pages, and in one that had been refused.
    for (first, copied) in [(100, 4 * PAGE_BYTES as i64), (150, -11)] {
        let (_, slot) = dead.slot();
        slot.region.store(1, Ordering::Relaxed);
        slot.first.store(first, Ordering::Relaxed);
        slot.call.copied.store(copied, Ordering::Relaxed);
    }
    let heir = again(&dead, &pages);
    assert_eq!(pairs(heir.take(1, PageRange::new(0, 300))), [(3, 97), (104, 196)]);
    assert!(
        heir.is_done(1, PageNumber::new(103))
            && !heir.is_done(1, PageNumber::new(104))
            && !heir.is_done(0, PageNumber::new(103))
    );
    assert!(heir.slots().iter().all(|slot| slot.taken.load(Ordering::Relaxed) == 0 && slot.pages().is_zero()));
}

#[test]
fn those_of_another_guest_are_refused() {
    let claims = Claims::new(&[PageCount::new(1 << 20)]).unwrap();
    let over = |pages: &[u64]| Claims::taken_over(rustix::io::dup(claims.fd()).unwrap(), &counts(pages)).err().unwrap();
    assert_eq!(over(&[1 << 21]).flaw(), Some(Flaw::NotOurs));
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, layout(&[PageCount::new(64)]).1 as u64).unwrap();
    assert!(Claims::taken_over(unsealed, &[PageCount::new(64)]).is_err());
}
