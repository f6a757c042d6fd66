//! Through the page cache without waiting for each other, or for the disk at the very end of writing.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::ByteRange;

/// Bytes written after which the disk is told: enough for large requests, and little to wait for at the end.
const STEP: u64 = 8 << 20;

/// Has the disk begin with what was written into the page cache, while more is written.
///
/// Left to itself Linux begins when a tenth of all memory is dirty, and a sync at the end waits for all that. For 2 GiB
/// on ext4 that took 1.5 s, and 1.25 s this way. Nothing is promised: what is to be on the disk must be synced as ever,
/// which also tells of errors.
#[derive(Debug, Default)]
pub struct Writeback {
    /// What was written since the disk was told last lies in it.
    span: ByteRange,
    bytes: u64,
}

impl Writeback {
    /// These bytes of the file were written. Now and then this waits until the disk takes more requests.
    pub fn wrote(&mut self, file: BorrowedFd<'_>, written: ByteRange) {
        if let Some(span) = self.add(written) {
            begin_writeback(file, span);
        }
    }

    /// Where the disk is to begin now, if it is.
    fn add(&mut self, written: ByteRange) -> Option<ByteRange> {
        self.span = match self.bytes {
            0 => written,
            _ => ByteRange { start: self.span.start.min(written.start), end: self.span.end.max(written.end) },
        };
        self.bytes = self.bytes.saturating_add(written.len());
        (self.bytes >= STEP).then(|| std::mem::take(self).span)
    }
}

fn begin_writeback(file: BorrowedFd<'_>, span: ByteRange) {
    let (Ok(offset), Ok(bytes)) = (span.start.try_into(), span.len().try_into()) else { return };
    // SAFETY: no memory of ours is involved. Whether it is refused does not matter, see the type.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Has the threads that use one file through the page cache do so one after the other.
///
/// Those that write would do so anyway: the file system lets one at a time into the page cache of a file, and those
/// that wait for it there spin. Those that read hand the pages on in between, to memory that takes one at a time as
/// well, and the kernel reads ahead as far as it does only where a file is read in its order.
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
        assert_eq!(writeback.add(ByteRange::sized(40 * MIB, 3 * MIB)), None);
        assert_eq!(writeback.add(ByteRange::sized(10 * MIB, 4 * MIB)), None);
        assert_eq!(writeback.add(ByteRange::sized(20 * MIB, MIB)), Some(ByteRange::sized(10 * MIB, 33 * MIB)));
        let (next, last) = (ByteRange::sized(100 * MIB, STEP), ByteRange::sized(u64::MAX - STEP, STEP));
        assert_eq!(writeback.add(next), Some(next), "what came before is forgotten");
        assert_eq!(writeback.add(last), Some(last));
    }
}
