//! Memory files as guests have them.

pub(crate) mod mounts;
pub(crate) mod process;

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::MemfdFlags;
use transship_lab::{keep_huge_pages, lacks};
use transship_memory::{Access, ByteRange, Error, PAGE_BYTES, PageCount, PageRange, Region};

pub(crate) const PAGE: u64 = PAGE_BYTES as u64;
pub(crate) const HUGE: u64 = 2 << 20;

/// Makes all pages read as zero, whatever they held.
pub(crate) fn clear_all(region: &Region) -> Result<(), Error> {
    region.clear_set(&region.ready()?)
}

/// An empty file on tmpfs.
pub(crate) fn file(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

/// An empty file of 2 MiB pages; none, with a word about it, where the machine has too few.
pub(crate) fn huge_file(bytes: u64) -> Option<OwnedFd> {
    keep_huge_pages().unwrap();
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let number = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let free = number("HugePages_Free:").unwrap_or(0) - number("HugePages_Rsvd:").unwrap_or(0);
    if number("Hugepagesize:") != Some(HUGE / 1024) || free < 2 * bytes / HUGE {
        lacks("free huge pages of 2 MiB; `sysctl vm.nr_hugepages=128` makes some");
        return None;
    }
    let file =
        rustix::fs::memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    Some(file)
}

pub(crate) fn map(file: impl AsFd, bytes: u64, access: Access) -> Region {
    Region::map("ram", rustix::io::dup(file).unwrap(), ByteRange::sized(0, bytes), access).unwrap()
}

/// A page whose bytes tell its number.
pub(crate) fn page_of(number: u64) -> Vec<u8> {
    (0..PAGE).map(|at| (number.wrapping_mul(37) + at % 251) as u8 | 1).collect()
}

/// All bytes of the region. Reads holes too.
pub(crate) fn contents(region: &Region) -> Vec<u8> {
    let mut out = Vec::new();
    for window in PageRange::all(region.pages()).windows() {
        region.copy_out(window, &mut out).unwrap();
    }
    out
}

/// Regions of so many pages.
pub(crate) fn counts(pages: &[u64]) -> Vec<PageCount> {
    pages.iter().copied().map(PageCount::new).collect()
}
