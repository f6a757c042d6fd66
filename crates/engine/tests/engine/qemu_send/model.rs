//! A waiting QEMU, as strict as the rules.
use std::{
    collections::{BTreeMap, HashSet},
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed, mpsc},
    thread,
};

use transship_engine::{Error, Progress, Report, Uri, send_to_qemu};
use transship_memory::PAGE_BYTES;
use transship_wire::qemu::{
    Command, GREETING_BYTES, GlobalState, Greeting, Packet, PageContent, Pages, Record, Reply, Step, StreamReader,
};

use super::{
    guest::{Guest, STALE, UUID, name},
    wires::Wires,
};

/// What the model does otherwise than a QEMU that is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quirk {
    None,
    /// Answers this ping by something else.
    AtPing(u32, Instead),
    /// Does this behind the end.
    AtEnd(Instead),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instead {
    Shut(u32),
    HangUp,
    Pong(u32),
    /// Bytes that are no answer.
    Noise,
    /// It lets go of a channel, and answers.
    DropChannel,
    /// It lets go of a channel, and says nothing more.
    Freeze,
    /// It asks for pages, as if the guest ran.
    Request,
    /// It answers, and gives up.
    PongAndShut,
}

/// A waiting QEMU.
pub(super) struct Model {
    pub(super) main: UnixStream,
    /// Packets as a thread for each channel reads them.
    pub(super) channels: Vec<mpsc::Receiver<(Pages, Vec<u8>)>>,
    sockets: Vec<UnixStream>,
    decoders: Vec<Box<dyn transship_codec::Decoder>>,
    /// Barriers at the end of each section, as machine types up to 8.0 have them.
    by_sections: bool,
    pub(super) memory: BTreeMap<String, Vec<u8>>,
    /// Pages that came, ever, and since the last barrier.
    received: HashSet<(String, u64)>,
    since_barrier: HashSet<(String, u64)>,
    fresh: u8,
    pub(super) quirk: Quirk,
    pub(super) barriers: usize,
    /// Bytes of the main stream so far, and as of each ping.
    taken: u64,
    pings: Vec<u64>,
    /// Whether the source's VMM describes its sections; we do, where it does not.
    described: bool,
}

/// What the model has when all is over.
pub(super) struct Arrived {
    pub(super) memory: BTreeMap<String, Vec<u8>>,
    pub(super) ran: bool,
    pub(super) barriers: usize,
    /// Bytes of the main stream behind the last round and its ping.
    pub(super) behind_the_rounds: u64,
}

impl Model {
    pub(super) fn accept(listener: &UnixListener, wires: Wires, quirk: Quirk) -> Self {
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
            // A machine type of 9.0 or newer has zero pages in packets, which do not clear; all others must clear what
            // was there.
            fresh: if wires.clears() { STALE } else { 0 },
            quirk,
            barriers: 0,
            taken: 0,
            pings: Vec::new(),
            described: true,
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
    pub(super) fn run(mut self) -> Arrived {
        let ran = self.load().is_some();
        // The last ping stands behind the devices.
        let rounds = self.pings.iter().rev().nth(1).copied().unwrap_or_default();
        Arrived { memory: self.memory, ran, barriers: self.barriers, behind_the_rounds: self.taken - rounds }
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
                Record::Command(Command::Ping(number)) => {
                    self.pings.push(self.taken + used as u64);
                    self.answer(number)?;
                }
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
            self.taken += used as u64;
        }
        self.tail(bytes.split_off(at))
    }

    /// The sections, a ping, and not a byte of the end before the answer.
    pub(super) fn tail(&mut self, begin: Vec<u8>) -> Option<()> {
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
        self.taken += tail.len() as u64;
        self.pings.push(self.taken);
        self.answer(number)?;
        // The end, and what a description begins with.
        let mut last = vec![0; 1 + 1 + 4];
        self.main.read_exact(&mut last).ok()?;
        assert_eq!(last[..2], [0, 6]);
        let described = u32::from_be_bytes(last[2..].try_into().unwrap());
        last.resize(last.len() + described as usize, 0);
        self.main.read_exact(&mut last[6..]).ok()?;
        self.taken += last.len() as u64;
        if self.described {
            assert_eq!(last, end);
        } else {
            // Of no section. A QEMU only skips it.
            assert!(last[6..].starts_with(b"{") && last.ends_with(b"}"), "{:?}", last.escape_ascii().to_string());
        }
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
            Instead::PongAndShut => {
                let Quirk::AtPing(ping, _) = self.quirk else { panic!("there is no ping") };
                self.main.write_all(&[Reply::Pong(ping).encode(), Reply::Shut(1).encode()].concat()).ok()?;
                let _ = self.main.read_to_end(&mut Vec::new());
                return None;
            }
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
            Instead::Freeze => {
                self.sockets[0].shutdown(Shutdown::Both).unwrap();
                // Until the source has lost patience.
                let _ = self.main.read_to_end(&mut Vec::new());
                return None;
            }
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

/// Sends to one.
pub(super) fn send(guest: &mut Guest, wires: Wires, quirk: Quirk) -> (Result<(), Error>, Report, Arrived) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("incoming");
    let listener = UnixListener::bind(&path).unwrap();
    let mut report = Report::default();
    let (over, described) = (Arc::clone(&guest.over), guest.describes);
    thread::scope(|scope| {
        let model = scope.spawn(|| {
            let arrived = Model { described, ..Model::accept(&listener, wires, quirk) }.run();
            over.store(true, Relaxed);
            arrived
        });
        let result = send_to_qemu(guest, None, &uri(&path), &wires.options(), &Progress::new(), &mut report);
        (result, report, model.join().unwrap())
    })
}

pub(super) fn uri(path: &Path) -> Uri {
    Uri::Unix(path.to_owned())
}
