//! Pages from the memory of one guest into that of another, by threads that do nothing else: what no move is faster
//! than, whatever it sends them by.
use std::{
    fs::{File, OpenOptions},
    path::Path,
    process,
    sync::Arc,
};

use transship_lab::Scratch;
use transship_memory::{
    Access, ByteRange, Error, InProcess, PAGE, PAGE_BYTES, PageBuffer, PageCount, PageNumber, PageRange, Process,
    Region, WINDOW_PAGES,
};

use super::threads::on_all;
use crate::pair::text;

/// Threads take so many pages at once.
const PIECE_PAGES: PageCount = PageCount::new(16 * WINDOW_PAGES.get());

/// The memory in pieces for threads.
pub(super) fn pieces(region: &Region) -> Vec<PageRange> {
    PageRange::all(region.pages()).parts(PIECE_PAGES).collect()
}

/// Puts bytes into their place, from a window's first page on.
pub(crate) fn write(region: &Region, first: PageNumber, bytes: &[u8]) -> Result<(), Error> {
    let mut rest = bytes;
    for window in first.run(PageCount::new((bytes.len() / PAGE_BYTES) as u64)).windows() {
        let (now, later) = rest.split_at(window.bytes() as usize);
        region.write_pages(window, now)?;
        rest = later;
    }
    Ok(())
}

/// Guest memory that is fresh: nothing of it was touched yet.
pub(crate) struct Memory {
    pub(crate) region: Region,
    held: Held,
}

/// What it is.
enum Held {
    /// A file, in a folder of its own.
    Folder(Scratch),
    /// This process has it for itself, on huge pages where the system has any, as QEMU's own.
    Own(PageBuffer),
}

impl Memory {
    /// In the file system of guest memory.
    pub(crate) fn fresh(base: &Path, bytes: u64) -> Result<Self, String> {
        let folder = Scratch::within(base).map_err(text)?;
        let path = folder.join("memory");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.and_then(|file| file.set_len(bytes).map(|()| file));
        let file = file.map_err(|error| format!("{}: {error}", path.display()))?;
        let region = Region::map("bench", file.into(), ByteRange::sized(0, bytes), Access::ReadWrite).map_err(text)?;
        Ok(Self { region, held: Held::Folder(folder) })
    }

    /// Memory that its process has for itself, which is reached from outside.
    pub(crate) fn private(bytes: u64) -> Result<Self, String> {
        let buffer = PageBuffer::new((bytes / PAGE) as usize);
        Ok(Self { region: from_outside(&buffer, Access::ReadWrite)?, held: Held::Own(buffer) })
    }

    /// Reached once more, to be read, without a page table yet.
    pub(super) fn again(&self) -> Result<Region, String> {
        let folder = match &self.held {
            Held::Folder(folder) => folder,
            Held::Own(buffer) => return from_outside(buffer, Access::Read),
        };
        let path = folder.join("memory");
        let file = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let all = ByteRange::sized(0, self.region.bytes());
        Region::map("bench", file.into(), all, Access::Read).map_err(text)
    }

    /// Has content everywhere from now on: it is warm.
    pub(super) fn fill(&self) -> Result<(), String> {
        self.fill_with(|byte| (byte % 251 + 1) as u8)
    }

    /// Is warm, with zeros everywhere.
    pub(super) fn fill_with_zeros(&self) -> Result<(), String> {
        self.fill_with(|_| 0)
    }

    fn fill_with(&self, byte: impl Fn(usize) -> u8) -> Result<(), String> {
        let window: Vec<u8> = (0..WINDOW_PAGES.buffer_bytes()).map(byte).collect();
        PageRange::all(self.region.pages())
            .windows()
            .try_for_each(|pages| self.region.write_pages(pages, &window[..pages.bytes() as usize]).map_err(text))
    }
}

/// As another process would reach it.
fn from_outside(buffer: &PageBuffer, access: Access) -> Result<Region, String> {
    let process = Process::open(process::id() as i32, access).map(Arc::new).map_err(text)?;
    let (address, bytes) = (buffer.bytes().as_ptr().addr() as u64, buffer.bytes().len() as u64);
    let memory = InProcess { process, address, bytes, page_bytes: PAGE, file: None };
    Region::in_process("bench", memory, access).map_err(text)
}

/// Both memories of a copy.
pub(crate) struct Copy {
    source: Memory,
    destination: Memory,
}

impl Copy {
    /// In the file system of guest memory. The source has content everywhere, the destination nowhere yet.
    pub(crate) fn new(base: &Path, bytes: u64) -> Result<Self, String> {
        Self::of(|| Memory::fresh(base, bytes))
    }

    /// The same of memory that processes have for themselves.
    pub(crate) fn private(bytes: u64) -> Result<Self, String> {
        Self::of(|| Memory::private(bytes))
    }

    fn of(fresh: impl Fn() -> Result<Memory, String>) -> Result<Self, String> {
        let (source, destination) = (fresh()?, fresh()?);
        source.fill()?;
        Ok(Self { source, destination })
    }

    /// Milliseconds of one copy by so many threads. The first is into fresh memory, all others are into warm memory.
    pub(crate) fn once(&self, threads: usize) -> Result<f64, String> {
        let (source, destination) = (&self.source.region, &self.destination.region);
        let pieces = pieces(source);
        let (ms, _) = on_all(pieces.len(), threads, || {
            let (mut window, pieces) = (vec![0; WINDOW_PAGES.buffer_bytes()], &pieces);
            move |number: usize| {
                pieces[number].parts(WINDOW_PAGES).try_for_each(|PageRange { first, .. }| {
                    source.copy_to(first.run(WINDOW_PAGES), &mut window).map_err(text)?;
                    destination.write_pages(first.masked(u128::MAX), &window).map_err(text)
                })
            }
        })?;
        Ok(ms)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_copied_by_any_number_of_threads() {
        let of_both = |threads| {
            [Copy::new(Path::new("/dev/shm"), 24 << 20), Copy::private(24 << 20)].map(|copy| (threads, copy.unwrap()))
        };
        for (threads, copy) in [1, 3].into_iter().flat_map(of_both) {
            assert!(copy.once(threads).unwrap() > 0.0);
            let Copy { source: Memory { region: from, .. }, destination: Memory { region: to, .. } } = &copy;
            let pages = PageRange::all(from.pages());
            let [mut source, mut destination] = [vec![0; 24 << 20], vec![0; 24 << 20]];
            from.copy_to(pages, &mut source).unwrap();
            to.copy_to(pages, &mut destination).unwrap();
            assert!(source == destination && source[24 << 20 >> 1] != 0);
        }
    }
}
