//! Memory that stays where it is while it is made to read as zero, and memory that can't be had.
use std::{fs, path::Path};

use rustix::mount::MountFlags;
use transship_memory::{
    Access, Error, Flaw, GuestMemory, Keep, PAGE_BYTES, PageCount, PageRange, PageSet, Region, WindowPages,
};

use crate::common::{HUGE, PAGE, clear_all, contents, file, huge_file, map, mounts::with_mounts_of_its_own, page_of};

const PAGES: u64 = 20_000;

fn allocated(region: &Region) -> u64 {
    rustix::fs::fstat(region.file().unwrap()).unwrap().st_blocks as u64 * 512
}

fn preallocated(region: Region) -> GuestMemory {
    rustix::fs::fallocate(region.file().unwrap(), rustix::fs::FallocateFlags::empty(), 0, region.bytes()).unwrap();
    GuestMemory::new(vec![region.keeping(Keep::All)])
}

/// Pages of many threads' parts, single ones and runs; the others are there and were never written, or are holes.
#[test]
fn what_was_allocated_stays_and_is_zero() {
    let memory = preallocated(map(file(PAGES * PAGE), PAGES * PAGE, Access::ReadWrite));
    let region = &memory.regions()[0];
    for first in [0, 5, 4095, 4096, 12_345, PAGES - 1] {
        region.write_pages(WindowPages::new(first, 1), &page_of(first)).unwrap();
    }
    region.write_pages(WindowPages::new(8000, u128::MAX), &vec![9; 128 * PAGE_BYTES]).unwrap();
    // Somebody has given a part of it back before.
    map(region.file().unwrap(), region.bytes(), Access::ReadWrite).clear(PageRange::new(100, 300)).unwrap();
    assert!(allocated(region) < region.bytes());
    clear_all(region).unwrap();
    assert_eq!(allocated(region), region.bytes());
    assert!(contents(region).iter().all(|byte| *byte == 0));
    region.write_pages(WindowPages::new(8000, 1), &page_of(1)).unwrap();
    region.clear(PageRange::new(8000, 1)).unwrap();
    assert_eq!(region.zero_mask(WindowPages::new(8000, 1)).unwrap(), 1);
    assert_eq!(allocated(region), region.bytes());
}

#[test]
fn memory_that_nobody_was_promised_is_given_back() {
    let region = map(file(PAGES * PAGE), PAGES * PAGE, Access::ReadWrite);
    region.write_pages(WindowPages::new(8000, u128::MAX), &vec![9; 128 * PAGE_BYTES]).unwrap();
    clear_all(&region).unwrap();
    assert_eq!(allocated(&region), 0);
}

/// Nothing is touched where it would be lost.
#[test]
fn memory_of_a_tmpfs_that_was_promised_is_not_emptied() {
    let lost = preallocated(map(file(8 * PAGE), 8 * PAGE, Access::ReadWrite));
    let other = map(file(8 * PAGE), 8 * PAGE, Access::ReadWrite);
    other.write_pages(WindowPages::new(0, 1), &page_of(1)).unwrap();
    let memory = GuestMemory::new(vec![
        other,
        map(lost.regions()[0].file().unwrap(), 8 * PAGE, Access::ReadWrite).keeping(Keep::All),
    ]);
    let refusal = memory.empty().unwrap_err();
    assert!(matches!(&refusal, Error::Unusable { region, flaw: Flaw::MustStay, .. } if region == "ram"), "{refusal}");
    assert_eq!(allocated(&memory.regions()[0]), PAGE);
    assert_eq!(allocated(&memory.regions()[1]), 8 * PAGE);
    let bound = map(file(PAGE), PAGE, Access::ReadWrite).keeping(Keep::AllOnTheirNodes);
    assert_eq!(bound.empty().unwrap_err().flaw(), Some(Flaw::MustStay));
}

/// A page of zeros is not made where there was none, and one that came and went is still there.
#[test]
fn a_hugetlbfs_gets_nothing_back() {
    let Some(file) = huge_file(4 * HUGE) else { return };
    let region = map(file, 4 * HUGE, Access::ReadWrite);
    region.write_pages(WindowPages::new(512, 1), &page_of(1)).unwrap();
    clear_all(&region).unwrap();
    assert_eq!(allocated(&region), HUGE);
    region.empty().unwrap();
    assert_eq!(allocated(&region), 0);
    let region = region.keeping(Keep::All);
    clear_all(&region).unwrap();
    assert_eq!(allocated(&region), 4 * HUGE);
    region.write_pages(WindowPages::new(1500, u128::MAX), &vec![1; 128 * PAGE_BYTES]).unwrap();
    clear_all(&region).unwrap();
    assert!(contents(&region).iter().all(|byte| *byte == 0));
}

#[test]
fn a_full_file_system_is_an_error_with_its_cure() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=64k")).unwrap();
        let region = named(dir, 64 * PAGE);
        let why = region
            .write_pages(WindowPages::new(0, u64::MAX.into()), &vec![1; 64 * PAGE_BYTES])
            .unwrap_err()
            .to_string();
        assert!(why.contains("\"ram\"") && why.contains("remount,size="), "{why}");
        clear_all(&region).unwrap();
        let why = clear_all(&region.keeping(Keep::All)).unwrap_err().to_string();
        assert!(why.contains("\"ram\"") && why.contains("remount,size="), "{why}");
    });
}

/// The file system itself lets no more pages go than it was made for, whatever the pool has.
#[test]
fn a_pool_without_a_page_left_is_an_error_with_its_cure() {
    with_mounts_of_its_own(|dir| {
        if huge_file(4 * HUGE).is_none() {
            return;
        }
        rustix::mount::mount("none", dir, "hugetlbfs", MountFlags::empty(), Some(c"pagesize=2M,size=4M")).unwrap();
        let region = named(dir, 4 * HUGE);
        region.write_pages(WindowPages::new(0, 1), &page_of(1)).unwrap();
        // It begins in a page that there is.
        region.write_pages(WindowPages::new(1000, 1), &page_of(1)).unwrap();
        for pages in [1, u128::MAX] {
            let bytes = vec![1; pages.count_ones() as usize * PAGE_BYTES];
            let why = region.write_pages(WindowPages::new(1000, pages), &bytes);
            assert_eq!(why.is_ok(), pages == 1, "the second page is there, the third is not");
            let Err(why) = why else { continue };
            assert!(why.to_string().contains("\"ram\"") && why.to_string().contains("nr_hugepages"), "{why}");
        }
        assert!(region.clear(PageRange::new(1400, 1)).is_err(), "zeros would need a page, too");
        let why = clear_all(&region.keeping(Keep::All)).unwrap_err().to_string();
        assert!(why.contains("nr_hugepages"), "{why}");
    });
}

fn some(pages: u64, runs: &[(u64, u64)]) -> PageSet {
    let mut set = PageSet::empty(PageCount::new(pages));
    runs.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
    set
}

/// Regions of one file system need their room together.
#[test]
fn a_file_system_is_asked_for_the_room_of_all_its_regions() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=64k")).unwrap();
        let regions = ["a", "b"].map(|name| {
            let own = dir.join(name);
            fs::create_dir(&own).unwrap();
            named(&own, 64 * PAGE)
        });
        let elsewhere = map(file(64 * PAGE), 64 * PAGE, Access::ReadWrite);
        let memory = GuestMemory::new(regions.into_iter().chain([elsewhere]).collect());
        let set_aside = |counts: [u64; 3]| memory.set_aside(&counts.map(|count| some(64, &[(0, count)])));
        set_aside([8, 8, 64]).unwrap();
        assert_eq!(set_aside([8, 9, 0]).unwrap_err().flaw(), Some(Flaw::NoRoom));
        assert_eq!(allocated(&memory.regions()[0]), 0, "it was only asked");
    });
}

/// Those that pages have a part in, once each.
#[test]
fn a_pool_sets_huge_pages_aside() {
    with_mounts_of_its_own(|dir| {
        if huge_file(4 * HUGE).is_none() {
            return;
        }
        rustix::mount::mount("none", dir, "hugetlbfs", MountFlags::empty(), Some(c"pagesize=2M,size=4M")).unwrap();
        let memory = GuestMemory::new(vec![named(dir, 4 * HUGE)]);
        let set_aside = |runs: &[(u64, u64)]| memory.set_aside(&[some(2048, runs)]);
        set_aside(&[]).unwrap();
        set_aside(&[(3, 1), (500, 1), (1535, 1)]).unwrap();
        set_aside(&[(0, 1), (1024, 512)]).unwrap();
        let why = set_aside(&[(600, 1)]).unwrap_err().to_string();
        assert!(why.contains("\"ram\"") && why.contains("nr_hugepages"), "{why}");
        // Whoever it was set aside for gets it.
        memory.regions()[0].write_pages(WindowPages::new(1100, 1), &page_of(1)).unwrap();
    });
}

fn named(dir: &Path, bytes: u64) -> Region {
    let path = dir.join("ram");
    let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
    map(file, bytes, Access::ReadWrite)
}
