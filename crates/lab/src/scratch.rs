//! Folders that go away.
use crate::{Result, failed};
use rustix::fs::IFlags;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const PREFIX: &str = "transship-lab-";

/// A folder in memory (`/dev/shm`) for guest memory files and sockets, removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        release(self.folder.path());
    }
}

impl Scratch {
    /// Makes one, in the folder that `TRANSSHIP_SCRATCH` names if it is set.
    ///
    /// # Errors
    /// There is no room.
    pub fn new() -> Result<Self> {
        Self::within(&base())
    }

    /// Makes one where files are on a disk as a rule, for direct I/O and for more than memory holds.
    ///
    /// # Errors
    /// There is no room.
    pub fn on_disk() -> Result<Self> {
        Self::within(&std::env::temp_dir())
    }

    /// Makes one in another place, such as a hugetlbfs.
    ///
    /// # Errors
    /// There is no room.
    pub fn within(base: &Path) -> Result<Self> {
        remove_what_the_dead_left(base);
        // The name says whose it is, so that the next run can tell that it is nobody's any more.
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(base);
        Ok(Self { folder: folder.map_err(failed(format!("can't make a folder in {}", base.display())))? })
    }

    /// Where [`Scratch::new`] makes them.
    pub fn base() -> PathBuf {
        base()
    }

    /// Removes all that this process has made in `base`, for a program that a signal is about to end.
    pub fn remove_all(base: &Path) {
        remove_all_of(those_of(base, |owner| owner == std::process::id()));
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A path in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn base() -> PathBuf {
    if let Some(base) = std::env::var_os("TRANSSHIP_SCRATCH") {
        return base.into();
    }
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() }
}

/// A test run that was killed leaves its folders, and they hold memory.
fn remove_what_the_dead_left(base: &Path) {
    remove_all_of(left_by_the_dead(base));
}

/// What processes that have ended left in `base`.
pub(crate) fn left_by_the_dead(base: &Path) -> Vec<PathBuf> {
    those_of(base, |owner| !Path::new(&format!("/proc/{owner}")).exists())
}

fn those_of(base: &Path, is_wanted: impl Fn(u32) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    let wanted = entries.filter(|entry| {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|n| n.strip_prefix(PREFIX)?.split('-').next()?.parse::<u32>().ok());
        owner.is_some_and(&is_wanted)
    });
    wanted.map(|entry| entry.path()).collect()
}

fn remove_all_of(folders: Vec<PathBuf>) {
    for folder in folders {
        release(&folder);
        // Another test process may be removing it too.
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// Lets files be removed that are immutable, as those of an image are.
pub(crate) fn release(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => release(&path),
            Ok(kind) if kind.is_file() => {
                let Ok(file) = std::fs::File::open(&path) else { continue };
                let flags = rustix::fs::ioctl_getflags(&file).unwrap_or(IFlags::empty());
                if flags.contains(IFlags::IMMUTABLE) {
                    // What can't be released stays, and is nobody's any more.
                    let _ = rustix::fs::ioctl_setflags(&file, flags - IFlags::IMMUTABLE);
                }
            }
            _ => {}
        }
    }
}
