//! Keeps all channels together below a rate.
use std::{
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How much lost time may be caught up. A scheduler that lets us sleep too long must not lower the rate, nor may a long
/// pause between two rounds become a burst.
const SLACK: Duration = Duration::from_secs(1);

/// A bound on bytes a second, shared by threads.
#[derive(Debug)]
pub(crate) struct Pacer {
    bytes_per_s: f64,
    /// When the next byte may go.
    next: Mutex<Instant>,
    /// Nothing is sent any more, and nobody waits.
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Pacer {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        let bytes_per_s = bytes_per_s.max(1) as f64;
        Self { bytes_per_s, next: Mutex::new(Instant::now()), is_over: Mutex::new(false), over: Condvar::new() }
    }

    /// Waits until `bytes` may be sent, or until it is over.
    pub(crate) fn wait(&self, bytes: usize) {
        let now = Instant::now();
        let at = self.book(bytes, now);
        if at > now {
            let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.over.wait_timeout_while(is_over, at - now, |is_over| !*is_over));
        }
    }

    /// From now on nobody waits: what is sent goes nowhere.
    pub(crate) fn end(&self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.over.notify_all();
    }

    /// So many bytes go at once, whether they may or not: those behind them wait for longer.
    pub(crate) fn note(&self, bytes: usize) {
        self.book(bytes, Instant::now());
    }

    /// How long so many bytes take.
    pub(crate) fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.bytes_per_s)
    }

    /// Books the bytes, and says when they may go.
    fn book(&self, bytes: usize, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let at = now.checked_sub(SLACK).map_or(*next, |earliest| earliest.max(*next));
        *next = at + self.time_of(bytes as u64);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_sender_catches_up_and_an_idle_one_does_not_burst() {
        let pacer = Pacer::new(1000);
        let start = *pacer.next.lock().unwrap();
        assert_eq!(pacer.book(500, start), start);
        // Half a second late: its slot was at 0.5 s, and the next is at 1.0 s as if it had been in time.
        pacer.book(500, start + Duration::from_secs(1));
        assert_eq!(*pacer.next.lock().unwrap(), start + Duration::from_secs(1));
        // A minute of silence: only the slack is caught up.
        let later = start + Duration::from_secs(60);
        pacer.book(0, later);
        assert_eq!(*pacer.next.lock().unwrap(), later - SLACK);
    }

    #[test]
    fn one_that_waits_goes_on_when_it_is_over() {
        let pacer = Pacer::new(1);
        pacer.wait(3600);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pacer.wait(1));
            pacer.end();
            waits.join().unwrap();
        });
        pacer.wait(1);
        assert!(begin.elapsed() < Duration::from_secs(600), "{:?}", begin.elapsed());
    }
}
