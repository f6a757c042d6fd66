//! Which of a region's pages are brought, and in which pieces.
use transship_memory::{PageCount, PageNumber, PageRange, PageSet, WindowPages};

/// Pages that a background thread takes at once: 1 MiB.
pub(crate) const UNIT_PAGES: PageCount = PageCount::new(256);
/// Pages in between that are read and thrown away rather than reading twice.
const GAP_PAGES: PageCount = PageCount::new(32);
/// Runs of pages that are not brought and at least this long are left to the kernel at once: 2 MiB.
const RELEASE_PAGES: PageCount = PageCount::new(512);

/// A region, and which of its pages are brought.
pub(crate) struct Region {
    /// Its number.
    pub(crate) index: usize,
    pub(crate) stored: PageSet,
    pub(crate) pages: PageCount,
    /// Pages that come and go together.
    pub(crate) unit: PageCount,
}

impl Region {
    /// The aligned range about `page` that has `pages` pages, or as many as a huge one.
    pub(crate) fn clip(&self, page: PageNumber, pages: PageCount) -> PageRange {
        let pages = pages.max(self.unit);
        let first = page.unit(pages);
        // Huge pages are whole also at the end.
        first.run(pages.min(PageRange::all(self.pages).end() - first))
    }

    pub(crate) fn units(&self) -> impl Iterator<Item = (usize, PageNumber)> + '_ {
        let pages = UNIT_PAGES.max(self.unit);
        let mut firsts: Vec<_> = self.stored.windows().map(|window| window.first.unit(pages)).collect();
        firsts.dedup();
        firsts.into_iter().map(|first| (self.index, first))
    }

    /// Runs of a range that are brought but not among the claimed, of which it is told by windows of 128 pages.
    pub(crate) fn wanted(&self, range: PageRange, claimed: impl Fn(PageNumber) -> u128) -> Vec<PageRange> {
        let mut wanted: Vec<PageRange> = Vec::new();
        for window in range.windows() {
            let pages = window.with(window.mask & self.stored.window(window.first) & !claimed(window.first));
            for run in pages.runs() {
                match wanted.last_mut() {
                    Some(last) if last.end() == run.first => last.count += run.count,
                    _ => wanted.push(run),
                }
            }
        }
        wanted
    }

    /// The huge pages of a range.
    pub(crate) fn in_units(&self, range: PageRange) -> impl Iterator<Item = PageRange> {
        range.parts(self.unit)
    }

    /// How many pages of a range are brought.
    pub(crate) fn stored_in(&self, range: PageRange) -> PageCount {
        let pages = |window: WindowPages| window.with(window.mask & self.stored.window(window.first));
        range.windows().map(|window| pages(window).count()).sum()
    }

    /// Long runs of pages that are not brought, of whole huge pages.
    pub(crate) fn holes(&self) -> impl Iterator<Item = PageRange> + '_ {
        let end = std::iter::once(PageRange::all(self.pages).end().run(PageCount::ZERO));
        let mut from = PageNumber::FIRST;
        let gaps = self.stored.ranges().chain(end).map(move |stored| {
            let gap = from.next_unit(self.unit).to(stored.first.unit(self.unit));
            from = stored.end();
            gap
        });
        gaps.filter(|gap| gap.count >= RELEASE_PAGES)
    }
}

/// Joins runs that are close to each other.
pub(crate) fn spans(runs: &[PageRange]) -> Vec<PageRange> {
    let mut spans: Vec<PageRange> = Vec::new();
    for run in runs {
        match spans.last_mut() {
            Some(span) if run.first - span.end() <= GAP_PAGES => span.count = run.end() - span.first,
            _ => spans.push(*run),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(pages: u64, unit: u64, stored: &[(u64, u64)]) -> Region {
        let mut set = PageSet::empty(PageCount::new(pages));
        stored.iter().for_each(|&(first, count)| set.insert(PageRange::new(first, count)));
        Region { index: 0, stored: set, pages: PageCount::new(pages), unit: PageCount::new(unit) }
    }

    fn pairs(ranges: impl IntoIterator<Item = PageRange>) -> Vec<(u64, u64)> {
        ranges.into_iter().map(|range| (range.first.get(), range.count.get())).collect()
    }

    #[test]
    fn what_is_wanted_is_stored_and_not_claimed() {
        let region = region(1000, 1, &[(10, 5), (120, 20), (300, 700)]);
        let wanted = |first, count| pairs(region.wanted(PageRange::new(first, count), |_| 0));
        assert_eq!(wanted(0, 256), [(10, 5), (120, 20)], "joined across windows");
        assert_eq!(wanted(12, 116), [(12, 3), (120, 8)]);
        let claimed = |first| WindowPages::within(PageRange::new(125, 10), first).mask;
        assert_eq!(pairs(region.wanted(PageRange::new(96, 64), claimed)), [(120, 5), (135, 5)]);
        assert_eq!(wanted(992, 8), [(992, 8)]);
        assert_eq!(region.stored_in(PageRange::new(0, 1000)), PageCount::new(725));
        assert_eq!(
            pairs([
                region.clip(PageNumber::new(999), PageCount::new(32)),
                region.clip(PageNumber::new(5), PageCount::new(32))
            ]),
            [(992, 8), (0, 32)]
        );
    }

    #[test]
    fn runs_that_are_close_are_read_at_once() {
        let runs = [PageRange::new(0, 1), PageRange::new(33, 2), PageRange::new(68, 1), PageRange::new(69, 1)];
        assert_eq!(pairs(spans(&runs)), [(0, 35), (68, 2)]);
        assert!(spans(&[]).is_empty());
    }

    #[test]
    fn only_long_runs_of_whole_units_are_released() {
        let small = region(4096, 1, &[(100, 1), (700, 1), (1300, 2000)]);
        assert_eq!(pairs(small.holes()), [(101, 599), (701, 599), (3300, 796)]);
        let huge = region(4096, 512, &[(100, 1), (700, 1), (1300, 2000)]);
        assert_eq!(pairs(huge.holes()), [(3584, 512)]);
        assert_eq!(pairs(region(4096, 1, &[]).holes()), [(0, 4096)]);
        assert_eq!(pairs(region(4096, 1, &[(0, 4096)]).holes()), []);
    }

    #[test]
    fn units_cover_what_is_stored() {
        let units = |region: Region| region.units().map(|(of, first)| (of, first.get())).collect::<Vec<_>>();
        assert_eq!(units(region(1000, 1, &[(10, 5), (120, 20), (300, 1)])), [(0, 0), (0, 256)]);
        assert_eq!(units(region(1024, 512, &[(10, 5), (300, 1), (600, 1)])), [(0, 0), (0, 512)]);
    }
}
