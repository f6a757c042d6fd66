//! Zeros in a guest's memory, looked at from outside by threads that do nothing else. A VMM has page tables for its
//! memory. Whoever looks at it from outside makes his own first, or has the kernel copy it if it is private, and both
//! take longer than the look.
use std::{path::Path, process, sync::Arc, time::Instant};

use transship_memory::{
    Access, InProcess, PAGE, PAGE_BYTES, PageBuffer, PageRange, Process, Region, WINDOW_PAGES, WindowBuffer,
};

use super::{
    copy::{self, Memory},
    quickest,
    threads::on_all,
};
use crate::{pair::text, units::millis};

/// Memory that has zeros everywhere.
pub(crate) enum Zeros {
    /// A file, with no page tables of ours.
    File(Memory),
    /// Of a process, on huge pages where the system has any, as QEMU's own.
    Private(PageBuffer),
}

impl Zeros {
    /// In the file system of guest memory.
    pub(crate) fn new(base: &Path, bytes: u64) -> Result<Self, String> {
        let memory = Memory::fresh(base, bytes)?;
        memory.fill_with_zeros()?;
        Ok(Self::File(memory))
    }

    /// Memory that only its process has mapped.
    pub(crate) fn private(bytes: u64) -> Self {
        let mut buffer = PageBuffer::new((bytes / PAGE) as usize);
        // Each page is there from now on.
        buffer.bytes_mut().chunks_mut(PAGE_BYTES).for_each(|page| page.fill(0));
        Self::Private(buffer)
    }

    /// As it is reached from outside.
    fn region(&self) -> Result<Region, String> {
        match self {
            Self::File(memory) => memory.again(),
            Self::Private(buffer) => {
                let process = Process::open(process::id() as i32, Access::Read).map(Arc::new).map_err(text)?;
                let (address, bytes) = (buffer.bytes().as_ptr().addr() as u64, buffer.bytes().len() as u64);
                let memory = InProcess { process, address, bytes, page_bytes: PAGE, file: None };
                Region::in_process("bench", memory, Access::Read).map_err(text)
            }
        }
    }

    /// Milliseconds that so many threads take at best to reach the memory, to look at all of it, and to let go of it.
    pub(crate) fn look(&self, threads: usize) -> Result<f64, String> {
        quickest(|| self.once(threads))
    }

    fn once(&self, threads: usize) -> Result<f64, String> {
        let begin = Instant::now();
        let region = self.region()?;
        let pieces = copy::pieces(&region);
        on_all(pieces.len(), threads, || {
            let (mut buffer, region, pieces) = (WindowBuffer::default(), &region, &pieces);
            move |number: usize| {
                pieces[number].parts(WINDOW_PAGES).try_for_each(|PageRange { first, .. }| {
                    let window = region.read_window(first.masked(u128::MAX), true, &mut buffer).map_err(text)?;
                    match window.zero_mask() {
                        u128::MAX => Ok(()),
                        _ => Err(format!("pages from {first:?} on are not zero")),
                    }
                })
            }
        })?;
        drop(region);
        Ok(millis(begin.elapsed()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use transship_memory::PageNumber;

    use super::*;

    #[test]
    fn every_page_is_looked_at() {
        const BYTES: u64 = 24 << 20;
        let look = |zeros: &Zeros| [1, 3].map(|threads| zeros.look(threads));
        let (mut file, mut private) = (Zeros::new(Path::new("/dev/shm"), BYTES).unwrap(), Zeros::private(BYTES));
        for zeros in [&file, &private] {
            assert!(look(zeros).iter().all(|ms| ms.as_ref().unwrap().is_normal()));
        }
        let last = PageNumber::at(BYTES - PAGE);
        match (&mut file, &mut private) {
            (Zeros::File(memory), Zeros::Private(buffer)) => {
                memory.region.write_pages(last.masked(1), &[1; PAGE_BYTES]).unwrap();
                buffer.bytes_mut()[BYTES as usize - 1] = 1;
            }
            _ => panic!("not what was asked for"),
        }
        for zeros in [&file, &private] {
            assert!(look(zeros).iter().all(|ms| ms.as_ref().unwrap_err().contains("not zero")));
        }
    }
}
