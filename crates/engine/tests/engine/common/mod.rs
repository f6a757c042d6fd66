//! Two guests of real memory whose writes are a list, so that what must arrive is known.
#![allow(unreachable_pub, clippy::unwrap_used)]
pub mod errors;
pub mod ops;
pub mod snapshot;

use std::{
    collections::VecDeque,
    io::Read,
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use transship_engine::{
    Error, Listener, MoveOptions, Progress, Report, Uri,
    guest::{DestinationGuest, Found, GuestError, Hints, SourceGuest},
    move_guest, receive_guest,
};
use transship_memory::{
    Access, ByteRange, Error as MemoryError, Flaw, Freeing, GuestMemory, InProcess, Keep, PAGE_BYTES, PageRange,
    PageSet, Process, Region, Tracker, WindowPages,
};
use transship_wire::{GuestDescription, RegionDescription, libvirt::Definition};
use vm_memory::MmapRegion;

pub use ops::{History, Op, apply};

/// Memory of regions with these numbers of pages.
pub fn memory(pages: &[u64]) -> GuestMemory {
    memory_of(pages, memfd)
}

/// The same in files that `file` makes.
pub fn memory_of(pages: &[u64], file: impl Fn(&str) -> OwnedFd) -> GuestMemory {
    let region = |(index, pages): (usize, &u64)| {
        let name = format!("region{index}");
        in_a_file(&name, file(&name), pages * PAGE_BYTES as u64)
    };
    GuestMemory::new(pages.iter().enumerate().map(region).collect())
}

/// What a guest's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A file of which pages may be given back.
    Shared,
    /// The same, where what was allocated beforehand stays so.
    Kept,
    /// A process has it for itself.
    Private,
}

/// Any of them.
pub fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![2 => Just(Kind::Shared), 1 => Just(Kind::Kept), 1 => Just(Kind::Private)]
}

/// Memory of a kind, and where it is if it is private.
fn memory_of_kind(pages: &[u64], kind: Kind) -> (GuestMemory, Vec<MmapRegion>) {
    let process = Arc::new(Process::open(std::process::id() as i32, Access::ReadWrite).unwrap());
    let mut mappings = Vec::new();
    let mut region = |(index, &pages): (usize, &u64)| {
        let (name, bytes) = (format!("region{index}"), pages * PAGE_BYTES as u64);
        match kind {
            Kind::Shared => in_a_file(&name, memfd(&name), bytes),
            Kind::Kept => in_a_file(&name, memfd(&name), bytes).keeping(Keep::All),
            Kind::Private => {
                let mapping = MmapRegion::new(bytes as usize).unwrap();
                let (process, address, page_bytes) = (Arc::clone(&process), mapping.as_ptr() as u64, PAGE_BYTES as u64);
                mappings.push(mapping);
                let memory = InProcess { process, address, bytes, page_bytes, file: None };
                Region::in_process(&name, memory, Access::ReadWrite).unwrap()
            }
        }
    };
    let memory = GuestMemory::new(pages.iter().enumerate().map(&mut region).collect());
    (memory, mappings)
}

fn memfd(name: &str) -> OwnedFd {
    rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

fn in_a_file(name: &str, file: OwnedFd, bytes: u64) -> Region {
    rustix::fs::ftruncate(&file, bytes).unwrap();
    Region::map(name, file, ByteRange::sized(0, bytes), Access::ReadWrite).unwrap().lendable()
}

/// Whose destinations are lent memory: ours.
pub fn us() -> Option<u32> {
    Some(rustix::process::geteuid().as_raw())
}

pub fn describe(memory: &GuestMemory) -> GuestDescription {
    let regions =
        memory.regions().iter().map(|r| RegionDescription { name: r.name().into(), bytes: r.bytes() }).collect();
    GuestDescription { machine: "test".into(), regions }
}

/// All bytes of all regions.
pub fn contents(memory: &GuestMemory) -> Vec<Vec<u8>> {
    let read = |region: &Region| {
        let mut bytes = Vec::new();
        for window in PageRange::all(region.pages()).windows() {
            region.copy_out(window, &mut bytes).unwrap();
        }
        bytes
    };
    memory.regions().iter().map(read).collect()
}

/// A guest that does the next list of operations after each scan of its last region, until it is stopped; and the next
/// of the other lists before each scan of its first region, and right before it is stopped.
pub struct Scripted {
    pub memory: GuestMemory,
    pub state: Vec<u8>,
    pub script: Arc<Mutex<Script>>,
    /// Makes `save_state` fail.
    pub broken_state: bool,
    /// Who says what it can do without.
    pub hints: Option<Box<dyn Hints>>,
    /// Whether it says when it gives memory back.
    pub freeing: Freeing,
    /// Where private memory is.
    pub mappings: Vec<MmapRegion>,
}

#[derive(Default)]
pub struct Script {
    pub lists: VecDeque<Vec<Op>>,
    /// What it does while a round is sent, or has just been.
    pub meanwhile: VecDeque<Vec<Op>>,
    pub history: History,
    /// It has given memory back since it was asked.
    pub gave_back: bool,
    pub stopped: bool,
    /// It did when it was stopped.
    pub ran: bool,
    pub resumed: Option<bool>,
    pub first_scans: usize,
    /// How often it was asked to let go of something: it does so when it is asked again.
    pub unplugs: u32,
    /// It does not, however often it is asked.
    pub keeps: bool,
    pub plugged_back: u32,
    /// The device state is being saved, or was.
    pub saving: bool,
    /// What the last scan does when the device state is being saved, and not before.
    pub last_scan: Option<LastScan>,
    /// The last region was scanned since it was stopped.
    pub last_scanned: bool,
    /// Processes beside it end when the device state is saved, and must have been scanned by then.
    pub ends_writers: bool,
    /// What its devices do after the last scan, when their state is saved.
    pub late: Vec<Op>,
    /// How long it takes to arm the tracking, and to save the device state.
    pub takes: Duration,
    /// It was stopped, and can't be resumed.
    pub stands_for_good: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastScan {
    GoesOn,
    Fails,
}

/// Waits until it holds; what does not happen is a failure.
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: it has not happened");
        thread::sleep(Duration::from_millis(1));
    }
}

impl Script {
    /// Does all that is on the list.
    fn run(&mut self, memory: &GuestMemory, list: Option<Vec<Op>>) {
        for op in list.iter().flatten() {
            self.gave_back |= matches!(op, Op::Free { .. });
            apply(memory, op, &mut self.history);
        }
    }

    /// What is left of it, for another guest.
    pub fn renewed(&mut self) -> Self {
        std::mem::take(self)
    }
}

/// Of devices: long enough that it is not sent in one piece. Hundreds of guests have the same.
fn state() -> Vec<u8> {
    static STATE: OnceLock<Vec<u8>> = OnceLock::new();
    STATE.get_or_init(|| (0..700_000u32).flat_map(u32::to_le_bytes).collect()).clone()
}

impl Scripted {
    pub fn new(pages: &[u64], lists: Vec<Vec<Op>>) -> Self {
        let script = Script { lists: lists.into(), history: History::new(pages), ..Script::default() };
        let (memory, mappings, script) = (memory(pages), Vec::new(), Arc::new(Mutex::new(script)));
        let freeing = Freeing::Possible;
        Self { memory, state: state(), script, broken_state: false, hints: None, freeing, mappings }
    }

    /// The same guest, whose memory is of this kind. It has done nothing yet.
    pub fn with_memory(mut self, kind: Kind) -> Self {
        let pages: Vec<u64> = self.memory.regions().iter().map(|region| region.pages().get()).collect();
        (self.memory, self.mappings) = memory_of_kind(&pages, kind);
        self
    }

    /// A guest that does this.
    pub fn living(pages: &[u64], life: ops::Life) -> Self {
        let guest = Self::new(pages, life.after);
        guest.script.lock().unwrap().meanwhile = life.before.into();
        guest
    }
}

struct ScriptedTracker {
    memory: GuestMemory,
    script: Arc<Mutex<Script>>,
}

impl Tracker for ScriptedTracker {
    fn scan(&mut self, region: usize) -> Result<PageSet, MemoryError> {
        let (stopped, last_scan) = {
            let script = self.script.lock().unwrap();
            (script.stopped, script.last_scan)
        };
        if let (true, Some(last_scan)) = (stopped, last_scan) {
            wait_until("saving the device state", || self.script.lock().unwrap().saving);
            if last_scan == LastScan::Fails {
                return Err(MemoryError::Untrackable { region, flaw: Flaw::Else, why: "the last scan fails".into() });
            }
        }
        let mut script = self.script.lock().unwrap();
        let is_first = script.first_scans <= region;
        if region == 0 && !is_first && !script.stopped {
            let list = script.meanwhile.pop_front();
            script.run(&self.memory, list);
        }
        let seen = script.history.scan(region);
        let seen = if is_first { PageSet::full(seen.pages()) } else { seen };
        script.first_scans = script.first_scans.max(region + 1);
        if region + 1 == self.memory.regions().len() {
            let list = if script.stopped { None } else { script.lists.pop_front() };
            script.run(&self.memory, list);
            script.last_scanned = script.stopped;
        }
        Ok(seen)
    }
}

impl SourceGuest for Scripted {
    fn description(&self) -> GuestDescription {
        describe(&self.memory)
    }
    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }
    fn freeing(&self) -> Freeing {
        self.freeing
    }
    fn gave_back(&mut self) -> Result<bool, GuestError> {
        Ok(std::mem::take(&mut self.script.lock().unwrap().gave_back))
    }
    fn hints(&mut self) -> Option<Box<dyn Hints>> {
        self.hints.take()
    }
    fn must_unplug(&self) -> bool {
        true
    }
    fn unplug(&mut self, _until: Instant) -> Result<bool, GuestError> {
        let mut script = self.script.lock().unwrap();
        assert!(!script.stopped, "it needs the guest's help");
        script.unplugs += 1;
        Ok(script.unplugs > 1 && !script.keeps)
    }
    fn plug_back(&mut self) {
        self.script.lock().unwrap().plugged_back += 1;
    }
    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        thread::sleep(self.script.lock().unwrap().takes);
        Ok(Box::new(ScriptedTracker { memory: self.memory.clone(), script: Arc::clone(&self.script) }))
    }
    fn definition(&mut self) -> Result<Option<Definition>, GuestError> {
        let xml = "<domain type='kvm'><name>scripted</name></domain>".into();
        Ok(Some(Definition::new(xml, None).map_err(|error| GuestError::Unfit(error.to_string()))?))
    }
    fn is_running(&mut self) -> Result<bool, GuestError> {
        Ok(!self.script.lock().unwrap().stopped)
    }
    fn stop(&mut self) -> Result<Found, GuestError> {
        let mut script = self.script.lock().unwrap();
        let list = script.meanwhile.pop_front();
        script.run(&self.memory, list);
        script.ran = !std::mem::replace(&mut script.stopped, true);
        Ok(Found::by(script.ran))
    }
    fn state_estimate(&self) -> Duration {
        Duration::ZERO
    }
    fn state_ends_writers(&self) -> bool {
        self.script.lock().unwrap().ends_writers
    }
    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
        let mut script = self.script.lock().unwrap();
        script.saving = true;
        assert!(!script.ends_writers || script.last_scanned, "what they have written can't be found any more");
        drop(script);
        thread::sleep(self.script.lock().unwrap().takes);
        if self.broken_state {
            return Err(GuestError::Unfit("the device state can't be saved".into()));
        }
        Ok(Box::new(std::io::Cursor::new(self.state.clone())))
    }
    fn state_saved(&mut self) -> Result<(), GuestError> {
        let late = std::mem::take(&mut self.script.lock().unwrap().late);
        if !late.is_empty() {
            wait_until("the last scan", || self.script.lock().unwrap().last_scanned);
            self.script.lock().unwrap().run(&self.memory, Some(late));
        }
        Ok(())
    }
    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        let mut script = self.script.lock().unwrap();
        if script.stands_for_good {
            return Err(GuestError::Unfit("the disk is locked".into()));
        }
        script.resumed = Some(run && script.ran);
        Ok(())
    }
    fn resume_hint(&self) -> String {
        "resume it".into()
    }
}

/// A guest that waits for its memory.
pub struct Waiting {
    pub memory: GuestMemory,
    pub state: Vec<u8>,
    pub started: Option<bool>,
    pub refuses_state: bool,
    /// Where private memory is.
    pub _mappings: Vec<MmapRegion>,
}

impl Waiting {
    /// With something else in its memory already, as a firmware would leave.
    pub fn new(pages: &[u64]) -> Self {
        Self::with_memory(pages, Kind::Shared)
    }

    /// The same with memory of this kind.
    pub fn with_memory(pages: &[u64], kind: Kind) -> Self {
        let (memory, mappings) = memory_of_kind(pages, kind);
        for region in memory.regions() {
            for first in (0..region.pages().get()).step_by(200) {
                let window = first / 128 * 128;
                region.write_pages(WindowPages::new(window, 1 << (first - window)), &[0xee; PAGE_BYTES]).unwrap();
            }
        }
        Self { memory, state: Vec::new(), started: None, refuses_state: false, _mappings: mappings }
    }

    /// Whether all that had to stay allocated is there. To be asked before anybody looks: that would allocate it.
    pub fn has_kept(&self, kind: Kind) -> bool {
        let there = |region: &Region| region.data().unwrap().count() == region.pages();
        kind != Kind::Kept || self.memory.regions().iter().all(there)
    }
}

impl DestinationGuest for Waiting {
    fn description(&self) -> GuestDescription {
        describe(&self.memory)
    }
    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        state.read_to_end(&mut self.state).map_err(|e| GuestError::Unfit(e.to_string()))?;
        if self.refuses_state { Err(GuestError::Unfit("no such device here".into())) } else { Ok(()) }
    }
    fn check_alive(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    fn start(&mut self, run: bool) -> Result<(), GuestError> {
        self.started = Some(run);
        Ok(())
    }
    fn start_hint(&self) -> String {
        "start it".into()
    }
}

pub struct Ended {
    pub source: Result<(), Error>,
    pub destination: Result<(), Error>,
    pub report: Report,
}

/// Moves one to the other over a unix socket.
pub fn run(source: &mut Scripted, destination: &mut Waiting, options: &MoveOptions, folder: &Path) -> Ended {
    let uri = Uri::Unix(folder.join("move.sock"));
    let listener = Listener::bind(&uri).unwrap();
    let mut report = Report::default();
    thread::scope(|scope| {
        let there =
            scope.spawn(|| receive_guest(destination, listener, None, &Progress::new(), &mut Report::default()));
        let source = move_guest(source, None, None, &uri, options, &Progress::new(), &mut report);
        Ended { source, destination: there.join().unwrap(), report }
    })
}
