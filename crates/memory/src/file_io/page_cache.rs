//! Writing through the page cache without waiting for each other, or for the disk at the very end.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Bytes written after which the disk is told: enough for large requests, and little to wait for at the end.
const STEP: u64 = 8 << 20;

/// Has the disk begin with what was written into the page cache, while more is written.
///
/// Left to itself Linux begins when a tenth of all memory is dirty, and a sync at the end waits for all that. For 2 GiB
/// on ext4 that took 1.5 s, and 1.25 s this way. Nothing is promised: what is to be on the disk must be synced as ever,
/// which also tells of errors.
#[derive(Debug, Default)]
pub struct Writeback {
    /// What was written since the disk was told last lies between these.
    begin: u64,
    end: u64,
    bytes: u64,
}

impl Writeback {
    /// `bytes` were written at `offset` of the file. Now and then this waits until the disk takes more requests.
    pub fn wrote(&mut self, file: BorrowedFd<'_>, offset: u64, bytes: u64) {
        if let Some((offset, bytes)) = self.add(offset, bytes) {
            begin_writeback(file, offset, bytes);
        }
    }

    /// Where the disk is to begin now, if it is.
    fn add(&mut self, offset: u64, bytes: u64) -> Option<(u64, u64)> {
        let end = offset.saturating_add(bytes);
        (self.begin, self.end) = match self.bytes {
            0 => (offset, end),
            _ => (self.begin.min(offset), self.end.max(end)),
        };
        self.bytes = self.bytes.saturating_add(bytes);
        (self.bytes >= STEP).then(|| {
            let told = std::mem::take(self);
            (told.begin, told.end - told.begin)
        })
    }
}

fn begin_writeback(file: BorrowedFd<'_>, offset: u64, bytes: u64) {
    let (Ok(offset), Ok(bytes)) = (offset.try_into(), bytes.try_into()) else { return };
    // SAFETY: no memory of ours is involved. Whether it is refused does not matter, see the type.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Has the threads that write to one file do so one after the other, where its file system would have them do so
/// anyway: it lets one at a time into the page cache of a file, and those that wait for it there spin.
#[derive(Debug, Clone, Default)]
pub struct Turns(Arc<Mutex<()>>);

impl Turns {
    pub(super) fn wait(&self) -> MutexGuard<'_, ()> {
        // It guards no data.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_disk_is_told_of_all_that_was_written_since_it_was_told_last() {
        let mut writeback = Writeback::default();
        assert_eq!(writeback.add(40 * MIB, 3 * MIB), None);
        assert_eq!(writeback.add(10 * MIB, 4 * MIB), None);
        assert_eq!(writeback.add(20 * MIB, MIB), Some((10 * MIB, 33 * MIB)));
        assert_eq!(writeback.add(100 * MIB, STEP), Some((100 * MIB, STEP)), "what came before is forgotten");
        assert_eq!(writeback.add(u64::MAX - 1, u64::MAX), Some((u64::MAX - 1, 1)));
    }
}
