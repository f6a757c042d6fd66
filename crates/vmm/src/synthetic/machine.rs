//! The guest itself: its memory, what it does there, and how often it has written each page.
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use serde::{Deserialize, Serialize};

use super::{
    Error,
    arrival::{Arrival, Holes},
    content::{Filler, Initial, is_zero},
    mapping::Ram,
    options::{SyntheticOptions, WriteRate},
    pattern::{PAGE_WORDS, PageWords, fill_written},
};
use transship_lines::Shutdown;

/// Pages between two looks at whether to go on.
const FILL_BATCH: u64 = 256;

/// What the guest does; goes with it wherever it moves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Program {
    pub(super) seed: u64,
    pub(super) regions: u64,
    pub(super) region_pages: u64,
    /// Of each region, from its start.
    pub(super) touched_pages: u64,
    /// Of each region, from its start.
    pub(super) hot_pages: u64,
    pub(super) initial: Initial,
    /// Bytes a second; none: as fast as they can; 0: not at all.
    pub(super) write_rate: Option<u64>,
    pub(super) threads: u64,
    /// Pages written before the guest came here.
    pub(super) writes: u64,
}

impl Program {
    fn new(options: &SyntheticOptions, initial: Initial) -> Self {
        Self {
            seed: options.seed,
            regions: options.regions as u64,
            region_pages: options.region_pages(),
            touched_pages: options.touched_pages(),
            hot_pages: options.hot_pages(),
            initial,
            write_rate: match options.write_rate {
                WriteRate::None => Some(0),
                WriteRate::BytesPerSecond(rate) => Some(rate),
                WriteRate::Max => None,
            },
            threads: options.threads as u64,
            writes: 0,
        }
    }

    /// Pages of all regions. They are numbered through: region 0 first.
    pub(super) fn pages(&self) -> u64 {
        self.regions * self.region_pages
    }
}

/// Room for a page as it is and a page as it should be.
pub(super) struct Buffers {
    page: PageWords,
    expected: PageWords,
}

impl Buffers {
    pub(super) fn new() -> Self {
        Self { page: [0; PAGE_WORDS], expected: [0; PAGE_WORDS] }
    }
}

/// A guest that has memory. Each page is written by one thread only, and checked when that thread stands still or has
/// not begun with it.
pub(super) struct Machine {
    pub(super) ram: Arc<[Ram]>,
    pub(super) program: Program,
    /// How often each page was written. Relaxed: the gate at which writers stop, or the lock of the arrival check,
    /// orders what others read here.
    versions: Box<[AtomicU32]>,
    /// Pages written here.
    writes: AtomicU64,
    /// What holes in the memory's files are.
    pub(super) holes: Holes,
    /// For a guest that came from elsewhere.
    pub(super) arrival: Option<Arrival>,
}

impl Machine {
    /// Fills the memory of a new guest, on all cores.
    pub(super) fn fill(ram: Arc<[Ram]>, options: &SyntheticOptions, shutdown: &Shutdown) -> Result<Self, Error> {
        let filler = Filler::new(&options.content)?;
        let program = Program::new(options, filler.initial().clone());
        let versions = (0..program.pages()).map(|_| AtomicU32::new(0)).collect();
        let holes = Holes::AreZero;
        let machine = Self { ram, program, versions, writes: AtomicU64::new(0), holes, arrival: None };
        let threads = super::cores();
        std::thread::scope(|scope| {
            (0..threads).for_each(|t| {
                drop(scope.spawn({
                    let (machine, filler) = (&machine, &filler);
                    move || machine.fill_part(filler, t as u64, threads as u64, shutdown)
                }))
            });
        });
        Ok(machine)
    }

    fn fill_part(&self, filler: &Filler, part: u64, parts: u64, shutdown: &Shutdown) {
        let mut page = [0; PAGE_WORDS];
        for (region, ram) in self.ram.iter().enumerate() {
            let mut batches = (0..self.program.touched_pages)
                .step_by(FILL_BATCH as usize)
                .skip(part as usize)
                .step_by(parts as usize);
            for first in batches.by_ref().take_while(|_| !shutdown.is_requested()) {
                for at in first..(first + FILL_BATCH).min(self.program.touched_pages) {
                    filler.fill(self.program.seed, region as u64 * self.program.region_pages + at, &mut page);
                    ram.write_page(at, &page);
                }
            }
        }
    }

    /// A guest whose memory has been brought into `ram`, or will be when it is touched. `program` and `versions` fit
    /// it.
    pub(super) fn arrived(
        ram: Arc<[Ram]>,
        program: Program,
        versions: Box<[AtomicU32]>,
        holes: Holes,
    ) -> Result<Self, String> {
        let arrival = Some(Arrival::new(&ram, holes).map_err(|e| e.to_string())?);
        Ok(Self { ram, program, versions, writes: AtomicU64::new(0), holes, arrival })
    }

    pub(super) fn version(&self, number: u64) -> u32 {
        self.versions[number as usize].load(Ordering::Relaxed)
    }

    /// Pages written in all the guest's life.
    pub(super) fn writes(&self) -> u64 {
        self.program.writes + self.writes.load(Ordering::Relaxed)
    }

    pub(super) fn count_writes(&self, pages: u64) {
        self.writes.fetch_add(pages, Ordering::Relaxed);
    }

    /// Writes the next version of a page. Only the thread that the page belongs to calls this.
    pub(super) fn write(&self, number: u64, buffers: &mut Buffers) {
        if let Some(arrival) = &self.arrival {
            arrival.check_before_write(number, |number, hole| self.is_right(number, hole, buffers));
        }
        // After 2^32 - 1 comes 1: 0 is for pages that were never written.
        let version = self.version(number).wrapping_add(1).max(1);
        fill_written(self.program.seed, number, version, &mut buffers.page);
        let (ram, page) = self.place(number);
        ram.write_page(page, &buffers.page);
        self.versions[number as usize].store(version, Ordering::Relaxed);
    }

    /// Checks what is not yet checked of a guest that came from elsewhere, until `quit` is set. Returns whether all is
    /// checked.
    pub(super) fn check_arrival(&self, arrival: &Arrival, quit: &AtomicBool) -> bool {
        let mut buffers = Buffers::new();
        arrival.check_all(quit, |number, hole| self.is_right(number, hole, &mut buffers))
    }

    /// Whether a page holds what it must hold. A hole isn't read: reading would fill it with a page of zeros.
    pub(super) fn is_right(&self, number: u64, hole: bool, buffers: &mut Buffers) -> bool {
        let Buffers { page, expected } = buffers;
        let (ram, at) = self.place(number);
        if hole {
            *page = [0; PAGE_WORDS];
        } else {
            ram.read_page(at, page);
        }
        let version = self.version(number);
        let right = match version {
            0 if at < self.program.touched_pages => {
                self.program.initial.matches(self.program.seed, number, page, expected)
            }
            0 => is_zero(page),
            _ => {
                fill_written(self.program.seed, number, version, expected);
                page == expected
            }
        };
        if !right {
            tracing::info!(region = ram.name(), page = at, version, holds = describe(number, page), "a page is wrong");
        }
        right
    }

    fn place(&self, number: u64) -> (&Ram, u64) {
        let Program { region_pages, .. } = self.program;
        (&self.ram[(number / region_pages) as usize], number % region_pages)
    }
}

/// What a wrong page looks like, from the words that a written page begins with.
fn describe(number: u64, page: &PageWords) -> String {
    match (page[0], page[1]) {
        _ if is_zero(page) => "zeros".into(),
        (n, version) if n == number => format!("version {version}, all or in part"),
        _ => "something else".into(),
    }
}
