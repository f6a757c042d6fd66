//! Memory files as guests have them.

pub(crate) mod mounts;
pub(crate) mod process;

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::MemfdFlags;
use transship_lab::{keep_huge_pages, lacks};
use transship_memory::{
    Access, ByteRange, Error, PAGE_BYTES, PageCount, PageNumber, PageRange, Region, WindowBuffer, WindowPages,
};

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

/// What is read of a window, or copied, is what its pages hold one by one, with and without a look for zeros.
pub(crate) fn is_read_as_it_is(region: &Region, wanted: WindowPages) {
    let page = |number: PageNumber| {
        let mut page = vec![0; PAGE_BYTES];
        region.copy_to(number.run(PageCount::ONE), &mut page).unwrap();
        page
    };
    let bytes_of = |pages: WindowPages| pages.iter().flat_map(page).collect::<Vec<u8>>();
    let is_zero = |number: &PageNumber| page(*number).iter().all(|&byte| byte == 0);
    let zero = wanted.iter().filter(is_zero).fold(0, |mask, page| mask | 1 << page.since(wanted.first).get());
    let mut buffer = WindowBuffer::default();
    // Each finds what the one before has left in the buffer.
    for (look, zero) in [(false, 0), (true, zero), (false, 0)] {
        let present = wanted.without(zero);
        let read = region.read_window(wanted, look, &mut buffer).unwrap();
        assert_eq!((read.zero_mask(), read.present()), (zero, present), "{wanted:?}");
        for part in [present, present.with(present.mask & 0xf0f0_5555_0000_ffff_8001_7ffe_3333_0ff0)] {
            let mut out = vec![1];
            read.copy_out(part, &mut out);
            assert!(out[0] == 1 && out[1..] == bytes_of(part), "{part:?} of {wanted:?}");
            let mut room = vec![1; part.bytes() as usize];
            read.copy_to(part, &mut room);
            assert!(room == bytes_of(part), "{part:?} of {wanted:?}");
        }
        assert!(read.into_bytes() == bytes_of(present), "{wanted:?}");
        assert!(buffer.bytes() == bytes_of(present), "{wanted:?}");
    }
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
