//! Which kind of memory guests have, and in which state the destination's is before a move.
use std::{
    fs::{self, File},
    io::{self, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;
use transship_lab::{Backend, Qemu, QemuBuilder, Scratch};

use crate::{
    content::SourceMemory,
    machine,
    pair::text,
    rows::{FRESH, WARM},
    units,
};

/// What is written at once.
const PIECE_BYTES: usize = 1 << 20;
/// Where a PC has memory for sure, and the ROMs are behind us.
const ANCHOR: u64 = 1 << 20;

/// Guest memory, as tables are told where it can be chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::Args)]
pub struct GuestMemory {
    /// Where guest memory lies: file, ram, memfd, huge
    ///
    /// file: shared files of 4 KiB pages in /dev/shm. ram: QEMU's own, private. memfd: shared, without a name. huge:
    /// files of huge pages, in a hugetlbfs that has enough of them or in a tmpfs that is mounted with huge=always; what
    /// is measured there does not depend on how fast the kernel makes small pages.
    #[arg(long, value_enum, value_name = "KIND", default_value = "file", hide_possible_values = true)]
    pub backend: MemoryKind,
    /// The destination's memory before a move: fresh (not there yet) or warm (preallocated)
    #[arg(long, value_enum, value_name = "STATE", default_value = "fresh", hide_possible_values = true)]
    pub memory: MemoryState,
}

/// Where guest memory lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// Shared files
    #[default]
    File,
    /// QEMU's own
    Ram,
    /// Shared, without a name
    Memfd,
    /// Files of huge pages
    Huge,
}

/// What the destination's memory is before a move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryState {
    /// Not there yet
    #[default]
    Fresh,
    /// Preallocated
    Warm,
}

impl MemoryKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Ram => "ram",
            Self::Memfd => "memfd",
            Self::Huge => "huge",
        }
    }

    /// Is it in a file that can be filled from outside, and that two QEMUs can have?
    pub(crate) fn has_file(self) -> bool {
        matches!(self, Self::File | Self::Huge)
    }
}

impl GuestMemory {
    /// The file system of memory files.
    pub(crate) fn base(self, guest_bytes: u64) -> Result<PathBuf, String> {
        let base = if self.backend == MemoryKind::Huge { huge_folder(2 * guest_bytes)? } else { Scratch::base() };
        let is_huge = self.backend == MemoryKind::Huge && machine::is_hugetlbfs(&base)?;
        machine::check_room(guest_bytes, &base, is_huge)?;
        Ok(base)
    }

    /// For the column of a table: `fresh`, or `warm, ram`.
    pub(crate) fn title(self) -> String {
        match self.backend {
            MemoryKind::File => self.state().to_owned(),
            kind => format!("{}, {}", self.state(), kind.name()),
        }
    }

    /// As limits call it.
    pub(crate) fn state(self) -> &'static str {
        if self.memory == MemoryState::Warm { WARM } else { FRESH }
    }

    /// A QEMU with this kind of memory.
    pub(crate) fn of(self, qemu: QemuBuilder) -> QemuBuilder {
        match self.backend {
            MemoryKind::File | MemoryKind::Huge => qemu,
            MemoryKind::Ram => qemu.backend(Backend::Ram),
            MemoryKind::Memfd => qemu.backend(Backend::Memfd),
        }
    }

    /// As [`GuestMemory::of`], in the state that a destination's memory is to be in.
    pub(crate) fn of_destination(self, qemu: QemuBuilder) -> QemuBuilder {
        let qemu = self.of(qemu);
        if self.memory == MemoryState::Warm { qemu.memory_options("prealloc=on") } else { qemu }
    }

    /// Has the guest hold what the file holds, where the file is not its memory itself.
    pub(crate) fn fill(self, qemu: &Qemu, memory: &SourceMemory) -> Result<(), String> {
        if self.backend.has_file() {
            return Ok(());
        }
        let from = File::open(memory.path()).map_err(|error| format!("{}: {error}", memory.path().display()))?;
        let (path, address) = in_process(qemu)?;
        let failed = |error: io::Error| format!("can't fill the guest's memory in {}: {error}", path.display());
        let into = File::options().write(true).open(&path).map_err(failed)?;
        let mut piece = vec![0; PIECE_BYTES];
        for range in memory.touched()? {
            let mut at = range.start;
            while at < range.end {
                let length = (range.end - at).min(PIECE_BYTES as u64) as usize;
                from.read_exact_at(&mut piece[..length], at).map_err(failed)?;
                into.write_all_at(&piece[..length], address + at).map_err(failed)?;
                at += length as u64;
            }
        }
        Ok(())
    }

    /// All of a guest's memory, to be read from outside; it stands at its first byte, and ends with `bytes`.
    pub(crate) fn open(self, qemu: &Qemu) -> Result<File, String> {
        if self.backend.has_file() {
            let path = qemu.memory_files().first().ok_or("a QEMU without memory")?;
            return File::open(path).map_err(|error| format!("can't read {}: {error}", path.display()));
        }
        let (path, address) = in_process(qemu)?;
        let opened = File::open(&path).and_then(|mut file| file.seek(SeekFrom::Start(address)).map(|_| file));
        opened.map_err(|error| format!("can't read {}: {error}", path.display()))
    }
}

/// The memory of a QEMU's process, and where in it the guest's begins.
fn in_process(qemu: &Qemu) -> Result<(PathBuf, u64), String> {
    let command = json!({ "command-line": format!("gpa2hva {ANCHOR:#x}") });
    let answer = qemu.qmp("human-monitor-command", command).map_err(text)?;
    let said = answer.as_str().unwrap_or_default().trim();
    let number = said.rsplit("0x").next().and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let address = number.and_then(|address| address.checked_sub(ANCHOR));
    let address = address.ok_or_else(|| format!("QEMU does not say where its guest's memory is: {said:?}"))?;
    Ok((PathBuf::from(format!("/proc/{}/mem", qemu.pid())), address))
}

/// A file system of huge pages with so much room.
fn huge_folder(bytes: u64) -> Result<PathBuf, String> {
    let mounts = fs::read_to_string("/proc/mounts").map_err(|error| format!("/proc/mounts: {error}"))?;
    let folders = huge_mounts(&mounts);
    let has_room = |folder: &PathBuf| {
        let is_hugetlbfs = machine::is_hugetlbfs(folder).unwrap_or(false);
        machine::room(folder, is_hugetlbfs).is_ok_and(|room| room >= bytes)
    };
    folders.into_iter().find(has_room).ok_or_else(|| {
        let (pages, size) = (bytes.div_ceil(2 << 20), units::bytes(bytes));
        format!(
            "--backend huge: no file system of huge pages has room for {size}: mount one with `mount -t tmpfs -o \
             huge=always,size={}M none /mnt/huge`, or set pages aside with `sysctl vm.nr_hugepages={pages}` and `mount -t \
             hugetlbfs none /mnt/huge`",
            bytes >> 20
        )
    })
}

/// Where huge pages are mounted: those that are set aside first.
fn huge_mounts(mounts: &str) -> Vec<PathBuf> {
    let of = |wanted: fn(&str, &str) -> bool| {
        mounts.lines().filter_map(move |line| {
            let mut words = line.split(' ').skip(1);
            let (folder, kind, options) = (words.next()?, words.next()?, words.next()?);
            wanted(kind, options).then(|| PathBuf::from(folder))
        })
    };
    let always =
        |kind: &str, options: &str| kind == "tmpfs" && options.split(',').any(|option| option == "huge=always");
    of(|kind, _| kind == "hugetlbfs").chain(of(always)).collect()
}

/// Is it one?
pub(crate) fn is_huge_mount(folder: &Path) -> Result<bool, String> {
    let folder = folder.canonicalize().map_err(|error| format!("--huge {}: {error}", folder.display()))?;
    let mounts = fs::read_to_string("/proc/mounts").map_err(|error| format!("/proc/mounts: {error}"))?;
    Ok(huge_mounts(&mounts).iter().any(|mount| folder.starts_with(mount)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::content::{Content, first_difference};

    #[test]
    fn huge_pages_are_found_where_they_are_mounted() {
        let mounts = "tmpfs /dev/shm tmpfs rw,size=1k 0 0\nnone /mnt/a tmpfs rw,huge=always,size=2k 0 0\n\
                      none /dev/hugepages hugetlbfs rw,pagesize=2M 0 0\nnone /mnt/b tmpfs rw,huge=advise 0 0\n";
        assert_eq!(huge_mounts(mounts), [PathBuf::from("/dev/hugepages"), PathBuf::from("/mnt/a")]);
        let error = huge_folder(1 << 60).unwrap_err();
        assert!(error.contains("vm.nr_hugepages") && error.contains("huge=always"), "{error}");
    }

    #[test]
    fn private_memory_is_filled_and_read_from_outside() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = SourceMemory::create(&folder.path().join("mem0"), 64 << 20, Content::Mixed).unwrap();
        let of_file = || File::open(memory.path()).unwrap();
        for backend in [MemoryKind::Ram, MemoryKind::Memfd] {
            let kind = GuestMemory { backend, memory: MemoryState::Fresh };
            let qemu = kind.of(Qemu::firmware().memory(64)).args(["-S"]).start().unwrap();
            let differs = || first_difference(of_file(), kind.open(&qemu).unwrap(), ANCHOR, 64 << 20).unwrap();
            // The firmware has not run: the last chunk but one of the first eight is the first with content.
            assert!(differs().is_some(), "it is empty");
            kind.fill(&qemu, &memory).unwrap();
            assert_eq!(differs(), None, "{backend:?}");
        }
    }
}
