//! Room for pages that two processes of one host share: one copies windows of memory into it that it can't lend, the
//! other writes them into place from there.
//!
//! ```text
//!   private memory ─► a slot (process_vm_readv), zeros left out ─► written into the memory of a waiting VM
//! ```
//!
//! Whoever fills a slot says which, and leaves it alone until he is told that it was emptied. A peer that does not keep
//! to that can spoil the pages that he sends, and nothing else.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    slice,
    sync::Arc,
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    mm::Advice,
};

use crate::{
    Error, Flaw, Region, WINDOW_PAGES, WindowBuffer, mapping::Mapping, region::Held, send::write_at,
    window::WindowPages,
};

const SLOT_BYTES: usize = WINDOW_PAGES.buffer_bytes();

/// One slot, for whoever fills it. There is one of each.
pub(crate) struct Slot {
    mapping: Arc<Mapping>,
    number: usize,
}

impl Slot {
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let start = self.mapping.at(self.number * SLOT_BYTES, SLOT_BYTES).expect("a slot that was made");
        // SAFETY: at() gives as many bytes of a mapping that lives as long as this slot. This is the only slot of that
        // number (see `make_slots`), it is borrowed for as long, and the other process can only read.
        unsafe { slice::from_raw_parts_mut(start, SLOT_BYTES) }
    }

    pub(crate) fn filled(&self, bytes: usize) -> &[u8] {
        let start = self.mapping.at(self.number * SLOT_BYTES, bytes).expect("a slot that was made");
        // SAFETY: as above, and nobody writes to it while it is borrowed.
        unsafe { slice::from_raw_parts(start, bytes) }
    }
}

/// Makes so many slots: a buffer for each, and the file that they are in, which its reader gets for reading only.
///
/// # Errors
/// The system's own.
pub fn make_slots(count: usize) -> io::Result<(OwnedFd, Vec<WindowBuffer>)> {
    let len = count * SLOT_BYTES;
    let file = rustix::fs::memfd_create("transship-slots", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    // The reader relies on its length.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    let mapping = Arc::new(Mapping::new(file.as_fd(), 0, len, true)?);
    let start = mapping.at(0, len).expect("all of it");
    // SAFETY: all of the mapping, which holds zeros before and after. Without it each page would be a fault.
    let _ = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite) };
    // The other process can't write to what it is handed, nor map it so.
    rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
    let slot = |number| WindowBuffer::in_slot(Slot { mapping: Arc::clone(&mapping), number });
    Ok((file, (0..count).map(slot).collect()))
}

/// The same slots, for whoever empties them.
#[derive(Debug)]
pub struct LentSlots {
    mapping: Mapping,
    count: usize,
}

impl LentSlots {
    /// Slots in a file of another process.
    ///
    /// # Errors
    /// A file that is too short for them, or that could become so.
    pub fn of(file: BorrowedFd<'_>, count: usize) -> Result<Self, Error> {
        let unusable = |flaw, why: &str| Error::unusable("slots", flaw, why);
        let failed = |source| Error::system("map the slots that were lent", source);
        let seals = rustix::fs::fcntl_get_seals(file)
            .map_err(|_| unusable(Flaw::NotRegular, "what was lent for them is no file in memory"))?;
        let size = rustix::fs::fstat(file).map_err(failed)?.st_size;
        let len = count * SLOT_BYTES;
        if !seals.contains(SealFlags::SHRINK) || u64::try_from(size).is_ok_and(|size| size < len as u64) {
            return Err(unusable(Flaw::TooShort, "their file is too short, or could be cut short"));
        }
        Ok(Self { mapping: Mapping::new(file, 0, len, false).map_err(failed)?, count })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Writes the present pages of a window, which are in a slot one behind the other, into place.
    ///
    /// # Errors
    /// InvalidInput for a slot that there is not, for pages that the region does not have, and for one that was mapped
    /// for reading. No memory left for the pages, as an [`Error`] inside; the system's own.
    pub fn write_window(&self, slot: usize, present: WindowPages, into: &Region) -> io::Result<()> {
        let refused = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        into.check_writable().map_err(refused)?;
        into.check_window(present).map_err(refused)?;
        if slot >= self.count {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if let Held::Shared(shared) = &into.held {
            shared.prepare(present).map_err(io::Error::other)?;
        }
        let mut at = slot * SLOT_BYTES;
        for run in present.runs() {
            let len = run.bytes() as usize;
            let from = self.mapping.at(at, len).ok_or(io::ErrorKind::InvalidInput)?;
            // SAFETY: at() gives len bytes of a mapping that lives longer than the call. Whoever lent it may write to
            // them meanwhile: the kernel copies them once, and no reference is made.
            let written = unsafe {
                match &into.held {
                    Held::Private(private) => {
                        write_at(private.process.memory(), private.address_of(run.first), from, len)
                    }
                    Held::Shared(shared) if shared.is_hugetlb() => {
                        let (start, _) = shared.raw(run);
                        // Both are mappings of ours, of different files.
                        std::ptr::copy_nonoverlapping(from, start, len);
                        Ok(())
                    }
                    Held::Shared(shared) => write_at(shared.file(), shared.offset_in_file(run.first), from, len),
                }
            };
            written.map_err(|source| io::Error::other(into.failed("write pages", source)))?;
            at += len;
        }
        Ok(())
    }
}
