//! When a guest that is held is looked at, and when its rest is sent.
use std::time::{Duration, Instant};

use crate::forecast::Room;

/// Looks come no further apart than this, unless they themselves take long.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Nor any closer.
const LOOK_AT_LEAST: Duration = Duration::from_millis(50);
/// Looking takes no more than such a part of the time.
const LOOK_SHARE: u32 = 10;
/// The other end gets a round at least this often, be it an empty one: networks forget connections that are silent.
const SEND_EVERY: Duration = Duration::from_secs(10);
/// The rest is sent before it is more than this share of what fits the downtime.
const SEND_AT: f64 = 0.7;
/// When to look, and when to send.
pub(super) struct Pulse {
    rest: u64,
    looked: Instant,
    sent: Instant,
    /// Bytes a second by which the rest grows.
    growth: f64,
    /// How long a look takes.
    look: Duration,
    /// What is written while the rest is sent is too much to be kept small: haste would not help.
    in_vain: bool,
}

impl Pulse {
    pub(super) fn new(rest: u64) -> Self {
        let now = Instant::now();
        Self { rest, looked: now, sent: now, growth: 0.0, look: Duration::ZERO, in_vain: false }
    }

    pub(super) fn pause(&self, room: &Room) -> Duration {
        let least = LOOK_AT_LEAST.max(self.look * LOOK_SHARE);
        let left = SEND_AT * room.fits_bytes as f64 - self.rest as f64;
        let until = match self.in_vain {
            false if self.growth > 0.0 => Duration::try_from_secs_f64(left / self.growth).unwrap_or_default(),
            _ => LOOK_EVERY,
        };
        until.min(LOOK_EVERY).max(least)
    }

    pub(super) fn looked(&mut self, rest: u64, begin: Instant) {
        let now = Instant::now();
        self.look = now.duration_since(begin);
        let seconds = now.duration_since(self.looked).as_secs_f64();
        self.growth = rest.saturating_sub(self.rest) as f64 / seconds.max(1e-3);
        (self.rest, self.looked) = (rest, now);
    }

    pub(super) fn is_send_due(&self, room: &Room) -> bool {
        self.rest as f64 > SEND_AT * room.fits_bytes as f64 || self.sent.elapsed() >= SEND_EVERY
    }

    pub(super) fn sent(&mut self, rest: u64, room: &Room) {
        self.in_vain = rest as f64 > SEND_AT * room.fits_bytes as f64;
        let now = Instant::now();
        (self.rest, self.looked, self.sent) = (rest, now, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(fits_mib: u64) -> Room {
        Room { fits_bytes: fits_mib * MIB, rounds_left: 30, until_deadline: None, bytes_per_s: 1e8 }
    }

    fn pulse(rest_mib: u64, growth_mib: f64) -> Pulse {
        Pulse { growth: growth_mib * MIB as f64, ..Pulse::new(rest_mib * MIB) }
    }

    #[test]
    fn a_quiet_guest_is_looked_at_once_a_second_and_a_busy_one_before_its_rest_is_too_much() {
        let ms = |pulse: Pulse| pulse.pause(&room(100)).as_millis();
        assert_eq!(ms(pulse(0, 0.0)), 1000);
        assert_eq!(ms(pulse(0, 10.0)), 1000);
        // 70 MiB may be written, and 20 are.
        assert_eq!(ms(pulse(20, 100.0)), 500);
        assert_eq!(ms(pulse(20, 10_000.0)), 50);
        assert_eq!(ms(pulse(90, 100.0)), 50, "it is too much already");
        assert_eq!(ms(Pulse { in_vain: true, ..pulse(90, 100.0) }), 1000);
        assert_eq!(ms(Pulse { look: Duration::from_millis(300), ..pulse(90, 100.0) }), 3000);
    }

    #[test]
    fn the_rest_is_sent_before_it_is_too_much_and_every_few_seconds() {
        assert!(!pulse(70, 0.0).is_send_due(&room(100)));
        assert!(pulse(71, 0.0).is_send_due(&room(100)));
        let Some(sent) = Instant::now().checked_sub(SEND_EVERY) else { return };
        assert!(Pulse { sent, ..pulse(0, 0.0) }.is_send_due(&room(100)));
    }
}
