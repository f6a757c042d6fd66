//! What this machine is, has room for, and reads in a second.
use std::{
    fs,
    hint::black_box,
    path::Path,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{guest_memory::is_huge_mount, units};

/// For two QEMUs, two transships and the rest of the machine.
const MEMORY_BESIDE: u64 = 3 << 29;
/// Far more than any cache holds.
const SCAN_BYTES: u64 = 1 << 30;
const SCAN_PASSES: u32 = 5;

/// Where it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    pub(crate) transship: String,
    /// A build without optimisation says nothing about speed.
    pub(crate) optimised: bool,
}

impl Machine {
    pub(crate) fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: cpu.map_or("unknown CPU", |(_, name)| name).trim().to_owned(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: meminfo("MemTotal").unwrap_or(0),
            kernel: kernel.trim().to_owned(),
            transship: env!("CARGO_PKG_VERSION").to_owned(),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// In a few words, with the QEMU that it was measured beside.
    pub(crate) fn title(&self, qemu: &str) -> String {
        let Self { cpu, cores, kernel, transship, .. } = self;
        format!("transship {transship}, QEMU {qemu} · {cpu}, {cores} cores, Linux {kernel}")
    }

    /// A line, or nothing.
    pub(crate) fn warning(&self) -> &'static str {
        if self.optimised { "" } else { "This is a debug build of transship: its times say nothing.\n" }
    }
}

/// Processes that want to run, on average over the last minute.
pub(crate) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

/// Is there room for the memory of both guests in the file system of `folder`, and for the rest beside it?
pub(crate) fn check_room(guest_bytes: u64, folder: &Path, huge: bool) -> Result<(), String> {
    let both = 2 * guest_bytes;
    let room = room(folder, huge)?;
    let what = format!("two guests of {}", units::bytes(guest_bytes));
    if room < both {
        let cure = if huge { "reserve more huge pages (vm.nr_hugepages)" } else { "enlarge it" };
        let (folder, room) = (folder.display(), units::bytes(room));
        return Err(format!("{folder} has room for {room}, too little for {what}: {cure}, or measure less with --mem"));
    }
    let available = available_memory()?;
    // Huge pages are set aside already.
    let needed = if huge { MEMORY_BESIDE } else { both + MEMORY_BESIDE };
    if available < needed {
        let (available, needed) = (units::bytes(available), units::bytes(needed));
        return Err(format!("{available} of memory are available, but {what} need {needed}: measure less with --mem"));
    }
    Ok(())
}

/// Bytes that can be used without pushing out what is in use.
pub(crate) fn available_memory() -> Result<u64, String> {
    meminfo("MemAvailable").ok_or_else(|| "/proc/meminfo does not say how much memory is available".into())
}

/// Does the disk of `folder` have room for so much?
pub(crate) fn check_disk(folder: &Path, bytes: u64) -> Result<(), String> {
    let room = room(folder, false)?;
    if room >= bytes {
        return Ok(());
    }
    let (folder, room, bytes) = (folder.display(), units::bytes(room), units::bytes(bytes));
    Err(format!(
        "{folder} has room for {room}, and files may need {bytes}: name another --dir, or measure less with --mem"
    ))
}

pub(crate) fn room(folder: &Path, huge: bool) -> Result<u64, String> {
    let limits = rustix::fs::statvfs(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let room = limits.f_bavail * limits.f_frsize;
    if !huge || limits.f_blocks > 0 {
        return Ok(room);
    }
    // A hugetlbfs without a limit of its own says nothing: what counts are the pages that are set aside.
    let pages = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", limits.f_bsize >> 10);
    let count = |name: &str| {
        let text = fs::read_to_string(format!("{pages}/{name}")).map_err(|error| format!("{pages}/{name}: {error}"))?;
        text.trim().parse::<u64>().map_err(|error| format!("{pages}/{name}: {error}"))
    };
    Ok(count("free_hugepages")?.saturating_sub(count("resv_hugepages")?) * limits.f_bsize)
}

const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// Is it a hugetlbfs?
pub(crate) fn is_hugetlbfs(folder: &Path) -> Result<bool, String> {
    let fs = rustix::fs::statfs(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(fs.f_type as u32 == HUGETLBFS_MAGIC)
}

/// Is it a hugetlbfs whose pages the memory is a multiple of, or a tmpfs of huge pages?
pub(crate) fn check_huge(folder: &Path, guest_bytes: u64) -> Result<(), String> {
    let name = folder.display();
    let fs = rustix::fs::statfs(folder).map_err(|error| format!("--huge {name}: {error}"))?;
    if fs.f_type as u32 != HUGETLBFS_MAGIC {
        if is_huge_mount(folder)? {
            return Ok(());
        }
        return Err(format!("--huge {name}: it is no hugetlbfs; make one with `mount -t hugetlbfs none {name}`"));
    }
    let page = u64::try_from(fs.f_bsize).unwrap_or(0).max(1);
    if !guest_bytes.is_multiple_of(page) {
        return Err(format!("--mem must be a multiple of {}, the page size of {name}", units::bytes(page)));
    }
    Ok(())
}

fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Bytes a second that so many threads together read at best, each from populated private memory of its own.
pub(crate) fn scan_bandwidth(threads: usize) -> Result<f64, String> {
    let available = meminfo("MemAvailable").unwrap_or(0);
    let bytes = SCAN_BYTES.min(available / 4) as usize / threads;
    let barrier = Barrier::new(threads);
    let passes: Vec<Vec<Duration>> = thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(|| scan_passes(bytes, &barrier))).collect();
        all.into_iter()
            .map(|thread| thread.join().map_err(|_| "a scanning thread panicked".to_owned()))
            .collect::<Result<_, _>>()
    })?;
    // A pass is over when its last thread is done.
    let slowest = |pass: usize| passes.iter().map(|times| times[pass]).max().unwrap_or_default();
    let best = (0..SCAN_PASSES as usize).map(slowest).min().unwrap_or_default();
    Ok((bytes * threads) as f64 / best.as_secs_f64())
}

fn scan_passes(bytes: usize, barrier: &Barrier) -> Vec<Duration> {
    // Ones, since zeroed memory would be the kernel's one zero page again and again.
    let memory = vec![1_u8; bytes];
    let pass = |_| {
        barrier.wait();
        let begin = Instant::now();
        // It is not among them, so all of them are read, in the widest pieces that the machine has.
        black_box(memchr::memchr(2, black_box(&memory)));
        begin.elapsed()
    };
    (0..SCAN_PASSES).map(pass).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn too_much_memory_is_refused_with_what_to_do() {
        let error = check_room(1 << 50, Path::new("/dev/shm"), false).unwrap_err();
        assert!(error.contains("two guests of 1024 TiB") && error.contains("--mem"), "{error}");
        let error = check_room(1 << 50, Path::new("/dev/shm"), true).unwrap_err();
        assert!(error.contains("vm.nr_hugepages"), "{error}");
        assert!(room(Path::new("/dev/shm"), false).unwrap() > 0);
        let error = check_huge(Path::new("/proc"), 1 << 30).unwrap_err();
        assert!(error.contains("no hugetlbfs"), "{error}");
    }

    #[test]
    fn the_machine_knows_itself() {
        let machine = Machine::here();
        assert!(machine.cores > 0 && machine.memory_bytes > 1 << 20 && !machine.kernel.is_empty(), "{machine:?}");
    }
}
