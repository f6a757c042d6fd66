//! What we send to a waiting QEMU, taken apart by a model of one that is as strict as the rules: barriers, zero pages, what comes when. And what
//! becomes of the guest if that QEMU says no, or nothing.
#![allow(clippy::unwrap_used)]
mod common;

use std::{
    collections::{BTreeMap, HashSet},
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

use common::{Op, Scripted, contents};
use proptest::{collection::vec, prelude::*};
use transship_codec::{Method as Codec, Setting};
use transship_engine::{
    Error, Outcome, Progress, QemuSendOptions, Report, Uri, WhenBusy, ZeroPages,
    guest::{GuestError, SourceGuest, StateFormat},
    send_to_qemu,
};
use transship_memory::{GuestMemory, PAGE_BYTES, Tracker};
use transship_wire::{
    GuestDescription,
    qemu::{
        Block, Command, Configuration, Described, GREETING_BYTES, GlobalState, Greeting, Name, Packet, PageContent,
        Pages, Record, Reply, Step, StreamReader, StreamWriter, describe,
    },
};

const UUID: [u8; 16] = *b"0123456789abcdef";
const VRAM_PAGES: u64 = 5;
/// What a memory file of an earlier guest may hold.
const STALE: u8 = 0xaa;
const PAGES: [u64; 2] = [300, 130];

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn block(text: &str, pages: u64) -> Block {
    Block { name: name(text), used_bytes: pages * PAGE_BYTES as u64, gpa: Some(0), mapped: None }
}

/// A scripted guest whose VMM is a QEMU.
struct Guest {
    inner: Scripted,
    machine: &'static str,
    pages: Vec<u64>,
    given_up: bool,
}

impl Guest {
    fn new(machine: &'static str, lists: Vec<Vec<Op>>) -> Self {
        Self::with(&PAGES, machine, lists)
    }

    fn with(pages: &[u64], machine: &'static str, lists: Vec<Vec<Op>>) -> Self {
        Self { inner: Scripted::new(pages, lists), machine, pages: pages.to_vec(), given_up: false }
    }

    fn names(&self) -> Vec<String> {
        (0..self.pages.len()).map(|n| format!("mem{n}")).collect()
    }

    /// The sections of its devices, and what ends them.
    fn tail(state: &str) -> (Vec<u8>, Vec<u8>) {
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
        let configuration = Configuration { ignore_shared: true, ..Configuration::new(name(self.machine)) };
        writer.header().configuration(&configuration).ram_start(blocks.iter().map(|block| block.used_bytes).sum());
        for block in &blocks {
            writer.block(block);
        }
        writer.end_of_section().command(&Command::SwitchoverStart).end();
        writer.page(&name("vga.vram"), 2 * PAGE_BYTES as u64, &[7; PAGE_BYTES]).end_of_section();
        let (sections, end) = Self::tail("paused");
        writer.raw(&sections).raw(&end);
        writer.take_bytes()
    }

    fn resumed(&self) -> Option<bool> {
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
    fn track(&mut self) -> Result<Box<dyn Tracker>, GuestError> {
        self.inner.track()
    }
    fn is_running(&mut self) -> Result<bool, GuestError> {
        self.inner.is_running()
    }
    fn stop(&mut self) -> Result<(), GuestError> {
        self.inner.stop()
    }
    fn state_format(&self) -> StateFormat {
        StateFormat::Qemu { blocks: self.names(), others: vec!["vga.vram".into()] }
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
        Ok(())
    }
    fn give_up(&mut self) -> Result<(), GuestError> {
        self.given_up = true;
        Ok(())
    }
    fn resume(&mut self, run: bool) -> Result<(), GuestError> {
        self.inner.resume(run)
    }
    fn resume_hint(&self) -> String {
        "resume it".into()
    }
}

/// What the model does otherwise than a QEMU that is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quirk {
    None,
    /// Answers this ping by something else.
    AtPing(u32, Instead),
    /// Does this behind the end.
    AtEnd(Instead),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Instead {
    Shut(u32),
    HangUp,
    Pong(u32),
    /// Bytes that are no answer.
    Noise,
    /// It lets go of a channel, and answers.
    DropChannel,
    /// It asks for pages, as if the guest ran.
    Request,
}

/// A waiting QEMU.
struct Model {
    main: UnixStream,
    /// Packets as a thread for each channel reads them.
    channels: Vec<mpsc::Receiver<(Pages, Vec<u8>)>>,
    sockets: Vec<UnixStream>,
    decoders: Vec<Box<dyn transship_codec::Decoder>>,
    /// Barriers at the end of each section, as machine types up to 8.0 have them.
    by_sections: bool,
    memory: BTreeMap<String, Vec<u8>>,
    /// Pages that came, ever, and since the last barrier.
    received: HashSet<(String, u64)>,
    since_barrier: HashSet<(String, u64)>,
    fresh: u8,
    quirk: Quirk,
    barriers: usize,
}

/// What the model has when all is over.
struct Arrived {
    memory: BTreeMap<String, Vec<u8>>,
    ran: bool,
    barriers: usize,
}

impl Model {
    fn accept(listener: &UnixListener, wires: Wires, quirk: Quirk) -> Self {
        let (main, _) = listener.accept().unwrap();
        let mut model = Self {
            main,
            channels: Vec::new(),
            sockets: Vec::new(),
            decoders: Vec::new(),
            by_sections: wires.machine == "pc-q35-7.2",
            memory: BTreeMap::new(),
            received: HashSet::new(),
            since_barrier: HashSet::new(),
            // A machine type of 9.0 or newer has zero pages in packets, which do not clear; all others must clear what was there.
            fresh: if wires.clears() { STALE } else { 0 },
            quirk,
            barriers: 0,
        };
        for number in 0..wires.channels {
            let (mut socket, _) = listener.accept().unwrap();
            let mut greeting = [0; GREETING_BYTES];
            socket.read_exact(&mut greeting).unwrap();
            assert_eq!(Greeting::decode(&greeting).unwrap(), Greeting { uuid: UUID, channel: number });
            let (packets, channel) = mpsc::channel();
            model.sockets.push(socket.try_clone().unwrap());
            thread::spawn(move || {
                while let Some(packet) = read_packet(&mut socket) {
                    if packets.send(packet).is_err() {
                        return;
                    }
                }
            });
            model.channels.push(channel);
            model.decoders.push(wires.compress.stock_decoder().unwrap());
        }
        model
    }

    /// To the end, or to where the source gives up.
    fn run(mut self) -> Arrived {
        let ran = self.load().is_some();
        Arrived { memory: self.memory, ran, barriers: self.barriers }
    }

    fn load(&mut self) -> Option<()> {
        let mut reader = StreamReader::new();
        let mut bytes = Vec::new();
        let (mut at, mut stopped) = (0, false);
        loop {
            let step = reader.next(&bytes[at..]).unwrap();
            let Step::Done { record, used } = step else {
                let mut piece = [0; 65536];
                let read = self.main.read(&mut piece).unwrap_or(0);
                if read == 0 {
                    return None;
                }
                bytes.drain(..at);
                at = 0;
                bytes.extend(&piece[..read]);
                continue;
            };
            match record {
                Record::Tail => break,
                Record::Block(block) => {
                    assert!(block.gpa.is_none());
                    self.memory.insert(block.name.to_string(), vec![self.fresh; block.used_bytes as usize]);
                }
                Record::MultifdFlush => {
                    assert!(!self.by_sections && !self.channels.is_empty(), "a record that this QEMU does not know");
                    self.barrier()?;
                }
                Record::EndOfBody if self.by_sections => self.barrier()?,
                Record::Command(Command::Ping(number)) => self.answer(number)?,
                Record::Command(Command::SwitchoverStart) => stopped = true,
                Record::Page(page) => {
                    let name = reader.blocks()[page.block].name.to_string();
                    assert_eq!(name == "vga.vram", stopped, "devices come when the guest stands still");
                    match page.content {
                        PageContent::Normal(bytes) => {
                            assert!(self.channels.is_empty() || stopped, "pages go on channels where there are any");
                            self.put(&name, page.offset, Some(bytes));
                        }
                        PageContent::Fill(0) => self.put(&name, page.offset, None),
                        other => panic!("{other:?}"),
                    }
                }
                _ => {}
            }
            at += used;
        }
        self.tail(bytes.split_off(at))
    }

    /// The sections, a ping, and not a byte of the end before the answer.
    fn tail(&mut self, begin: Vec<u8>) -> Option<()> {
        let (sections, end) = Guest::tail("running");
        const PING_BYTES: usize = 1 + 2 + 2 + 4;
        let mut tail = begin;
        let rest = (sections.len() + PING_BYTES).checked_sub(tail.len()).expect("no more than that before the answer");
        let have = tail.len();
        tail.resize(have + rest, 0);
        self.main.read_exact(&mut tail[have..]).ok()?;
        // Byte for byte, but that it ran.
        assert!(GlobalState::find(&[&sections[..], &end].concat(), 0).unwrap().unwrap().runs());
        assert_eq!(tail[..sections.len()], sections);
        assert_eq!(tail[sections.len()..][..5], [8, 0, 2, 0, 4]);
        let number = u32::from_be_bytes(tail[sections.len() + 5..].try_into().unwrap());
        self.main.set_nonblocking(true).unwrap();
        assert!(
            self.main.read(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock),
            "nothing may follow yet"
        );
        self.main.set_nonblocking(false).unwrap();
        self.answer(number)?;
        let mut last = vec![0; end.len()];
        self.main.read_exact(&mut last).ok()?;
        assert_eq!(last, end);
        match self.quirk {
            Quirk::AtEnd(instead) => drop(self.instead(instead)),
            _ => self.main.write_all(&Reply::Shut(0).encode()).unwrap(),
        }
        Some(())
    }

    fn answer(&mut self, number: u32) -> Option<()> {
        match self.quirk {
            Quirk::AtPing(ping, instead) if ping == number => self.instead(instead)?,
            _ => {}
        }
        self.main.write_all(&Reply::Pong(number).encode()).ok()
    }

    /// Whether it goes on.
    fn instead(&mut self, instead: Instead) -> Option<()> {
        match instead {
            Instead::Shut(status) => self.main.write_all(&Reply::Shut(status).encode()).ok()?,
            Instead::Pong(number) => self.main.write_all(&Reply::Pong(number).encode()).ok()?,
            Instead::Noise => self.main.write_all(&[0xff; 8]).ok()?,
            Instead::Request => {
                self.main
                    .write_all(&Reply::RequestPages { block: Some(name("mem0")), offset: 0, bytes: 4096 }.encode())
                    .ok()?;
            }
            Instead::HangUp => {
                let _ = self.main.shutdown(Shutdown::Both);
                return None;
            }
            Instead::DropChannel => self.sockets[0].shutdown(Shutdown::Both).unwrap(),
        }
        Some(())
    }

    /// Everything on the channels up to their barrier packets.
    fn barrier(&mut self) -> Option<()> {
        for channel in 0..self.channels.len() {
            loop {
                let (packet, payload) = self.channels[channel].recv().ok()?;
                self.put_packet(channel, &packet, &payload);
                if packet.sync {
                    break;
                }
            }
        }
        self.since_barrier.clear();
        self.barriers += usize::from(!self.channels.is_empty());
        Some(())
    }

    fn put_packet(&mut self, channel: usize, packet: &Pages, payload: &[u8]) {
        let Some(name) = packet.block() else { return };
        assert!(!packet.sync, "pages and barriers go apart");
        assert!(!self.by_sections || packet.zero().is_empty(), "this QEMU would skip zero pages in packets");
        let mut pages = vec![0; packet.normal().len() * PAGE_BYTES];
        if !pages.is_empty() {
            self.decoders[channel].decode(payload, &mut pages).unwrap();
        }
        for (&offset, page) in packet.normal().iter().zip(pages.as_chunks().0) {
            self.put(name, offset, Some(page));
        }
        for &offset in packet.zero() {
            let place = (name.to_string(), offset);
            assert!(self.since_barrier.insert(place.clone()), "page {offset:#x} of {place:?} twice between barriers");
            // The trap: what never came is trusted to be zero.
            if !self.received.insert(place) {
                self.memory.get_mut(&**name).unwrap()[offset as usize..][..PAGE_BYTES].fill(0);
            }
        }
    }

    fn put(&mut self, name: &str, offset: u64, page: Option<&[u8; PAGE_BYTES]>) {
        let place = (name.to_owned(), offset);
        let once = self.since_barrier.insert(place.clone());
        assert!(once || self.channels.is_empty(), "page {offset:#x} of {name} twice between barriers");
        self.received.insert(place);
        let memory = &mut self.memory.get_mut(name).unwrap()[offset as usize..][..PAGE_BYTES];
        memory.copy_from_slice(page.unwrap_or(&[0; PAGE_BYTES]));
    }
}

fn read_packet(socket: &mut UnixStream) -> Option<(Pages, Vec<u8>)> {
    let mut header = vec![0; transship_wire::qemu::PACKET_HEADER_BYTES];
    socket.read_exact(&mut header).ok()?;
    let Ok(Step::Done { record: Packet::Pages(pages), .. }) = Packet::read(&header, 0) else { panic!("no packet") };
    let mut payload = vec![0; pages.payload_bytes() as usize];
    socket.read_exact(&mut payload).ok()?;
    Some((pages, payload))
}

/// What both are told.
#[derive(Debug, Clone, Copy)]
struct Wires {
    machine: &'static str,
    channels: u8,
    compress: Codec,
    zero_pages: ZeroPages,
    encoders: u8,
    when_busy: WhenBusy,
}

impl Wires {
    /// Whether what the destination's memory held before must be gone.
    fn clears(&self) -> bool {
        self.channels == 0 || self.machine != "pc-q35-10.0" || self.zero_pages == ZeroPages::Main
    }

    fn options(&self) -> QemuSendOptions {
        QemuSendOptions {
            channels: self.channels,
            compress: Setting::new(self.compress, None).unwrap(),
            zero_pages: self.zero_pages,
            encoders: self.encoders,
            when_busy: self.when_busy,
            downtime: Duration::from_nanos(1),
            max_rounds: 1000,
            ..QemuSendOptions::default()
        }
    }
}

fn send(guest: &mut Guest, wires: Wires, quirk: Quirk) -> (Result<(), Error>, Report, Arrived) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("incoming");
    let listener = UnixListener::bind(&path).unwrap();
    let mut report = Report::default();
    thread::scope(|scope| {
        let model = scope.spawn(|| Model::accept(&listener, wires, quirk).run());
        let result = send_to_qemu(guest, &uri(&path), &wires.options(), &Progress::new(), &mut report);
        (result, report, model.join().unwrap())
    })
}

fn uri(path: &Path) -> Uri {
    Uri::Unix(path.to_owned())
}

fn op() -> impl Strategy<Value = Op> {
    let fill = (0..2usize, 0..300u64, prop_oneof![Just(0u8), 1..5u8]);
    let free = (0..2usize, 0..300u64, 1..150u64);
    prop_oneof![
        5 => fill.prop_map(|(region, page, byte)| Op::Fill { region, page, byte }),
        1 => free.prop_map(|(region, first, count)| Op::Free { region, first, count }),
    ]
}

fn wires() -> impl Strategy<Value = Wires> {
    let zero_pages = prop_oneof![Just(ZeroPages::Channels), Just(ZeroPages::Main), Just(ZeroPages::Off)];
    let machine = prop_oneof![Just("pc-q35-7.2"), Just("pc-q35-8.2"), Just("pc-q35-10.0")];
    let compress = prop_oneof![Just(Codec::None), Just(Codec::Zlib), Just(Codec::Zstd)];
    let when_busy = prop_oneof![Just(WhenBusy::Wait), Just(WhenBusy::Raw)];
    (machine, 0..4u8, compress, zero_pages, 1..4u8, when_busy).prop_map(
        |(machine, channels, compress, zero_pages, encoders, when_busy)| {
            let compress = if channels == 0 { Codec::None } else { compress };
            Wires { machine, channels, compress, zero_pages, encoders, when_busy }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the guest wrote and freed while it travelled, in whichever form, and whatever the destination's memory held before where that
    /// is to be cleared.
    #[test]
    fn what_arrives_is_what_the_guest_held(
        wires in wires(), before in vec(op(), 0..40), lists in vec(vec(op(), 0..20), 0..5),
    ) {
        let mut guest = Guest::new(wires.machine, lists);
        {
            let script = guest.inner.script.lock().unwrap();
            let mut seen = script.written.clone();
            drop(script);
            before.iter().for_each(|op| common::apply(&guest.inner.memory, op, &mut seen));
        }
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        prop_assert!(result.is_ok(), "{:?}", result);
        prop_assert!(arrived.ran && guest.given_up && guest.resumed().is_none());
        for (name, held) in guest.names().iter().zip(contents(&guest.inner.memory)) {
            let same = arrived.memory[name] == held;
            let page = arrived.memory[name].chunks(4096).zip(held.chunks(4096)).position(|(a, b)| a != b);
            prop_assert!(same, "{name}, page {page:?}");
        }
        let mut vram = vec![0; VRAM_PAGES as usize * PAGE_BYTES];
        vram[2 * PAGE_BYTES..3 * PAGE_BYTES].fill(7);
        prop_assert!(arrived.memory["vga.vram"] == vram);
        // Two lists of blocks, each round, and the last section.
        let barriers = if wires.channels == 0 { 0 } else { 2 + report.rounds.len() + 1 };
        prop_assert_eq!(arrived.barriers, barriers);
    }
}

const ONE: Wires = Wires {
    machine: "pc-q35-10.0",
    channels: 0,
    compress: Codec::None,
    zero_pages: ZeroPages::Channels,
    encoders: 2,
    when_busy: WhenBusy::Wait,
};
const TWO: Wires = Wires { channels: 2, ..ONE };

/// Encoders and channels are any number; what does not shrink, and what found all encoders busy, goes in the form of the method all the same.
#[test]
fn encoders_serve_all_channels_also_with_what_does_not_shrink() {
    let pages = [64 * 128];
    for (compress, channels, encoders, when_busy) in [
        (Codec::Zlib, 2, 3, WhenBusy::Wait),
        (Codec::Zstd, 3, 1, WhenBusy::Wait),
        (Codec::Zlib, 2, 1, WhenBusy::Raw),
        (Codec::Zstd, 1, 2, WhenBusy::Raw),
    ] {
        let wires = Wires { compress, channels, encoders, when_busy, ..ONE };
        let mut guest = Guest::with(&pages, ONE.machine, vec![vec![Op::Fill { region: 0, page: 5, byte: 3 }]]);
        let mut state = 1_u64;
        for first in (0..pages[0]).step_by(128) {
            let noise = (0..128 * PAGE_BYTES / 8).flat_map(|_| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (state ^ state >> 29).to_le_bytes()
            });
            guest.inner.memory.regions()[0].write_pages(first, u128::MAX, &noise.collect::<Vec<_>>()).unwrap();
        }
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        result.unwrap();
        assert!(arrived.memory["mem0"] == contents(&guest.inner.memory)[0], "{wires:?}");
        assert_eq!(report.pages.normal, pages[0] + 1, "{wires:?}");
        // Stored pages are no encoder's.
        let encoded = report.pages.normal - report.pages.raw_busy;
        assert_eq!(report.bytes.encoder_in, encoded * PAGE_BYTES as u64, "{wires:?}");
        assert!(when_busy == WhenBusy::Raw || report.pages.raw_busy == 0, "{report:?}");
        assert!(report.cpu.encoders > 0.0, "{report:?}");
    }
}

/// Looking at a hole would make it memory again.
#[test]
fn what_becomes_a_hole_before_its_turn_is_not_read() {
    // Done when the first region was looked at already; one of these pages is used again.
    let free = Op::Free { region: 0, first: 10, count: 50 };
    let fill = |page| Op::Fill { region: 0, page, byte: 9 };
    let zstd = Wires { compress: Codec::Zstd, ..TWO };
    let main = Wires { zero_pages: ZeroPages::Main, ..TWO };
    for wires in [ONE, TWO, zstd, main] {
        let mut guest = Guest::new(ONE.machine, vec![vec![free.clone()], vec![fill(12), fill(80)]]);
        let mut seen = guest.inner.script.lock().unwrap().written.clone();
        (0..100).for_each(|page| common::apply(&guest.inner.memory, &fill(page), &mut seen));
        let (result, report, arrived) = send(&mut guest, wires, Quirk::None);
        result.unwrap();
        assert_eq!(guest.inner.memory.regions()[0].data().unwrap().count(), 50 + 1, "{wires:?}");
        assert!(arrived.memory["mem0"] == contents(&guest.inner.memory)[0], "{wires:?}");
        assert_eq!((report.rounds[0].hole, report.pages.zero), (430 - 50, 0), "{wires:?}: {report:?}");
        assert_eq!(report.pages.normal, 50 + 2, "{wires:?}: {report:?}");
    }
}

/// A guest with some pages, and two rounds: pings 1 to 5 are those of the begin, the blocks, the rounds and the devices.
fn guest() -> Guest {
    let guest = Guest::new("pc-q35-10.0", vec![vec![Op::Fill { region: 0, page: 1, byte: 1 }]]);
    let mut seen = guest.inner.script.lock().unwrap().written.clone();
    for page in 0..200 {
        common::apply(&guest.inner.memory, &Op::Fill { region: 0, page, byte: 9 }, &mut seen);
    }
    guest
}

/// Before the byte that ends the stream, nothing that it says or does can make two guests or none.
#[test]
fn whatever_it_says_before_the_end_the_guest_stays_here() {
    for wires in [ONE, TWO] {
        for ping in 1..=5 {
            for (instead, words) in [
                (Instead::Shut(1), "gives up (status 1)"),
                (Instead::Shut(0), "before it was sent everything"),
                (Instead::HangUp, "has closed the connection"),
                (Instead::Pong(77), "which nobody has asked for"),
                (Instead::Noise, "not the protocol's"),
                (Instead::Request, "which nobody has asked for"),
                (Instead::DropChannel, "has closed channel 0"),
            ] {
                if instead == Instead::DropChannel && wires.channels == 0 {
                    continue;
                }
                let mut guest = guest();
                let (result, report, arrived) = send(&mut guest, wires, Quirk::AtPing(ping, instead));
                let error = result.expect_err("it goes wrong");
                let story = format!("{instead:?} at ping {ping}, {wires:?}: {error}");
                assert_eq!(error.outcome(), Outcome::SourceRunsOn, "{story}");
                assert!(error.to_string().contains(words), "{story}");
                assert!(!arrived.ran && !guest.given_up, "{story}");
                assert_eq!(report.error, Some(error.to_string()));
                // Stopped or not, it runs.
                let stopped = guest.inner.script.lock().unwrap().stopped;
                assert_eq!(guest.resumed(), stopped.then_some(true), "{story}");
                assert!(
                    ping > 2 || !stopped,
                    "{story}: what can be refused at the begin is refused before it is stopped"
                );
            }
        }
    }
}

/// From that byte on it may run there, so it never runs here without a person.
#[test]
fn whatever_it_says_after_the_end_but_that_it_has_it_needs_a_person() {
    for instead in [Instead::Shut(1), Instead::HangUp, Instead::Pong(77), Instead::Noise] {
        let mut guest = guest();
        let (result, _, _) = send(&mut guest, ONE, Quirk::AtEnd(instead));
        let error = result.expect_err("it goes wrong");
        assert_eq!(error.outcome(), Outcome::NeedsPerson, "{instead:?}: {error}");
        assert!(error.to_string().contains("info status") && error.to_string().contains("resume it"), "{error}");
        assert!(guest.given_up && guest.resumed().is_none(), "{instead:?}");
    }
}

#[test]
fn what_can_not_be_sent_is_refused_before_anybody_is_asked() {
    let nobody = uri(Path::new("/nowhere/incoming"));
    let send = |guest: &mut dyn SourceGuest, wires: Wires| {
        send_to_qemu(guest, &nobody, &wires.options(), &Progress::new(), &mut Report::default())
            .unwrap_err()
            .to_string()
    };
    let error = send(&mut Scripted::new(&[1], vec![]), ONE);
    assert!(error.contains("let a transship receive it"), "{error}");
    let error = send(&mut Guest::new("microvm", vec![]), TWO);
    assert!(error.contains("microvm") && error.contains("--channels"), "{error}");
    let error = send(&mut Guest::new("microvm", vec![]), ONE);
    assert!(error.contains("connect to unix:/nowhere/incoming"), "{error}");
}
