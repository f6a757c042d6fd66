//! What is kept of a guest that was handed over before its pages, for a process that a person starts when all are dead
//! that had it: `transship move --recover`. A file for each VMM, by the number of its process; whoever serves the pages
//! holds a lock of it.
//!
//! Its lines are added one by one, each by one call: what was handed over; that it was, perhaps; each process that has
//! taken over since. An empty one says that there is nothing to recover.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};
use transship_engine::HandedOver;

use crate::{output, runtime::Folder};

/// Held by this process, or handed on to another with its descriptor.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    /// Its place, and who had the guest; none: they are another process's to know.
    of: Option<(PathBuf, Vmm)>,
}

/// A process that no other can be taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Vmm {
    pid: i32,
    /// In the kernel's ticks since the host was started.
    started: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Entry {
    /// What is about to be handed over.
    HandedOver { vmm: Vmm, what: HandedOver },
    /// From now on the guest may be the destination's.
    Given,
    /// A process has taken over.
    Recovered,
}

/// What there is to go on with.
#[derive(Debug)]
pub(crate) struct Unfinished {
    pub(crate) what: HandedOver,
    /// So many processes have taken over before.
    pub(crate) before: u32,
}

impl Journal {
    /// An empty one for the VMM that is this process.
    ///
    /// # Errors
    /// It can't be kept. The text says why.
    pub(crate) fn begin(pid: i32) -> Result<Self, String> {
        let folder = Folder::HandedOver.made()?;
        sweep(&folder);
        let journal = Self::lock(&folder, pid)?;
        journal.file.set_len(0).map_err(|error| error.to_string())?;
        Ok(journal)
    }

    /// That of the VMM that is this process, if its guest was handed over and nobody serves its pages any more. The
    /// next to take over will find that this process has.
    ///
    /// # Errors
    /// There is nothing to take over. The text says why.
    pub(crate) fn take_over(pid: i32) -> Result<(Self, Unfinished), String> {
        let folder = Folder::HandedOver.path()?;
        let there = folder.join(pid.to_string());
        let none = "there is no record of a guest of this VMM that was handed over before its pages and lacks some";
        if !there.exists() {
            return Err(format!("{none}: {} does not exist", there.display()));
        }
        let mut journal = Self::lock(&folder, pid)?;
        let mut text = String::new();
        journal.file.read_to_string(&mut text).map_err(|error| format!("can't read {}: {error}", there.display()))?;
        let vmm = Vmm::of(pid)?;
        let unfinished = read(&text, vmm).map_err(|why| format!("{none}: {}: {why}", there.display()))?;
        journal.add(&Entry::Recovered).map_err(|error| format!("can't write to {}: {error}", there.display()))?;
        Ok((journal, unfinished))
    }

    /// One that another process has opened.
    pub(crate) fn passed(file: OwnedFd) -> Self {
        Self { file: file.into(), of: None }
    }

    fn lock(folder: &Path, pid: i32) -> Result<Self, String> {
        let path = folder.join(pid.to_string());
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let vmm = Vmm::of(pid)?;
        loop {
            let mut how = OpenOptions::new();
            how.read(true).append(true).create(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
            let file = how.open(&path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err("another transship still serves the pages of this VMM's guest".into());
                }
                Err(error) => return Err(failed(error.into())),
            }
            // Whoever had it may have removed it meanwhile.
            let is_there = fs::symlink_metadata(&path).is_ok_and(|there| is_same(&file, &there));
            if is_there {
                return Ok(Self { file, of: Some((path, vmm)) });
            }
        }
    }

    /// Where it is, if that is known.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.of.as_ref().map(|(path, _)| path.as_path())
    }

    /// The lock goes with it.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// What is about to be handed over: a [`HandedOver`] in JSON. If it can't be kept the user is told.
    pub(crate) fn note(&mut self, record: &str) {
        let Some((_, vmm)) = self.of else { return };
        let what = serde_json::from_str(record).map_err(io::Error::other);
        if let Err(error) = what.and_then(|what| self.add(&Entry::HandedOver { vmm, what })) {
            output::complain(&cant_keep(&error.to_string()));
        }
    }

    /// Said before it is so.
    pub(crate) fn given(&mut self) {
        // What can't be written now is missed only if it is looked for.
        let _ = self.add(&Entry::Given);
    }

    fn add(&mut self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        self.file.write_all(&line)
    }

    /// There is nothing to recover. A process that has no right to remove the file leaves an empty one.
    pub(crate) fn erase(&mut self) {
        // It is about a guest that is whole, or is not the destination's: at worst it is refused later.
        let _ = self.file.set_len(0).and_then(|()| self.file.rewind());
        if let Some((path, _)) = &self.of {
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // Of a guest that was not handed over.
        if let Some((path, _)) = &self.of
            && self.file.metadata().is_ok_and(|file| file.len() == 0)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// That a third process could not go on.
pub(crate) fn cant_keep(why: &str) -> String {
    format!("`transship move --recover` won't find this guest if all processes of this move are killed: {why}")
}

/// Removes a journal that says nothing, if nobody holds it. For a process that has kept the right to.
pub(crate) fn remove_empty(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    let is_empty = || fs::symlink_metadata(path).is_ok_and(|there| there.len() == 0 && is_same(&file, &there));
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_empty() {
        let _ = fs::remove_file(path);
    }
}

fn is_same(file: &File, there: &fs::Metadata) -> bool {
    file.metadata().is_ok_and(|here| (here.dev(), here.ino()) == (there.dev(), there.ino()))
}

/// Removes those of VMMs that have ended: nobody has that memory any more.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if pid.is_some_and(|pid| Vmm::of(pid).is_err()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn read(text: &str, vmm: Vmm) -> Result<Unfinished, String> {
    let entries = text.lines().map(serde_json::from_str).collect::<Result<Vec<Entry>, _>>();
    let mut entries = entries.map_err(|error| error.to_string())?.into_iter();
    let what = match entries.next() {
        None => return Err("it is empty".into()),
        Some(Entry::HandedOver { vmm: had, what }) if had == vmm => what,
        Some(Entry::HandedOver { .. }) => return Err("it is of a process that has ended".into()),
        Some(Entry::Given | Entry::Recovered) => return Err("it has no beginning".into()),
    };
    match entries.next() {
        Some(Entry::Given) => {}
        _ => return Err("the guest was not handed over; it is here, so let it run here".into()),
    }
    Ok(Unfinished { what, before: u32::try_from(entries.count()).unwrap_or(u32::MAX) })
}

impl Vmm {
    fn of(pid: i32) -> Result<Self, String> {
        let stat =
            fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|error| format!("process {pid}: {error}"))?;
        // The name, in brackets, may hold anything; behind it come the fields from the third on.
        let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
        let started = behind.split_whitespace().nth(22 - 3).and_then(|field| field.parse().ok());
        let started = started.ok_or_else(|| format!("process {pid}: when it was started is not known"))?;
        Ok(Self { pid, started })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const WHAT: &str =
        r#"{"session":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"channels":2,"ran":true,"regions":[["mem0",4096]]}"#;

    fn here() -> i32 {
        std::process::id() as i32
    }

    fn text(folder: &Path) -> String {
        fs::read_to_string(folder.join(here().to_string())).unwrap()
    }

    #[test]
    fn what_is_unfinished_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::lock(folder.path(), here()).unwrap();
        let vmm = Vmm::of(here()).unwrap();
        let why = |text: &str| read(text, vmm).unwrap_err();
        assert!(why(&text(folder.path())).contains("empty"));
        journal.note(WHAT);
        assert!(why(&text(folder.path())).contains("was not handed over"));
        journal.given();
        let before = |text: &str| read(text, vmm).map(|unfinished| unfinished.before);
        assert_eq!(before(&text(folder.path())), Ok(0));
        journal.add(&Entry::Recovered).unwrap();
        assert_eq!(before(&text(folder.path())), Ok(1));
        let other = Vmm { started: vmm.started + 1, ..vmm };
        assert!(read(&text(folder.path()), other).unwrap_err().contains("has ended"));
        journal.erase();
        assert!(!folder.path().join(here().to_string()).exists());
    }

    #[test]
    fn only_one_process_serves() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::lock(folder.path(), here()).unwrap();
        journal.note(WHAT);
        assert!(Journal::lock(folder.path(), here()).unwrap_err().contains("still serves"));
        let passed = Journal::passed(journal.fd().try_clone_to_owned().unwrap());
        drop(journal);
        assert!(Journal::lock(folder.path(), here()).is_err(), "the descriptor has the lock");
        drop(passed);
        Journal::lock(folder.path(), here()).unwrap();
    }

    #[test]
    fn only_an_empty_one_that_nobody_holds_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(here().to_string());
        let mut journal = Journal::lock(folder.path(), here()).unwrap();
        remove_empty(&path);
        assert!(path.exists(), "somebody holds it");
        journal.note(WHAT);
        drop(journal);
        remove_empty(&path);
        assert!(path.exists(), "there is something to recover");
        let mut journal = Journal::passed(File::options().append(true).open(&path).unwrap().into());
        journal.erase();
        assert!(path.exists(), "whoever knows no place removes nothing");
        drop(journal);
        remove_empty(&path);
        assert!(!path.exists());
    }

    #[test]
    fn those_of_processes_that_have_ended_are_swept_away() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (ended, runs, strange) = (child.id().to_string(), here().to_string(), "notes".to_owned());
        for name in [&ended, &runs, &strange] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        sweep(folder.path());
        let is_there = [&ended, &runs, &strange].map(|name| folder.path().join(name).exists());
        assert_eq!(is_there, [false, true, true]);
    }
}
