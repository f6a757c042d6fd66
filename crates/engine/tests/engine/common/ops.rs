//! What a guest does to its memory, made up at random, and what of it must arrive.
use proptest::{collection::vec, prelude::*};
use transship_memory::{GuestMemory, PAGE_BYTES, PageCount, PageNumber, PageRange, PageSet, Region, WindowPages};

/// What a guest does to its memory.
#[derive(Debug, Clone)]
pub enum Op {
    /// Fills a page with a byte; 0 makes it a zero page.
    Fill { region: usize, page: u64, byte: u8 },
    /// Fills pages that follow one another.
    FillRun { region: usize, first: u64, count: u64, byte: u8 },
    /// Frees pages: they become holes, and nobody reports them as written.
    Free { region: usize, first: u64, count: u64 },
    /// Looks at pages. Those that are holes become memory of zeros, and nobody reports that as written.
    Look { region: usize, first: u64, count: u64 },
}

/// Any of them, on two regions. Runs often begin or end where a window does.
pub fn op() -> impl Strategy<Value = Op> {
    let byte = || prop_oneof![1 => Just(0u8), 2 => any::<u8>()];
    prop_oneof![
        8 => (0..2usize, 0..1000u64, byte()).prop_map(|(region, page, byte)| Op::Fill { region, page, byte }),
        4 => (0..2usize, run(), byte())
            .prop_map(|(region, (first, count), byte)| Op::FillRun { region, first, count, byte }),
        2 => (0..2usize, run()).prop_map(|(region, (first, count))| Op::Free { region, first, count }),
        1 => (0..2usize, run()).prop_map(|(region, (first, count))| Op::Look { region, first, count }),
    ]
}

/// What devices may still do to memory when the guest stands.
pub fn late() -> impl Strategy<Value = Vec<Op>> {
    let fill = (0..2usize, run(), any::<u8>()).prop_map(|(region, (first, count), byte)| Op::FillRun {
        region,
        first,
        count,
        byte,
    });
    vec(fill, 0..3)
}

/// What a guest does, by scans: after each, and before each but the first.
#[derive(Debug, Clone)]
pub struct Life {
    pub after: Vec<Vec<Op>>,
    pub before: Vec<Vec<Op>>,
}

/// A life at random, of `ops` operations between two scans at most. Some pages have a story: they are filled and sent,
/// filled again and found so by a scan, freed before their turn comes, and looked at before the next scan; or some of
/// that.
pub fn life(ops: usize) -> impl Strategy<Value = Life> {
    let random = || vec(vec(op(), 0..ops), 0..6);
    (random(), random(), vec(story(), 0..4)).prop_map(|(after, before, stories)| {
        let mut life = Life { after, before };
        for (round, [sent, found, freed, looked]) in stories {
            add(&mut life.after, round, sent);
            add(&mut life.before, round + 1, found);
            add(&mut life.after, round + 2, freed);
            add(&mut life.before, round + 2, looked);
        }
        life
    })
}

fn add(lists: &mut Vec<Vec<Op>>, round: usize, op: Option<Op>) {
    lists.resize(lists.len().max(round + 1), vec![]);
    lists[round].extend(op);
}

/// The round that it begins in, and what happens to the pages.
fn story() -> impl Strategy<Value = (usize, [Option<Op>; 4])> {
    let all = (0..2usize, run(), any::<[u8; 2]>(), 0..3usize, any::<[bool; 4]>(), any::<bool>());
    all.prop_map(|(region, (first, count), [sent, found], round, some, whole)| {
        let ops = [
            Op::FillRun { region, first, count, byte: sent },
            Op::FillRun { region, first, count, byte: found },
            Op::Free { region, first, count },
            Op::Look { region, first, count },
        ];
        let mut happens = some.into_iter();
        (round, ops.map(|op| (whole | happens.next().unwrap_or_default()).then_some(op)))
    })
}

/// A first page, and how many.
fn run() -> impl Strategy<Value = (u64, u64)> {
    let counts = prop_oneof![Just(1u64), Just(2), Just(127), Just(128), Just(129), Just(256), 1..400u64];
    let at_an_edge = (0..8u64, prop_oneof![Just(0u64), Just(1), Just(126), Just(127)], counts)
        .prop_map(|(window, page, count)| (window * 128 + page, count));
    prop_oneof![2 => at_an_edge, 1 => (0..1000u64, 1..400u64)]
}

/// What a guest did to its memory, as far as it matters to what must arrive.
#[derive(Default)]
pub struct History {
    /// By region: what the tracker's next scan reports.
    pub written: Vec<PageSet>,
    /// By region: pages that were written and became holes before a scan, which then does not report them. The one does
    /// that comes after they are memory again, since nobody has protected that.
    erased: Vec<PageSet>,
    /// By region: pages that were given back and not written since.
    given_back: Vec<PageSet>,
}

impl History {
    /// Nothing was done yet to regions of these numbers of pages.
    pub fn new(pages: &[u64]) -> Self {
        let none = || pages.iter().map(|pages| PageSet::empty(PageCount::new(*pages))).collect();
        Self { written: none(), erased: none(), given_back: none() }
    }

    /// What a scan of a region reports.
    pub fn scan(&mut self, region: usize) -> PageSet {
        let fresh = PageSet::empty(self.written[region].pages());
        std::mem::replace(&mut self.written[region], fresh)
    }

    /// The pages where the other end does not hold what is there now.
    pub fn wrong(&self, memory: &GuestMemory, arrived: &[Vec<u8>]) -> Vec<(usize, u64)> {
        let held = super::contents(memory);
        let mut wrong = Vec::new();
        for (region, (held, arrived)) in held.iter().zip(arrived).enumerate() {
            assert_eq!(held.len(), arrived.len(), "region {region}");
            let pages = held.chunks(PAGE_BYTES).zip(arrived.chunks(PAGE_BYTES)).zip(0..);
            wrong.extend(pages.filter(|((held, arrived), _)| held != arrived).map(|(_, page)| (region, page)));
        }
        wrong
    }

    /// Those of them that a guest relies on which gives memory to a balloon: what it was given back does not count.
    pub fn wrong_for_a_balloon(&self, memory: &GuestMemory, arrived: &[Vec<u8>]) -> Vec<(usize, u64)> {
        let wrong = self.wrong(memory, arrived).into_iter();
        wrong.filter(|&(region, page)| !self.given_back[region].contains(PageNumber::new(page))).collect()
    }
}

/// Does it, and notes what a tracker would see of it.
pub fn apply(memory: &GuestMemory, op: &Op, history: &mut History) {
    match *op {
        Op::Fill { region, page, byte } => apply(memory, &Op::FillRun { region, first: page, count: 1, byte }, history),
        Op::FillRun { region, first, count, byte } => {
            let pages = bounded(&memory.regions()[region], first, count);
            fill(&memory.regions()[region], pages, byte);
            history.written[region].insert(pages);
            history.erased[region].remove(pages);
            history.given_back[region].remove(pages);
        }
        // Of such memory nothing can be given back from here: the guest writes zeros.
        Op::Free { region, first, count } if !memory.regions()[region].gives_back() => {
            apply(memory, &Op::FillRun { region, first, count, byte: 0 }, history);
        }
        Op::Free { region, first, count } => {
            let pages = bounded(&memory.regions()[region], first, count);
            for page in each(pages) {
                if history.written[region].contains(PageNumber::new(page)) {
                    history.erased[region].insert(PageRange::new(page, 1));
                }
            }
            history.written[region].remove(pages);
            history.given_back[region].insert(pages);
            memory.regions()[region].clear(pages).unwrap();
        }
        Op::Look { region, first, count } => {
            let in_memory = &memory.regions()[region];
            for page in each(bounded(in_memory, first, count)).map(|page| PageRange::new(page, 1)) {
                if !in_memory.is_data(page).unwrap() {
                    fill(in_memory, page, 0);
                    if history.erased[region].contains(page.first) {
                        history.erased[region].remove(page);
                        history.written[region].insert(page);
                    }
                }
            }
        }
    }
}

/// The pages that an operation speaks of, whatever numbers it was given.
fn bounded(region: &Region, first: u64, count: u64) -> PageRange {
    let pages = region.pages().get();
    let first = first % pages;
    PageRange::new(first, count.clamp(1, pages - first))
}

fn each(pages: PageRange) -> std::ops::Range<u64> {
    pages.first.get()..pages.end().get()
}

fn fill(region: &Region, pages: PageRange, byte: u8) {
    for page in each(pages) {
        let window = page / 128 * 128;
        region.write_pages(WindowPages::new(window, 1 << (page - window)), &[byte; PAGE_BYTES]).unwrap();
    }
}
