//! Pages go to their places and come back, whatever carries them.
use std::{
    fs::File,
    os::fd::OwnedFd,
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use rustix::{fs::OFlags, mount::MountFlags};
use transship_lab::lacks;
use transship_memory::{Access, FileIo, GuestMemory, PageBuffer, PageBuffers, PageRange, Region, Turns, WindowPages};

use super::files::{NEW, RUNS, disk, huge_filled, is_in_runs, memory, open, open_direct, pair, put, queue, ways};
use crate::common::{HUGE, PAGE, contents, file, huge_file, map, mounts::with_mounts_of_its_own, page_of};

/// Where the pages begin in the file.
const BASE: u64 = 3 * PAGE;

/// Writes the runs to the file and reads them into the other region; looks at the file in between by other means.
pub(super) fn there_and_back(path: &Path, file: &OwnedFd, how: FileIo, (from, to): (&GuestMemory, &GuestMemory)) {
    let mut queue = queue(from, file, how);
    for (first, count) in RUNS {
        queue.write(0, PageRange::new(first, count), BASE + first * PAGE).unwrap();
    }
    let mut head = PageBuffer::new(2);
    head.bytes_mut().fill(0xab);
    queue.write_buffer(head, PAGE).unwrap();
    queue.finish().unwrap();

    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes.len() as u64, BASE + 1024 * PAGE);
    assert!(bytes[..PAGE as usize].iter().all(|&byte| byte == 0), "before the first byte asked for");
    assert!(bytes[PAGE as usize..BASE as usize].iter().all(|&byte| byte == 0xab));
    for page in 0..1024 {
        let is = &bytes[(BASE + page * PAGE) as usize..][..PAGE as usize];
        let expected = if is_in_runs(page) { page_of(page) } else { vec![0; PAGE as usize] };
        assert!(is == expected, "{how:?}: page {page} of the file");
    }

    let mut queue = self::queue(to, file, how);
    for (first, count) in RUNS {
        queue.read(0, PageRange::new(first, count), BASE + first * PAGE).unwrap();
    }
    queue.finish().unwrap();
    let bytes = contents(&to.regions()[0]);
    for page in 0..1024 {
        let is = &bytes[(page * PAGE) as usize..][..PAGE as usize];
        let expected = if is_in_runs(page) { page_of(page) } else { vec![0; PAGE as usize] };
        assert!(is == expected, "{how:?}: page {page} of the region");
    }
}

/// In all ways, through the page cache and past it.
fn there_and_back_in(dir: &Path) {
    for how in ways() {
        for direct in [false, true] {
            let path = dir.join(format!("{how:?}-{direct}"));
            let Some(file) = (if direct { open_direct(&path) } else { Some(open(&path, NEW).unwrap()) }) else {
                continue;
            };
            let (from, to) = pair(1024);
            there_and_back(&path, &file, how, (&from, &to));
            let (from, to) = (huge_file(2 * HUGE), huge_file(2 * HUGE));
            if let (Some(from), Some(to)) = (from, to) {
                std::fs::remove_file(&path).unwrap();
                let file = open(&path, NEW | if direct { OFlags::DIRECT } else { OFlags::empty() }).unwrap();
                there_and_back(&path, &file, how, (&huge_filled(&from), &memory(&to, 1024)));
            }
        }
    }
}

#[test]
fn pages_go_to_their_places_and_come_back() {
    there_and_back_in(disk().path());
}

#[test]
fn a_tmpfs_takes_them_too() {
    there_and_back_in(tempfile::tempdir_in("/dev/shm").unwrap().path());
}

/// Runs a program; what it printed, or none if it can't be or fails.
fn printed(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(text)
}

#[test]
fn a_disk_of_4_kib_sectors_takes_them_too() {
    with_mounts_of_its_own(|dir| {
        let image = dir.join("image");
        File::create(&image).unwrap().set_len(96 << 20).unwrap();
        let args = ["--find", "--show", "--sector-size", "4096", image.to_str().unwrap()];
        let Some(device) = printed("losetup", &args) else {
            return lacks("a loop device of 4 KiB sectors");
        };
        let mounted = dir.join("mounted");
        std::fs::create_dir(&mounted).unwrap();
        let made = printed("mkfs.ext4", &["-q", "-F", &device]).is_some()
            && rustix::mount::mount(device.as_str(), &mounted, "ext4", MountFlags::empty(), None).is_ok();
        // Goes when it is unmounted, which is when this thread ends, or at once if it is not mounted.
        printed("losetup", &["--detach", &device]).unwrap();
        if !made {
            return lacks("mkfs.ext4 and its file system");
        }
        let path = mounted.join("file");
        let direct = open_direct(&path).unwrap();
        // It is such a disk: half a page is refused.
        assert!(rustix::io::pwrite(&direct, &PageBuffer::new(1).bytes()[..512], 0).is_err());
        std::fs::remove_file(path).unwrap();
        there_and_back_in(&mounted);
    });
}

/// System calls of this thread that wrote; none where the kernel does not count.
fn writes() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/thread-self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("syscw: "))?.parse().ok()
}

#[test]
fn runs_that_continue_each_other_are_one_request() {
    let dir = disk();
    let (from, _) = pair(2048);
    let mut queue = queue(&from, open(&dir.path().join("file"), NEW).unwrap(), FileIo::Plain);
    let Some(before) = writes() else { return lacks("a kernel that counts system calls") };
    // 1 MiB in runs of two pages, and a page more; then one page elsewhere.
    (0..128).for_each(|run| queue.write(0, PageRange::new(2 * run, 2), 2 * run * PAGE).unwrap());
    queue.write(0, PageRange::new(256, 1), 256 * PAGE).unwrap();
    queue.write(0, PageRange::new(300, 1), 300 * PAGE).unwrap();
    queue.finish().unwrap();
    assert_eq!(writes().unwrap() - before, 3);
}

#[test]
fn regions_have_files_of_their_own_and_places_of_their_own() {
    let dir = disk();
    let path = dir.path().join("file");
    let regions = |start: u64| -> Vec<Region> {
        let region = |number| {
            let region = map(file(64 * PAGE), 64 * PAGE, Access::ReadWrite);
            (0..64).for_each(|page| {
                region.write_pages(WindowPages::new(page, 1), &page_of(number * start + page)).unwrap()
            });
            region
        };
        (0..3).map(region).collect()
    };
    for how in ways() {
        let (from, to) = (GuestMemory::new(regions(1000)), GuestMemory::new(regions(0)));
        let mut writer = queue(&from, open(&path, NEW).unwrap(), how);
        let mut reader = queue(&to, open(&path, NEW).unwrap(), how);
        // Right behind each other in the file, and with the numbers of pages that follow, but of two regions.
        for region in 0..3 {
            writer.write(region as usize, PageRange::new(10 * region, 10), 10 * region * PAGE).unwrap();
        }
        writer.finish().unwrap();
        for region in 0..3 {
            reader.read(region as usize, PageRange::new(10 * region, 10), 10 * region * PAGE).unwrap();
        }
        reader.finish().unwrap();
        for (from, to) in from.regions().iter().zip(to.regions()).enumerate().map(|(number, pair)| {
            let bytes = 10 * number * PAGE as usize..10 * (number + 1) * PAGE as usize;
            (contents(pair.0)[bytes.clone()].to_vec(), contents(pair.1)[bytes].to_vec())
        }) {
            assert!(from == to);
        }
    }
}

/// The guest writes all the time; when it has stopped, one more round makes the file what memory is.
#[test]
fn many_threads_write_one_file_from_memory_that_changes() {
    const THREADS: u64 = 4;
    let pages = 2048;
    let dir = disk();
    for how in ways() {
        for direct in [false, true] {
            let path = dir.path().join(format!("{how:?}-{direct}"));
            let Some(file) = (if direct { open_direct(&path) } else { open(&path, NEW).ok() }) else { continue };
            let (from, to) = pair(pages);
            let turns = Turns::default();
            let round = |write: bool, of: &GuestMemory| {
                thread::scope(|scope| {
                    for thread in 0..THREADS {
                        let mut queue = queue(of, &file, how).taking(&turns);
                        scope.spawn(move || {
                            for first in (16 * thread..pages).step_by(16 * THREADS as usize) {
                                let range = PageRange::new(first, 16);
                                let asked = if write {
                                    queue.write(0, range, first * PAGE)
                                } else {
                                    queue.read(0, range, first * PAGE)
                                };
                                asked.unwrap();
                            }
                            queue.finish().unwrap();
                        });
                    }
                });
            };
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for number in 0.. {
                        put(&from, number * 7 % pages, number);
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
                (0..3).for_each(|_| round(true, &from));
                stop.store(true, Ordering::Relaxed);
            });
            round(true, &from);
            round(false, &to);
            assert!(contents(&from.regions()[0]) == contents(&to.regions()[0]), "{how:?}, direct {direct}");
            let disk = std::fs::read(&path).unwrap();
            assert!(disk == contents(&from.regions()[0]));
        }
    }
}

#[test]
fn a_buffer_of_pages_is_aligned_zero_and_as_long_as_asked() {
    for pages in [0, 1, 3, 300] {
        let mut buffer = PageBuffer::new(pages);
        assert_eq!(buffer.bytes().len() as u64, pages as u64 * PAGE);
        assert!(buffer.bytes().iter().all(|&byte| byte == 0));
        buffer.bytes_mut().fill(1);
        let moved = buffer;
        assert!(moved.bytes().iter().all(|&byte| byte == 1));
        assert_eq!(moved.bytes().as_ptr().addr() as u64 % PAGE, 0);
    }
}

#[test]
fn buffers_of_a_huge_page_lie_side_by_side_and_are_their_holders_own() {
    let mut buffers = PageBuffers::default();
    let pages = [128, 128, 1, 300, 128, 600, 7];
    let mut taken = pages.map(|pages| buffers.take(pages));
    drop(buffers);
    (1..).zip(&mut taken).for_each(|(number, buffer)| buffer.bytes_mut().fill(number));
    let starts = taken.each_ref().map(|buffer| buffer.bytes().as_ptr().addr() as u64);
    assert_eq!(starts[0] % (512 * PAGE), 0);
    assert_eq!([starts[1] - starts[0], starts[2] - starts[1]], [128 * PAGE; 2]);
    for ((number, buffer), pages) in (1..).zip(taken).zip(pages) {
        assert_eq!(buffer.pages(), pages);
        assert_eq!(buffer.bytes().as_ptr().addr() as u64 % PAGE, 0);
        assert!(buffer.bytes().iter().all(|&byte| byte == number), "the others are gone or were filled since");
    }
}
