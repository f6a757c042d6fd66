//! What is open of QEMU's process. Whoever has given up the right to open it reads it all the same, and it is of this
//! very process: a number that the kernel gives to another one later leads nowhere from here.
use std::{
    fs::File,
    io::{self, Read, Seek},
    path::{Path, PathBuf},
};

use transship_guest::GuestError;

use super::maps::{self, FileId, Mapping};

/// The files, each open from its first use on.
pub(super) struct Opened {
    pid: i32,
    maps: Option<File>,
    smaps: Option<File>,
    memory: Option<File>,
    /// Files that back its memory, and how they are reached from here; by backend, and the name that it has.
    found: Vec<((String, PathBuf), (PathBuf, FileId))>,
}

impl Opened {
    pub(super) fn of(pid: i32) -> Self {
        Self { pid, maps: None, smaps: None, memory: None, found: Vec::new() }
    }

    /// All mappings of QEMU, ascending, as they are now.
    pub(super) fn mappings(&mut self) -> Result<Vec<Mapping>, GuestError> {
        let text = read_again(&mut self.maps, self.pid, "maps").map_err(|source| maps::unread(self.pid, source))?;
        Ok(maps::parse(&text))
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

fn opened<'f>(file: &'f mut Option<File>, pid: i32, name: &str) -> io::Result<&'f File> {
    if file.is_none() {
        *file = Some(File::open(format!("/proc/{pid}/{name}"))?);
    }
    file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn read_again(file: &mut Option<File>, pid: i32, name: &str) -> io::Result<Vec<u8>> {
    let mut file = opened(file, pid, name)?;
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
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
        drop(region);
        assert!(!shows_it(&mut ours));
    }
}
