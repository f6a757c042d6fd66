//! How much a guest writes while its first round is sent, by looks at what the next scan would report.
use std::{thread, time::Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use transship_memory::{PageCount, Tracker};

use super::sample::{LOOK_SHARE, TICK, Written};

/// A tracker that can be looked at, and since when it counts.
pub(crate) struct Tracked<'a> {
    pub(crate) tracker: &'a mut dyn Tracker,
    pub(crate) regions: usize,
    pub(crate) since: Instant,
}

impl Tracked<'_> {
    /// Does `act`, and looks now and then while that takes long: after a tenth of a second, and then after half as much
    /// time again each.
    pub(crate) fn while_doing<T>(self, act: impl FnOnce() -> T) -> (T, Vec<Written>) {
        let (over, is_over) = bounded::<()>(0);
        thread::scope(|scope| {
            let looking = thread::Builder::new().name("looks".into()).spawn_scoped(scope, move || self.look(&is_over));
            let done = act();
            drop(over);
            // Without a thread, or after a panic, which was printed, there is less to make a forecast of.
            (done, looking.ok().and_then(|thread| thread.join().ok()).unwrap_or_default())
        })
    }

    fn look(self, is_over: &Receiver<()>) -> Vec<Written> {
        let Self { tracker, regions, since } = self;
        let (mut looks, mut next) = (Vec::new(), TICK);
        while is_over.recv_timeout(next.saturating_sub(since.elapsed())) == Err(RecvTimeoutError::Timeout) {
            let at = since.elapsed();
            let Some(pages) = written_so_far(tracker, regions) else { break };
            looks.push(Written { ms: at.as_secs_f64() * 1e3, bytes: pages.bytes() as f64 });
            let now = since.elapsed();
            next = (next * 3 / 2).max(now + (now - at) * LOOK_SHARE);
        }
        looks
    }
}

/// None: it is not to be known.
fn written_so_far(tracker: &mut dyn Tracker, regions: usize) -> Option<PageCount> {
    let count = |region| {
        let failed = |error: &_| tracing::debug!(%error, "what is written during the first round is not known");
        tracker.written_so_far(region).inspect_err(failed).ok().flatten()
    };
    (0..regions).map(count).sum()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use transship_memory::{Error, PageSet};

    use super::*;

    /// Has ten pages more at each look, until it fails.
    struct Growing {
        looks: u64,
        fails_after: u64,
    }

    impl Tracker for Growing {
        fn scan(&mut self, _: usize) -> Result<PageSet, Error> {
            unreachable!("a look is no scan")
        }

        fn written_so_far(&mut self, region: usize) -> Result<Option<PageCount>, Error> {
            self.looks += u64::from(region == 0);
            if self.looks > self.fails_after {
                return Err(Error::System { what: "look".into(), source: std::io::Error::other("gone") });
            }
            Ok(Some(PageCount::new(5 * self.looks)))
        }
    }

    fn looks(fails_after: u64, looks: u32) -> Vec<Written> {
        let mut tracker = Growing { looks: 0, fails_after };
        let since = Instant::now();
        let tracked = Tracked { tracker: &mut tracker, regions: 2, since };
        let end = TICK * 2_u32.pow(looks);
        let (done, written) = tracked.while_doing(|| {
            // The looks come by the clock.
            while since.elapsed() < end {
                thread::yield_now();
            }
            "done"
        });
        assert_eq!(done, "done");
        written
    }

    #[test]
    fn looks_come_more_and_more_seldom() {
        // At 100, 150, 225 and 337 ms.
        let written = looks(u64::MAX, 2);
        assert!((1..=4).contains(&written.len()), "{written:?}");
        for (number, look) in written.iter().enumerate() {
            assert_eq!(look.bytes, (number + 1) as f64 * 10.0 * 4096.0);
            let least = TICK.as_secs_f64() * 1e3 * 1.5_f64.powi(number as i32);
            assert!(look.ms >= least, "{written:?}");
        }
    }

    #[test]
    fn a_tracker_that_fails_is_not_looked_at_again() {
        assert!(looks(0, 1).is_empty());
        let mut cannot = Cannot;
        let tracked = Tracked { tracker: &mut cannot, regions: 1, since: Instant::now() - Duration::from_secs(1) };
        assert_eq!(tracked.while_doing(|| 7).1.len(), 0);
    }

    /// Can't look without a scan.
    struct Cannot;

    impl Tracker for Cannot {
        fn scan(&mut self, _: usize) -> Result<PageSet, Error> {
            unreachable!("a look is no scan")
        }
    }
}
