//! What a user can choose about a synthetic guest.
use std::{path::PathBuf, time::Duration};

use transship_memory::PAGE_BYTES;

use super::Error;

/// What touched pages hold before they are written for the first time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Content {
    /// Zeros, in pages that are there.
    Zero,
    /// What no codec can shrink.
    Random,
    /// Half zeros, a quarter random, a quarter that shrinks well, in runs of 16 pages.
    #[default]
    Mixed,
    /// The files of a folder, one after the other, each from the start of a page, again and again.
    Corpus(PathBuf),
}

/// How fast the writers write, all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WriteRate {
    /// Not at all.
    #[default]
    None,
    /// Bytes a second, in whole pages.
    BytesPerSecond(u64),
    /// As fast as they can.
    Max,
}

/// A synthetic guest.
#[derive(Debug, Clone)]
pub struct SyntheticOptions {
    /// Where it listens for the hand-off protocol.
    pub listen: PathBuf,
    /// Size of all regions together; a multiple of the page size times `regions`.
    pub memory_bytes: u64,
    /// 1 to 64 regions of equal size.
    pub regions: usize,
    /// Waits for a guest instead of being one: only what is said of memory and of duration applies.
    pub incoming: bool,
    /// The directory of a file system that holds the memory files, such as a mounted hugetlbfs or a tmpfs with huge
    /// pages. None: memfds of small pages.
    pub huge: Option<PathBuf>,
    /// Share of the memory that is touched at first, 0 to 1, from the start of each region. The rest is holes.
    pub touched: f64,
    /// What the touched pages hold.
    pub content: Content,
    /// How fast the writers write.
    pub write_rate: WriteRate,
    /// Threads that write, 1 to 256. Each writes pages of its own.
    pub threads: usize,
    /// The writers write this number of bytes again and again, from the start of each region. None: in what is touched.
    pub hot_set_bytes: Option<u64>,
    /// Makes the random content another one.
    pub seed: u64,
    /// Ends the guest by itself after so long.
    pub duration: Option<Duration>,
}

impl SyntheticOptions {
    /// A quiet guest of `memory_bytes`, all touched, in one region.
    pub fn new(listen: impl Into<PathBuf>, memory_bytes: u64) -> Self {
        Self {
            listen: listen.into(),
            memory_bytes,
            regions: 1,
            incoming: false,
            huge: None,
            touched: 1.0,
            content: Content::default(),
            write_rate: WriteRate::None,
            threads: 1,
            hot_set_bytes: None,
            seed: 1,
            duration: None,
        }
    }

    /// Pages of each region.
    pub(super) fn region_pages(&self) -> u64 {
        self.memory_bytes / self.regions.max(1) as u64 / PAGE_BYTES as u64
    }

    /// Touched pages of each region.
    pub(super) fn touched_pages(&self) -> u64 {
        // Exact for every region below 2^53 pages.
        (self.region_pages() as f64 * self.touched).round() as u64
    }

    /// Pages of each region that the writers write.
    pub(super) fn hot_pages(&self) -> u64 {
        match self.hot_set_bytes {
            Some(bytes) => bytes.div_ceil(PAGE_BYTES as u64 * self.regions as u64),
            None => self.touched_pages(),
        }
    }

    /// All that can be checked without touching anything.
    pub(super) fn check(&self) -> Result<(), Error> {
        let wrong = |what: String| Err(Error::Options(what));
        if self.regions == 0 || self.regions > 64 {
            return wrong(format!("{} regions: 1 to 64 are possible", self.regions));
        }
        let unit = PAGE_BYTES as u64 * self.regions as u64;
        if self.memory_bytes == 0 || !self.memory_bytes.is_multiple_of(unit) {
            return wrong(format!("memory of {} bytes: it must be a multiple of {unit}", self.memory_bytes));
        }
        if self.incoming {
            return Ok(());
        }
        if !(0.0..=1.0).contains(&self.touched) {
            return wrong(format!("touched share {}: 0 to 1 is possible", self.touched));
        }
        if self.threads == 0 || self.threads > 256 {
            return wrong(format!("{} threads: 1 to 256 are possible", self.threads));
        }
        if self.hot_pages() > self.region_pages() {
            return wrong(format!(
                "hot set of {} bytes: the memory has {}",
                self.hot_pages() * unit,
                self.memory_bytes
            ));
        }
        if self.write_rate != WriteRate::None && self.hot_pages() == 0 {
            return wrong(
                "nothing to write to: no page is touched; give a hot set or touch a share of the memory".into(),
            );
        }
        if self.write_rate == WriteRate::BytesPerSecond(0) {
            return wrong("write rate 0: leave it out for a guest that does not write".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn wrong_options_are_named() {
        type Break = fn(&mut SyntheticOptions);
        let cases: [(&str, Break); 8] = [
            ("0 regions", |o| o.regions = 0),
            ("multiple of 4096", |o| o.memory_bytes += 1),
            ("multiple of 12288", |o| o.regions = 3),
            ("touched share 1.5", |o| o.touched = 1.5),
            ("touched share NaN", |o| o.touched = f64::NAN),
            ("0 threads", |o| o.threads = 0),
            ("hot set of 2097152", |o| o.hot_set_bytes = Some(2 << 20)),
            ("nothing to write", |o| (o.touched, o.write_rate) = (0.0, WriteRate::Max)),
        ];
        let good = SyntheticOptions::new("/tmp/x", 1 << 20);
        good.check().unwrap();
        for (expected, spoil) in cases {
            let mut options = good.clone();
            spoil(&mut options);
            let error = options.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
    }

    #[test]
    fn shares_are_per_region() {
        let mut options = SyntheticOptions::new("/tmp/x", 8 << 20);
        options.regions = 2;
        options.touched = 0.25;
        assert_eq!((options.region_pages(), options.touched_pages(), options.hot_pages()), (1024, 256, 256));
        options.hot_set_bytes = Some(3 * 4096);
        assert_eq!(options.hot_pages(), 2);
    }
}
