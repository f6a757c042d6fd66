//! What the disk does on its own: the same bytes past the page cache, without a guest.
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::OFlags;
use serde::Serialize;
use transship_memory::{PAGE_BYTES, PageBuffer};

use crate::units::millis;

/// Each request, on a huge page, and how many are under way at once: where this is not enough for a disk, a snapshot's
/// are not either.
pub(super) const REQUEST_BYTES: usize = 2 << 20;
pub(super) const REQUESTS: usize = 8;

/// The disk's turn.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct DiskRun {
    /// Until the file is durable.
    pub(crate) write_ms: f64,
    pub(crate) read_ms: f64,
}

/// Does the file system of this folder do direct I/O?
pub(crate) fn does_direct_io(folder: &Path) -> Result<bool, String> {
    let path = folder.join("direct");
    let opened = open(&path, true);
    // None is there if it could not be opened.
    let _ = fs::remove_file(&path);
    match opened {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// Writes a new file of this size and reads it.
pub(crate) fn measure(folder: &Path, bytes: u64) -> Result<DiskRun, String> {
    let path = folder.join("disk");
    let run = write_and_read(&path, bytes).map_err(|error| format!("{}: {error}", path.display()));
    let _ = fs::remove_file(&path);
    run
}

fn write_and_read(path: &Path, bytes: u64) -> io::Result<DiskRun> {
    let file = open(path, true)?;
    let write_ms = millis(timed(|| {
        // As a snapshot: its size is known before, its pages are not.
        file.set_len(bytes)?;
        in_requests(bytes, |buffer, offset| {
            // No two pages are equal, for disks that would notice.
            buffer.chunks_exact_mut(PAGE_BYTES).zip(offset..).for_each(|(page, tag)| {
                page[..8].copy_from_slice(&tag.to_le_bytes());
            });
            file.write_all_at(buffer, offset)
        })?;
        file.sync_all()
    })?);
    drop(file);
    let file = open(path, false)?;
    let read_ms = millis(timed(|| in_requests(bytes, |buffer, offset| file.read_exact_at(buffer, offset)))?);
    Ok(DiskRun { write_ms, read_ms })
}

fn open(path: &Path, new: bool) -> io::Result<File> {
    let direct = OFlags::DIRECT.bits() as i32;
    OpenOptions::new().read(!new).write(new).create_new(new).custom_flags(direct).open(path)
}

fn timed(work: impl FnOnce() -> io::Result<()>) -> io::Result<Duration> {
    let begin = Instant::now();
    work()?;
    Ok(begin.elapsed())
}

/// Has threads go over all bytes, each in requests of its own.
fn in_requests(bytes: u64, once: impl Fn(&mut [u8], u64) -> io::Result<()> + Sync) -> io::Result<()> {
    let next = AtomicU64::new(0);
    let work = || {
        let mut memory = PageBuffer::new(REQUEST_BYTES / PAGE_BYTES);
        fill(memory.bytes_mut());
        loop {
            // A counter: nothing else is published by it.
            let offset = next.fetch_add(REQUEST_BYTES as u64, Relaxed);
            let length = bytes.saturating_sub(offset).min(REQUEST_BYTES as u64) as usize;
            if length == 0 {
                return Ok(());
            }
            once(&mut memory.bytes_mut()[..length], offset)?;
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..REQUESTS).map(|_| scope.spawn(work)).collect();
        let ended = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that uses the disk panicked")))
        };
        // All of them, also after the first error.
        let ends: Vec<io::Result<()>> = threads.into_iter().map(ended).collect();
        ends.into_iter().collect()
    })
}

/// With what no disk makes smaller.
fn fill(bytes: &mut [u8]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    bytes.fill_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_byte_is_asked_for_once() {
        let bytes = 5 * REQUEST_BYTES as u64 + 8192;
        let seen = Mutex::new(Vec::new());
        in_requests(bytes, |buffer, offset| {
            assert_eq!(buffer.as_ptr().align_offset(PAGE_BYTES), 0);
            seen.lock().unwrap().push((offset, buffer.len() as u64));
            Ok(())
        })
        .unwrap();
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        let end = seen.iter().fold(0, |end, &(offset, length)| {
            assert_eq!(offset, end);
            offset + length
        });
        assert_eq!(end, bytes);
    }

    #[test]
    fn an_error_of_one_request_is_an_error() {
        let error = in_requests(8 << 20, |_, offset| match offset {
            0x40_0000 => Err(io::Error::other("bad block")),
            _ => Ok(()),
        });
        assert_eq!(error.unwrap_err().to_string(), "bad block");
    }

    #[test]
    fn what_was_written_is_read_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        if !does_direct_io(folder.path()).unwrap() {
            return;
        }
        let run = measure(folder.path(), 3 << 20).unwrap();
        assert!(run.write_ms > 0.0 && run.read_ms > 0.0, "{run:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
