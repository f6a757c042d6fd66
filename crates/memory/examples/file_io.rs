//! How fast pages go to a file and come back, by each way: a table for the machine and the directory that it is run on.
//!
//! ```text
//! cargo run --release -p transship-memory --example file_io -- DIRECTORY [MIB]
//! ```
//!
//! Each row writes and reads one file of MIB (1024) MiB of a tmpfs region, on one thread, three times, and shows the
//! median. "64 KiB of 128" is every second 16 pages, "single pages" is every second page: then a request can't be more
//! than that. Reading goes into holes, as in a restore. Where it is not direct I/O, writing ends when all is in the
//! page cache, and reading comes from there.

use std::{
    error::Error,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags},
    time::{ClockId, clock_gettime},
};
use transship_memory::{Access, ByteRange, FileIo, FileQueue, GuestMemory, PAGE_BYTES, PageRange, Region, WindowPages};

const PAGE: u64 = PAGE_BYTES as u64;

/// Runs of `count` pages, each `step` pages behind the one before.
struct Pattern {
    name: &'static str,
    count: u64,
    step: u64,
}

const PATTERNS: [Pattern; 3] = [
    Pattern { name: "everything", count: 128, step: 128 },
    Pattern { name: "64 KiB of 128", count: 16, step: 32 },
    Pattern { name: "single pages", count: 1, step: 2 },
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().ok_or("which directory?")?);
    let mib: u64 = arguments.next().map_or(Ok(1024), |text| text.parse())?;
    let path = directory.join("transship-file-io");
    let result = table(&path, mib << 20);
    let _ = std::fs::remove_file(path);
    result
}

fn table(path: &Path, bytes: u64) -> Result<(), Box<dyn Error>> {
    let (from, to) = (memory(bytes)?, memory(bytes)?);
    // Content that no disk makes smaller.
    for first in (0..bytes / PAGE).step_by(128) {
        let words = (0..128 * PAGE / 8).map(|word| (first * 512 + word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        from.regions()[0]
            .write_pages(WindowPages::new(first, u128::MAX), &words.flat_map(u64::to_ne_bytes).collect::<Vec<_>>())?;
    }
    println!("{:>8} {:>13} {:>6} {:>5}  {:>12} {:>12}", "", "", "", "", "write", "read");
    println!(
        "{:>8} {:>13} {:>6} {:>5}  {:>12} {:>12}",
        "file", "pages", "way", "depth", "MB/s  ms CPU", "MB/s  ms CPU"
    );
    for direct in [true, false] {
        for pattern in &PATTERNS {
            for (how, depth) in [(FileIo::Plain, 1), (FileIo::Uring, 4), (FileIo::Uring, 16), (FileIo::Uring, 64)] {
                let open = || open(path, direct);
                let written = median(|| moved(&from, open()?, (how, depth), pattern, FileQueue::write))?;
                let read = median(|| {
                    to.regions()[0].clear(PageRange::new(0, bytes / PAGE))?;
                    moved(&to, open()?, (how, depth), pattern, FileQueue::read)
                })?;
                let kind = if direct { "direct" } else { "buffered" };
                let cell = |(rate, cpu): (f64, f64)| format!("{rate:.0} {cpu:>5.0}");
                let name = pattern.name;
                println!("{kind:>8} {name:>13} {how:>6?} {depth:>5}  {:>12} {:>12}", cell(written), cell(read));
            }
        }
    }
    Ok(())
}

fn memory(bytes: u64) -> Result<GuestMemory, Box<dyn Error>> {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(GuestMemory::new(vec![Region::map("ram", file, ByteRange::sized(0, bytes), Access::ReadWrite)?]))
}

fn open(path: &Path, direct: bool) -> Result<OwnedFd, Box<dyn Error>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let flags = if direct { flags | OFlags::DIRECT } else { flags };
    Ok(rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?)
}

type Ask = fn(&mut FileQueue, usize, PageRange, u64) -> Result<(), transship_memory::Error>;

/// MB/s, and milliseconds of CPU time.
fn moved(
    memory: &GuestMemory,
    file: OwnedFd,
    (how, depth): (FileIo, u16),
    pattern: &Pattern,
    ask: Ask,
) -> Result<(f64, f64), Box<dyn Error>> {
    let pages = memory.regions()[0].pages();
    if rustix::fs::fstat(&file)?.st_size == 0 {
        // As a saver does: a file that grows is written by one at a time.
        rustix::fs::ftruncate(&file, pages.bytes())?;
    }
    let (begun, cpu) = (Instant::now(), clock_gettime(ClockId::ProcessCPUTime));
    let mut queue = FileQueue::new(memory.clone(), file, depth, how)?;
    let mut bytes = 0;
    for first in (0..pages.get()).step_by(pattern.step as usize) {
        let range = PageRange::new(first, pattern.count);
        ask(&mut queue, 0, range, first * PAGE)?;
        bytes += range.bytes();
    }
    queue.finish()?;
    drop(queue);
    let cpu_ms = (clock_gettime(ClockId::ProcessCPUTime) - cpu).tv_nsec as f64 / 1e6
        + (clock_gettime(ClockId::ProcessCPUTime) - cpu).tv_sec as f64 * 1e3;
    Ok((bytes as f64 / 1e6 / begun.elapsed().as_secs_f64(), cpu_ms))
}

/// Of three, by the rate.
fn median(mut once: impl FnMut() -> Result<(f64, f64), Box<dyn Error>>) -> Result<(f64, f64), Box<dyn Error>> {
    let mut results = [once()?, once()?, once()?];
    results.sort_by(|one, other| one.0.total_cmp(&other.0));
    Ok(results[1])
}
