//! What is open of QEMU's process. Whoever has given up the right to open it reads it all the same, and it is of this
//! very process: a number that the kernel gives to another one later leads nowhere from here.
use std::{
    fs::File,
    io::{self, Read, Seek},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, Weak},
};

use transship_guest::GuestError;

use super::maps::{self, FileId, Mapping};

/// What the mappings of a QEMU take as text.
const TEXT_BYTES: usize = 64 << 10;

/// The files, each open from its first use on.
pub(super) struct Opened {
    pid: i32,
    maps: Option<File>,
    /// Its mappings, while somebody holds them.
    held: Weak<OnceLock<Arc<Vec<Mapping>>>>,
    smaps: Option<File>,
    memory: Option<File>,
    /// Files that back its memory, and how they are reached from here; by backend, and the name that it has.
    found: Vec<((String, PathBuf), (PathBuf, FileId))>,
}

impl Opened {
    pub(super) fn of(pid: i32) -> Self {
        Self { pid, maps: None, held: Weak::new(), smaps: None, memory: None, found: Vec::new() }
    }

    /// All mappings of QEMU, ascending, as they are now, or since they are held.
    pub(super) fn mappings(&mut self) -> Result<Arc<Vec<Mapping>>, GuestError> {
        let held = self.held.upgrade();
        if let Some(mappings) = held.as_ref().and_then(|held| held.get()) {
            return Ok(Arc::clone(mappings));
        }
        let text = read_again(&mut self.maps, self.pid, "maps").map_err(|source| maps::unread(self.pid, source))?;
        let mappings = Arc::new(maps::parse(&text));
        if let Some(held) = held {
            let _ = held.set(Arc::clone(&mappings));
        }
        Ok(mappings)
    }

    /// Until the end of what this gives, what QEMU has mapped when it is asked next counts: it takes the kernel a
    /// millisecond to tell.
    pub(super) fn hold_mappings(&mut self) -> MappingsHeld {
        let held = Arc::default();
        self.held = Arc::downgrade(&held);
        MappingsHeld { _mappings: held }
    }

    /// The same as text, with what is known of each.
    pub(super) fn smaps(&mut self) -> io::Result<Vec<u8>> {
        read_again(&mut self.smaps, self.pid, "smaps")
    }

    /// Its memory, to be read.
    pub(super) fn memory(&mut self) -> io::Result<&File> {
        opened(&mut self.memory, self.pid, "mem")
    }

    /// The file that a backend has by this name, if it was found before.
    pub(super) fn found(&self, backend: &str, name: &Path) -> Option<&(PathBuf, FileId)> {
        let is_it = |(id, known): &(String, PathBuf)| id == backend && known == name;
        self.found.iter().rev().find(|(known, _)| is_it(known)).map(|(_, found)| found)
    }

    /// It was found.
    pub(super) fn note(&mut self, backend: &str, name: &Path, found: &(PathBuf, FileId)) {
        self.found.push(((backend.to_owned(), name.to_owned()), found.clone()));
    }
}

/// While it lives, QEMU's mappings are looked up once for all who ask.
#[must_use]
pub(super) struct MappingsHeld {
    _mappings: Arc<OnceLock<Arc<Vec<Mapping>>>>,
}

fn opened<'f>(file: &'f mut Option<File>, pid: i32, name: &str) -> io::Result<&'f File> {
    if file.is_none() {
        *file = Some(File::open(format!("/proc/{pid}/{name}"))?);
    }
    file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn read_again(file: &mut Option<File>, pid: i32, name: &str) -> io::Result<Vec<u8>> {
    let mut file = opened(file, pid, name)?;
    let mut text = Vec::with_capacity(TEXT_BYTES);
    file.rewind()?;
    // With a bound its size is not asked for, which is 0, and would have it read by small pieces first.
    file.take(u64::MAX).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_open_shows_the_process_as_it_is_now() {
        let mut ours = Opened::of(std::process::id() as i32);
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 10).unwrap();
        let file_id = FileId::of(&file.metadata().unwrap());
        let shows_it = |ours: &mut Opened| ours.mappings().unwrap().iter().any(|one| one.file == file_id);
        assert!(!shows_it(&mut ours));
        let region = transship_memory::Region::map(
            "it",
            file.into(),
            transship_memory::ByteRange::sized(0, 64 << 10),
            transship_memory::Access::Read,
        );
        let region = region.unwrap();
        assert!(shows_it(&mut ours));
        let held = ours.hold_mappings();
        assert!(shows_it(&mut ours));
        drop(region);
        assert!(shows_it(&mut ours), "held");
        drop(held);
        assert!(!shows_it(&mut ours));
    }
}
