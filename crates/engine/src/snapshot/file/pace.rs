//! A bound on how fast pages are written while the guest runs.
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::pacer::Pacer;

/// For all threads that write one file. Without a bound nobody waits.
#[derive(Debug, Default)]
pub(crate) struct FilePace {
    pacer: OnceLock<Pacer>,
    /// The guest stands still, and nothing may keep it so. Relaxed: a thread that sees it late waits once more.
    over: AtomicBool,
}

impl FilePace {
    /// From now on so many bytes a second.
    pub(crate) fn limit(&self, bytes_per_s: u64) {
        // It is called once, before there are threads.
        let _ = self.pacer.set(Pacer::new(bytes_per_s));
    }

    /// The guest stands still: the rest goes as fast as it can.
    pub(crate) fn end(&self) {
        self.over.store(true, Relaxed);
    }

    /// Waits until so many bytes may be written.
    pub(crate) fn wait(&self, bytes: u64) {
        if let Some(pacer) = self.pacer.get()
            && !self.over.load(Relaxed)
            && bytes > 0
        {
            pacer.wait(bytes as usize);
        }
    }

    /// So many bytes are written at once, because somebody waits; others wait for longer.
    pub(crate) fn note(&self, bytes: u64) {
        if let Some(pacer) = self.pacer.get() {
            pacer.note(bytes as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Far longer than any test may take, if it did wait.
    #[test]
    fn nobody_waits_without_a_bound_or_for_a_guest_that_stands_still() {
        let begin = Instant::now();
        let pace = FilePace::default();
        pace.wait(1 << 40);
        pace.limit(1);
        pace.note(1 << 20);
        pace.end();
        pace.wait(1 << 40);
        assert!(begin.elapsed() < Duration::from_secs(1 << 20));
    }
}
