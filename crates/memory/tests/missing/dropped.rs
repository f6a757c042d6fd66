//! Memory that was there, of which a part is dropped and brought again while the guest runs, as post-copy does.
use std::thread;

use proptest::{collection::vec, prelude::*};
use transship_memory::{Access, Claims, PageCount, PageNumber, PageRange, PageSet, WindowPages};

use super::{NONE, missing, word_of};
use crate::common::{self, page_of, process::Guest};

const PAGES: u64 = 300;

/// What comes over the network, in any order, and any of it more than once.
#[derive(Debug, Clone)]
enum Comes {
    /// Pages with content.
    Pages(PageRange),
    /// Pages that are announced as zero.
    Zero(PageRange),
    /// The guest writes a page, if it is there.
    Write(u64),
}

fn range() -> impl Strategy<Value = PageRange> {
    (0..PAGES).prop_flat_map(|first| (Just(first), 1..=(PAGES - first).min(40))).prop_map(|(f, c)| PageRange::new(f, c))
}

fn comes() -> impl Strategy<Value = Comes> {
    prop_oneof![
        4 => range().prop_map(Comes::Pages),
        1 => range().prop_map(Comes::Zero),
        2 => (0..PAGES).prop_map(Comes::Write),
    ]
}

/// What page `number` holds: nothing, what was sent before, what comes now, or what the guest has written.
fn old(number: u64) -> u64 {
    word_of(number + 1000)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// First the owed pages are dropped, then they are waited for, then they come: each once, and never over what the
    /// guest has written. What is not owed is left as it is.
    #[test]
    fn owed_pages_are_dropped_and_then_put_once(
        sent in vec(range(), 0..6),
        owed in vec(range(), 1..6),
        comes in vec(comes(), 0..30),
    ) {
        let file = common::file(PAGES * 4096);
        let (region, guest) = (common::map(&file, PAGES * 4096, Access::ReadWrite), Guest::map(&file, PAGES * 4096));
        let set = |ranges: &[PageRange]| {
            let mut set = PageSet::empty(PageCount::new(PAGES));
            ranges.iter().for_each(|range| set.insert(*range));
            set
        };
        let (sent, owed) = (set(&sent), set(&owed));
        let was = |page: PageNumber| if sent.contains(page) { old(page.get()) } else { 0 };
        let mut model: Vec<u64> = PageRange::all(PageCount::new(PAGES)).iter().map(was).collect();
        for page in (0..PAGES).filter(|page| sent.contains(PageNumber::new(*page))) {
            region.write_pages(WindowPages::new(page, 1), &page_of(page + 1000)).unwrap();
        }

        owed.ranges().for_each(|range| region.clear(range).unwrap());
        let missing = missing(&guest);
        let claims = Claims::new(&[PageCount::new(PAGES)]).unwrap();
        let mut others = PageSet::full(PageCount::new(PAGES));
        others.subtract(&owed);
        others.ranges().for_each(|range| claims.exclude(0, range));
        prop_assert_eq!(claims.not_done(0), owed.clone());
        let mut data = region.data().unwrap();
        data.intersect_with(&owed);
        prop_assert!(data.is_empty(), "what is there is never waited for");

        let mut lacks = owed.clone();
        let rest = owed.ranges().map(Comes::Pages);
        for next in comes.into_iter().chain(rest) {
            match next {
                Comes::Pages(range) => {
                    let bytes: Vec<u8> = (range.first.get()..range.end().get()).flat_map(page_of).collect();
                    missing.fill_once(&claims, 0, range.first, &bytes).unwrap();
                    range.iter().filter(|page| lacks.contains(*page)).map(PageNumber::get).for_each(|page| {
                        model[page as usize] = word_of(page);
                    });
                    lacks.remove(range);
                }
                Comes::Zero(range) => {
                    let before = range.iter().filter(|page| lacks.contains(*page)).count() as u64;
                    prop_assert_eq!(missing.leave_zero(&claims, 0, range).unwrap().get(), before);
                    range.iter().filter(|page| lacks.contains(*page)).for_each(|page| {
                        model[page.get() as usize] = 0;
                    });
                    lacks.remove(range);
                }
                Comes::Write(page) if lacks.contains(PageNumber::new(page)) => {}
                Comes::Write(page) => {
                    // What is a hole and none of ours to put is zero, as who serves the faults sees to.
                    missing.fill_zero(0, PageRange::new(page, 1)).unwrap();
                    guest.write(page, 7777);
                    model[page as usize] = 7777;
                }
            }
            prop_assert_eq!(claims.not_done(0), lacks.clone());
        }
        prop_assert!(claims.are_all_done());
        missing.release(0, PageRange::new(0, PAGES)).unwrap();
        prop_assert!(missing.next_fault(NONE).unwrap().is_none());
        for page in 0..PAGES {
            prop_assert_eq!(guest.read(page), model[page as usize], "page {}", page);
        }
    }
}

/// Whoever waits for a page that turns out to be zero asks again, and gets zeros.
#[test]
fn a_thread_that_waits_for_a_page_that_is_zero_goes_on() {
    let file = common::file(PAGES * 4096);
    let guest = Guest::map(&file, PAGES * 4096);
    let (missing, claims) = (missing(&guest), Claims::new(&[PageCount::new(PAGES)]).unwrap());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| guest.read(5));
        assert_eq!(missing.next_fault(super::LONG).unwrap(), super::fault(5));
        assert_eq!(missing.leave_zero(&claims, 0, PageRange::new(0, 10)).unwrap(), PageCount::new(10));
        assert_eq!(missing.next_fault(super::LONG).unwrap(), super::fault(5), "it asks again");
        assert!(claims.is_done(0, PageNumber::new(5)));
        missing.fill_zero(0, PageRange::new(5, 1)).unwrap();
        assert_eq!(waiter.join().unwrap(), 0);
    });
}
