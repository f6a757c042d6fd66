//! What encoders and channels count while they work, for the choice between encodings.
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use transship_auto::{Counts, Sample};
use transship_memory::{PageCount, WindowBuffer, WindowRead};
use transship_ring::mpmc;

use super::{Shared, Window};
use crate::Error;

/// Samples that may wait to be looked at.
const SAMPLES: usize = 16;

/// Counters of all threads together. Relaxed: they are read one by one while they change, and estimates are made of
/// them.
pub(crate) struct Meters {
    all_pages: AtomicU64,
    /// Pages with content that were sent, and bytes, by the encoding that was chosen for them.
    sent: Vec<(AtomicU64, AtomicU64)>,
    encoding_nanos: AtomicU64,
    looking_nanos: AtomicU64,
    pub(crate) samples: mpmc::Ring<Sample>,
}

impl Meters {
    pub(crate) fn new(encodings: usize) -> Self {
        Self {
            all_pages: AtomicU64::new(0),
            sent: (0..encodings).map(|_| Default::default()).collect(),
            encoding_nanos: AtomicU64::new(0),
            looking_nanos: AtomicU64::new(0),
            samples: mpmc::Ring::new(SAMPLES),
        }
    }

    /// As [`Shared::read`], of which the time counts in which nobody has looked for zero pages before.
    pub(crate) fn read<'a>(
        &self,
        shared: &'a Shared,
        window: &mut Window,
        buffer: &'a mut WindowBuffer,
    ) -> Result<WindowRead<'a>, Error> {
        let begin = window.zero.is_none().then(Instant::now);
        let read = shared.read(window, buffer)?;
        if let Some(begin) = begin {
            add(&self.looking_nanos, begin.elapsed());
        }
        Ok(read)
    }

    /// An encoder had a window at hand for so long.
    pub(crate) fn encoded(&self, took: Duration) {
        add(&self.encoding_nanos, took);
    }

    /// A window was sent: pages, those of them with content, and bytes.
    pub(crate) fn sent(&self, encoding: u8, all_pages: PageCount, pages: PageCount, wire: u64) {
        self.all_pages.fetch_add(all_pages.get(), Relaxed);
        let sent = &self.sent[usize::from(encoding)];
        sent.0.fetch_add(pages.get(), Relaxed);
        sent.1.fetch_add(wire, Relaxed);
    }

    /// As they are now. `own`: the encoding in use.
    pub(crate) fn counts(&self, own: usize) -> Counts {
        Counts {
            all_pages: self.all_pages.load(Relaxed),
            pages: self.sent.iter().map(|sent| sent.0.load(Relaxed)).sum(),
            wire: self.sent.iter().map(|sent| sent.1.load(Relaxed)).sum(),
            own_pages: self.sent[own].0.load(Relaxed),
            own_wire: self.sent[own].1.load(Relaxed),
            encoding: Duration::from_nanos(self.encoding_nanos.load(Relaxed)),
            looking: Duration::from_nanos(self.looking_nanos.load(Relaxed)),
        }
    }
}

fn add(nanos: &AtomicU64, time: Duration) {
    nanos.fetch_add(time.as_nanos() as u64, Relaxed); // centuries fit
}
