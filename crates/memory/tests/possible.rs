//! Which trackers this system is said to have.
use rustix::mount::MountFlags;
use transship_memory::{PageCount, SyncTracker, Tracker, UffdTracker};

use crate::common::{
    PAGE, file,
    mounts::with_mounts_of_its_own,
    process::{Faults, Guest, userfaultfd},
};

/// The other tests use both.
#[test]
fn trackers_are_possible_where_they_are_tested() {
    assert!(UffdTracker::is_possible());
    assert!(SyncTracker::is_possible());
}

#[test]
fn without_a_pagemap_nothing_can_be_scanned() {
    with_mounts_of_its_own(|_| {
        rustix::mount::mount("none", "/proc", "tmpfs", MountFlags::empty(), None).unwrap();
        assert!(!UffdTracker::is_possible());
        assert!(SyncTracker::is_possible(), "it is asked of a userfaultfd alone");
    });
}

#[test]
fn nobody_waits_for_a_tracker_that_takes_note_only() {
    let guest = Guest::map(file(16 * PAGE), 16 * PAGE);
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap().into();
    let uffd = userfaultfd(Faults::User).unwrap();
    let tracker = UffdTracker::new(uffd, pagemap, vec![guest.area()], vec![PageCount::new(guest.pages())]).unwrap();
    assert!(tracker.waits().is_none());
}
