//! Windows go to their places in a file without their zero pages, from the mapping and as copies.
use std::{fs::File, ops::Range, os::fd::AsFd};

use transship_memory::{Access, FileIo, GuestMemory, PageRange, WindowPages};

use super::files::{put, queue, ways};
use crate::{
    common::{PAGE, file, map, page_of, process::Guest},
    private::region_of,
};

const PAGES: u64 = 2048;
/// Where page 0 of the first region is in the file; the second one's is behind its last.
const BASE: u64 = 3 * PAGE;
/// More than a request takes, and not from the beginning of a window on.
const LONG: Range<u64> = 1100..2000;

/// The others are zero. These are single pages, pages in a row, and pages between which one or two are missing, at the
/// borders of windows and elsewhere.
fn is_there(page: u64) -> bool {
    page < 400 && ![127, 129, 300].contains(&page)
        || (700..1024).contains(&page) && page.is_multiple_of(3)
        || LONG.contains(&page)
}

/// Of a window.
fn zero_mask(pages: WindowPages) -> u128 {
    let zero = pages.iter().filter(|page| !is_there(page.get()));
    zero.fold(0, |mask, page| mask | 1 << page.since(pages.first).get())
}

/// Asks for all windows of a region, for every other one in two parts.
fn write_all(memory: &GuestMemory, region: usize, file: &File, how: FileIo, copied: bool, behind: impl Fn(u64)) {
    const SOME: u128 = 0xffff_0fff_ff00_ffff_0000_ffff_1235_5551;
    let mut queue = queue(memory, file, how);
    let at = BASE + region as u64 * PAGES * PAGE;
    for (number, window) in PageRange::all(memory.regions()[region].pages()).windows().enumerate() {
        let parts = if number % 2 == 0 { vec![u128::MAX] } else { vec![SOME, !SOME] };
        for part in parts.into_iter().map(|part| window.with(part)) {
            let zero = queue.write_window(region, part, at, copied).unwrap();
            assert_eq!(zero, zero_mask(part), "{how:?} {copied} {part:?}");
        }
        behind(window.first.get());
    }
    queue.finish().unwrap();
}

#[test]
fn windows_go_to_their_places_without_their_zero_pages() {
    let guest = Guest::private(PAGES * PAGE, false);
    let shared = map(file(PAGES * PAGE), PAGES * PAGE, Access::ReadWrite);
    let memory = GuestMemory::new(vec![shared, region_of(&guest, Access::Read)]);
    (0..PAGES).filter(|&page| is_there(page)).for_each(|page| {
        put(&memory, page, page);
        guest.write(page, page + 1);
    });
    for how in ways() {
        for copied in [false, true] {
            let saved = tempfile::tempfile().unwrap();
            let region = &memory.regions()[0];
            // What is written behind the call is not in the file if pages are copied.
            let written = |first: u64| {
                if copied {
                    region.write_pages(WindowPages::new(first, 1), &page_of(first + 1)).unwrap();
                }
            };
            write_all(&memory, 0, &saved, how, copied, written);
            write_all(&memory, 1, &saved, how, copied, |first| guest.write(first, 0xffff_ffff));
            let mut found = vec![0; (BASE + 2 * PAGES * PAGE) as usize];
            let end = rustix::io::pread(&saved, &mut found, 0).unwrap() as u64;
            assert_eq!(end, BASE + (PAGES + LONG.end) * PAGE, "nothing is behind the last page");
            for page in 0..PAGES {
                let at = |region: u64| &found[(BASE + (region * PAGES + page) * PAGE) as usize..][..PAGE as usize];
                let expected = if is_there(page) { page_of(page) } else { vec![0; PAGE as usize] };
                assert!(at(0) == expected, "{how:?} {copied}: page {page} of the file in memory");
                let number = u64::from_le_bytes(at(1)[..8].try_into().unwrap());
                assert_eq!(number, if is_there(page) { page + 1 } else { 0 }, "{how:?} {copied}: private page {page}");
            }
            for first in (0..PAGES).step_by(128) {
                guest.write(first, if is_there(first) { first + 1 } else { 0 });
                let bytes = if is_there(first) { page_of(first) } else { vec![0; PAGE as usize] };
                memory.regions()[0].write_pages(WindowPages::new(first, 1), &bytes).unwrap();
            }
        }
    }
}

#[test]
fn what_cannot_be_read_loses_nothing_that_was_asked_for_before() {
    for how in ways() {
        let (under, saved) = (file(256 * PAGE), tempfile::tempfile().unwrap());
        let memory = GuestMemory::new(vec![map(under.as_fd(), 256 * PAGE, Access::ReadWrite)]);
        (0..256).for_each(|page| put(&memory, page, page));
        let mut queue = queue(&memory, &saved, how);
        assert_eq!(queue.write_window(0, WindowPages::new(0, u128::MAX), 0, true).unwrap(), 0);
        // Copied pages are not mapped, so this is an error and no signal.
        rustix::fs::ftruncate(&under, 200 * PAGE).unwrap();
        let error = queue.write_window(0, WindowPages::new(128, u128::MAX), 0, true).unwrap_err().to_string();
        assert!(error.contains("read pages"), "{error}");
        queue.finish().unwrap();
        let mut found = vec![0; 256 * PAGE as usize];
        let end = rustix::io::pread(&saved, &mut found, 0).unwrap() as u64;
        assert_eq!(end, 128 * PAGE, "{how:?}");
        assert!((0..128).all(|page| found[(page * PAGE) as usize..][..PAGE as usize] == page_of(page)), "{how:?}");
        assert!(queue.write_window(1, WindowPages::new(0, 1), 0, true).is_err(), "there is no such region");
        assert!(queue.write_window(0, WindowPages::new(255, 0b11), 0, true).is_err(), "there is no such page");
    }
}
