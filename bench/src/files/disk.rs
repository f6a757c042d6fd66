//! What the disk does on its own: the same bytes past the page cache, without a guest.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, IoSlice, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Instant,
};

use rustix::fs::{Advice, OFlags};
use serde::Serialize;
use transship_memory::{PAGE_BYTES, PageBuffer, PageNumber, Region};

use super::guests::forget;
use crate::{
    at_hand,
    limits::{
        self,
        copy::{self, Memory},
    },
    pair::text,
    processes::own_cpu_seconds,
    units::millis,
};

/// Each request, on a huge page, and how many are under way at once: where this is not enough for a disk, a snapshot's
/// are not either.
pub(super) const REQUEST_BYTES: usize = 2 << 20;
pub(super) const REQUESTS: usize = 8;

/// The disk's turn.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct DiskRun {
    /// Until the file is durable.
    pub(crate) write_ms: f64,
    pub(crate) write_cpu_seconds: f64,
    pub(crate) read_ms: f64,
    /// Read, and put into guest memory that is fresh, by threads that do nothing else.
    pub(crate) fill_ms: f64,
    /// Read through the page cache, by one thread in the order of the file, which is where the kernel reads ahead.
    pub(crate) cached_ms: f64,
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

/// How long a file took to be written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    /// Until it is durable.
    pub(crate) ms: f64,
    pub(crate) cpu_seconds: f64,
}

/// Writes a new file of this size, reads it, and reads it into guest memory, which lies in `base`.
pub(crate) fn measure(folder: &Path, base: &Path, bytes: u64) -> Result<DiskRun, String> {
    with_file(folder, |path| {
        let mut requests = Requests::new();
        let Written { ms, cpu_seconds } = write(path, bytes, |file| requests.write(file, bytes))?;
        let read_ms = read(path, &mut requests, bytes)?;
        at_hand::have(bytes)?;
        let fill_ms = fill_from(path, &mut requests, &Memory::fresh(base, bytes)?.region)?;
        at_hand::have(bytes)?;
        let cached_ms = read_cached(path, &mut requests.0[0])?;
        Ok(DiskRun { write_ms: ms, write_cpu_seconds: cpu_seconds, read_ms, fill_ms, cached_ms })
    })
}

/// Writes a new file of this size.
pub(crate) fn written(folder: &Path, bytes: u64) -> Result<Written, String> {
    let mut requests = Requests::new();
    with_file(folder, |path| write(path, bytes, |file| requests.write(file, bytes)))
}

/// The same as the disk takes guest memory whose pages lie anywhere, if nobody copies them: each page of a request is
/// another buffer.
pub(crate) fn written_scattered(folder: &Path, bytes: u64) -> Result<Written, String> {
    with_file(folder, |path| scattered(path, bytes))
}

/// The file goes away behind the work.
fn with_file<T>(folder: &Path, work: impl FnOnce(&Path) -> Result<T, String>) -> Result<T, String> {
    let path = folder.join("disk");
    let done = work(&path);
    let _ = fs::remove_file(&path);
    done.map_err(|error| format!("{}: {error}", path.display()))
}

/// `all`: writes all of it, and gives its CPU seconds.
fn write(path: &Path, bytes: u64, all: impl FnOnce(&File) -> io::Result<f64>) -> Result<Written, String> {
    let file = open(path, true).map_err(text)?;
    let (ms, cpu_seconds) = timed(|| {
        // As a snapshot: its size is known before, its pages are not.
        file.set_len(bytes)?;
        let cpu_seconds = all(&file)?;
        file.sync_all()?;
        Ok(cpu_seconds)
    })?;
    Ok(Written { ms, cpu_seconds })
}

fn scattered(path: &Path, bytes: u64) -> Result<Written, String> {
    let mut pages: Vec<_> = (0..REQUEST_BYTES / PAGE_BYTES).map(|_| PageBuffer::new(1)).collect();
    pages.iter_mut().for_each(|page| fill(page.bytes_mut()));
    let slices: Vec<_> = pages.iter().map(|page| IoSlice::new(page.bytes())).collect();
    write(path, bytes, |file| {
        in_requests(bytes, [(); REQUESTS].iter_mut(), |(), offset, length| {
            write_slices(file, &slices[..length / PAGE_BYTES], offset)
        })
    })
}

fn write_slices(file: &File, slices: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
    let length: usize = slices.iter().map(|slice| slice.len()).sum();
    match rustix::io::pwritev(file, slices, offset)? {
        written if written == length => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Milliseconds that the file takes to be read.
fn read(path: &Path, requests: &mut Requests, bytes: u64) -> Result<f64, String> {
    let file = open(path, false).map_err(text)?;
    let (ms, _) = timed(|| requests.run(bytes, |buffer, offset| file.read_exact_at(buffer, offset)))?;
    Ok(ms)
}

/// Milliseconds that it takes into memory as large as it is.
fn fill_from(path: &Path, requests: &mut Requests, memory: &Region) -> Result<f64, String> {
    let file = open(path, false).map_err(text)?;
    let (ms, _) = timed(|| {
        requests.run(memory.bytes(), |buffer, offset| {
            file.read_exact_at(buffer, offset)?;
            copy::write(memory, PageNumber::at(offset), buffer).map_err(io::Error::other)
        })
    })?;
    Ok(ms)
}

/// Milliseconds that the page cache, in which it is not, takes to give all of it: the quickest of some tries, since it
/// also depends on which pages the kernel has at hand. It is not there afterwards either.
fn read_cached(path: &Path, buffer: &mut PageBuffer) -> Result<f64, String> {
    limits::quickest(|| {
        let mut file = File::open(path).map_err(text)?;
        rustix::fs::fadvise(&file, 0, None, Advice::Sequential).map_err(text)?;
        let (ms, ()) = timed(|| {
            while file.read(buffer.bytes_mut())? > 0 {}
            Ok(())
        })?;
        forget(path)?;
        Ok(ms)
    })
}

fn open(path: &Path, new: bool) -> io::Result<File> {
    let direct = OFlags::DIRECT.bits() as i32;
    OpenOptions::new().read(!new).write(new).create_new(new).custom_flags(direct).open(path)
}

/// Milliseconds, beside what it gives.
fn timed<T>(work: impl FnOnce() -> io::Result<T>) -> Result<(f64, T), String> {
    let begin = Instant::now();
    let done = work().map_err(text)?;
    Ok((millis(begin.elapsed()), done))
}

/// What several threads read into, or write from.
struct Requests(Vec<PageBuffer>);

impl Requests {
    /// Made before any time is taken.
    fn new() -> Self {
        let buffer = || {
            let mut buffer = PageBuffer::new(REQUEST_BYTES / PAGE_BYTES);
            fill(buffer.bytes_mut());
            buffer
        };
        Self((0..REQUESTS).map(|_| buffer()).collect())
    }

    /// Writes so many bytes, and gives the CPU seconds.
    fn write(&mut self, file: &File, bytes: u64) -> io::Result<f64> {
        self.run(bytes, |buffer, offset| {
            // No two pages are equal, for disks that would notice.
            buffer.chunks_exact_mut(PAGE_BYTES).zip(offset..).for_each(|(page, tag)| {
                page[..8].copy_from_slice(&tag.to_le_bytes());
            });
            file.write_all_at(buffer, offset)
        })
    }

    /// Has threads go over all bytes, each in requests of its own. Gives their CPU seconds.
    fn run(&mut self, bytes: u64, once: impl Fn(&mut [u8], u64) -> io::Result<()> + Sync) -> io::Result<f64> {
        in_requests(bytes, self.0.iter_mut(), |buffer, offset, length| once(&mut buffer.bytes_mut()[..length], offset))
    }
}

/// The same by a thread for each of these: what it has, where the request begins, and how long it is.
fn in_requests<'a, T: Send + 'a>(
    bytes: u64,
    each: impl Iterator<Item = &'a mut T>,
    once: impl Fn(&mut T, u64, usize) -> io::Result<()> + Sync,
) -> io::Result<f64> {
    let next = AtomicU64::new(0);
    let work = |own: &mut T| {
        loop {
            // A counter: nothing else is published by it.
            let offset = next.fetch_add(REQUEST_BYTES as u64, Relaxed);
            let length = bytes.saturating_sub(offset).min(REQUEST_BYTES as u64) as usize;
            if length == 0 {
                return Ok(own_cpu_seconds());
            }
            once(own, offset, length)?;
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = each.map(|own| scope.spawn(|| work(own))).collect();
        let ended = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that uses the disk panicked")))
        };
        // All of them, also after the first error.
        let ends: Vec<io::Result<f64>> = threads.into_iter().map(ended).collect();
        ends.into_iter().sum()
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
    use transship_memory::PageRange;

    #[test]
    fn every_byte_is_asked_for_once() {
        let bytes = 5 * REQUEST_BYTES as u64 + 8192;
        let seen = Mutex::new(Vec::new());
        let used = Requests::new().run(bytes, |buffer, offset| {
            assert_eq!(buffer.as_ptr().align_offset(PAGE_BYTES), 0);
            seen.lock().unwrap().push((offset, buffer.len() as u64));
            Ok(())
        });
        assert!(used.unwrap() > 0.0);
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
        let error = Requests::new().run(8 << 20, |_, offset| match offset {
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
        let run = measure(folder.path(), Path::new("/dev/shm"), 3 << 20).unwrap();
        let DiskRun { write_ms, write_cpu_seconds, read_ms, fill_ms, cached_ms } = run;
        let all = [write_ms, write_cpu_seconds, read_ms, fill_ms, cached_ms];
        assert!(all.iter().all(|number| *number > 0.0), "{run:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn scattered_pages_are_all_written() {
        let folder = tempfile::tempdir().unwrap();
        if !does_direct_io(folder.path()).unwrap() {
            return;
        }
        let (path, bytes) = (folder.path().join("disk"), (5 << 20) + 4096);
        let Written { ms, cpu_seconds } = scattered(&path, bytes).unwrap();
        assert!(ms > 0.0 && cpu_seconds > 0.0);
        let written = fs::read(&path).unwrap();
        assert_eq!(written.len() as u64, bytes);
        let (pages, rest) = written.as_chunks::<PAGE_BYTES>();
        assert!(rest.is_empty() && pages.iter().all(|page| page == &pages[0] && page[0] | page[1] != 0));
        assert!(written_scattered(folder.path(), bytes).is_err(), "the file was there");
        assert!(written_scattered(folder.path(), bytes).is_ok() && fs::read_dir(folder.path()).unwrap().count() == 0);
    }

    #[test]
    fn memory_has_what_was_read() {
        let folder = tempfile::tempdir().unwrap();
        if !does_direct_io(folder.path()).unwrap() {
            return;
        }
        let (path, bytes) = (folder.path().join("disk"), 5 << 20);
        let mut requests = Requests::new();
        write(&path, bytes, |file| requests.write(file, bytes)).unwrap();
        let memory = Memory::fresh(Path::new("/dev/shm"), bytes).unwrap();
        assert!(fill_from(&path, &mut requests, &memory.region).unwrap() > 0.0);
        let mut found = vec![0; bytes as usize];
        memory.region.copy_to(PageRange::all(memory.region.pages()), &mut found).unwrap();
        assert!(found == fs::read(&path).unwrap());
    }
}
