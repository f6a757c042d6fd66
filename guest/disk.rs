//! A disk that the guest writes and checks as it does its memory: each block holds its number and version, and the
//! versions are kept in memory. So a write that was lost, or came from a guest that had been given up, is an error.
use crate::{WORDS, pattern, say};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const PATH: &str = "/dev/vda";
/// Past the guest's page cache: what was written is in the image, and what is read comes from there.
const O_DIRECT: i32 = 0o40000;
const BLOCK: usize = WORDS * 8;
/// Blocks read at once when all are checked.
const RUN: usize = 32;
/// Numbers of blocks begin here: no page of memory looks like one.
const FIRST: usize = 1 << 40;
const PAUSE: Duration = Duration::from_millis(10);

/// Room for what is read and written: aligned, as O_DIRECT wants it.
#[repr(C, align(4096))]
struct Room([u8; RUN * BLOCK]);

/// The disk, or none.
#[derive(Default)]
pub struct Disk {
    file: Option<File>,
    versions: Vec<u64>,
    writes: u64,
    errors: u64,
    random: u64,
    at_rest: bool,
}

/// Nobody panics with the lock held, as far as one can see; a disk is looked at all the same.
pub fn lock(disk: &Mutex<Disk>) -> std::sync::MutexGuard<'_, Disk> {
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// Fills `blocks` blocks, and writes them one after the other from then on, on a thread of its own.
    pub fn start(disk: &Arc<Mutex<Self>>, blocks: usize) {
        if blocks == 0 {
            return;
        }
        let file = OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(PATH);
        {
            let mut disk = lock(disk);
            disk.file = Some(file.expect("the disk is there"));
            disk.versions = vec![0; blocks];
            (0..blocks).for_each(|block| disk.write(block));
        }
        let disk = Arc::clone(disk);
        std::thread::spawn(move || {
            loop {
                lock(&disk).step();
                std::thread::sleep(PAUSE);
            }
        });
    }

    /// Nothing is written any more when this returns, or it is again.
    pub fn rest(&mut self, at_rest: bool) {
        self.at_rest = at_rest;
    }

    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// Reads all blocks.
    pub fn check_all(&mut self) {
        for first in (0..self.versions.len()).step_by(RUN) {
            self.check(first, RUN.min(self.versions.len() - first));
        }
        if self.file.is_some() {
            let (blocks, writes, errors) = (self.versions.len(), self.writes, self.errors);
            say(format_args!("disk blocks={blocks} writes={writes} errors={errors}"));
        }
    }

    fn step(&mut self) {
        if !self.at_rest {
            self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let block = (self.random >> 33) as usize % self.versions.len();
            self.check(block, 1);
            self.write(block);
        }
    }

    fn write(&mut self, block: usize) {
        let version = self.versions[block] + 1;
        let words = pattern(FIRST + block, version);
        let mut room = Room([0; RUN * BLOCK]);
        for (index, word) in room.0[..BLOCK].chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&words(index).to_le_bytes());
        }
        match self.file().write_all_at(&room.0[..BLOCK], place(block)) {
            Ok(()) => self.versions[block] = version,
            Err(error) => self.wrong(block, format_args!("write: {error}")),
        }
        self.writes += 1;
    }

    fn check(&mut self, first: usize, count: usize) {
        let mut room = Room([0; RUN * BLOCK]);
        if let Err(error) = self.file().read_exact_at(&mut room.0[..count * BLOCK], place(first)) {
            return self.wrong(first, format_args!("read: {error}"));
        }
        for (held, block) in room.0[..count * BLOCK].chunks_exact(BLOCK).zip(first..) {
            let version = self.versions[block];
            let words = pattern(FIRST + block, version);
            let is_right = |(index, word): (usize, &[u8])| word == words(index).to_le_bytes();
            if !held.chunks_exact(8).enumerate().all(is_right) {
                self.wrong(block, format_args!("version={version} found={:?}", &held[16..24]));
                // Made good, so that it counts once.
                self.write(block);
            }
        }
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("only a disk that is there is used")
    }

    fn wrong(&mut self, block: usize, what: std::fmt::Arguments<'_>) {
        self.errors += 1;
        if self.errors < 10 {
            say(format_args!("bad block={block} {what}"));
        }
    }
}

fn place(block: usize) -> u64 {
    (block * BLOCK) as u64
}
