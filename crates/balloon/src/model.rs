//! A model of everything that races when hints are used, run through all its orders.
//!
//! One page, its guest, the guest's balloon driver, the hint queue, the device (the real [`Hinting`]), the tracker, and
//! a mover that keeps the rule of docs/free-pages.md. Whatever happens in whatever order, the destination must end with
//! what the guest relies on. Each part of the rule is then left out in turn, and the model must find an order that
//! loses the page: if it did not, it would prove nothing.
use std::collections::HashSet;

use crate::hinting::{DONE, Hinting, STOP};

/// What the guest does with memory that it frees, or takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// Nothing.
    Plain,
    /// Writes 0 to freed pages and then relies on that: `init_on_free=1`. Poisoning is the same with another value.
    InitOnFree,
    /// Writes 0 to pages that it takes, also for the balloon: `init_on_alloc=1`.
    InitOnAlloc,
}

/// The rule, or the part of it that is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Whole,
    /// The id is shown first, then the scan arms the tracking.
    AskBeforeScan,
    /// Hints are taken whatever the id that they answer to.
    AnyId,
    /// The device counts what is in the queue before the driver has repeated the id.
    NoEcho,
    /// A hint also removes the tracker's record of writes since the scan.
    ForgetWrites,
    /// A hint is applied to what a later scan has found.
    AfterNextScan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Use {
    Free,
    /// The balloon driver has set it aside.
    Held,
    Used,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Item {
    Number(u32),
    Page,
}

/// What the mover does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Scan,
    Ask,
    /// Hints come, and the page may be sent, or not yet.
    Round,
    /// Hints are over, the rest is sent.
    Rest,
    Finished,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    // The guest.
    usage: Use,
    content: u8,
    /// What it must find there again; nothing if it does not care.
    relies_on: Option<u8>,
    writes: u8,
    running: bool,
    // Its driver.
    naming: Option<u32>,
    answered: u32,
    taken: u8,
    // Between them.
    queue: Vec<Item>,
    device: Hinting,
    /// By device and client: the ids of hints on their way to the mover.
    heard: Vec<u32>,
    // The mover.
    armed: bool,
    written: bool,
    step: Step,
    scans: u8,
    command: Option<u32>,
    pending: bool,
    arrived: u8,
}

/// Enough that all overlaps of two commands, three scans and a page that is used twice come about.
const WRITES: u8 = 3;
const SCANS: u8 = 3;
const TAKEN: u8 = 2;
const QUEUE: usize = 5;

impl World {
    fn new() -> Self {
        World {
            usage: Use::Used,
            content: 1,
            relies_on: Some(1),
            writes: 1,
            running: true,
            naming: None,
            answered: DONE,
            taken: 0,
            queue: Vec::new(),
            device: Hinting::new(0),
            heard: Vec::new(),
            armed: false,
            written: false,
            step: Step::Scan,
            scans: 0,
            command: None,
            pending: false,
            arrived: 0,
        }
    }

    fn write(&mut self, content: u8) {
        self.content = content;
        self.written |= self.armed;
    }

    /// The page goes to the free list.
    fn free(&mut self, kernel: Kernel) {
        self.usage = Use::Free;
        self.relies_on = None;
        if kernel == Kernel::InitOnFree {
            self.write(0);
            self.relies_on = Some(0);
        }
    }

    /// Everything that can happen next.
    fn next(&self, kernel: Kernel, rule: Rule) -> Vec<World> {
        let mut worlds = Vec::new();
        if self.running {
            self.guest(kernel, &mut worlds);
            self.driver(kernel, &mut worlds);
        }
        self.device(rule, &mut worlds);
        self.mover(rule, &mut worlds);
        worlds
    }

    fn guest(&self, kernel: Kernel, worlds: &mut Vec<World>) {
        if self.usage != Use::Held && self.writes < WRITES {
            let mut world = self.clone();
            world.usage = Use::Used;
            world.writes += 1;
            world.write(world.writes);
            world.relies_on = Some(world.writes);
            worlds.push(world);
        }
        if self.usage != Use::Free {
            // Its own page; or the driver's, when memory is short.
            let mut world = self.clone();
            world.free(kernel);
            worlds.push(world);
        }
    }

    fn driver(&self, kernel: Kernel, worlds: &mut Vec<World>) {
        let shown = self.device.shown();
        let room = self.queue.len() < QUEUE;
        match self.naming {
            // It looks at the configuration whenever it comes to it.
            None if shown == DONE && self.usage == Use::Held => {
                let mut world = self.clone();
                world.free(kernel);
                worlds.push(world);
            }
            None if shown > DONE && shown != self.answered && room => {
                let mut world = self.clone();
                (world.naming, world.answered) = (Some(shown), shown);
                world.queue.push(Item::Number(shown));
                worlds.push(world);
            }
            None => {}
            Some(_) => {
                if self.usage == Use::Free && self.taken < TAKEN && room {
                    let mut world = self.clone();
                    (world.usage, world.relies_on, world.taken) = (Use::Held, None, self.taken + 1);
                    if kernel == Kernel::InitOnAlloc {
                        world.write(0);
                    }
                    world.queue.push(Item::Page);
                    worlds.push(world);
                }
                if room {
                    let mut world = self.clone();
                    world.naming = None;
                    world.queue.push(Item::Number(STOP));
                    worlds.push(world);
                }
            }
        }
    }

    fn device(&self, rule: Rule, worlds: &mut Vec<World>) {
        let Some((&item, rest)) = self.queue.split_first() else { return };
        let mut world = self.clone();
        world.queue = rest.to_vec();
        match item {
            Item::Number(number) => drop(world.device.answered(number)),
            Item::Page => {
                let shown = self.device.shown();
                let early = (rule == Rule::NoEcho && shown > DONE).then_some(shown);
                world.heard.extend(self.device.counting().or(early));
            }
        }
        worlds.push(world);
    }

    fn mover(&self, rule: Rule, worlds: &mut Vec<World>) {
        let mut world = self.clone();
        match self.step {
            Step::Scan => {
                if rule == Rule::AskBeforeScan {
                    world.command = Some(world.device.ask());
                    world.heard.clear();
                    world.step = Step::Ask;
                } else {
                    world.scan();
                    world.step = if world.running { Step::Ask } else { Step::Rest };
                }
                worlds.push(world);
            }
            Step::Ask => {
                if rule == Rule::AskBeforeScan {
                    world.scan();
                } else {
                    world.command = Some(world.device.ask());
                    world.heard.clear();
                }
                world.step = Step::Round;
                worlds.push(world);
            }
            Step::Round => {
                self.hear(rule, worlds);
                let mut sent = self.clone();
                sent.send();
                worlds.push(sent);
                world.device.stop();
                // What was heard until then may still be used, or not: it has been tried above.
                if rule != Rule::AfterNextScan {
                    world.command = None;
                }
                world.step = Step::Rest;
                worlds.push(world);
            }
            Step::Rest => {
                if [Rule::AnyId, Rule::AfterNextScan].contains(&rule) {
                    self.hear(rule, worlds);
                }
                if world.pending {
                    world.send();
                } else if !world.running {
                    world.step = Step::Finished;
                } else if world.scans + 1 < SCANS {
                    world.step = Step::Scan;
                } else {
                    world.running = false;
                    world.step = Step::Scan;
                }
                worlds.push(world);
            }
            Step::Finished => {}
        }
    }

    /// Takes one hint, if there is one.
    fn hear(&self, rule: Rule, worlds: &mut Vec<World>) {
        let Some((&id, rest)) = self.heard.split_first() else { return };
        let mut world = self.clone();
        world.heard = rest.to_vec();
        if self.command == Some(id) || rule == Rule::AnyId {
            world.pending = false;
            if rule == Rule::ForgetWrites {
                world.written = false;
            }
        }
        worlds.push(world);
    }

    fn scan(&mut self) {
        self.pending |= self.written || !self.armed;
        (self.armed, self.written) = (true, false);
        self.scans += 1;
    }

    fn send(&mut self) {
        if std::mem::take(&mut self.pending) {
            self.arrived = self.content;
        }
    }

    /// The move is over, and what has arrived is not what the guest relies on.
    fn is_lost(&self) -> bool {
        self.step == Step::Finished && self.relies_on.is_some_and(|content| content != self.arrived)
    }
}

/// Goes through all orders: the number of states, and the first bad end.
fn explore(kernel: Kernel, rule: Rule) -> (usize, Option<World>) {
    let mut seen = HashSet::from([World::new()]);
    let mut open: Vec<_> = seen.iter().cloned().collect();
    while let Some(world) = open.pop() {
        if world.is_lost() {
            return (seen.len(), Some(world));
        }
        for next in world.next(kernel, rule) {
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    (seen.len(), None)
}

#[test]
fn no_order_loses_a_page() {
    for kernel in [Kernel::Plain, Kernel::InitOnFree, Kernel::InitOnAlloc] {
        let (states, lost) = explore(kernel, Rule::Whole);
        assert_eq!(lost, None, "{kernel:?}");
        assert!(states > 10_000, "{kernel:?}: only {states} states were seen");
    }
}

#[test]
fn without_any_part_of_the_rule_pages_are_lost() {
    for rule in [Rule::AskBeforeScan, Rule::AnyId, Rule::NoEcho, Rule::ForgetWrites, Rule::AfterNextScan] {
        assert!(explore(Kernel::Plain, rule).1.is_some(), "{rule:?} is not needed, or the model does not see why");
    }
}
