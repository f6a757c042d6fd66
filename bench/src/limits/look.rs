//! Zeros in a guest's memory, looked at from outside by threads that do nothing else. A VMM has page tables for its
//! memory. Whoever looks at it from outside makes his own first, or has the kernel copy it if it is private, and both
//! take longer than the look.
use std::{path::Path, time::Instant};

use transship_memory::{PageRange, WINDOW_PAGES, WindowBuffer};

use super::{
    copy::{self, Memory},
    quickest,
    threads::on_all,
};
use crate::{pair::text, units::millis};

/// Memory that has zeros everywhere.
pub(crate) struct Zeros(Memory);

impl Zeros {
    /// In the file system of guest memory, with no page tables of ours.
    pub(crate) fn new(base: &Path, bytes: u64) -> Result<Self, String> {
        Self::of(Memory::fresh(base, bytes)?)
    }

    /// Memory that only its process has mapped.
    pub(crate) fn private(bytes: u64) -> Result<Self, String> {
        Self::of(Memory::private(bytes)?)
    }

    /// Each page is there from now on.
    fn of(memory: Memory) -> Result<Self, String> {
        memory.fill_with_zeros()?;
        Ok(Self(memory))
    }

    /// Milliseconds that so many threads take at best to reach the memory, to look at all of it, and to let go of it.
    pub(crate) fn look(&self, threads: usize) -> Result<f64, String> {
        quickest(|| self.once(threads))
    }

    fn once(&self, threads: usize) -> Result<f64, String> {
        let begin = Instant::now();
        let region = self.0.again()?;
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
    use transship_memory::{PAGE, PAGE_BYTES, PageNumber};

    use super::*;

    #[test]
    fn every_page_is_looked_at() {
        const BYTES: u64 = 24 << 20;
        let look = |zeros: &Zeros| [1, 3].map(|threads| zeros.look(threads));
        for zeros in [Zeros::new(Path::new("/dev/shm"), BYTES), Zeros::private(BYTES)] {
            let zeros = zeros.unwrap();
            assert!(look(&zeros).iter().all(|ms| ms.as_ref().unwrap().is_normal()));
            let last = PageNumber::at(BYTES - PAGE);
            zeros.0.region.write_pages(last.masked(1), &[1; PAGE_BYTES]).unwrap();
            assert!(look(&zeros).iter().all(|ms| ms.as_ref().unwrap_err().contains("not zero")));
        }
    }
}
