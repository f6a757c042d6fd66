//! The synthetic guest as a VMM sees one.
use std::{
    collections::BTreeSet,
    io::{Read, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use super::{
    Event, Events,
    arrival::{Holes, data, is_hole},
    cores, lock,
    machine::{Buffers, Machine},
    mapping::Ram,
    state,
    writers::Writers,
};
use crate::handoff::{CheckResult, GuestRegion, HandoffGuest};

/// What machine a synthetic guest says that it is.
pub const MACHINE: &str = "synthetic";

/// Memory, and a guest in it unless it still waits for one.
pub(super) struct SyntheticGuest {
    ram: Arc<[Ram]>,
    running: Option<Life>,
    /// Of memory that has been brought.
    holes: Holes,
    events: Events,
    last_check: Arc<Mutex<Option<CheckResult>>>,
}

/// A guest that is there.
struct Life {
    machine: Arc<Machine>,
    writers: Writers,
    arrival: Option<ArrivalCheck>,
}

impl SyntheticGuest {
    pub(super) fn waiting(ram: Arc<[Ram]>, events: Events) -> Self {
        Self { ram, running: None, holes: Holes::AreZero, events, last_check: Arc::default() }
    }

    /// A guest whose writers go.
    pub(super) fn going(machine: Machine, events: Events) -> std::io::Result<Self> {
        let ram = machine.ram.clone();
        let life = Life::new(machine)?;
        life.writers.go();
        Ok(Self { ram, running: Some(life), holes: Holes::AreZero, events, last_check: Arc::default() })
    }

    pub(super) fn writes(&self) -> u64 {
        self.running.as_ref().map_or(0, |life| life.machine.writes())
    }

    pub(super) fn last_check(&self) -> Option<CheckResult> {
        *lock(&self.last_check)
    }

    fn life(&mut self) -> Result<&mut Life, String> {
        self.running.as_mut().ok_or_else(|| "there is no guest in this memory yet".into())
    }
}

impl Life {
    fn new(machine: Machine) -> std::io::Result<Self> {
        let machine = Arc::new(machine);
        Ok(Self { writers: Writers::start(&machine)?, machine, arrival: None })
    }
}

impl HandoffGuest for SyntheticGuest {
    fn machine(&self) -> String {
        MACHINE.into()
    }

    fn regions(&self) -> Vec<GuestRegion<'_>> {
        let region = |ram: &'_ Ram| (ram.name().to_owned(), ram.bytes(), ram.address());
        self.ram
            .iter()
            .map(|ram| {
                let (name, bytes, address) = region(ram);
                GuestRegion { name, bytes, file: ram.file(), file_offset: 0, address }
            })
            .collect()
    }

    fn stop(&mut self) -> Result<(), String> {
        self.life()?.writers.halt();
        (self.events)(Event::Stopped);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), String> {
        self.life()?.writers.go();
        (self.events)(Event::Running);
        Ok(())
    }

    fn save_state(&mut self, to: &mut dyn Write) -> Result<(), String> {
        let state = state::encode(&self.life()?.machine)?;
        to.write_all(&state).map_err(|e| format!("can't write its device state: {e}"))
    }

    fn load_state(&mut self, from: &mut dyn Read) -> Result<(), String> {
        let (regions, pages) = (self.ram.len() as u64, self.ram.first().map_or(0, |ram| ram.pages().get()));
        let (program, versions) = state::decode(from, regions, pages)?;
        let machine = Machine::arrived(self.ram.clone(), program, versions, self.holes)?;
        self.running = Some(Life::new(machine).map_err(|e| e.to_string())?);
        (self.events)(Event::Loaded);
        Ok(())
    }

    fn may_wait_for_pages(&self) -> bool {
        true
    }

    fn wait_for_pages(&mut self) -> Result<(), String> {
        self.holes = Holes::MayCome;
        Ok(())
    }

    fn start(&mut self) -> Result<(), String> {
        let (events, last_check) = (self.events.clone(), self.last_check.clone());
        let life = self.life()?;
        let check = ArrivalCheck::start(life.machine.clone(), events, last_check).map_err(|e| e.to_string())?;
        life.arrival = Some(check);
        life.writers.go();
        (self.events)(Event::Running);
        Ok(())
    }

    fn check(&mut self) -> Result<CheckResult, String> {
        let life = self.life()?;
        let going = life.writers.is_going();
        life.writers.halt();
        let result = check_all(&life.machine);
        if going {
            life.writers.go();
        }
        let result = result.map_err(|e| e.to_string())?;
        *lock(&self.last_check) = Some(result);
        (self.events)(Event::Checked(result));
        Ok(result)
    }
}

/// Checks all pages of a guest that stands still. What was wrong on arrival counts also if it has been overwritten.
fn check_all(machine: &Machine) -> Result<CheckResult, transship_memory::Error> {
    let mut wrong = BTreeSet::new();
    if let Some(arrival) = &machine.arrival {
        machine.check_arrival(arrival, &AtomicBool::new(false));
        wrong.extend(arrival.wrong());
    }
    let data = data(&machine.ram, machine.holes)?;
    let (pages, next, found) = (machine.program.pages(), AtomicU64::new(0), Mutex::new(&mut wrong));
    let part = || {
        const BATCH: u64 = 1024;
        let mut buffers = Buffers::new();
        loop {
            // Relaxed: nothing but the number is passed.
            let first = next.fetch_add(BATCH, Ordering::Relaxed);
            if first >= pages {
                return;
            }
            let is_wrong = |&number: &u64| !machine.is_right(number, is_hole(&data, number), &mut buffers);
            let bad: Vec<u64> = (first..(first + BATCH).min(pages)).filter(is_wrong).collect();
            lock(&found).extend(bad);
        }
    };
    thread::scope(|scope| (0..cores()).for_each(|_| drop(scope.spawn(part))));
    Ok(CheckResult { pages, wrong: wrong.len() as u64, writes: machine.writes() })
}

/// The thread that checks a guest that has arrived, while it runs. Dropping this ends it.
struct ArrivalCheck {
    quit: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ArrivalCheck {
    fn start(machine: Arc<Machine>, events: Events, last: Arc<Mutex<Option<CheckResult>>>) -> std::io::Result<Self> {
        let quit = Arc::new(AtomicBool::new(false));
        let stop = quit.clone();
        let check = move || {
            let Some(arrival) = &machine.arrival else { return };
            if machine.check_arrival(arrival, &stop) {
                let wrong = arrival.wrong().len() as u64;
                let result = CheckResult { pages: machine.program.pages(), wrong, writes: machine.writes() };
                *lock(&last) = Some(result);
                events(Event::Checked(result));
            }
        };
        Ok(Self { quit, thread: Some(thread::Builder::new().name("check".into()).spawn(check)?) })
    }
}

impl Drop for ArrivalCheck {
    fn drop(&mut self) {
        self.quit.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic there was printed.
            let _ = thread.join();
        }
    }
}
