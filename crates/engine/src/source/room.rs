//! How fast pages may go that nobody waits for yet, so that the next that is waited for finds the link free.
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use transship_memory::PageCount;

/// What goes into the link at once takes so long there.
const AT_ONCE: Duration = Duration::from_micros(100);

/// Bytes a second; 0 while nobody knows. All threads use it at once.
#[derive(Debug, Default)]
pub(super) struct Room(AtomicU64);

impl Room {
    /// Relaxed: it says nothing about other memory.
    pub(super) fn set(&self, bytes_per_s: Option<f64>) {
        self.0.store(bytes_per_s.map_or(0, |rate| (rate as u64).max(1)), Relaxed);
    }

    /// Pages that take the link for a moment only. As long as nobody knows, they are as many as can be.
    pub(super) fn at_once(&self) -> PageCount {
        match self.0.load(Relaxed) {
            0 => PageCount::MAX,
            rate => PageCount::within((rate as f64 * AT_ONCE.as_secs_f64()) as u64),
        }
    }

    /// How long these pages take.
    pub(super) fn time_of(&self, pages: PageCount) -> Duration {
        match self.0.load(Relaxed) {
            0 => Duration::ZERO,
            rate => Duration::from_secs_f64(pages.bytes() as f64 / rate as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_has_room_for_few_at_once() {
        let room = Room::default();
        assert_eq!((room.at_once(), room.time_of(PageCount::new(5))), (PageCount::MAX, Duration::ZERO));
        room.set(Some(122_880_000.0));
        assert_eq!((room.at_once(), room.time_of(PageCount::new(3))), (PageCount::new(3), Duration::from_micros(100)));
        room.set(Some(0.3));
        assert_eq!(room.at_once(), PageCount::ZERO);
        room.set(None);
        assert_eq!(room.at_once(), PageCount::MAX);
    }
}
