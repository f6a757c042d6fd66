//! Pages from the memory of one guest into that of another, by threads that do nothing else: what no move is faster
//! than, whatever it sends them by.
use std::{
    fs::OpenOptions,
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Instant,
};

use transship_lab::Scratch;
use transship_memory::{Access, ByteRange, PageCount, PageNumber, PageRange, Region, WINDOW_PAGES};

use crate::{pair::text, units::millis};

/// Threads take so many pages at once.
const PIECE_PAGES: PageCount = PageCount::new(16 * WINDOW_PAGES.get());

/// Both memories of a copy: files of one file system, mapped.
pub(crate) struct Copy {
    source: Region,
    destination: Region,
    _folder: Scratch,
}

impl Copy {
    /// In the file system of guest memory. The source has content everywhere, the destination nowhere yet.
    pub(crate) fn new(base: &Path, bytes: u64) -> Result<Self, String> {
        let folder = Scratch::within(base).map_err(text)?;
        let map = |name: &str| {
            let path = folder.join(name);
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
            let file = file.and_then(|file| file.set_len(bytes).map(|()| file));
            let file = file.map_err(|error| format!("{}: {error}", path.display()))?;
            Region::map("bench", file.into(), ByteRange::sized(0, bytes), Access::ReadWrite).map_err(text)
        };
        let (source, destination) = (map("source")?, map("destination")?);
        let window: Vec<u8> = (0..WINDOW_PAGES.buffer_bytes()).map(|byte| (byte % 251 + 1) as u8).collect();
        for PageRange { first, .. } in PageRange::all(source.pages()).parts(WINDOW_PAGES) {
            source.write_pages(first.masked(u128::MAX), &window).map_err(text)?;
        }
        Ok(Self { source, destination, _folder: folder })
    }

    /// Milliseconds of one copy by so many threads. The first is into fresh memory, all others are into warm memory.
    pub(crate) fn once(&self, threads: usize) -> Result<f64, String> {
        let next = AtomicU64::new(0);
        let begin = Instant::now();
        thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(|| self.pieces(&next))).collect();
            all.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a copying thread panicked")?)
        })?;
        Ok(millis(begin.elapsed()))
    }

    fn pieces(&self, next: &AtomicU64) -> Result<(), String> {
        let mut window = vec![0; WINDOW_PAGES.buffer_bytes()];
        loop {
            // A counter: nothing else is published by it.
            let piece = PageNumber::new(next.fetch_add(PIECE_PAGES.get(), Relaxed));
            let end = PageRange::all(self.source.pages()).end();
            if piece >= end {
                return Ok(());
            }
            for PageRange { first, .. } in piece.to(end.min(piece + PIECE_PAGES)).parts(WINDOW_PAGES) {
                self.source.copy_to(first.run(WINDOW_PAGES), &mut window).map_err(text)?;
                self.destination.write_pages(first.masked(u128::MAX), &window).map_err(text)?;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_copied_by_any_number_of_threads() {
        for threads in [1, 3] {
            let copy = Copy::new(Path::new("/dev/shm"), 24 << 20).unwrap();
            assert!(copy.once(threads).unwrap() > 0.0);
            let pages = PageRange::all(copy.source.pages());
            let [mut source, mut destination] = [vec![0; 24 << 20], vec![0; 24 << 20]];
            copy.source.copy_to(pages, &mut source).unwrap();
            copy.destination.copy_to(pages, &mut destination).unwrap();
            assert!(source == destination && source[24 << 20 >> 1] != 0);
        }
    }
}
