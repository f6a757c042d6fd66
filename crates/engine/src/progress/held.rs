//! A guest that could be stopped, and is not before somebody says so.
use std::{
    sync::{Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use super::Progress;

/// Whether it waits for the word to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Held {
    /// It goes on by itself.
    #[default]
    Never,
    /// It will wait once it has converged.
    NotYet,
    /// It has waited since then. It may have to converge again, while the phase is not [`Phase::Held`](super::Phase).
    Since(Instant),
    /// It was told to go on.
    Released,
}

/// What a hold waits at.
#[derive(Debug, Default)]
pub(super) struct Gate {
    held: Mutex<Held>,
    changed: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Progress {
    /// Whether it waits for the word to go on.
    pub fn held(&self) -> Held {
        *self.gate.lock()
    }

    /// Tells it to go on: at once if it waits, else as soon as it has converged. Without effect if it never waits.
    pub fn release(&self) {
        let mut held = self.gate.lock();
        if *held != Held::Never {
            *held = Held::Released;
            self.gate.changed.notify_all();
        }
    }

    /// It will wait once it has converged.
    pub(crate) fn hold(&self) {
        let mut held = self.gate.lock();
        if *held == Held::Never {
            *held = Held::NotYet;
        }
    }

    /// It waits from now on, unless it was told to go on already.
    pub(crate) fn held_now(&self) {
        let mut held = self.gate.lock();
        if *held == Held::NotYet {
            *held = Held::Since(Instant::now());
        }
    }

    /// Waits until it was told to go on, for `time` at most. Whether it was.
    pub(crate) fn await_release(&self, time: Duration) -> bool {
        let is_held = |held: &mut Held| *held != Held::Released;
        let waited = self.gate.changed.wait_timeout_while(self.gate.lock(), time, is_held);
        *waited.unwrap_or_else(|e| e.into_inner()).0 == Held::Released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_to_be_held_can_be_released() {
        let progress = Progress::default();
        progress.release();
        progress.held_now();
        assert_eq!(progress.held(), Held::Never);
        assert!(!progress.await_release(Duration::ZERO));
        progress.hold();
        assert_eq!(progress.held(), Held::NotYet);
        progress.held_now();
        assert!(matches!(progress.held(), Held::Since(_)));
        assert!(!progress.await_release(Duration::ZERO));
        progress.release();
        progress.held_now();
        progress.hold();
        assert_eq!(progress.held(), Held::Released);
        assert!(progress.await_release(Duration::ZERO));
    }

    #[test]
    fn whoever_waits_is_woken() {
        let progress = Progress::default();
        progress.hold();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| progress.await_release(Duration::from_secs(600)));
            progress.release();
            assert!(waiting.join().is_ok_and(|released| released));
        });
    }
}
