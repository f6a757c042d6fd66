//! The host's pool of huge pages, of a size that a test chooses, and file systems of a limited size.
use std::{
    fs::{self, File},
    path::Path,
    process::Command,
    sync::OnceLock,
    time::{Duration, Instant},
};

use rustix::fs::FlockOperation;

use crate::{LabError, Result, Scratch, failed};

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const PAGE_MIB: u64 = 2;
/// How long the pages of a process that has ended may take to be in the pool again.
const GIVING_BACK_WAIT: Duration = Duration::from_secs(2);

/// A file system for guest memory, mounted for as long as this lives. Needs root.
#[derive(Debug)]
pub struct MemoryMount {
    folder: Scratch,
}

impl MemoryMount {
    /// A tmpfs of so many MiB.
    ///
    /// # Errors
    /// It can't be mounted.
    pub fn tmpfs(mib: u64) -> Result<Self> {
        Self::mount("tmpfs", &format!("size={mib}M"))
    }

    /// A hugetlbfs of pages of a size that the processor has, such as `2M`. Its pages come from the pool of that size.
    ///
    /// # Errors
    /// As [`MemoryMount::tmpfs`].
    pub fn hugetlbfs(page: &str) -> Result<Self> {
        Self::mount("hugetlbfs", &format!("pagesize={page}"))
    }

    fn mount(kind: &str, options: &str) -> Result<Self> {
        let folder = Scratch::new()?;
        let mut command = Command::new("mount");
        command.args(["-t", kind, "-o", options, "none"]).arg(folder.path());
        let output = command.output().map_err(failed("mount"))?;
        match output.status.success() {
            true => Ok(Self { folder }),
            false => Err(LabError(format!("can't mount a {kind}: {}", String::from_utf8_lossy(&output.stderr)))),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// MiB that are free in it.
    ///
    /// # Errors
    /// The system's own.
    pub fn free_mib(&self) -> Result<u64> {
        let room = rustix::fs::statvfs(self.path()).map_err(failed("can't get the free room of a file system"))?;
        Ok((room.f_bavail * room.f_frsize) >> 20)
    }
}

impl Drop for MemoryMount {
    fn drop(&mut self) {
        // Whoever still has files in it keeps it alive.
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// The pool of huge pages of 2 MiB, and a hugetlbfs on it. The host has only one: its holder keeps all others out, and
/// the pool is restored when this is dropped.
#[derive(Debug)]
pub struct HugePool {
    mount: MemoryMount,
    before: u64,
    _turn: File,
}

/// What the kernel says of the pool, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolState {
    /// Pages that nobody has.
    pub free: u64,
    /// Those of them that are set aside for somebody.
    pub reserved: u64,
}

impl PoolState {
    /// Pages that anybody can have.
    pub fn to_be_had(&self) -> u64 {
        self.free - self.reserved
    }
}

impl HugePool {
    /// Makes the pool so large that there are `mib` MiB to be had.
    ///
    /// # Errors
    /// No root, or no memory in pieces that are large enough. A test that needs the pool fails then: it can't be told
    /// whether guests are safe.
    pub fn with_mib(mib: u64) -> Result<Self> {
        let turn = take_turn(FlockOperation::LockExclusive)?;
        wait_for_pages_given_back()?;
        let before = field("HugePages_Total")?;
        let mut pool = Self { mount: MemoryMount::hugetlbfs("2M")?, before, _turn: turn };
        pool.resize(mib)?;
        Ok(pool)
    }

    /// Makes it so large that there are `mib` MiB to be had from now on.
    ///
    /// # Errors
    /// As [`HugePool::with_mib`].
    pub fn resize(&mut self, mib: u64) -> Result<()> {
        let wanted = mib / PAGE_MIB;
        let total = field("HugePages_Total")? + wanted - self.state()?.to_be_had();
        fs::write(POOL, total.to_string()).map_err(failed(format!("{POOL} (only root can change it)")))?;
        match self.state()?.to_be_had() {
            had if had == wanted => Ok(()),
            had => Err(LabError(format!(
                "this machine has no room for {wanted} huge pages of {PAGE_MIB} MiB (it made {had}), which this test needs: free some memory, \
                 or defragment it (echo 1 > /proc/sys/vm/compact_memory)"
            ))),
        }
    }

    /// Where its hugetlbfs is.
    pub fn path(&self) -> &Path {
        self.mount.path()
    }

    /// How it stands.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn state(&self) -> Result<PoolState> {
        Ok(PoolState { free: field("HugePages_Free")?, reserved: field("HugePages_Rsvd")? })
    }
}

/// Nobody makes the pool smaller or larger from now on, as long as this process lives: for one that takes huge pages as
/// it finds them.
///
/// # Errors
/// The lock can't be taken.
pub fn keep_huge_pages() -> Result<()> {
    static TURN: OnceLock<Result<File>> = OnceLock::new();
    TURN.get_or_init(|| take_turn(FlockOperation::LockShared))
        .as_ref()
        .map(drop)
        .map_err(|error| LabError(error.0.clone()))
}

/// Waits until the pool is not somebody else's.
fn take_turn(how: FlockOperation) -> Result<File> {
    let path = std::env::temp_dir().join("hugepages.lock");
    // One that another user has made can be read.
    let turn = File::open(&path).or_else(|_| File::create(&path)).map_err(failed("a lock file"))?;
    rustix::fs::flock(&turn, how).map_err(failed("can't wait for the huge pages"))?;
    Ok(turn)
}

/// Whoever had its turn before may have ended, and its pages may be on their way: they come back after its lock does.
/// Pages of others, who have them for long, are not waited for.
fn wait_for_pages_given_back() -> Result<()> {
    let deadline = Instant::now() + GIVING_BACK_WAIT;
    while field("HugePages_Free")? < field("HugePages_Total")? && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Drop for HugePool {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.before.to_string());
    }
}

fn field(name: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").map_err(failed("/proc/meminfo"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.trim().parse().ok());
    number.ok_or_else(|| LabError(format!("this kernel has no huge pages ({name}), which this test needs")))
}
