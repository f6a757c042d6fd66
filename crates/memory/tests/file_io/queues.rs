//! What is in flight when a queue, a thread or a buffer ends, and what comes first.
use std::{os::fd::OwnedFd, sync::Arc, thread};

use rustix::fs::OFlags;
use tempfile::TempDir;
use transship_memory::{Error, FileIo, FileQueue, GuestMemory, PageBuffer, PageRange, Turns};

use super::files::{NEW, disk, memory, open, open_direct, pair, queue, ways};
use crate::common::{self, PAGE, contents, file, page_of};

/// Pages in a file of the disk, each with its number, and an empty region of as many.
pub(super) fn on_disk(dir: &TempDir, pages: u64) -> Option<(OwnedFd, GuestMemory)> {
    let path = dir.path().join("pages");
    std::fs::write(&path, (0..pages).flat_map(page_of).collect::<Vec<_>>()).unwrap();
    let file = open_direct(&path)?;
    Some((file, memory(&common::file(pages * PAGE), pages)))
}

/// The kernel uses the memory until then.
#[test]
fn dropping_a_queue_waits_for_what_is_in_flight() {
    const PAGES: u64 = 8192;
    let dir = disk();
    let Some((file, to)) = on_disk(&dir, PAGES) else { return };
    for how in ways() {
        to.regions()[0].clear(PageRange::new(0, PAGES)).unwrap();
        let mut queue = FileQueue::new(to.clone(), rustix::io::dup(&file).unwrap(), 64, how).unwrap();
        queue.read(0, PageRange::new(0, PAGES), 0).unwrap();
        drop(queue);
        let is = contents(&to.regions()[0]);
        assert!(is == (0..PAGES).flat_map(page_of).collect::<Vec<_>>(), "{how:?}");
    }
}

/// The kernel cancels what a thread has asked for, and has not been begun when the thread ends. Writes through the page
/// cache wait for each other.
#[test]
fn a_queue_survives_the_thread_that_used_it() {
    const PAGES: u64 = 4096;
    let dir = disk();
    let path = dir.path().join("file");
    for how in ways() {
        let (from, _) = pair(PAGES);
        let file = open(&path, NEW | OFlags::TRUNC).unwrap();
        let begin = || {
            let mut queue = FileQueue::new(from.clone(), rustix::io::dup(&file).unwrap(), 1024, how).unwrap();
            // No two are neighbours, so that there is much in flight.
            (0..2000).step_by(2).for_each(|page| queue.write(0, PageRange::new(page, 1), page * PAGE).unwrap());
            queue
        };
        let mut queue = thread::scope(|scope| scope.spawn(begin).join().unwrap());
        queue.write(0, PageRange::new(3001, 1), 3001 * PAGE).unwrap();
        queue.finish().unwrap();
        let is = std::fs::read(&path).unwrap();
        for page in (0..2000).step_by(2).chain([3001]) {
            assert!(is[(page * PAGE) as usize..][..PAGE as usize] == page_of(page), "{how:?}, page {page}");
        }
    }
}

#[test]
fn one_place_is_enough() {
    const PAGES: u64 = 200;
    let dir = disk();
    let Some((file, to)) = on_disk(&dir, PAGES) else { return };
    for how in ways() {
        to.regions()[0].clear(PageRange::new(0, PAGES)).unwrap();
        let mut queue = FileQueue::new(to.clone(), rustix::io::dup(&file).unwrap(), 1, how).unwrap();
        (0..PAGES).rev().for_each(|page| queue.read(0, PageRange::new(page, 1), page * PAGE).unwrap());
        // It can be used again after it has finished.
        queue.finish().unwrap();
        assert!(contents(&to.regions()[0]) == (0..PAGES).flat_map(page_of).collect::<Vec<_>>(), "{how:?}");
        to.regions()[0].clear(PageRange::new(0, PAGES)).unwrap();
        queue.read(0, PageRange::new(7, 1), 9 * PAGE).unwrap();
        queue.finish().unwrap();
        assert!(contents(&to.regions()[0])[7 * PAGE as usize..][..PAGE as usize] == page_of(9));
    }
}

/// Each waits for the others to have read, and for none of them to be done.
#[test]
fn threads_that_take_turns_read_all_of_a_file() {
    const PAGES: u64 = 8192;
    let dir = disk();
    let path = dir.path().join("pages");
    std::fs::write(&path, (0..PAGES).flat_map(page_of).collect::<Vec<_>>()).unwrap();
    let file = open(&path, OFlags::RDONLY).unwrap();
    let to = memory(&common::file(PAGES * PAGE), PAGES);
    let turns = Turns::default();
    let read = |first: u64| {
        let mut queue = queue(&to, &file, FileIo::Plain).taking(&turns);
        (first..PAGES).step_by(4 * 64).try_for_each(|page| queue.read(0, PageRange::new(page, 64), page * PAGE))?;
        queue.finish()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || read(number * 64))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
    assert!(contents(&to.regions()[0]) == (0..PAGES).flat_map(page_of).collect::<Vec<_>>());
    // One that ends too early leaves the turn to the others.
    rustix::fs::ftruncate(open(&path, OFlags::RDWR).unwrap(), 100 * PAGE).unwrap();
    let failed = read(64).unwrap_err();
    assert!(matches!(failed, Error::FileEnds { size, .. } if size == 100 * PAGE), "{failed}");
    let mut queue = queue(&to, &file, FileIo::Plain).taking(&turns);
    queue.read(0, PageRange::new(0, 100), 0).and_then(|()| queue.finish()).unwrap();
}

/// Some are good and some are not: all end, and the first that is told is told again.
#[test]
fn an_error_among_many_is_found() {
    const PAGES: u64 = 2048;
    let dir = disk();
    let Some((file, to)) = on_disk(&dir, PAGES) else { return };
    rustix::fs::ftruncate(&file, 1000 * PAGE).unwrap();
    for how in ways() {
        let mut queue = FileQueue::new(to.clone(), rustix::io::dup(&file).unwrap(), 16, how).unwrap();
        let asked = (0..PAGES).step_by(2).try_for_each(|page| queue.read(0, PageRange::new(page, 1), page * PAGE));
        let failed = asked.and_then(|()| queue.finish()).unwrap_err();
        assert!(matches!(failed, Error::FileEnds { size, .. } if size == 1000 * PAGE), "{failed}");
        assert_eq!(queue.finish().unwrap_err().to_string(), failed.to_string());
        assert_eq!(queue.read(0, PageRange::new(0, 1), 0).unwrap_err().to_string(), failed.to_string());
    }
}

/// Requests at the same place are carried out in any order if the kernel has both.
#[test]
fn what_a_buffer_is_written_over_by_comes_later() {
    let dir = disk();
    for how in ways() {
        for direct in [false, true] {
            let path = dir.path().join(format!("order-{how:?}-{direct}"));
            let Some(file) = (if direct { open_direct(&path) } else { Some(open(&path, NEW).unwrap()) }) else {
                continue;
            };
            let mut queue = queue(&GuestMemory::new(vec![]), &file, how);
            let buffer = |byte| {
                let mut buffer = PageBuffer::new(64);
                buffer.bytes_mut().fill(byte);
                Arc::new(buffer)
            };
            // A large one, which takes its time, and small ones in it, the last of which counts.
            for round in 0..40_u8 {
                let (large, small) = (buffer(2 * round + 1), buffer(2 * round + 2));
                queue.write_shared(&large, 0..64, 0).unwrap();
                for page in [0, 17, 63] {
                    queue.write_shared(&small, 5..6, page * PAGE).unwrap();
                    assert_eq!(
                        Arc::strong_count(&large),
                        1,
                        "it is done before anything else is asked for at its place"
                    );
                }
                if round % 8 == 0 {
                    queue.finish().unwrap();
                    assert_eq!(
                        (Arc::strong_count(&large), Arc::strong_count(&small)),
                        (1, 1),
                        "nobody holds them any more"
                    );
                    let bytes = std::fs::read(&path).unwrap();
                    for (page, bytes) in bytes.chunks(PAGE as usize).enumerate() {
                        let expected = 2 * round + if [0, 17, 63].contains(&page) { 2 } else { 1 };
                        assert!(bytes.iter().all(|&byte| byte == expected), "{how:?} {direct}: page {page}");
                    }
                }
            }
        }
    }
}

/// A buffer is free again when the kernel has written what is in it, which can be waited for.
#[test]
fn a_buffer_comes_back_when_one_request_has_ended() {
    for how in ways() {
        let file = file(64 * PAGE);
        let mut queue = queue(&GuestMemory::new(vec![]), &file, how);
        queue.wait_for_one().unwrap();
        let buffer = Arc::new(PageBuffer::new(1));
        queue.write_shared(&buffer, 0..1, 0).unwrap();
        queue.wait_for_one().unwrap();
        assert_eq!(Arc::strong_count(&buffer), 1, "{how:?}");
    }
}
