//! Pages that go to a guest beside those that it waits for: the others of the same group, and the groups behind it if
//! the guest goes through its memory page after page. They are sent while nobody waits.
use std::collections::VecDeque;

use transship_memory::{PageCount, PageRange};
use transship_wire::MAX_PAGES_AT_ONCE;

/// Groups that are sent ahead of a guest at most: 2 MiB, which a fast link carries in two milliseconds.
const MOST: u64 = 16;
const GROUP: u64 = MAX_PAGES_AT_ONCE as u64;
/// Pages that are sent at most before somebody who waits may be heard, however fast the link is.
const AT_ONCE: PageCount = PageCount::new(GROUP / 2);

/// A guest that asks for one group after the other.
#[derive(Debug, Clone, Copy)]
struct Walk {
    region: u16,
    /// The last group that it waited for, and the last that was to be sent for that.
    asked: u64,
    last: u64,
    /// Groups ahead of it.
    ahead: u64,
}

impl Walk {
    /// Whether it has come to this group. Some behind those that were sent may have come in order.
    fn is_about(&self, group: u64) -> bool {
        (self.asked..=self.last + 1 + self.ahead).contains(&group)
    }
}

/// What is to be sent when nobody waits.
#[derive(Debug, Default)]
pub(super) struct Beside {
    /// Regions, and the pages of a group that are still to come.
    groups: VecDeque<(u16, PageRange)>,
    walk: Option<Walk>,
}

impl Beside {
    /// Somebody waits for this page.
    pub(super) fn note(&mut self, region: u16, page: u64) {
        let group = page / GROUP;
        let goes_on = self.walk.filter(|walk| walk.region == region && walk.is_about(group));
        let walk = match goes_on {
            // Within the group that it waited for before: others of it are on their way.
            Some(walk) if group == walk.asked => walk,
            Some(walk) => Walk { asked: group, ahead: (walk.ahead * 2).clamp(1, MOST), ..walk },
            None => Walk { region, asked: group, last: group, ahead: 0 },
        };
        let last = group + walk.ahead;
        let first = if goes_on.is_some() { group.max(walk.last + 1) } else { group };
        self.groups.extend((first..=last).map(|group| (region, PageRange::new(group * GROUP, GROUP))));
        self.walk = Some(Walk { last: last.max(walk.last), ..walk });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The next of them, of a region that has so many pages. `at_once`: what the link carries in a moment.
    pub(super) fn take(&mut self, at_once: PageCount, pages: impl Fn(u16) -> PageCount) -> Option<(u16, PageRange)> {
        let &mut (region, ref mut group) = self.groups.front_mut()?;
        let piece = group.first.run(group.count.min(at_once.clamp(PageCount::ONE, AT_ONCE)));
        *group = piece.end().to(group.end());
        if group.count == PageCount::ZERO {
            self.groups.pop_front();
        }
        Some((region, piece.first.to(piece.end().min(PageRange::all(pages(region)).end()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is sent after each of these pages was waited for: groups.
    fn sent(waits: &[(u16, u64)]) -> Vec<Vec<u64>> {
        let mut beside = Beside::default();
        let after = |&(region, page): &(u16, u64)| {
            beside.note(region, page);
            let taken = std::iter::from_fn(|| beside.take(PageCount::MAX, |_| PageCount::new(1_000_000)));
            let mut groups: Vec<_> = taken.map(|(_, pages)| pages.first.get() / GROUP).collect();
            groups.dedup();
            groups
        };
        waits.iter().map(after).collect()
    }

    #[test]
    fn one_that_jumps_gets_the_group_of_each_page() {
        assert_eq!(sent(&[(0, 5), (0, 999), (0, 64), (1, 70)]), [vec![0], vec![31], vec![2], vec![2]]);
    }

    #[test]
    fn one_that_goes_on_gets_twice_as_much_each_time() {
        let waits = [(0, 0), (0, 32), (0, 96), (0, 200), (0, 420), (0, 704)];
        let groups = sent(&waits);
        assert_eq!(groups[..3], [vec![0], vec![1, 2], vec![3, 4, 5]]);
        assert_eq!((groups[3].first(), groups[3].last()), (Some(&6), Some(&10)));
        assert_eq!((groups[4].first(), groups[4].last()), (Some(&13), Some(&21)), "those before it are there");
        assert_eq!((groups[5].first(), groups[5].last()), (Some(&22), Some(&38)), "never more");
        // Not more than the most, and what lies behind comes once.
        let all: Vec<u64> = sent(&(0..100).map(|at| (0, at * GROUP)).collect::<Vec<_>>()).concat();
        assert_eq!(all, (0..=99 + MOST).collect::<Vec<_>>());
    }

    #[test]
    fn a_second_wait_in_the_same_group_is_no_walk() {
        assert_eq!(sent(&[(0, 0), (0, 3), (0, 3)])[0], [0]);
        assert!(sent(&[(0, 0), (0, 3)]).concat().len() <= 1);
    }

    #[test]
    fn a_region_ends() {
        let mut beside = Beside::default();
        beside.note(0, 40);
        let mut take = || beside.take(PageCount::MAX, |_| PageCount::new(50));
        assert_eq!(take(), Some((0, PageRange::new(32, 16))));
        assert_eq!(take(), Some((0, PageRange::new(48, 2))));
        assert_eq!(take(), None);
    }

    #[test]
    fn a_slow_link_gets_few_at_a_time() {
        for (at_once, each) in [(0, 1), (7, 7), (100, 16)] {
            let mut beside = Beside::default();
            beside.note(0, 70);
            let take = || beside.take(PageCount::new(at_once), |_| PageCount::new(1_000_000));
            let taken: Vec<_> = std::iter::from_fn(take).map(|(_, pages)| pages).collect();
            let group: Vec<_> = PageRange::new(64, GROUP).parts(PageCount::new(each)).collect();
            assert_eq!(taken, group, "{at_once}");
        }
    }
}
