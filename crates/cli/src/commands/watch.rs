//! `transship watch`: how fast a guest writes its memory, live.
use std::{
    collections::VecDeque,
    fmt::Write as _,
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use serde::Serialize;
use transship_guest::Watch as Watched;
use transship_memory::{GuestMemory, PAGE_BYTES, PageCount, PageSet, Tracker};
use transship_vmm::{AttachOptions, VmAddress, attach_source, qemu::libvirt::Purpose};

use crate::{
    args::WatchArgs,
    checks::Checks,
    failure::Failure,
    flags, output,
    sandbox::{Left, Role, Sandbox},
    signals::Held,
    units::{self, Bytes, Count, Rate, Time},
};

const HOUR: Duration = Duration::from_secs(3600);
const INTERVAL_MIN: Duration = Duration::from_millis(10);
/// The window is kept in so many parts at most, each a bitmap of the whole guest: it bounds our memory, and makes the
/// window up to an eighth longer than was asked for.
const WINDOW_PARTS: u32 = 8;

pub(crate) fn run(args: &WatchArgs) -> Result<(), Failure> {
    let request = Request::check(args)?;
    let (interrupted, interrupt) = mpsc::channel();
    let signals = Held::hold()?;
    let sandbox = &request.sandbox;
    sandbox.reach_domain(&request.vm, &Purpose::Watch)?;
    let mut guest = attach_source(&request.vm, request.attach.clone())?;
    guest.acquire(Watched::Track)?;
    sandbox.confine(Role::Watch, Left::Nothing)?;
    let _signals = signals.start(move |_| {
        // The receiver is gone when the watching has ended anyway.
        let _ = interrupted.send(());
    })?;
    let memory = guest.memory();
    let mut tracker = guest.track()?;
    let mut watch = Watch::start(&memory, tracker.as_mut(), request.window)?;
    let mut due = Instant::now();
    for line in 0.. {
        if request.count.is_some_and(|count| line >= count) {
            break;
        }
        due = (due + request.interval).max(Instant::now());
        match interrupt.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => show(line, request.window, &watch.look(tracker.as_mut())?, args.json)?,
            // Ctrl-C is how a watch ends.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(())
}

/// What was asked for, checked.
struct Request {
    vm: VmAddress,
    interval: Duration,
    window: Duration,
    count: Option<u64>,
    attach: AttachOptions,
    sandbox: Sandbox,
}

impl Request {
    fn check(args: &WatchArgs) -> Result<Self, Failure> {
        let mut checks = Checks::default();
        let vm = checks.read("--vm", &args.vm, str::parse::<VmAddress>);
        let interval =
            checks.within("--interval", &args.interval, units::time, (INTERVAL_MIN, HOUR), "from 10ms to 1h");
        let window =
            checks.within("--window", &args.window, units::time, (INTERVAL_MIN, 24 * HOUR), "from 10ms to 24h");
        let count = match &args.count {
            Some(text) => checks.within("--count", text, units::count, (1, u64::MAX), "at least 1").map(Some),
            None => Some(None),
        };
        if let Some((interval, window)) = interval.zip(window)
            && window < interval
        {
            checks.mistake(format!(
                "--window {:?}: it can't be shorter than --interval {:?}",
                args.window, args.interval
            ));
        }
        let attach = flags::attach(args.allow_untracked_writers, args.tracker.into(), None);
        let sandbox = Sandbox::check(&args.sandbox, &mut checks);
        let request = (|| {
            let (interval, window, count) = (interval?, window?, count?);
            Some(Self { vm: vm?, interval, window, count, attach, sandbox: sandbox? })
        })();
        checks.finish(request)
    }
}

/// One line of the watch.
#[derive(Debug, Serialize)]
struct Look {
    /// Since the watch began.
    elapsed_ms: f64,
    /// Since the look before.
    interval_ms: f64,
    dirty_pages: u64,
    dirty_pages_per_s: f64,
    dirty_bytes_per_s: f64,
    working_set: WorkingSet,
    memory: Memory,
}

/// Memory that was written, each page counted once.
#[derive(Debug, Serialize)]
struct WorkingSet {
    /// How far back `window_bytes` looks.
    window_ms: f64,
    window_bytes: u64,
    since_start_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Memory {
    bytes: u64,
    data_bytes: u64,
    /// Never touched, or given back.
    hole_bytes: u64,
}

/// What was seen so far.
struct Watch<'a> {
    memory: &'a GuestMemory,
    begin: Instant,
    before: Instant,
    since_start: Pages,
    recent: Recent,
}

impl<'a> Watch<'a> {
    /// The first scan reports every page, whenever it was written: it only arms the tracking.
    fn start(memory: &'a GuestMemory, tracker: &mut dyn Tracker, window: Duration) -> Result<Self, Failure> {
        Pages::scan(memory, tracker)?;
        let begin = Instant::now();
        Ok(Self { memory, begin, before: begin, since_start: Pages::none(memory), recent: Recent::new(begin, window) })
    }

    fn look(&mut self, tracker: &mut dyn Tracker) -> Result<Look, Failure> {
        let written = Pages::scan(self.memory, tracker)?;
        let now = Instant::now();
        let interval = now.duration_since(self.before);
        self.before = now;
        self.since_start.add(&written);
        let dirty_pages = written.count();
        let pages_per_s = dirty_pages.get() as f64 / interval.as_secs_f64().max(1e-9);
        let window = self.recent.add(now, written);
        Ok(Look {
            elapsed_ms: ms(now.duration_since(self.begin)),
            interval_ms: ms(interval),
            dirty_pages: dirty_pages.get(),
            dirty_pages_per_s: pages_per_s,
            dirty_bytes_per_s: pages_per_s * PAGE_BYTES as f64,
            working_set: WorkingSet {
                window_ms: ms(window),
                window_bytes: self.recent.bytes(),
                since_start_bytes: self.since_start.bytes(),
            },
            memory: Memory::of(self.memory)?,
        })
    }
}

impl Memory {
    fn of(memory: &GuestMemory) -> Result<Self, Failure> {
        let bytes = memory.bytes();
        let mut data_bytes = 0;
        for region in memory.regions() {
            data_bytes += region.data()?.bytes();
        }
        Ok(Self { bytes, data_bytes, hole_bytes: bytes.saturating_sub(data_bytes) })
    }
}

/// A set of pages in each region.
#[derive(Clone)]
struct Pages(Vec<PageSet>);

impl Pages {
    fn none(memory: &GuestMemory) -> Self {
        Self(memory.regions().iter().map(|region| PageSet::empty(region.pages())).collect())
    }

    fn scan(memory: &GuestMemory, tracker: &mut dyn Tracker) -> Result<Self, Failure> {
        let scans = (0..memory.regions().len()).map(|region| tracker.scan(region));
        Ok(Self(scans.collect::<Result<_, _>>()?))
    }

    fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(all, more)| all.union_with(more));
    }

    fn count(&self) -> PageCount {
        PageCount::of(&self.0)
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(PageSet::bytes).sum()
    }
}

/// The pages written within the last window, in parts by age.
struct Recent {
    window: Duration,
    /// When the newest part began to be filled, or ended if it is full.
    begin: Instant,
    /// Oldest first, with the moment at which each begins.
    parts: VecDeque<(Instant, Pages)>,
}

impl Recent {
    fn new(begin: Instant, window: Duration) -> Self {
        Self { window, begin, parts: VecDeque::new() }
    }

    /// Adds what was written up to `now`, forgets what is older than the window, and says how far back it now reaches.
    fn add(&mut self, now: Instant, written: Pages) -> Duration {
        match self.parts.back_mut() {
            Some((since, newest)) if now.duration_since(*since) <= self.window / WINDOW_PARTS => newest.add(&written),
            _ => self.parts.push_back((self.begin, written)),
        }
        self.begin = now;
        // A part goes when all of it is older than the window, that is when its successor covers the window alone.
        while self.parts.get(1).is_some_and(|(since, _)| now.duration_since(*since) >= self.window) {
            self.parts.pop_front();
        }
        self.parts.front().map_or(Duration::ZERO, |(since, _)| now.duration_since(*since))
    }

    fn bytes(&self) -> u64 {
        let mut parts = self.parts.iter().map(|(_, pages)| pages);
        let Some(mut all) = parts.next().cloned() else { return 0 };
        parts.for_each(|part| all.add(part));
        all.bytes()
    }
}

/// Milliseconds, to the microsecond: more digits are noise.
fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

fn show(line: u64, window: Duration, look: &Look, json: bool) -> Result<(), Failure> {
    if json {
        return Ok(output::json(look)?);
    }
    Ok(output::result(&table(line, window, look))?)
}

/// A line for people; the names of the columns come again on each new screen.
fn table(line: u64, window: Duration, look: &Look) -> String {
    const LINES_PER_HEAD: u64 = 20;
    let mut text = String::new();
    if line.is_multiple_of(LINES_PER_HEAD) {
        let window = format!("in {}", Time(window));
        let _ =
            writeln!(text, "{:>10} {:>14} {:>12}  {:>12} {:>12}  {:>10} {:>10}", "", "", "", "working set", "", "", "");
        let _ = writeln!(
            text,
            "{:>10} {:>14} {:>12}  {:>12} {:>12}  {:>10} {:>10}",
            "time", "dirty pages/s", "dirty", window, "since start", "data", "holes"
        );
    }
    let _ = writeln!(
        text,
        "{:>10} {:>14} {:>12}  {:>12} {:>12}  {:>10} {:>10}",
        Time::from_ms(look.elapsed_ms),
        Count(look.dirty_pages_per_s.round() as u64),
        Rate(look.dirty_bytes_per_s),
        Bytes(look.working_set.window_bytes),
        Bytes(look.working_set.since_start_bytes),
        Bytes(look.memory.data_bytes),
        Bytes(look.memory.hole_bytes),
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use transship_memory::PageRange;

    const WINDOW: Duration = Duration::from_secs(10);

    fn pages(first: u64, count: u64) -> Pages {
        let mut set = PageSet::empty(PageCount::new(1000));
        set.insert(PageRange::new(first, count));
        Pages(vec![set])
    }

    #[test]
    fn the_window_counts_each_page_once_and_forgets_old_ones() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut recent = Recent::new(begin, Duration::from_secs(8));
        recent.add(at(1), pages(0, 10));
        recent.add(at(2), pages(5, 10));
        assert_eq!(recent.bytes(), 15 * PAGE_BYTES as u64);
        for second in 3..=8 {
            recent.add(at(second), pages(100, 1));
        }
        assert_eq!(recent.bytes(), 16 * PAGE_BYTES as u64, "all of it is within the window");
        assert_eq!(recent.add(at(9), pages(100, 1)), Duration::from_secs(8));
        assert_eq!(recent.bytes(), 11 * PAGE_BYTES as u64, "what was written in the first second is out");
    }

    #[test]
    fn a_window_of_many_intervals_is_kept_in_few_parts() {
        let begin = Instant::now();
        let mut recent = Recent::new(begin, Duration::from_secs(8));
        for tick in 1..=2000 {
            let reach = recent.add(begin + Duration::from_millis(10 * tick), pages(tick % 1000, 1));
            assert!(recent.parts.len() <= WINDOW_PARTS as usize + 2, "{}", recent.parts.len());
            assert!(tick < 800 || reach >= Duration::from_secs(8), "{reach:?} at tick {tick}");
            assert!(reach <= Duration::from_millis(9020), "{reach:?} at tick {tick}");
        }
    }

    #[test]
    fn lines_have_units_and_a_head_once_a_screen() {
        let look = Look {
            elapsed_ms: 2000.0,
            interval_ms: 1000.0,
            dirty_pages: 12_345,
            dirty_pages_per_s: 12_345.0,
            dirty_bytes_per_s: 12_345.0 * 4096.0,
            working_set: WorkingSet { window_ms: 2000.0, window_bytes: 64 << 20, since_start_bytes: 65 << 20 },
            memory: Memory { bytes: 4 << 30, data_bytes: 1 << 30, hole_bytes: 3 << 30 },
        };
        assert_eq!(table(0, WINDOW, &look).lines().count(), 3);
        assert_eq!(
            table(1, WINDOW, &look),
            "    2.00 s         12,345   48.2 MiB/s      64.0 MiB     65.0 MiB     1.0 GiB    3.0 GiB\n"
        );
        assert_eq!(table(20, WINDOW, &look).lines().count(), 3);
    }
}
