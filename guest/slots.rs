//! A disk, or a file of another file system, that is read straight into memory, many reads at once.
//!
//! Each block of it says its number, all through, and each place in memory ("slot") remembers which block it must
//! hold. Nobody but it writes to a slot, and its data comes some time after the slot's page was given to it: who
//! copied that page meanwhile, and does not look again, has the slot's old block.
use crate::say;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Past the guest's page cache: the data goes to the slot itself. A file system that is not to be cached does that
/// anyway.
const O_DIRECT: i32 = 0o40000;
const BLOCK: usize = 4096;
/// Reads that are under way at any time.
const READERS: u64 = 64;

#[repr(C, align(4096))]
struct Page([u8; BLOCK]);

struct Slot {
    page: &'static mut Page,
    block: u64,
}

/// All slots, or none. A thread that reads into one has its lock.
#[derive(Default)]
pub struct Slots {
    slots: Vec<Mutex<Slot>>,
    reads: AtomicU64,
    errors: AtomicU64,
}

impl Slots {
    /// Reads from `path` into `count` slots from now on, on threads of their own.
    pub fn start(count: usize, path: &str) -> Arc<Self> {
        if count == 0 {
            return Arc::default();
        }
        let pages: Vec<Page> = (0..count).map(|_| Page([0; BLOCK])).collect();
        // They hold what block 0 holds.
        let slots = pages.leak().iter_mut().map(|page| Mutex::new(Slot { page, block: 0 }));
        let all = Arc::new(Self { slots: slots.collect(), ..Self::default() });
        let flags = if path.starts_with("/dev/") { O_DIRECT } else { 0 };
        let mut disk = OpenOptions::new().read(true).custom_flags(flags).open(path).expect("it is there");
        let blocks = disk.seek(SeekFrom::End(0)).expect("it has a size") / BLOCK as u64;
        let disk = Arc::new(disk);
        for reader in 0..READERS {
            let (all, disk) = (Arc::clone(&all), Arc::clone(&disk));
            std::thread::spawn(move || all.read(&disk, blocks, reader));
        }
        all
    }

    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Looks at all slots but those that are being read.
    pub fn check_all(&self) {
        for slot in &self.slots {
            let Ok(mut slot) = slot.try_lock() else { continue };
            let right = slot.block.to_le_bytes();
            let wrong = slot.page.0.chunks_exact(8).filter(|word| *word != right).count();
            if wrong > 0 {
                let found = &slot.page.0[..8];
                self.wrong(format_args!("bad slot: block={} found={found:?} words={wrong}", slot.block));
                // Made good, so that it counts once.
                slot.page.0.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&right));
            }
        }
        if !self.slots.is_empty() {
            let (slots, reads) = (self.slots.len(), self.reads.load(Ordering::Relaxed));
            say(format_args!("slots={slots} reads={reads} errors={}", self.errors()));
        }
    }

    fn read(&self, disk: &File, blocks: u64, mut random: u64) {
        loop {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let slot = &self.slots[(random >> 33) as usize % self.slots.len()];
            let Ok(mut slot) = slot.try_lock() else { continue };
            let block = (random >> 20) % blocks;
            match disk.read_exact_at(&mut slot.page.0, block * BLOCK as u64) {
                Ok(()) => slot.block = block,
                Err(error) => self.wrong(format_args!("bad slot: block={block} read: {error}")),
            }
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn wrong(&self, what: std::fmt::Arguments<'_>) {
        if self.errors.fetch_add(1, Ordering::Relaxed) < 10 {
            say(what);
        }
    }
}
