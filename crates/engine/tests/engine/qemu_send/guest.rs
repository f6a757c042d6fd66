//! A scripted guest whose VMM is a QEMU.
use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use transship_engine::guest::{DeviceBlock, Found, GuestError, SourceGuest, StateFormat};
use transship_memory::{Freeing, GuestMemory, PAGE_BYTES, Tracker};
use transship_wire::{
    GuestDescription,
    qemu::{Block, Command, Configuration, Described, Name, StreamWriter, describe},
};

use crate::{
    common::{self, History, Op, Scripted},
    snapshot_qemu::early_section,
};

pub(super) const UUID: [u8; 16] = *b"0123456789abcdef";
pub(super) const VRAM_PAGES: u64 = 5;
/// What a memory file of an earlier guest may hold.
pub(super) const STALE: u8 = 0xaa;
const PAGES: [u64; 2] = [300, 130];

pub(super) fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

pub(super) fn block(text: &str, pages: u64) -> Block {
    Block { name: name(text), used_bytes: pages * PAGE_BYTES as u64, gpa: Some(0), mapped: None }
}

/// A scripted guest whose VMM is a QEMU.
pub(super) struct Guest {
    pub(super) inner: Scripted,
    pub(super) machine: &'static str,
    pub(super) pages: Vec<u64>,
    pub(super) given_up: bool,
    /// Whether the QEMU that waits has ended.
    pub(super) over: Arc<AtomicBool>,
    /// Its VMM describes the sections of its devices.
    pub(super) describes: bool,
    /// Sections that its VMM sends before the first page.
    pub(super) early: bool,
    /// The machine of its device state, if that is another one.
    pub(super) says_machine: Option<&'static str>,
    pub(super) freeing: Freeing,
}

impl Guest {
    pub(super) fn new(machine: &'static str, lists: Vec<Vec<Op>>) -> Self {
        Self::with(&PAGES, machine, lists)
    }

    pub(super) fn with(pages: &[u64], machine: &'static str, lists: Vec<Vec<Op>>) -> Self {
        Self {
            inner: Scripted::new(pages, lists),
            machine,
            pages: pages.to_vec(),
            given_up: false,
            over: Arc::default(),
            describes: true,
            early: false,
            says_machine: None,
            freeing: Freeing::Possible,
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        (0..self.pages.len()).map(|n| format!("mem{n}")).collect()
    }

    /// The sections of its devices, and what ends them where they are described.
    pub(super) fn tail(state: &str) -> (Vec<u8>, Vec<u8>) {
        let mut body = (state.len() as u32 + 1).to_be_bytes().to_vec();
        body.extend(state.as_bytes());
        body.resize(104, 0);
        let mut writer = StreamWriter::new(0, 1);
        writer.full(2, &name("cpu"), 0, 1, b"registers").full(3, &name("globalstate"), 0, 1, &body);
        let sections = writer.take_bytes();
        let (cpu, global) = (name("cpu"), name("globalstate"));
        let described = [
            Described { name: &cpu, instance: 0, version: 1, fields: &[("regs", "buffer", 9)] },
            Described { name: &global, instance: 0, version: 1, fields: &[("state", "buffer", 104)] },
        ];
        writer.eof().vmdesc(&describe(&described));
        (sections, writer.take_bytes())
    }

    fn state(&self) -> Vec<u8> {
        let mut blocks: Vec<Block> =
            self.names().iter().zip(&self.pages).map(|(name, &pages)| block(name, pages)).collect();
        blocks.push(block("vga.vram", VRAM_PAGES));
        let mut writer = StreamWriter::new(0, 1);
        let machine = name(self.says_machine.unwrap_or(self.machine));
        let configuration = Configuration { ignore_shared: true, ..Configuration::new(machine) };
        writer.header().configuration(&configuration).ram_start(blocks.iter().map(|block| block.used_bytes).sum());
        for block in &blocks {
            writer.block(block);
        }
        writer.end_of_section();
        if self.early {
            writer.raw(&early_section());
        }
        writer.command(&Command::SwitchoverStart).end();
        writer.page(&name("vga.vram"), 2 * PAGE_BYTES as u64, &[7; PAGE_BYTES]).end_of_section();
        let (sections, end) = Self::tail("paused");
        writer.raw(&sections);
        match self.describes {
            true => writer.raw(&end),
            false => writer.eof(),
        };
        writer.take_bytes()
    }

    pub(super) fn resumed(&self) -> Option<bool> {
        self.inner.script.lock().unwrap().resumed
    }
}

impl SourceGuest for Guest {
    fn description(&self) -> GuestDescription {
        GuestDescription { machine: format!("qemu {}", self.machine), ..self.inner.description() }
    }
    fn memory(&self) -> GuestMemory {
        self.inner.memory()
    }
    fn freeing(&self) -> Freeing {
        self.freeing
    }
    fn gave_back(&mut self) -> Result<bool, GuestError> {
        self.inner.gave_back()
    }
    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        self.inner.track()
    }
    fn is_running(&mut self) -> Result<bool, GuestError> {
        self.inner.is_running()
    }
    fn stop(&mut self) -> Result<Found, GuestError> {
        self.inner.stop()
    }
    fn state_format(&self) -> StateFormat {
        StateFormat::Qemu {
            blocks: self.names(),
            others: vec![DeviceBlock { name: "vga.vram".into(), max_bytes: 16 << 20 }],
        }
    }
    fn uuid(&mut self) -> Result<[u8; 16], GuestError> {
        Ok(UUID)
    }
    fn state_estimate(&self) -> Duration {
        Duration::ZERO
    }
    fn save_state(&mut self) -> Result<Box<dyn Read + Send>, GuestError> {
        Ok(Box::new(std::io::Cursor::new(self.state())))
    }
    fn state_saved(&mut self) -> Result<(), GuestError> {
        self.inner.state_saved()
    }
    fn give_up(&mut self) -> Result<(), GuestError> {
        self.given_up = true;
        Ok(())
    }
    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        common::wait_until("hanging up before it runs here again", || self.over.load(Relaxed));
        self.inner.resume(run)
    }
    fn resume_hint(&self) -> String {
        "resume it".into()
    }
}

/// A guest with some pages, and two rounds: pings 1 to 6 are those of the start, the blocks, the rounds, the last round
/// and the devices.
pub(super) fn guest() -> Guest {
    let guest = Guest::new("pc-q35-10.0", vec![vec![Op::Fill { region: 0, page: 1, byte: 1 }]]);
    let mut seen = History::new(&PAGES);
    for page in 0..200 {
        common::apply(&guest.inner.memory, &Op::Fill { region: 0, page, byte: 9 }, &mut seen);
    }
    guest
}
