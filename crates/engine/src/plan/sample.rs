//! Learns of a guest that runs how it writes its memory, and what that memory is like. It is tracked meanwhile as in a
//! move, and nothing else is done to it.
use std::time::{Duration, Instant};

use serde::Serialize;
use transship_codec::{Method, Outcome, Setting};
use transship_memory::{GuestMemory, PAGE_BYTES, PageCount, PageSet, Tracker, WindowBuffer, WindowPages};

use crate::{Cancelled, Error, Progress, guest::SourceGuest};

/// How often it is looked what was written.
pub(super) const TICK: Duration = Duration::from_millis(100);
/// Looking takes no more than such a part of the time.
pub(super) const LOOK_SHARE: u32 = 10;
/// Windows whose pages are looked at: 32 MiB.
const WINDOWS: usize = 64;
/// Methods that are tried on them.
const METHODS: [Method; 3] = [Method::Lz4, Method::Zstd, Method::Zlib];

/// What was learned of a guest.
#[derive(Debug, Clone, Default, Serialize)]
pub struct GuestSample {
    /// Of all its memory.
    pub memory_bytes: u64,
    /// Of it, what was ever touched and not given back.
    pub data_bytes: u64,
    /// Of that, the share that reads as zero, by a sample.
    pub zero_share: f64,
    /// How much memory is written within a time, each page counted once. Both grow.
    pub written: Vec<Written>,
    /// How well its pages can be made smaller, by a sample.
    pub codecs: Vec<CodecSample>,
    /// What saving, sending and loading its device state is thought to take, in milliseconds.
    pub state_ms: f64,
}

/// How much memory is written within a time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Written {
    /// The time, in milliseconds.
    pub ms: f64,
    /// Each page counted once; an average over all such times in the sample.
    pub bytes: f64,
}

/// What a method makes of the pages of a sample.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CodecSample {
    /// As `--compress` has it.
    pub method: String,
    /// Bytes before by bytes after; 1 where it does not help.
    pub ratio: f64,
    /// Bytes of pages that one thread encodes a second.
    pub encode_bytes_per_s: f64,
}

/// Looks at a guest for so long. Nobody is held, and its tracking ends with this.
///
/// # Errors
/// Its writes can't be tracked, or its memory can't be read. Cancelled.
pub fn sample_guest(guest: &mut dyn SourceGuest, time: Duration, progress: &Progress) -> Result<GuestSample, Error> {
    let memory = guest.memory();
    let mut tracker = guest.track()?;
    // The first scan finds everything.
    let first = scan(&memory, tracker.as_mut())?;
    drop(first);
    let mut levels = Levels::new(&memory);
    let (begin, mut before) = (Instant::now(), Instant::now());
    while begin.elapsed() < time {
        let looked = before.elapsed();
        // A guest whose memory takes long to look at is looked at less often.
        let pause = TICK.max(looked * LOOK_SHARE).min(time);
        if wait(pause, progress) {
            return Err(Error::Cancelled(Cancelled::Look));
        }
        before = Instant::now();
        levels.add(&scan(&memory, tracker.as_mut())?);
    }
    let written = levels.curve(begin.elapsed());
    drop(tracker);
    let mut sample = GuestSample { memory_bytes: memory.bytes(), written, ..GuestSample::default() };
    sample.state_ms = guest.state_estimate().as_secs_f64() * 1e3;
    look_at_pages(&memory, &mut sample)?;
    Ok(sample)
}

fn scan(memory: &GuestMemory, tracker: &mut dyn Tracker) -> Result<Vec<PageSet>, Error> {
    (0..memory.regions().len()).map(|region| Ok(tracker.scan(region)?)).collect()
}

/// Whether somebody has cancelled.
fn wait(time: Duration, progress: &Progress) -> bool {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || progress.is_cancelled() {
            return progress.is_cancelled();
        }
        progress.await_release(left.min(crate::control::TICK));
    }
}

/// How much is written in one tick, in two, in four, …, and in all.
struct Levels {
    levels: Vec<Level>,
    all: Vec<PageSet>,
    empty: Vec<PageSet>,
    ticks: u32,
}

/// Of so many ticks together.
struct Level {
    ticks: u32,
    pages: Vec<PageSet>,
    /// How many of them are in there.
    gathered: u32,
    /// Pages, of all that are complete, and how many those are.
    sum: u64,
    count: u32,
}

impl Levels {
    fn new(memory: &GuestMemory) -> Self {
        let empty: Vec<_> = memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect();
        let level = |power: u32| Level { ticks: 1 << power, pages: empty.clone(), gathered: 0, sum: 0, count: 0 };
        Self { levels: (0..5).map(level).collect(), all: empty.clone(), empty, ticks: 0 }
    }

    fn add(&mut self, written: &[PageSet]) {
        self.ticks += 1;
        unite(&mut self.all, written);
        for level in &mut self.levels {
            unite(&mut level.pages, written);
            level.gathered += 1;
            if level.gathered == level.ticks {
                level.sum += count(&level.pages).get();
                level.count += 1;
                level.gathered = 0;
                level.pages.clone_from(&self.empty);
            }
        }
    }

    fn curve(&self, time: Duration) -> Vec<Written> {
        let tick_ms = time.as_secs_f64() * 1e3 / f64::from(self.ticks.max(1));
        let point =
            |ticks: u32, pages: f64| Written { ms: tick_ms * f64::from(ticks), bytes: pages * PAGE_BYTES as f64 };
        let levels = self.levels.iter().filter(|level| level.count > 0 && level.ticks < self.ticks);
        let mut curve: Vec<_> =
            levels.map(|level| point(level.ticks, level.sum as f64 / f64::from(level.count))).collect();
        curve.push(point(self.ticks, count(&self.all).get() as f64));
        // Averages of different times may fall a little where the truth does not.
        for at in 1..curve.len() {
            curve[at].bytes = curve[at].bytes.max(curve[at - 1].bytes);
        }
        curve
    }
}

fn unite(all: &mut [PageSet], more: &[PageSet]) {
    all.iter_mut().zip(more).for_each(|(all, more)| all.union_with(more));
}

fn count(pages: &[PageSet]) -> PageCount {
    PageCount::of(pages)
}

/// Holes, zeros, and what the codecs make of the rest.
fn look_at_pages(memory: &GuestMemory, sample: &mut GuestSample) -> Result<(), Error> {
    let data = memory.regions().iter().map(|region| region.data()).collect::<Result<Vec<_>, _>>()?;
    sample.data_bytes = count(&data).bytes();
    let windows: Vec<(usize, WindowPages)> =
        data.iter().enumerate().flat_map(|(region, data)| data.windows().map(move |window| (region, window))).collect();
    let mut encoders: Vec<_> = METHODS
        .iter()
        .filter_map(|method| Some((*method, Setting::new(*method, None).ok()?.encoder(), Tried::default())))
        .collect();
    let (mut looked, mut zeros, mut buffer, mut out) = (0, 0, WindowBuffer::default(), Vec::new());
    for (region, window) in windows.iter().step_by(windows.len().div_ceil(WINDOWS).max(1)) {
        let read = memory.regions()[*region].read_window(*window, true, &mut buffer)?;
        looked += window.mask.count_ones();
        zeros += read.zero_mask().count_ones();
        let pages = read.into_bytes();
        if pages.is_empty() {
            continue;
        }
        for (_, encoder, tried) in &mut encoders {
            let begin = Instant::now();
            let outcome = encoder.encode(pages, &mut out);
            tried.seconds += begin.elapsed().as_secs_f64();
            tried.given += pages.len();
            tried.made += if outcome == Outcome::Encoded { out.len() } else { pages.len() };
        }
    }
    sample.zero_share = f64::from(zeros) / f64::from(looked.max(1));
    let tried = encoders.iter().filter(|(_, _, tried)| tried.given > 0);
    sample.codecs = tried
        .map(|(method, _, tried)| CodecSample {
            method: method.to_string(),
            ratio: tried.given as f64 / tried.made.max(1) as f64,
            encode_bytes_per_s: tried.given as f64 / tried.seconds.max(1e-9),
        })
        .collect();
    Ok(())
}

/// What an encoder did.
#[derive(Default)]
struct Tried {
    given: usize,
    made: usize,
    seconds: f64,
}

#[cfg(test)]
mod tests {
    use transship_memory::PageRange;

    use super::*;

    fn levels() -> Levels {
        let empty = vec![PageSet::empty(PageCount::new(1000))];
        let level = |power: u32| Level { ticks: 1 << power, pages: empty.clone(), gathered: 0, sum: 0, count: 0 };
        Levels { levels: (0..5).map(level).collect(), all: empty.clone(), empty: empty.clone(), ticks: 0 }
    }

    fn pages(first: u64, count: u64) -> Vec<PageSet> {
        let mut pages = PageSet::empty(PageCount::new(1000));
        pages.insert(PageRange::new(first, count));
        vec![pages]
    }

    #[test]
    fn what_is_written_again_counts_once_in_longer_times() {
        let mut levels = levels();
        for tick in 0..6 {
            levels.add(&pages(tick % 2 * 10, 10));
        }
        let curve: Vec<_> = levels.curve(Duration::from_millis(600)).iter().map(|w| (w.ms, w.bytes / 4096.0)).collect();
        assert_eq!(curve, [(100.0, 10.0), (200.0, 20.0), (400.0, 20.0), (600.0, 20.0)]);
    }

    #[test]
    fn the_curve_never_falls() {
        let mut levels = levels();
        // Much in the end, of which the two complete pairs have seen nothing.
        for tick in [0, 0, 0, 0, 100] {
            levels.add(&pages(0, tick));
        }
        let curve = levels.curve(Duration::from_millis(500));
        assert!(curve.windows(2).all(|pair| pair[0].bytes <= pair[1].bytes), "{curve:?}");
        assert_eq!(curve.last().map(|written| written.bytes), Some(100.0 * 4096.0));
    }
}
