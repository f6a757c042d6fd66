//! Ways, files, and pages that tell their numbers.
use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;
use transship_lab::lacks;
use transship_memory::{Access, FileIo, FileQueue, GuestMemory, WindowPages};

use crate::common::{HUGE, PAGE, file, map, page_of};

/// The ways that this machine has.
pub(super) fn ways() -> Vec<FileIo> {
    let uring = FileQueue::new(GuestMemory::new(vec![]), file(PAGE), 1, FileIo::Uring);
    match uring {
        Ok(_) => vec![FileIo::Auto, FileIo::Plain, FileIo::Uring],
        Err(why) => {
            lacks(why);
            vec![FileIo::Auto, FileIo::Plain]
        }
    }
}

/// Where the project's tests may write; a disk on most machines.
pub(super) fn disk() -> TempDir {
    tempfile::tempdir().unwrap()
}

pub(super) fn open(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
}

pub(super) const NEW: OFlags = OFlags::RDWR.union(OFlags::CREATE);

/// Opens for direct I/O; none, with a word about it, where the file system has no such thing.
pub(super) fn open_direct(path: &Path) -> Option<OwnedFd> {
    open(path, NEW | OFlags::DIRECT)
        .inspect_err(|why| lacks(format_args!("{} for direct I/O: {why}", path.display())))
        .ok()
}

/// A region of pages that tell their numbers, and one that holds nothing.
pub(super) fn pair(pages: u64) -> (GuestMemory, GuestMemory) {
    let (from, to) = (file(pages * PAGE), file(pages * PAGE));
    (filled(&from, pages), memory(&to, pages))
}

pub(super) fn memory(file: &OwnedFd, pages: u64) -> GuestMemory {
    GuestMemory::new(vec![map(file, pages * PAGE, Access::ReadWrite)])
}

fn filled(file: &OwnedFd, pages: u64) -> GuestMemory {
    let memory = memory(file, pages);
    (0..pages).for_each(|page| put(&memory, page, page));
    memory
}

/// Makes a page that of `number`.
pub(super) fn put(memory: &GuestMemory, page: u64, number: u64) {
    memory.regions()[0].write_pages(WindowPages::new(page, 1), &page_of(number)).unwrap();
}

pub(super) fn queue(memory: &GuestMemory, file: impl AsFd, how: FileIo) -> FileQueue {
    FileQueue::new(memory.clone(), rustix::io::dup(file).unwrap(), 8, how).unwrap()
}

/// Runs of all kinds: single pages, neighbours asked for one by one, more than a request takes, backwards.
pub(super) const RUNS: [(u64, u64); 9] =
    [(0, 1), (1, 1), (2, 5), (9, 1), (11, 600), (1000, 1), (800, 3), (799, 1), (1023, 1)];

pub(super) fn is_in_runs(page: u64) -> bool {
    RUNS.iter().any(|&(first, count)| (first..first + count).contains(&page))
}

pub(super) fn huge_filled(file: &OwnedFd) -> GuestMemory {
    filled(file, 2 * HUGE / PAGE)
}
