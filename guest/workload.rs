//! The workload of the Linux guest: writes its memory, checks it, and reports on the serial port.
//!
//! Every page holds a pattern made of its number and its version; the versions are kept in a table elsewhere. A page
//! is checked completely before it is overwritten, and all pages are checked regularly ("sweep"), so one stale, lost
//! or misplaced page is an error.
//!
//! Lines (those of guest/kvm.c too):
//!
//! ```text
//! workload: ready pages=16384
//! workload: count=N checked=M errors=E uptime=S     five times a second; count: pages written
//! workload: sweep=K pages=P errors=E [asked]        all pages were checked: every `sweep_ms`, or as "check" asks for
//! workload: bad page=N version=V found=F [words=W]    the first few errors
//! workload: old mib=N                               free memory was filled and given back, as "old" asks for
//! workload: dropped mib=N                           what was held was given back, as "drop" asks for
//! workload: fresh mib=N wrong=W                     free memory was taken, as "fresh" asks for; in so many of its pages
//!                                                   something was not zero
//! workload: random=H                                16 bytes that the kernel drew, as "random" asks for
//! workload: at rest                                 nothing is compiled any more, as "rest" asks for
//! workload: disk blocks=B writes=N errors=E         all blocks of the disk were checked, before each sweep's line, which has their errors too
//! workload: bad block=B ...                         the first few of these
//! workload: slots=S reads=N errors=E                all slots were checked (see slots.rs), before each sweep's line, which has their errors too
//! workload: bad slot: ...                           the first few of these
//! workload: net sent=S received=R errors=E          what came back was checked (see net.rs), before each sweep's line, which has its errors too
//! workload: bad datagram: ...                       the first few of these
//! workload: disk at rest                            nothing is written to the disk any more, as "disk rest" asks for, until "disk go"
//! ~                                                 a beat, every `beat_ms`. When it comes in is for whoever listens to
//!                                                   see: the guest's own clock stands still when the guest does
//! workload: units=N                                 functions compiled, fifty times a second between "compile" and "rest"
//! ```
//!
//! Commands are lines, too: "check", and "old" (writes nearly all free memory and gives it back, so that it is full of
//! old data), "compile" (see compile.rs), "rest", "drop", "fresh", "random", and "disk rest" and "disk go" (see
//! disk.rs).
//!
//! Arguments come by the kernel command line: `workload.mib` (64), `workload.rate` (pages a second; 0, the default: as
//! fast as possible), `workload.hot` (MiB that are written; the default is all), `workload.idle=1` (write nothing after
//! the first fill), `workload.sweep_ms` (1000), `workload.stale` (MiB that are written and given back before "ready",
//! so that free memory is full of old data; 0), `workload.churn` (MiB that are taken, written, checked and given back,
//! over and over, as fast as possible; 0), `workload.hold` (MiB that are written before "ready" and kept until "drop";
//! 0), `workload.disk` (MiB of the first disk that are written and checked; 0), `workload.slots` (MiB that blocks of
//! `workload.slots_from`, the first disk by default, are read into, over and over; 0), `workload.net` (datagrams a
//! second to a network that sends them back; 0) to `workload.net_port`, `workload.beat_ms` (time between two beats; 0:
//! none).
mod compile;
mod disk;
mod net;
mod slots;

use disk::Disk;
use net::Net;
use slots::Slots;

use std::hint::black_box;
use std::io::{BufRead, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const WORDS: usize = 512;
/// "tranship": by this a page is found in a memory dump.
const MAGIC: u64 = u64::from_le_bytes(*b"tranship");
const PAGES_PER_MIB: usize = 256;
const REPORT: Duration = Duration::from_millis(200);
const BATCH: Duration = Duration::from_millis(10);
/// What is not filled with old data, beside a part of all memory, so that the system is never short of it.
const LEFT_FREE_MIB: usize = 48;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u64; WORDS]);

struct Settings {
    pages: usize,
    hot: usize,
    /// Pages a second; 0: as fast as possible.
    rate: u64,
    idle: bool,
    sweep: Duration,
    stale: usize,
    churn: usize,
    disk: usize,
    slots: usize,
    slots_from: String,
    net: u64,
    net_port: u16,
    hold: usize,
    beat: Duration,
}

struct Workload {
    pages: Vec<Page>,
    versions: Vec<u64>,
    count: u64,
    checked: u64,
    errors: u64,
    sweeps: u64,
    churn: Arc<Mutex<Churn>>,
    disk: Arc<Mutex<Disk>>,
    slots: Arc<Slots>,
    net: Arc<Net>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, _, source, object] = &arguments[..] {
        return compile::compile(source, object);
    }
    let settings = Settings::read();
    drop(Block::new(0, settings.stale));
    let mut workload = Workload::fill(settings.pages);
    let held = Block::new(0, settings.hold);
    Churn::start(&workload.churn, settings.churn);
    Disk::start(&workload.disk, settings.disk);
    workload.slots = Slots::start(settings.slots, &settings.slots_from);
    workload.net = Net::start(settings.net, settings.net_port);
    say(format_args!("ready pages={}", settings.pages));
    let asked = listen(&workload.disk, held);
    beat(settings.beat);
    workload.run(&settings, &asked);
}

impl Settings {
    fn read() -> Self {
        let line = std::fs::read_to_string("/proc/cmdline").expect("/proc is mounted");
        let text = |name: &str| {
            let prefix = format!("workload.{name}=");
            line.split_whitespace()
                .find_map(|word| word.strip_prefix(&prefix))
        };
        let number = |name: &str, otherwise: u64| {
            text(name).map_or(otherwise, |v| {
                v.parse()
                    .unwrap_or_else(|_| panic!("workload.{name}={v} is not a number"))
            })
        };
        let pages = number("mib", 64) as usize * PAGES_PER_MIB;
        Self {
            pages,
            hot: (number("hot", u64::MAX / 256) as usize * PAGES_PER_MIB).clamp(1, pages),
            rate: number("rate", 0),
            idle: number("idle", 0) != 0,
            sweep: Duration::from_millis(number("sweep_ms", 1000)),
            stale: number("stale", 0) as usize * PAGES_PER_MIB,
            churn: number("churn", 0) as usize * PAGES_PER_MIB,
            disk: number("disk", 0) as usize * PAGES_PER_MIB,
            slots: number("slots", 0) as usize * PAGES_PER_MIB,
            slots_from: text("slots_from").unwrap_or("/dev/vda").to_owned(),
            net: number("net", 0),
            net_port: number("net_port", 7) as u16,
            hold: number("hold", 0) as usize * PAGES_PER_MIB,
            beat: Duration::from_millis(number("beat_ms", 0)),
        }
    }
}

impl Workload {
    fn fill(pages: usize) -> Self {
        let mut workload = Self {
            pages: vec![Page([0; WORDS]); pages],
            versions: vec![0; pages],
            count: 0,
            checked: 0,
            errors: 0,
            sweeps: 0,
            churn: Arc::default(),
            disk: Arc::default(),
            slots: Arc::default(),
            net: Arc::default(),
        };
        (0..pages).for_each(|page| workload.write(page, 1));
        workload
    }

    fn run(&mut self, settings: &Settings, asked: &AtomicU64) {
        let start = Instant::now();
        let (mut next_report, mut next_sweep, mut next_batch) = (start, start, start);
        let (mut page, mut answered) = (0, 0);
        loop {
            for _ in 0..batch(settings, &mut next_batch) {
                self.check(page);
                self.write(page, self.versions[page] + 1);
                self.count += 1;
                page = if page + 1 == settings.hot {
                    0
                } else {
                    page + 1
                };
            }
            if reached(&mut next_report, REPORT) {
                self.report(start.elapsed());
            }
            let questions = asked.load(Ordering::Relaxed);
            let is_asked = questions != answered;
            if is_asked || reached(&mut next_sweep, settings.sweep) {
                answered = questions;
                self.sweep(is_asked);
            }
            if settings.idle || settings.rate != 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    fn write(&mut self, page: usize, version: u64) {
        let words = pattern(page, version);
        for (index, word) in black_box(&mut self.pages[page]).0.iter_mut().enumerate() {
            *word = words(index);
        }
        self.versions[page] = version;
    }

    fn check(&mut self, page: usize) {
        let version = self.versions[page];
        self.checked += 1;
        if is_right(&self.pages[page], page, version, self.errors < 10) {
            return;
        }
        self.errors += 1;
        // Made good, so that it counts once.
        self.write(page, version + 1);
    }

    fn sweep(&mut self, is_asked: bool) {
        (0..self.pages.len()).for_each(|page| self.check(page));
        self.sweeps += 1;
        let mut churn = self.churn.lock().expect("nobody panics with it");
        churn.check_all();
        let disk = Arc::clone(&self.disk);
        let mut disk = disk::lock(&disk);
        disk.check_all();
        self.slots.check_all();
        self.net.tell();
        say(format_args!(
            "sweep={} pages={} errors={}{}",
            self.sweeps,
            self.pages.len() + churn.pages(),
            self.errors + churn.errors + disk.errors() + self.slots.errors() + self.net.errors(),
            if is_asked { " asked" } else { "" }
        ));
    }

    fn report(&self, uptime: Duration) {
        let (count, checked, mut errors) = (self.count, self.checked, self.errors);
        errors += self.churn.lock().expect("nobody panics with it").errors + disk::lock(&self.disk).errors();
        errors += self.slots.errors() + self.net.errors();
        say(format_args!(
            "count={count} checked={checked} errors={errors} uptime={}",
            uptime.as_secs()
        ));
    }
}

/// Memory that is taken, written, checked and given back.
#[derive(Default)]
struct Churn {
    blocks: [Option<Block>; 16],
    /// Steps so far, which number the blocks too.
    steps: u64,
    random: u64,
    errors: u64,
}

impl Churn {
    /// Churns on a thread of its own, with `pages` at most.
    fn start(churn: &Arc<Mutex<Self>>, pages: usize) {
        if pages == 0 {
            return;
        }
        let churn = Arc::clone(churn);
        std::thread::spawn(move || {
            loop {
                churn.lock().expect("nobody panics with it").step(pages);
                // Whoever wants to sweep gets the lock.
                std::thread::yield_now();
            }
        });
    }

    fn step(&mut self, pages: usize) {
        self.steps += 1;
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let place = (self.random >> 60) as usize;
        match self.blocks[place].take() {
            Some(block) => self.errors += block.wrong(self.errors),
            None => {
                let most = (pages / self.blocks.len()).max(1) as u64;
                let pages = 1 + (self.random >> 20) % most;
                self.blocks[place] = Some(Block::new(self.steps, pages as usize));
            }
        }
    }

    fn check_all(&mut self) {
        for block in self.blocks.iter().flatten() {
            self.errors += block.wrong(self.errors);
        }
    }

    fn pages(&self) -> usize {
        self.blocks.iter().flatten().map(|block| block.pages.len()).sum()
    }
}

/// Pages that come from the system and go back to it together.
struct Block {
    number: u64,
    pages: Vec<Page>,
}

impl Block {
    fn new(number: u64, pages: usize) -> Self {
        let mut block = Self { number, pages: Vec::with_capacity(pages) };
        for page in 0..pages {
            let words = pattern(page, number);
            block.pages.push(Page(std::array::from_fn(words)));
        }
        black_box(block)
    }

    /// How many pages do not hold what was written. The first few of all are told.
    fn wrong(&self, errors: u64) -> u64 {
        let pages = self.pages.iter().enumerate();
        pages.filter(|(page, held)| !is_right(held, *page, self.number, errors < 10)).count() as u64
    }
}

/// Whether a page holds what it must; if not, and it is to be told, says so.
fn is_right(page: &Page, number: usize, version: u64, tell: bool) -> bool {
    let words = pattern(number, version);
    let held = &black_box(page).0;
    let wrong = held.iter().enumerate().filter(|&(index, &word)| word != words(index)).count();
    if wrong > 0 && tell {
        say(format_args!("bad page={number} version={version} found={} words={wrong}", held[2]));
    }
    wrong == 0
}

/// The words of a page. The first three name the page and its version; the rest depends on both.
fn pattern(page: usize, version: u64) -> impl Fn(usize) -> u64 {
    let page = page as u64;
    let seed =
        page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    move |index| match index {
        0 => MAGIC,
        1 => page,
        2 => version,
        _ => seed.wrapping_add((index as u64).wrapping_mul(0x1656_67b1_9e37_79f9)),
    }
}

/// How many pages to write before looking at the clock again.
fn batch(settings: &Settings, next: &mut Instant) -> u64 {
    if settings.idle {
        0
    } else if settings.rate == 0 {
        64
    } else if reached(next, BATCH) {
        settings.rate.div_ceil(100)
    } else {
        0
    }
}

/// Beats on a thread of its own.
fn beat(every: Duration) {
    if every.is_zero() {
        return;
    }
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(every);
            // A serial port that nobody listens to is no reason to stop.
            let _ = std::io::stdout().write_all(b"~\n");
            let _ = std::io::stdout().flush();
        }
    });
}

/// True once a step. A clock that has jumped (the guest stood still) is not caught up with.
fn reached(next: &mut Instant, step: Duration) -> bool {
    let now = Instant::now();
    if now < *next {
        return false;
    }
    *next = if now > *next + step {
        now + step
    } else {
        *next + step
    };
    true
}

/// Counts the lines "check" on standard input, and does what the others say.
fn listen(disk: &Arc<Mutex<Disk>>, mut held: Block) -> Arc<AtomicU64> {
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    let load = Arc::new(compile::Load::default());
    let disk = Arc::clone(disk);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match line.trim() {
                "check" => _ = count.fetch_add(1, Ordering::Relaxed),
                "old" => say(format_args!("old mib={}", leave_old_data())),
                "drop" => {
                    let pages = std::mem::take(&mut held.pages);
                    let mib = pages.len() / PAGES_PER_MIB;
                    drop(pages);
                    say(format_args!("dropped mib={mib}"));
                }
                "fresh" => {
                    let (mib, wrong) = take_fresh_memory();
                    say(format_args!("fresh mib={mib} wrong={wrong}"));
                }
                "random" => say(format_args!("random={:032x}", random())),
                "compile" => load.start(),
                "rest" => {
                    load.rest();
                    say(format_args!("at rest"));
                }
                "disk rest" => {
                    disk::lock(&disk).rest(true);
                    say(format_args!("disk at rest"));
                }
                "disk go" => disk::lock(&disk).rest(false),
                _ => {}
            }
        }
    });
    asked
}

/// Writes nearly all free memory and gives it back. Returns how much, in MiB.
fn leave_old_data() -> usize {
    const WORDS_PER_MIB: usize = WORDS * PAGES_PER_MIB;
    let free = memory_info("MemFree");
    let mib = free.saturating_sub(LEFT_FREE_MIB + memory_info("MemTotal") / 64);
    let mut words = vec![0_u64; mib * WORDS_PER_MIB];
    let mut value = MAGIC ^ free as u64;
    for word in &mut words {
        value = value.wrapping_add(0x1656_67b1_9e37_79f9);
        *word = value;
    }
    black_box(words);
    mib
}

/// Takes nearly all free memory, and gives it back. How much, in MiB, and in how many of its pages something was not
/// zero.
fn take_fresh_memory() -> (usize, usize) {
    let mib = memory_info("MemFree").saturating_sub(LEFT_FREE_MIB + memory_info("MemTotal") / 64);
    let mut words = vec![0_u64; mib * PAGES_PER_MIB * WORDS];
    // Only who writes to a page gets one.
    black_box(&mut words).chunks_mut(WORDS).for_each(|page| page[0] = MAGIC);
    let wrong = black_box(&words).chunks(WORDS).filter(|page| page[1..].iter().any(|&word| word != 0));
    (mib, wrong.count())
}

/// What the kernel draws for whoever asks, once it has something to draw from.
fn random() -> u128 {
    let mut bytes = [0; 16];
    let mut source = std::fs::File::open("/dev/random").expect("/dev is mounted");
    source.read_exact(&mut bytes).expect("it has no end");
    u128::from_le_bytes(bytes)
}

/// A line of /proc/meminfo, in MiB.
fn memory_info(name: &str) -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").expect("/proc is mounted");
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kib.expect("the kernel says how much memory there is") / 1024
}

/// One line in one write, so that the kernel's own lines can't split it.
fn say(text: std::fmt::Arguments<'_>) {
    let line = format!("workload: {text}\n");
    // A serial port that nobody listens to is no reason to stop.
    let _ = std::io::stdout().write_all(line.as_bytes());
    let _ = std::io::stdout().flush();
}
