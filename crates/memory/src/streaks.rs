//! Whoever writes page after page need not wait at each of them: the longer somebody has done so, the more pages are
//! let go of at once. A page that is let go of counts as written whether it is or not, so a streak may be wrong about
//! an eighth of its pages at most.
use crate::{Fault, PageCount, PageNumber};

/// Streaks that are remembered: as many threads may write side by side.
const KNOWN: usize = 8;
/// Pages in a row before any is let go of that nobody waits for.
const BEGIN: PageCount = PageCount::new(16);
/// Of the pages of a streak, what comes on top.
const SHARE: u64 = 8;
/// At once. The last round has so many pages more than it must, for each thread that writes.
const MOST: PageCount = PageCount::new(128);

/// Pages that were let go of one after the other.
#[derive(Debug, Clone, Copy, Default)]
struct Streak {
    region: usize,
    /// The page behind it.
    next: PageNumber,
    pages: PageCount,
}

/// The latest ones.
#[derive(Debug, Default)]
pub(crate) struct Streaks {
    known: [Streak; KNOWN],
    /// Which one the next new one replaces.
    oldest: usize,
}

impl Streaks {
    /// How many pages may be let go of from this one on, which somebody waits for.
    pub(crate) fn pages(&self, fault: Fault) -> PageCount {
        let pages = self.place(fault).map_or(PageCount::ZERO, |place| self.known[place].pages);
        if pages < BEGIN { PageCount::ONE } else { (pages / SHARE).min(MOST) }
    }

    /// So many were.
    pub(crate) fn note(&mut self, fault: Fault, pages: PageCount) {
        let next = fault.page + pages;
        match self.place(fault) {
            Some(place) => {
                let streak = &mut self.known[place];
                (streak.next, streak.pages) = (next, streak.pages + pages);
            }
            None => {
                self.known[self.oldest] = Streak { region: fault.region, next, pages };
                self.oldest = (self.oldest + 1) % KNOWN;
            }
        }
    }

    fn place(&self, fault: Fault) -> Option<usize> {
        self.known
            .iter()
            .position(|streak| !streak.pages.is_zero() && (streak.region, streak.next) == (fault.region, fault.page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(region: usize, page: u64) -> Fault {
        Fault { region, page: PageNumber::new(page) }
    }

    /// How often a thread waits that writes these pages in this order, and how many pages are let go of.
    fn waits(writes: impl Iterator<Item = u64>) -> (u64, u64) {
        let (mut streaks, mut gone, mut waits) = (Streaks::default(), std::collections::BTreeSet::new(), 0);
        for page in writes {
            if gone.contains(&page) {
                continue;
            }
            let pages = streaks.pages(fault(0, page));
            streaks.note(fault(0, page), pages);
            gone.extend(page..page + pages.get());
            waits += 1;
        }
        (waits, gone.len() as u64)
    }

    #[test]
    fn whoever_writes_all_pages_waits_at_few() {
        let (waits, gone) = waits(0..10_000);
        assert!(waits < 10_000 / 25 && (10_000..10_000 + MOST.get()).contains(&gone), "{waits} {gone}");
    }

    #[test]
    fn no_streak_is_wrong_about_more_than_an_eighth() {
        for length in 1..2000 {
            let (_, gone) = waits(0..length);
            assert!(gone <= length + length / SHARE, "{length}: {gone}");
        }
    }

    #[test]
    fn pages_that_are_not_in_a_row_are_let_go_of_one_by_one() {
        assert_eq!(waits((0..1000).map(|page| page * 2)), (1000, 1000));
        assert_eq!(waits((0..1000).rev()), (1000, 1000));
        assert_eq!(waits((0..100).flat_map(|group| group * 32..group * 32 + BEGIN.get())), (1600, 1600));
    }

    #[test]
    fn several_threads_have_a_streak_each() {
        let side_by_side =
            |threads: u64| (0..1000).flat_map(move |page| (0..threads).map(move |at| at * 100_000 + page));
        assert!(waits(side_by_side(KNOWN as u64)).0 < 8000 / 10);
        assert_eq!(waits(side_by_side(KNOWN as u64 + 1)).0, 9000, "there are more than are remembered");
    }

    #[test]
    fn a_streak_is_in_one_region() {
        let mut streaks = Streaks::default();
        (0..100).for_each(|page| streaks.note(fault(0, page), PageCount::ONE));
        assert_eq!((streaks.pages(fault(0, 100)).get(), streaks.pages(fault(1, 100)).get()), (12, 1));
        assert_eq!(Streaks::default().pages(fault(0, 0)), PageCount::ONE);
    }
}
