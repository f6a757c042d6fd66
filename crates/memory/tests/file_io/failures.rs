//! What the disk, the file or the memory does not take is an error that says so.
use std::fs::File;

use rustix::{fs::OFlags, mount::MountFlags};
use transship_memory::{Access, Error, FileIo, FileQueue, Flaw, GuestMemory, PageBuffer, PageRange};

use super::{
    files::{NEW, disk, memory, open, open_direct, pair, queue, ways},
    queues::on_disk,
};
use crate::common::{PAGE, file, map, mounts::with_mounts_of_its_own, page_of};

#[test]
fn a_full_file_system_is_an_error_that_stays() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=1m")).unwrap();
        for how in ways() {
            let path = dir.join("file");
            let (from, _) = pair(1024);
            let mut queue = queue(&from, open(&path, NEW).unwrap(), how);
            let failed = queue.write(0, PageRange::new(0, 1024), 0).and_then(|()| queue.finish()).unwrap_err();
            assert!(failed.to_string().contains("No space left on device"), "{failed}");
            std::fs::write(&path, b"").unwrap();
            // There is room now; but a page has been lost.
            assert!(queue.write(0, PageRange::new(0, 1), 0).is_err());
            assert!(queue.write_buffer(PageBuffer::new(1), 0).is_err());
            assert_eq!(queue.finish().unwrap_err().to_string(), failed.to_string());
            drop(queue);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "nothing more was asked of the kernel");
            std::fs::remove_file(&path).unwrap();
        }
    });
}

#[test]
fn memory_that_has_no_room_is_an_error() {
    with_mounts_of_its_own(|dir| {
        rustix::mount::mount("none", dir, "tmpfs", MountFlags::empty(), Some(c"size=256k")).unwrap();
        let disk = disk();
        let Some((file, _)) = on_disk(&disk, 512) else { return };
        for how in ways() {
            let ram = open(&dir.join("ram"), NEW | OFlags::TRUNC).unwrap();
            rustix::fs::ftruncate(&ram, 512 * PAGE).unwrap();
            let mut queue = queue(&memory(&ram, 512), &file, how);
            let failed =
                queue.read(0, PageRange::new(0, 512), 0).and_then(|()| queue.finish()).unwrap_err().to_string();
            let cure = "into the file of its memory (the file system of its memory is full: make it larger";
            let (begin, end) = ("can't put pages ", "): No space left on device (os error 28)");
            assert!(failed.starts_with(begin) && failed.contains(cure) && failed.ends_with(end), "{failed}");
        }
    });
}

/// As the one above the last, for whom can't mount.
#[test]
fn a_device_that_is_always_full_is_an_error() {
    for how in ways() {
        let (from, _) = pair(4);
        let mut queue = queue(&from, File::options().write(true).open("/dev/full").unwrap(), how);
        let failed =
            queue.write(0, PageRange::new(1, 2), 8 * PAGE).and_then(|()| queue.finish()).unwrap_err().to_string();
        let expected = "can't write pages 1..3 of region \"ram\" at byte 0x8000 of the file: No space left on device (os error 28)";
        assert_eq!(failed, expected);
    }
}

#[test]
fn a_file_that_is_too_short_is_an_error() {
    let dir = disk();
    for how in ways() {
        for direct in [false, true] {
            // Within a block of the disk, between two of them, between two pages; and it may end before the first byte.
            for size in [2 * PAGE + 100, 2 * PAGE + 512, 3 * PAGE, 0] {
                let path = dir.path().join("short");
                std::fs::write(&path, vec![7; size as usize]).unwrap();
                let Some(file) = (if direct { open_direct(&path) } else { open(&path, NEW).ok() }) else { continue };
                let (_, to) = pair(8);
                let mut queue = queue(&to, file, how);
                let failed = queue.read(0, PageRange::new(2, 4), PAGE).and_then(|()| queue.finish()).unwrap_err();
                let text = failed.to_string();
                assert!(
                    matches!(failed, Error::FileEnds { needed, size: is, .. } if needed == 5 * PAGE && is == size),
                    "{text}"
                );
                assert!(
                    text.starts_with(
                        "can't read pages 2..6 of region \"ram\" at byte 0x1000 of the file: the file has"
                    ),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn a_descriptor_that_is_not_open_for_it_is_an_error() {
    let dir = disk();
    let path = dir.path().join("file");
    std::fs::write(&path, page_of(1)).unwrap();
    let (from, to) = pair(4);
    for how in ways() {
        let mut reader = queue(&from, open(&path, OFlags::RDONLY).unwrap(), how);
        let failed = reader.write(0, PageRange::new(0, 1), 0).and_then(|()| reader.finish()).unwrap_err();
        assert!(failed.to_string().contains("it must be open for writing"), "{failed}");
        let mut writer = queue(&to, open(&path, OFlags::WRONLY).unwrap(), how);
        let failed = writer.read(0, PageRange::new(0, 1), 0).and_then(|()| writer.finish()).unwrap_err();
        assert!(failed.to_string().contains("it must be open for reading"), "{failed}");
    }
}

#[test]
fn direct_io_off_the_blocks_says_what_it_is() {
    let dir = disk();
    let Some(file) = open_direct(&dir.path().join("file")) else { return };
    for how in ways() {
        let (from, _) = pair(4);
        let mut queue = queue(&from, &file, how);
        let failed = queue.write(0, PageRange::new(0, 1), 100).and_then(|()| queue.finish()).unwrap_err().to_string();
        assert!(failed.contains("direct I/O") && failed.contains("Invalid argument"), "{failed}");
    }
}

#[test]
fn what_the_memory_does_not_have_is_refused_and_breaks_nothing() {
    let dir = disk();
    let path = dir.path().join("file");
    let (from, _) = pair(8);
    for how in ways() {
        let mut queue = queue(&from, open(&path, NEW).unwrap(), how);
        for (first, count) in [(8, 1), (7, 2), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(
                matches!(queue.write(0, PageRange::new(first, count), 0), Err(Error::OutOfRange { pages, .. }) if pages.get() == 8)
            );
            assert!(
                matches!(queue.read(0, PageRange::new(first, count), 0), Err(Error::OutOfRange { pages, .. }) if pages.get() == 8)
            );
        }
        assert!(queue.write(1, PageRange::new(0, 1), 0).unwrap_err().flaw() == Some(Flaw::NoRegion));
        queue.write(0, PageRange::new(8, 0), u64::MAX).unwrap();
        queue.write(0, PageRange::new(5, 1), 0).unwrap();
        queue.finish().unwrap();
        assert!(std::fs::read(&path).unwrap() == page_of(5));
        for offset in [u64::MAX - PAGE, u64::MAX, 1 << 63] {
            let mut queue = self::queue(&from, open(&path, NEW).unwrap(), how);
            assert!(queue.write(0, PageRange::new(0, 4), offset).and_then(|()| queue.finish()).is_err(), "{offset:#x}");
        }
        let only_read = GuestMemory::new(vec![map(file(PAGE), PAGE, Access::Read)]);
        assert!(self::queue(&only_read, open(&path, NEW).unwrap(), how).read(0, PageRange::new(0, 1), 0).is_err());
    }
    for depth in [0, 1025] {
        let made = FileQueue::new(from.clone(), open(&path, NEW).unwrap(), depth, FileIo::Auto);
        assert_eq!(made.err().unwrap().kind(), std::io::ErrorKind::InvalidInput);
    }
}
