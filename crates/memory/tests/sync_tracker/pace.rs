//! How long writers are held.
use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use transship_memory::{Error, LetWait, PageCount, SyncTracker, Tracker, WriterPace};

use super::{AtMost, HOLD, Kind, PAGES, own_pagemap, set, track};
use crate::common::{
    PAGE,
    process::{Faults, Guest, userfaultfd},
};

#[test]
fn writers_are_held_beyond_the_pace_and_each_time_for_a_moment_only() {
    let guest = Guest::private(256 * PAGE, false);
    (0..256).for_each(|page| guest.write(page, 1));
    let mut tracker = track(&guest, &[0], false);
    tracker.scan(0).unwrap();
    let waits = tracker.waits().unwrap();
    waits.set_pace(Some(Box::new(AtMost(10))));
    let begin = Instant::now();
    // Not page after page.
    let write = |pages: u64, word| (0..pages).for_each(|page| guest.write(page * 2, word));
    write(40, 2);
    let waited = waits.so_far();
    assert_eq!((waited.writes, waited.held), (40, 30), "{waited:?}");
    assert!(waited.held_time >= 30 * HOLD && begin.elapsed() >= 30 * HOLD, "{waited:?}");
    assert!(waited.longest >= HOLD, "{waited:?}");
    // Without a pace nobody is held, and what was written already does not count.
    waits.set_pace(None);
    write(80, 3);
    let waited = waits.so_far();
    assert_eq!((waited.writes, waited.held, waited.longest), (80, 30, Duration::ZERO), "{waited:?}");
    let written: Vec<_> = (0..80).map(|page| (page * 2, 1)).collect();
    assert_eq!(tracker.scan(0).unwrap(), set(256, &written));
}

/// The pages that come next are let go of with it, but never more than there are, and never more than the pace lets go.
#[test]
fn whoever_writes_page_after_page_waits_at_few() {
    for (number, kind) in Kind::all().into_iter().enumerate().take(3) {
        let guest = &kind.guest;
        (0..PAGES).for_each(|page| guest.write(page, 1));
        let mut tracker = track(guest, kind.private, false);
        tracker.scan(0).unwrap();
        let waits = tracker.waits().unwrap();
        (0..1000).for_each(|page| guest.write(page, 2));
        let waited = waits.so_far().writes;
        assert!((40..150).contains(&waited), "kind {number}: {waited}");
        let mut written = tracker.scan(0).unwrap();
        assert!(written.count() < PageCount::new(1000 + 1000 / 8), "kind {number}");
        written.intersect_with(&set(PAGES, &[(0, 1000)]));
        assert_eq!(written.count(), PageCount::new(1000), "kind {number}");
        // Those that were let go of and not written are protected again, or a later write to them would be missed.
        (0..1100).rev().for_each(|page| guest.write(page, 3));
        assert_eq!(tracker.scan(0).unwrap(), set(PAGES, &[(0, 1100)]), "kind {number}");
        (PAGES - 100..PAGES).for_each(|page| guest.write(page, 4));
        assert_eq!(tracker.scan(0).unwrap(), set(PAGES, &[(PAGES - 100, 100)]), "kind {number}");
        waits.set_pace(Some(Box::new(AtMost(40))));
        (0..40).for_each(|page| guest.write(page, 5));
        assert_eq!(waits.so_far().held, 0, "kind {number}");
        assert_eq!(tracker.scan(0).unwrap(), set(PAGES, &[(0, 40)]), "kind {number}");
    }
}

/// Lets nothing go, and is patient.
struct Never(u32);

impl WriterPace for Never {
    fn may_pass(&self, _passed: u64) -> bool {
        false
    }

    fn patience(&self) -> u32 {
        self.0
    }
}

/// Whoever is not to be held is not, however patient the pace is.
#[test]
fn a_pace_may_hold_for_longer_but_only_those_who_may_be_held() {
    for (hold, patience) in [(HOLD, 1), (HOLD, 4), (Duration::ZERO, 4)] {
        let guest = Guest::private(16 * PAGE, false);
        (0..16).for_each(|page| guest.write(page, 1));
        let uffd = userfaultfd(Faults::User).unwrap();
        let mut tracker =
            SyncTracker::new(uffd, own_pagemap(), vec![guest.area()], &[PageCount::new(16)], &[0], Box::new(hold))
                .unwrap();
        tracker.scan(0).unwrap();
        let waits = tracker.waits().unwrap();
        waits.set_pace(Some(Box::new(Never(patience))));
        (0..5).for_each(|page| guest.write(page, 2));
        let waited = waits.so_far();
        assert!(waited.held_time >= 5 * hold * patience, "{waited:?}");
        assert_eq!((waited.writes, waited.held), (5, if hold.is_zero() { 0 } else { 5 }), "{waited:?}");
    }
}

/// Says of nobody how long it may be held.
struct Panics;

impl LetWait for Panics {
    fn at_most(&mut self, _thread: u32) -> Duration {
        panic!("a test's panic")
    }
}

#[test]
fn a_writer_goes_on_though_what_says_how_long_it_may_be_held_panics() {
    let guest: &Guest = Box::leak(Box::new(Guest::private(16 * PAGE, false)));
    (0..16).for_each(|page| guest.write(page, 1));
    let uffd = userfaultfd(Faults::User).unwrap();
    let mut tracker =
        SyncTracker::new(uffd, own_pagemap(), vec![guest.area()], &[PageCount::new(16)], &[0], Box::new(Panics))
            .unwrap();
    tracker.scan(0).unwrap();
    tracker.waits().unwrap().set_pace(Some(Box::new(AtMost(1))));
    let (wrote, written) = mpsc::channel();
    // It waits for ever, also after this test, if nobody lets it go.
    thread::spawn(move || {
        (0..16).for_each(|page| guest.write(page, 2));
        let _ = wrote.send(());
    });
    written.recv_timeout(Duration::from_secs(30)).expect("it goes on");
    let error = tracker.scan(0).unwrap_err();
    assert!(matches!(error, Error::System { .. }) && error.to_string().contains("panicked"), "{error}");
    assert!(matches!(tracker.scan(0), Err(Error::Gone { region: 0, .. })), "it stays so");
}
