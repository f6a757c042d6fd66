//! What is known of the link: how long it takes for a byte of pages as they are.
use transship_memory::PAGE_BYTES;
use transship_wire::PAGES_PER_PACKET;

use super::{BELIEVED, LOSS, pace::EncodingPace};

/// A link that is faster or slower by so much is another one.
pub(super) const ANOTHER: f64 = 1.33;
/// Windows that it costs to send pages as they are only to see how fast it is, about.
pub(super) const LOOK_WINDOWS: u64 = 5;
/// That is done the more seldom the more often it was in vain, up to this number.
const LOOKS_MAX: u32 = 4;

/// The link, with all that lies behind it for pages as they are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    /// 0: not known, but less than was thought.
    seconds_a_byte: f64,
    /// What was seen last, without what was before.
    newest: f64,
    /// Seen over a whole stretch of pages as they are. Else it is hardly more than a guess.
    is_exact: bool,
    /// When it was looked at, in active seconds, and how often in vain.
    looked: f64,
    looks: u32,
}

impl Link {
    /// By a stretch of pages as they are, which was cut short or not.
    pub(super) fn seen(before: Option<Self>, pace: EncodingPace, newest: EncodingPace, is_cut: bool, now: f64) -> Self {
        let looks = before.map_or(0, |link| link.looks);
        let (seconds_a_byte, newest) = (pace.seconds_a_byte, newest.seconds_a_byte);
        Self { seconds_a_byte, newest, is_exact: !is_cut, looked: now, looks }
    }

    pub(super) fn seconds_a_byte(&self) -> f64 {
        self.seconds_a_byte
    }

    pub(super) fn is_guess(&self) -> bool {
        !self.is_exact
    }

    pub(super) fn looked_in_vain(&mut self) {
        self.looks = (self.looks + 1).min(LOOKS_MAX);
    }

    /// How many times its time each encoded byte takes, if that is well known and the encoders are not waited for.
    /// Nothing else has changed since it was looked at but the encoding.
    pub(super) fn compared_with(&self, pace: &EncodingPace) -> f64 {
        if self.is_exact && pace.waits_for_link { (pace.seconds_a_byte / self.newest).max(1.0) } else { 1.0 }
    }

    /// What a stretch of encoded pages says of it.
    pub(super) fn pass_encoded(&mut self, pace: EncodingPace, now: f64) {
        let here = pace.seconds_a_byte;
        let age = (now - self.looked) / f64::from((1 + self.looks).pow(2));
        let look = (LOOK_WINDOWS * PAGES_PER_PACKET * PAGE_BYTES as u64) as f64 * here / LOSS;
        if !pace.waits_for_link {
            // So much goes through now: it is not what it was. Or nobody has seen for long whether it would let more
            // through.
            let is_faster = self.seconds_a_byte > here * ANOTHER;
            self.looks = if is_faster { 0 } else { self.looks };
            self.seconds_a_byte = if is_faster || age > look.max(BELIEVED) { 0.0 } else { self.seconds_a_byte };
        } else if !self.is_exact && age > look {
            self.seconds_a_byte = 0.0;
        } else if !self.is_exact || self.seconds_a_byte * PAGE_BYTES as f64 > pace.seconds_a_page {
            // What encoded pages need for a byte is what others would need, too; unless it is what lies behind the link
            // that is slow, and then pages as they are would be faster.
            self.is_exact &= (self.seconds_a_byte / here).max(here / self.seconds_a_byte) < ANOTHER;
            self.seconds_a_byte = here;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(seconds_a_page: f64, seconds_a_byte: f64, waits_for_link: bool) -> EncodingPace {
        EncodingPace { seconds_a_page, seconds_a_byte, waits_for_link, harder: 1.0 }
    }

    /// 8 ns a byte, a gigabit.
    fn gigabit(is_cut: bool) -> Link {
        let raw = pace(8e-9 * PAGE_BYTES as f64, 8e-9, true);
        Link::seen(None, raw, raw, is_cut, 0.0)
    }

    #[test]
    fn more_than_it_could_carry_shows_that_it_has_changed() {
        let mut link = gigabit(false);
        link.pass_encoded(pace(4e-6, 7e-9, false), 0.1);
        assert_eq!(link.seconds_a_byte(), 8e-9, "little more: that may be chance");
        link.pass_encoded(pace(4e-6, 4e-9, false), 0.2);
        assert_eq!(link.seconds_a_byte(), 0.0);
    }

    #[test]
    fn it_is_looked_at_again_and_ever_more_seldom() {
        let slow = pace(8e-6, 8e-9, true);
        let after = |mut link: Link, seconds: f64| {
            link.pass_encoded(slow, seconds);
            link.seconds_a_byte() == 0.0
        };
        let guess = gigabit(true);
        assert!(!after(guess, 1.0) && after(guess, 3.0), "2.6 MB take 21 ms, a hundredth of 2.1 s");
        let mut once = guess;
        once.looked_in_vain();
        assert!(!after(once, 3.0) && after(once, 9.0));
        assert!(!after(gigabit(false), 1000.0), "what was seen well and is still waited for is known");
    }

    #[test]
    fn what_is_behind_it_is_told_from_the_link() {
        let mut link = gigabit(false);
        let decoders = pace(40e-6, 40e-9, true);
        assert_eq!(link.compared_with(&decoders), 5.0);
        link.pass_encoded(decoders, 0.1);
        assert_eq!(link.seconds_a_byte(), 8e-9, "pages as they are would take 33 us, not 40: it is to be looked at");
    }
}
