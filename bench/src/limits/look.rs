//! Zeros in a guest's memory, looked at from outside by threads that do nothing else. A VMM has page tables for its
//! memory. Whoever looks at it from outside makes his own first, and that takes longer than the look.
use std::{path::Path, time::Instant};

use transship_memory::{PageRange, WINDOW_PAGES, WindowBuffer};

use super::{
    copy::{self, Memory},
    threads::on_all,
};
use crate::{pair::text, units::millis};

/// How often it is looked at; the quickest counts, as of a scan.
const PASSES: usize = 3;

/// Memory that has zeros everywhere, and no page tables of ours.
pub(crate) struct Zeros(Memory);

impl Zeros {
    /// In the file system of guest memory.
    pub(crate) fn new(base: &Path, bytes: u64) -> Result<Self, String> {
        let memory = Memory::fresh(base, bytes)?;
        memory.fill_with_zeros()?;
        Ok(Self(memory))
    }

    /// Milliseconds that so many threads take at best to map the memory, to look at all of it, and to unmap it.
    pub(crate) fn look(&self, threads: usize) -> Result<f64, String> {
        (0..PASSES).try_fold(f64::INFINITY, |best, _| Ok(self.once(threads)?.min(best)))
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
    use transship_memory::PageNumber;

    use super::*;

    #[test]
    fn every_page_is_looked_at() {
        let zeros = Zeros::new(Path::new("/dev/shm"), 24 << 20).unwrap();
        assert!([1, 3].iter().all(|threads| zeros.look(*threads).unwrap().is_normal()));
        let last = PageNumber::new((24 << 20 >> 12) - 1);
        zeros.0.region.write_pages(last.masked(1), &[1; 4096]).unwrap();
        for threads in [1, 3] {
            assert!(zeros.look(threads).unwrap_err().contains("not zero"));
        }
    }
}
