//! Whatever a guest writes while it says what it can do without, the destination has all that it needs.
#![allow(clippy::unwrap_used)]
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use crate::common::{self, Ended, History, Op, Script, Scripted, Waiting, apply, run};
use proptest::{collection::vec, prelude::*};
use transship_engine::{
    FileUri, MoveOptions, MoveTerms, Progress, Report, SaveOptions,
    guest::{GuestError, Hint, Hints, RegionPages},
    save_guest,
};
use transship_memory::{GuestMemory, PAGE_BYTES, PageCount, PageNumber, PageRange, PageSet};

const PAGES: [u64; 2] = [300, 1000];
/// Written by whoever gives the hints, which no tracker sees.
const RING: RegionPages =
    RegionPages { region: 0, pages: PageRange { first: PageNumber::new(7), count: PageCount::new(2) } };

/// What happens from one hint to the next.
#[derive(Debug, Clone)]
enum Step {
    /// The guest does this, frees pages, does that, and only then the hint is heard.
    Free {
        before: Vec<Op>,
        region: usize,
        first: u64,
        count: u64,
        after: Vec<Op>,
    },
    NamedAll,
    /// Nothing comes for a while.
    Silence,
    Broken,
}

/// A guest that frees memory by a list.
struct Frees {
    memory: GuestMemory,
    script: Arc<Mutex<Script>>,
    steps: VecDeque<Step>,
    /// By region: free, and not written since.
    free: Arc<Mutex<Vec<PageSet>>>,
    started: bool,
    /// It was told that it has its memory again.
    let_go: bool,
    writes: u8,
}

impl Frees {
    fn write(&self, op: &Op) {
        let mut script = self.script.lock().unwrap();
        apply(&self.memory, op, &mut script.history);
        if let Op::Fill { region, page, .. } = *op {
            self.free.lock().unwrap()[region].remove(PageRange::new(page % PAGES[region], 1));
        }
    }

    fn write_unseen(&mut self) {
        self.writes = self.writes.wrapping_add(1);
        for page in [RING.pages.first, RING.pages.first + PageCount::ONE] {
            let op = Op::Fill { region: RING.region, page: page.get(), byte: self.writes };
            apply(&self.memory, &op, &mut History::new(&PAGES));
        }
    }
}

impl Hints for Frees {
    fn start(&mut self) -> Result<(), GuestError> {
        (self.started, self.let_go) = (true, false);
        Ok(())
    }

    fn next(&mut self, deadline: Instant) -> Result<Option<Hint>, GuestError> {
        assert!(self.started);
        self.write_unseen();
        match self.steps.pop_front() {
            Some(Step::Free { before, region, first, count, after }) => {
                before.iter().for_each(|op| self.write(op));
                let first = first % PAGES[region];
                let pages = PageRange::new(first, count.min(PAGES[region] - first));
                // From here on nobody misses what is there; whoever writes there later is seen by the next scan.
                self.free.lock().unwrap()[region].insert(pages);
                after.iter().for_each(|op| self.write(op));
                Ok(Some(Hint::Free(RegionPages { region, pages })))
            }
            Some(Step::NamedAll) => Ok(Some(Hint::NamedAll)),
            Some(Step::Broken) => Err(GuestError::Unfit("the balloon is gone".into())),
            Some(Step::Silence) | None => {
                thread::sleep(deadline.saturating_duration_since(Instant::now()));
                Ok(None)
            }
        }
    }

    fn stop(&mut self) -> Result<(), GuestError> {
        self.started = false;
        Ok(())
    }

    fn done(&mut self) -> Result<(), GuestError> {
        assert!(!self.started, "`stop` comes first");
        self.let_go = true;
        Ok(())
    }

    fn taken_back(&mut self) -> Result<(), GuestError> {
        assert!(self.let_go, "it can't take back what is not given");
        // It uses its memory, and the balloon its rings.
        self.write_unseen();
        Ok(())
    }

    fn writes_to(&mut self) -> Vec<RegionPages> {
        vec![RING]
    }
}

fn fill() -> impl Strategy<Value = Op> {
    (0..2usize, 0..1000u64, any::<u8>()).prop_map(|(region, page, byte)| Op::Fill { region, page, byte })
}

fn step() -> impl Strategy<Value = Step> {
    let free = (vec(fill(), 0..3), 0..2usize, 0..1000u64, 1..400u64, vec(fill(), 0..3));
    let free =
        free.prop_map(|(before, region, first, count, after)| Step::Free { before, region, first, count, after });
    prop_oneof![16 => free, 1 => Just(Step::NamedAll), 2 => Just(Step::Silence), 1 => Just(Step::Broken)]
}

/// A guest with something in every page but some, and the hints that it will give.
fn guest(steps: Vec<Step>, lists: Vec<Vec<Op>>) -> (Scripted, Arc<Mutex<Vec<PageSet>>>) {
    let mut source = Scripted::new(&PAGES, lists);
    for (region, pages) in PAGES.into_iter().enumerate() {
        for page in (0..pages).filter(|page| page % 11 != 0) {
            let op = Op::Fill { region, page, byte: 1 + (page % 250) as u8 };
            apply(&source.memory, &op, &mut source.script.lock().unwrap().history);
        }
    }
    let free = Arc::new(Mutex::new(PAGES.map(|pages| PageSet::empty(PageCount::new(pages))).to_vec()));
    source.hints = Some(Box::new(Frees {
        memory: source.memory.clone(),
        script: Arc::clone(&source.script),
        steps: steps.into(),
        free: Arc::clone(&free),
        started: false,
        let_go: false,
        writes: 0,
    }));
    (source, free)
}

fn moved(source: &mut Scripted, destination: &mut Waiting, options: &MoveOptions) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    run(source, destination, options, folder.path())
}

/// Rounds go on until nothing is left, so that the whole script is done before the stop.
fn patient() -> MoveOptions {
    let terms = MoveTerms { downtime: Duration::from_nanos(1), max_rounds: 1000, ..MoveTerms::default() };
    MoveOptions { verify: true, terms, ..MoveOptions::default() }
}

/// Pages that the destination holds otherwise than the source, and that are not free.
fn missed(source: &GuestMemory, destination: &GuestMemory, free: &[PageSet]) -> Vec<(usize, u64)> {
    let (ours, theirs) = (common::contents(source), common::contents(destination));
    let page = |bytes: &[u8], page: u64| bytes[page as usize * PAGE_BYTES..][..PAGE_BYTES].to_vec();
    let differs = |&(region, number): &(usize, u64)| page(&ours[region], number) != page(&theirs[region], number);
    let all = (0..2).flat_map(|region| (0..PAGES[region]).map(move |page| (region, page)));
    all.filter(|&(region, page)| !free[region].contains(PageNumber::new(page))).filter(differs).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_missed(
        steps in vec(step(), 0..12),
        lists in vec(vec(fill(), 0..20), 0..4),
        compress in prop_oneof![Just("none"), Just("lz4:1")],
    ) {
        // The lists are done after a scan: writes to pages that are free by then make them needed.
        let (mut source, free) = guest(steps, lists.clone());
        let mut destination = Waiting::new(&PAGES);
        let options = MoveOptions { compress: compress.parse().unwrap(), channels: 2, ..patient() };
        let ended = moved(&mut source, &mut destination, &options);
        ended.source.unwrap();
        ended.destination.unwrap();
        prop_assert_eq!(ended.report.verified, Some(true));
        let mut free = free.lock().unwrap().clone();
        // The first list is done before anything is freed.
        for op in lists.iter().skip(1).flatten() {
            if let Op::Fill { region, page, .. } = *op {
                free[region].remove(PageRange::new(page % PAGES[region], 1));
            }
        }
        prop_assert_eq!(missed(&source.memory, &destination.memory, &free), vec![]);
        let script = source.script.lock().unwrap();
        prop_assert_eq!((script.unplugs, script.plugged_back), (2, 0));
    }
}

#[test]
fn what_is_free_is_not_sent_before_the_round_and_while_it_is_sent() {
    let free = |region, first, count| Step::Free { before: vec![], region, first, count, after: vec![] };
    // The last comes when the round has begun.
    let steps = vec![free(1, 110, 110), free(0, 50, 11), Step::Silence, free(1, 800, 200)];
    let (mut source, _) = guest(steps, vec![]);
    let mut destination = Waiting::new(&PAGES);
    let ended = moved(&mut source, &mut destination, &patient());
    ended.source.unwrap();
    let report = ended.report;
    // Of eleven pages one is a hole. What is named before the round is not looked at, whatever it is.
    let (all, left_out) = (1300 - 28 - 91, 110 + 11 + 200 - 18);
    assert_eq!((report.pages.free, report.rounds[0].free), (left_out, left_out), "{report:?}");
    let holes_before = 28 + 91 - 10 - 1;
    assert_eq!((report.rounds[0].hole, report.rounds[0].written), (holes_before, 1300 - holes_before), "{report:?}");
    // And two that nobody saw being written.
    assert_eq!(report.pages.normal, all + 10 + 1 - left_out + 2, "{report:?}");
    assert_eq!(report.verified, Some(true));
}

/// A file keeps what was not waited for.
#[test]
fn a_save_waits_for_a_guest_that_names_its_free_memory_slowly() {
    let free = |first| Step::Free { before: vec![], region: 1, first, count: 100, after: vec![] };
    let steps = vec![free(0), Step::Silence, free(200), Step::Silence, Step::Silence, free(400), Step::NamedAll];
    let (mut source, _) = guest(steps, vec![]);
    let folder = tempfile::tempdir().unwrap();
    let mut report = Report::default();
    let uri = FileUri::path(folder.path().join("snapshot"));
    save_guest(&mut source, None, &uri, &SaveOptions::default(), &Progress::new(), &mut report).unwrap();
    assert_eq!(report.rounds[0].free, 300, "{report:?}");
}

#[test]
fn a_move_that_fails_plugs_in_again_what_was_unplugged() {
    let (mut source, _) = guest(vec![Step::NamedAll], vec![]);
    source.broken_state = true;
    let ended = moved(&mut source, &mut Waiting::new(&PAGES), &patient());
    ended.source.unwrap_err();
    let script = source.script.lock().unwrap();
    assert_eq!((script.unplugs, script.plugged_back, script.resumed), (2, 1, Some(true)));
}
