//! What a guest has given back after a lazy restore had brought it is zero, and stays so: a guest that clears what it
//! frees (Linux with `init_on_free=1`) uses it again without another look.
#![allow(clippy::unwrap_used)]
use std::{fs, ops::Range, os::unix::fs::MetadataExt, path::Path};

use crate::restoring::{
    lazy::{Stalled, stand_ins},
    place,
};
use crate::sector;
use crate::stock::StockSave;
use serde_json::json;
use transship_lab::{Backend, LabError, Qemu, QemuBuilder, Result, Scratch, Workload, wait_until};

const PAGE: u64 = 4096;
/// The memory below what a PC has for its devices, of which there is little more in the first piece of the file than
/// this.
const LOW: Range<u64> = 0..0xa0;

/// A guest that stands still and whose pages are touched by hand.
struct Touched {
    guest: Qemu,
    /// What it was saved with.
    saved: Vec<u8>,
}

impl Touched {
    /// Saves a guest to `path`, and has another QEMU wait for it.
    fn new(path: &Path) -> Result<Self> {
        let source = Qemu::multiboot().booted()?;
        StockSave::default().save(&source, path)?;
        let saved = fs::read(&source.memory_files()[0])?;
        Ok(Self { guest: Qemu::multiboot().incoming().start()?, saved })
    }

    fn saved(&self, page: u64) -> &[u8] {
        &self.saved[(page * PAGE) as usize..][..PAGE as usize]
    }

    fn found(&self, page: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; PAGE as usize];
        let file = fs::File::open(&self.guest.memory_files()[0])?;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, page * PAGE)?;
        Ok(bytes)
    }

    /// Whether the memory has it. Looking does not make it.
    fn is_there(&self, page: u64) -> Result<bool> {
        let file = fs::File::open(&self.guest.memory_files()[0])?;
        match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(page * PAGE)) {
            Ok(data) => Ok(data < (page + 1) * PAGE),
            Err(rustix::io::Errno::NXIO) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Pages of the first 640 KiB that were saved, and have not come yet.
    fn missing(&self) -> Result<Vec<u64>> {
        let stored = LOW.filter(|page| self.saved(*page).iter().any(|&byte| byte != 0));
        Ok(stored.filter(|page| !self.is_there(*page).unwrap_or(true)).collect())
    }

    /// The first word of a page, as QEMU sees it when it reads it for the monitor: until then it waits.
    fn touch(&self, page: u64) -> Result<u64> {
        let line = format!("xp /1gx {:#x}", page * PAGE);
        let answer = self.guest.qmp("human-monitor-command", json!({ "command-line": line }))?;
        let word = answer.as_str().and_then(|text| text.trim().rsplit_once("0x")?.1.split_whitespace().next());
        word.and_then(|word| u64::from_str_radix(word, 16).ok()).ok_or_else(|| LabError(format!("{line}: {answer}")))
    }

    /// As a balloon device does it for a page that its guest has reported free.
    fn give_back(&self, page: u64) -> Result<()> {
        sector::give_back(&self.guest, page * PAGE..(page + 1) * PAGE)
    }

    /// Has a page that was saved and is missing brought, and gives it back.
    fn bring_and_give_back(&self) -> Result<u64> {
        let missing = self.missing()?;
        let page = *missing.last().ok_or_else(|| LabError("all low memory is there already".into()))?;
        let word = u64::from_le_bytes(self.saved(page)[..8].try_into().unwrap());
        assert_eq!(self.touch(page)?, word, "page {page}");
        self.give_back(page)?;
        assert!(!self.is_there(page)?, "page {page}");
        Ok(page)
    }

    /// All is there but what was given back.
    fn assert_whole_but(&self, given_back: u64) -> Result<()> {
        assert!(!self.is_there(given_back)?, "page {given_back} was put there once more");
        let pages = (0x100..self.saved.len() as u64 / PAGE).chain(LOW).filter(|page| *page != given_back);
        for page in pages.filter(|page| self.saved(*page).iter().any(|&byte| byte != 0)) {
            assert!(self.found(page)? == self.saved(page), "page {page}");
        }
        assert_eq!(self.touch(given_back)?, 0);
        Ok(())
    }
}

#[test]
fn what_was_given_back_is_not_brought_again_by_the_second_process() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    let touched = Touched::new(&path)?;
    let mut stalled = Stalled::start_with(&touched.guest.vm(), &path, &["--stopped"])?;
    let page = touched.bring_and_give_back()?;
    stalled.restore.kill9();
    wait_until("the second process to end", || Ok(stand_ins(&touched.guest)?.is_empty()))?;
    touched.assert_whole_but(page)
}

/// One thread has read it for everybody, another one brings it for somebody who waits; it is given back before the
/// first one comes to it.
#[test]
fn what_was_given_back_is_not_brought_again_by_another_thread() -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    let touched = Touched::new(&path)?;
    let flags = ["--stopped", "--channels=1"];
    let stalled = Stalled::at("restore.unit-read", &touched.guest.vm(), &path, &flags)?;
    let page = touched.bring_and_give_back()?;
    stalled.go_on()?.wait()?.expect_code(0)?;
    touched.assert_whole_but(page)
}

/// A guest that relies on zeros in what it has freed, and a balloon that takes that away.
fn clearing(backend: Backend) -> QemuBuilder {
    let balloon = ["-device", "virtio-balloon-pci,free-page-reporting=on"];
    // Huge pages are cleared in any case.
    let words = "init_on_free=1 transparent_hugepage=never workload.hold=200";
    let workload = Workload { mib: 32, ..Workload::LINUX };
    Qemu::linux().memory(512).backend(backend).workload(workload).args(balloon).append(words)
}

/// How much of its memory a guest has, in MiB.
fn allocated(guest: &Qemu, backend: Backend) -> Result<u64> {
    if backend == Backend::SharedFile {
        return Ok(fs::metadata(&guest.memory_files()[0])?.blocks() / 2048);
    }
    let (address, bytes) = place(guest)?;
    let (mut inside, mut kib) = (false, 0);
    for line in fs::read_to_string(format!("/proc/{}/smaps", guest.pid()))?.lines() {
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        if let Some((start, _)) = line.split_once(' ').and_then(|(range, _)| range.split_once('-')) {
            inside = hex(start).is_some_and(|start| (address..address + bytes).contains(&start));
        } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| inside) {
            kib += rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    Ok(kib / 1024)
}

fn a_guest_that_clears_finds_zeros(backend: Backend) -> Result<()> {
    let folder = Scratch::on_disk()?;
    let path = folder.join("snapshot");
    crate::restoring::saved_by_stock(clearing(backend), StockSave::default(), &path)?;
    let guest = clearing(backend).incoming().start()?;
    let mut stalled = Stalled::start(&guest.vm(), &path)?;
    // Each page is touched to be cleared, and so brought.
    assert_eq!(guest.serial().drop_held()?, 200);
    wait_until("the guest to report what it has freed", || Ok(allocated(&guest, backend)? < 150))?;
    stalled.restore.kill9();
    wait_until("the second process to end", || Ok(stand_ins(&guest)?.is_empty()))?;
    let (mib, wrong) = guest.serial().take_fresh()?;
    assert!(mib > 200, "{mib}");
    assert_eq!(wrong, 0, "pages of {mib} MiB");
    crate::restoring::assert_goes_on(&guest)
}

#[test]
#[ignore = "two minutes: Linux boots and frees 200 MiB under emulation"]
fn a_guest_that_clears_what_it_frees_finds_zeros_after_a_kill() -> Result<()> {
    a_guest_that_clears_finds_zeros(Backend::SharedFile)
}

#[test]
#[ignore = "two minutes: Linux boots and frees 200 MiB under emulation"]
fn a_guest_of_private_memory_that_clears_what_it_frees_finds_zeros_after_a_kill() -> Result<()> {
    a_guest_that_clears_finds_zeros(Backend::Default)
}
