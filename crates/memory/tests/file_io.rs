//! Pages to and from real files: on the disk, by its own hand (O_DIRECT) and through the page cache, on tmpfs, and on a disk of 4 KiB sectors.
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use common::{HUGE, PAGE, contents, file, huge_file, map, mounts::with_mounts_of_its_own, page_of};
use rustix::{
    fs::{Mode, OFlags},
    mount::MountFlags,
};
use tempfile::TempDir;
use transship_memory::{Access, Error, FileIo, FileQueue, GuestMemory, PageBuffer, PageRange, Region, Turns};

/// The ways that this machine has.
fn ways() -> Vec<FileIo> {
    let uring = FileQueue::new(GuestMemory::new(vec![]), file(PAGE), 1, FileIo::Uring);
    match uring {
        Ok(_) => vec![FileIo::Auto, FileIo::Plain, FileIo::Uring],
        Err(why) => {
            eprintln!("skipped: {why}");
            vec![FileIo::Auto, FileIo::Plain]
        }
    }
}

/// Where the project's tests may write; a disk on most machines.
fn disk() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn open(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
}

const NEW: OFlags = OFlags::RDWR.union(OFlags::CREATE);

/// Opens for direct I/O; none, with a word about it, where the file system has no such thing.
fn open_direct(path: &Path) -> Option<OwnedFd> {
    open(path, NEW | OFlags::DIRECT)
        .inspect_err(|why| eprintln!("skipped: {} for direct I/O: {why}", path.display()))
        .ok()
}

/// A region of pages that tell their numbers, and one that holds nothing.
fn pair(pages: u64) -> (GuestMemory, GuestMemory) {
    let (from, to) = (file(pages * PAGE), file(pages * PAGE));
    (filled(&from, pages), memory(&to, pages))
}

fn memory(file: &OwnedFd, pages: u64) -> GuestMemory {
    GuestMemory::new(vec![map(file, pages * PAGE, Access::ReadWrite)])
}

fn filled(file: &OwnedFd, pages: u64) -> GuestMemory {
    let memory = memory(file, pages);
    (0..pages).for_each(|page| put(&memory, page, page));
    memory
}

/// Makes a page that of `number`.
fn put(memory: &GuestMemory, page: u64, number: u64) {
    memory.regions()[0].write_pages(page, 1, &page_of(number)).unwrap();
}

fn queue(memory: &GuestMemory, file: impl AsFd, how: FileIo) -> FileQueue {
    FileQueue::new(memory.clone(), rustix::io::dup(file).unwrap(), 8, how).unwrap()
}

/// Runs of all kinds: single pages, neighbours asked for one by one, more than a request takes, backwards.
const RUNS: [(u64, u64); 9] = [(0, 1), (1, 1), (2, 5), (9, 1), (11, 600), (1000, 1), (800, 3), (799, 1), (1023, 1)];

fn is_in_runs(page: u64) -> bool {
    RUNS.iter().any(|&(first, count)| (first..first + count).contains(&page))
}

/// Where the pages begin in the file.
const BASE: u64 = 3 * PAGE;

/// Writes the runs to the file and reads them into the other region; looks at the file in between by other means.
fn there_and_back(path: &Path, file: &OwnedFd, how: FileIo, (from, to): (&GuestMemory, &GuestMemory)) {
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

fn huge_filled(file: &OwnedFd) -> GuestMemory {
    filled(file, 2 * HUGE / PAGE)
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
            return eprintln!("skipped: no loop device of 4 KiB sectors is to be had");
        };
        let mounted = dir.join("mounted");
        std::fs::create_dir(&mounted).unwrap();
        let made = printed("mkfs.ext4", &["-q", "-F", &device]).is_some()
            && rustix::mount::mount(device.as_str(), &mounted, "ext4", MountFlags::empty(), None).is_ok();
        // Goes when it is unmounted, which is when this thread ends, or at once if it is not mounted.
        printed("losetup", &["--detach", &device]).unwrap();
        if !made {
            return eprintln!("skipped: mkfs.ext4 or its file system is not there");
        }
        let path = mounted.join("file");
        let direct = open_direct(&path).unwrap();
        // It is such a disk: half a page is refused.
        assert!(rustix::io::pwrite(&direct, &PageBuffer::new(1).bytes()[..512], 0).is_err());
        std::fs::remove_file(path).unwrap();
        there_and_back_in(&mounted);
    });
}

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
            let expected = "into the file of its memory: No space left on device";
            assert!(failed.starts_with("putting pages ") && failed.contains(expected), "{failed}");
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
        let expected =
            "writing pages 1..3 of region \"ram\" at byte 0x8000 of the file: No space left on device (os error 28)";
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
                    text.starts_with("reading pages 2..6 of region \"ram\" at byte 0x1000 of the file: the file has"),
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
        assert!(failed.to_string().contains("it has to be open for writing"), "{failed}");
        let mut writer = queue(&to, open(&path, OFlags::WRONLY).unwrap(), how);
        let failed = writer.read(0, PageRange::new(0, 1), 0).and_then(|()| writer.finish()).unwrap_err();
        assert!(failed.to_string().contains("it has to be open for reading"), "{failed}");
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
            assert!(matches!(queue.write(0, PageRange::new(first, count), 0), Err(Error::OutOfRange { pages: 8, .. })));
            assert!(matches!(queue.read(0, PageRange::new(first, count), 0), Err(Error::OutOfRange { pages: 8, .. })));
        }
        assert!(queue.write(1, PageRange::new(0, 1), 0).unwrap_err().to_string().contains("no such region"));
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
    let Some(before) = writes() else { return eprintln!("skipped: the kernel does not count system calls") };
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
            (0..64).for_each(|page| region.write_pages(page, 1, &page_of(number * start + page)).unwrap());
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

/// On this machine with its own disk; elsewhere direct I/O may be for nobody.
#[test]
fn auto_asks_io_uring_for_direct_io_alone() {
    let dir = disk();
    let (from, _) = pair(4);
    let buffered = open(&dir.path().join("buffered"), NEW).unwrap();
    assert!(!queue(&from, buffered, FileIo::Auto).is_uring());
    let Some(direct) = open_direct(&dir.path().join("direct")) else { return };
    assert!(!queue(&from, &direct, FileIo::Plain).is_uring());
    let has_uring = ways().contains(&FileIo::Uring);
    assert_eq!(queue(&from, &direct, FileIo::Auto).is_uring(), has_uring);
    if has_uring {
        assert!(queue(&from, &direct, FileIo::Uring).is_uring());
    }
}

/// Has the kernel refuse io_uring to this thread, as container engines do.
fn forbid_uring() {
    let statement = |code: u32, k: u32, jf: u8| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let filter = [
        // The number of the system call is first in what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 1),
        statement(libc::BPF_RET | libc::BPF_K, refused, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program and its filter are there during the call, and the kernel keeps a copy.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn where_io_uring_is_forbidden_plain_is_taken_and_a_wish_refused() {
    let run = || {
        forbid_uring();
        let dir = disk();
        let path = dir.path().join("file");
        let Some(file) = open_direct(&path) else { return };
        let (from, to) = pair(1024);
        assert!(!queue(&from, &file, FileIo::Auto).is_uring());
        there_and_back(&path, &file, FileIo::Auto, (&from, &to));
        let refused = FileQueue::new(from, file, 8, FileIo::Uring).err().unwrap();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        let refused = refused.to_string();
        assert!(refused.contains("kernel.io_uring_disabled or a seccomp filter forbids it"), "{refused}");
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap());
}

/// Pages in a file of the disk, each with its number, and an empty region of as many.
fn on_disk(dir: &TempDir, pages: u64) -> Option<(OwnedFd, GuestMemory)> {
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

/// The kernel cancels what a thread has asked for, and has not been begun when the thread ends. Writes through the page cache wait for each other.
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
