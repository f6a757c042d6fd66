//! Two relays between models of QEMUs: sockets and threads that say what stock ones do, in order, at their own pace, or not at all.
#![allow(clippy::unwrap_used)]
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use tempfile::TempDir;
use transship_engine::{
    Error, Listener, Outcome, Progress, RelayOptions, Report, Status, Uri, relay_from_qemu, relay_to_qemu,
};
use transship_wire::{
    Preamble, Role, Session,
    qemu::{Block, Command, Configuration, Described, Greeting, Name, Reply, StreamWriter, describe},
    relay::{self, Content, MAX_BYTES, MESSAGE_BYTES, Message, Packet, TheEnd},
};

/// More than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Numbers that only look random, so that a failure comes again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Half of it shrinks.
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 4096);
        while bytes.len() < count {
            let run = 1 + self.below(3000) as usize;
            match self.below(2) {
                0 => bytes.resize(bytes.len() + run, self.next() as u8),
                _ => bytes.extend((0..run).map(|_| self.next() as u8)),
            }
        }
        bytes.truncate(count);
        bytes
    }
}

/// What a source says on its main connection, and where the byte is that hands the guest over.
fn main_stream(random: &mut Random, pages: usize, return_path: bool) -> (Vec<u8>, usize) {
    let mut writer = StreamWriter::new(0, 1);
    writer.header().configuration(&Configuration::new(Name::new("pc-q35-10.0").unwrap()));
    if return_path {
        writer.command(&Command::OpenReturnPath).command(&Command::Ping(1));
    }
    let ram = Name::new("pc.ram").unwrap();
    let bytes = pages as u64 * 4096;
    writer
        .ram_start(bytes)
        .block(&Block { name: ram.clone(), used_bytes: bytes, gpa: None, mapped: None })
        .end_of_section();
    writer.part();
    for page in 0..pages {
        writer.page(&ram, page as u64 * 4096, random.bytes(4096).as_slice().try_into().unwrap());
    }
    writer.end_of_section().end().end_of_section();
    let (name, state) = (Name::new("globalstate").unwrap(), [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat());
    writer.full(3, &name, 0, 1, &state);
    let mut stream = writer.eof().take_bytes();
    let end = stream.len() - 1;
    let json = describe(&[Described { name: &name, instance: 0, version: 1, fields: &[("state", "buffer", 104)] }]);
    stream.extend(StreamWriter::new(0, 1).vmdesc(&json).take_bytes());
    (stream, end)
}

fn greeting(channel: u8) -> Vec<u8> {
    Greeting { uuid: [3; 16], channel }.encode().to_vec()
}

/// A link that can be cut, and counts.
struct Cable {
    uri: Uri,
    ends: Arc<Mutex<Vec<TcpStream>>>,
    carried: Arc<AtomicU64>,
    cut: Arc<AtomicU64>,
}

impl Cable {
    /// `cut_after`: so many bytes in all.
    fn new(to: &Uri, cut_after: u64) -> Self {
        let Uri::Tcp { port, .. } = *to else { panic!("{to}") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let cable =
            Self { uri, ends: Arc::default(), carried: Arc::default(), cut: Arc::new(AtomicU64::new(cut_after)) };
        let (ends, carried, cut) = (Arc::clone(&cable.ends), Arc::clone(&cable.carried), Arc::clone(&cable.cut));
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { return };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (ends, carried, cut) = (Arc::clone(&ends), Arc::clone(&carried), Arc::clone(&cut));
                    ends.lock().unwrap().push(from.try_clone().unwrap());
                    thread::spawn(move || {
                        let mut room = vec![0; 16 << 10];
                        while let Ok(count @ 1..) = from.read(&mut room) {
                            if carried.fetch_add(count as u64, SeqCst) + count as u64 > cut.load(SeqCst) {
                                sever(&ends);
                                break;
                            }
                            if to.write_all(&room[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        cable
    }

    fn cut_now(&self) {
        self.cut.store(0, SeqCst);
        sever(&self.ends);
    }
}

fn sever(ends: &Mutex<Vec<TcpStream>>) {
    ends.lock().unwrap().iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
}

struct Ended {
    result: Result<(), Error>,
    report: Report,
}

/// Both relays, each on a thread, and the two addresses at which QEMUs are or come.
struct Relays {
    _folder: TempDir,
    near_uri: PathBuf,
    qemu: UnixListener,
    cable: Cable,
    near: thread::JoinHandle<Ended>,
    far: thread::JoinHandle<Ended>,
    near_progress: Arc<Progress>,
}

fn options(compress: &str) -> RelayOptions {
    RelayOptions { channels: 3, compress: compress.parse().unwrap(), encoders: 2, without_return_path: false }
}

impl Relays {
    fn start(options: RelayOptions, cut_after: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (near_uri, qemu_uri) = (folder.path().join("near"), folder.path().join("qemu"));
        let qemu = UnixListener::bind(&qemu_uri).unwrap();
        let link = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let cable = Cable::new(link.uri(), cut_after);
        let far = thread::spawn(move || {
            let mut report = Report::default();
            let result = relay_to_qemu(link, &Uri::Unix(qemu_uri), &Progress::new(), &mut report);
            Ended { result, report }
        });
        let listener = Listener::bind(&Uri::Unix(near_uri.clone())).unwrap();
        let (near_progress, to) = (Progress::new(), cable.uri.clone());
        let progress = Arc::clone(&near_progress);
        let near = thread::spawn(move || {
            let mut report = Report::default();
            let result = relay_from_qemu(&listener, &to, &options, &progress, &mut report);
            Ended { result, report }
        });
        Self { _folder: folder, near_uri, qemu, cable, near, far, near_progress }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.near_uri).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A connection that comes to the waiting QEMU, with its first bytes: it is silent for no longer than it takes to hear of it.
    fn accept(&self) -> (UnixStream, Vec<u8>) {
        let (mut stream, _) = self.qemu.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut first = vec![0; 4];
        stream.read_exact(&mut first).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        (stream, first)
    }

    fn end(self) -> (Ended, Ended) {
        (self.near.join().unwrap(), self.far.join().unwrap())
    }
}

/// Writes in pieces of all sizes, and says how much was taken.
fn say(mut to: &UnixStream, bytes: &[u8], mut random: Random, taken: &AtomicU64) -> bool {
    let mut rest = bytes;
    while !rest.is_empty() {
        let most = if random.below(4) == 0 { 50 } else { 1 << 20 };
        let count = (1 + random.below(most) as usize).min(rest.len());
        if to.write_all(&rest[..count]).is_err() {
            return false;
        }
        taken.fetch_add(count as u64, SeqCst);
        rest = &rest[count..];
    }
    true
}

fn read_exactly(mut from: &UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

/// Whether nothing more comes on it, whichever way it ended.
fn is_closed(mut stream: &UnixStream) -> bool {
    let mut room = [0; 4096];
    loop {
        match stream.read(&mut room) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => {
                return !matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            }
        }
    }
}

fn shut(status: u32) -> Vec<u8> {
    Reply::Shut(status).encode()
}

/// A migration with `channels` that each say and hear `channel_bytes`.
fn migrate(compress: &str, channels: u8, pages: usize, channel_bytes: usize, seed: u64) -> (Ended, Ended) {
    let relays = Relays::start(options(compress), u64::MAX);
    let mut random = Random(seed);
    let (main_bytes, _) = main_stream(&mut random, pages, true);
    let said: Vec<_> = (0..channels).map(|n| [greeting(n), random.bytes(channel_bytes)].concat()).collect();
    let heard: Vec<_> = (0..channels).map(|_| random.bytes(channel_bytes / 2 + 1)).collect();
    let main = relays.connect();
    let lines: Vec<_> = said.iter().map(|_| relays.connect()).collect();
    thread::scope(|scope| {
        for ((line, said), heard) in lines.iter().zip(&said).zip(&heard) {
            let random = Random(random.next());
            scope.spawn(move || {
                assert!(say(line, said, random, &AtomicU64::new(0)));
                line.shutdown(Shutdown::Write).unwrap();
            });
            scope.spawn(move || {
                assert!(read_exactly(line, heard.len()) == *heard);
                assert!(is_closed(line));
            });
        }
        scope.spawn(|| assert!(say(&main, &main_bytes, Random(9), &AtomicU64::new(0))));
        let (over_there, first) = relays.accept();
        assert_eq!(first, b"QEVM", "the main connection comes first");
        for _ in 0..channels {
            let (line, first) = relays.accept();
            let (said, heard, random) = (&said, &heard, Random(random.next()));
            scope.spawn(move || {
                let rest = read_exactly(&line, 60);
                let number = usize::from(rest[20]);
                assert!([&first[..], &rest].concat() == said[number][..64]);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        assert!(say(&line, &heard[number], random, &AtomicU64::new(0)));
                        line.shutdown(Shutdown::Write).unwrap();
                    });
                    assert!(read_exactly(&line, said[number].len() - 64) == said[number][64..]);
                    assert!(is_closed(&line), "an end is an end over there, too");
                });
            });
        }
        assert!(read_exactly(&over_there, main_bytes.len() - 4) == main_bytes[4..]);
        (&over_there).write_all(&[Reply::Pong(1).encode(), shut(0)].concat()).unwrap();
        drop(over_there);
        assert_eq!(read_exactly(&main, 16), [Reply::Pong(1).encode(), shut(0)].concat());
        main.shutdown(Shutdown::Both).unwrap();
    });
    relays.end()
}

#[test]
fn what_is_said_arrives_in_order_in_both_directions() {
    for (seed, compress) in ["none", "lz4", "zstd:3", "zlib", "qatzip", "auto"].into_iter().enumerate() {
        let (near, far) = migrate(compress, 3, 1000, 6 << 20, 77 + seed as u64);
        for Ended { result, report } in [&near, &far] {
            assert!(result.is_ok(), "{compress}: {result:?}");
            assert_eq!(report.status, Status::Completed);
        }
        let [near, far] = [near, far].map(|ended| ended.report.relay.unwrap());
        assert_eq!((near.connections, near.from_qemu, near.to_qemu), (4, far.to_qemu, far.from_qemu), "{compress}");
        assert!(near.link_out == far.link_in && near.from_qemu > 20 << 20, "{near:?}");
        if !["none", "auto"].contains(&compress) {
            let method = compress.split(':').next().unwrap();
            let encoded = near.methods.iter().find(|bytes| bytes.method == method).unwrap();
            assert!(encoded.made < encoded.bytes && near.ratio > 1.2, "{near:?}");
        }
    }
}

#[test]
fn one_connection_is_relayed() {
    let (near, far) = migrate("zstd", 0, 300, 0, 5);
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
}

/// A multifd channel waits for the main stream at each barrier, and reads nothing meanwhile.
#[test]
fn a_connection_that_is_not_read_holds_up_no_other_and_fills_no_memory() {
    const SILENT: usize = 96 << 20;
    let relays = Relays::start(options("lz4"), u64::MAX);
    let mut random = Random(4711);
    let (main_bytes, end) = main_stream(&mut random, 8000, true);
    let silent_bytes = [greeting(0), vec![5; SILENT]].concat();
    let lively_bytes = [greeting(1), random.bytes(40 << 20)].concat();
    let (main, silent, lively) = (relays.connect(), relays.connect(), relays.connect());
    let taken = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| say(&silent, &silent_bytes, Random(1), &taken));
        scope.spawn(|| say(&lively, &lively_bytes, Random(2), &AtomicU64::new(0)));
        scope.spawn(|| say(&main, &main_bytes, Random(3), &AtomicU64::new(0)));
        let (main_there, _) = relays.accept();
        let others = [relays.accept().0, relays.accept().0].map(|line| (read_exactly(&line, 60)[20], Arc::new(line)));
        let [(number, first), (_, second)] = &others;
        let (silent_there, lively_there) = if *number == 0 { (first, second) } else { (second, first) };
        let (reading, lively_bytes) = (Arc::clone(lively_there), &lively_bytes);
        let read = scope.spawn(move || assert!(read_exactly(&reading, lively_bytes.len() - 64) == lively_bytes[64..]));
        // All but the end, which is given only when all else was taken.
        assert!(read_exactly(&main_there, end - 4) == main_bytes[4..end]);
        read.join().unwrap();
        // What the two relays and four sockets may hold of it: a window, and what waits for encoders.
        let held = taken.load(SeqCst);
        assert!(held < 40 << 20, "{held} bytes were taken of a connection that nobody reads");
        assert!(held > 12 << 20, "{held}: the window was not used");
        assert!(read_exactly(silent_there, SILENT).iter().all(|&byte| byte == 5));
        assert!(read_exactly(&main_there, main_bytes.len() - end) == main_bytes[end..]);
        (&main_there).write_all(&shut(0)).unwrap();
        assert_eq!(read_exactly(&main, 8), shut(0));
        for line in [&main, &silent, &lively] {
            line.shutdown(Shutdown::Both).unwrap();
        }
        drop(main_there);
        others.iter().for_each(|(_, line)| line.shutdown(Shutdown::Both).unwrap());
    });
    let (near, far) = relays.end();
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
}

/// Says all of a source, with one channel, and gives what the waiting QEMU got of the main stream until all was closed there. As with a QEMU, the channel
/// has said all before the memory ends on the main connection.
fn what_arrives(relays: &Relays, main_bytes: &[u8], channel_bytes: &[u8]) -> Vec<u8> {
    let (main, line) = (relays.connect(), relays.connect());
    let mut got = Vec::new();
    let (has_said, is_said) = mpsc::channel();
    let (line, main) = (&line, &main);
    thread::scope(|scope| {
        scope.spawn(move || {
            say(line, channel_bytes, Random(1), &AtomicU64::new(0));
            has_said.send(()).unwrap();
            assert!(is_closed(line), "the channel is closed at the source");
        });
        scope.spawn(move || {
            let (memory, rest) = main_bytes.split_at(main_bytes.len() / 2);
            say(main, memory, Random(2), &AtomicU64::new(0));
            is_said.recv().unwrap();
            say(main, rest, Random(2), &AtomicU64::new(0));
            assert!(is_closed(main), "so is the main connection");
        });
        relays.qemu.set_nonblocking(true).unwrap();
        let mut readers = Vec::new();
        while !relays.near.is_finished() || !relays.far.is_finished() {
            let Ok((mut there, _)) = relays.qemu.accept() else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            there.set_nonblocking(false).unwrap();
            readers.push(scope.spawn(move || {
                let (mut bytes, mut room) = (Vec::new(), [0; 64 << 10]);
                while let Ok(count @ 1..) = there.read(&mut room) {
                    bytes.extend_from_slice(&room[..count]);
                }
                bytes
            }));
        }
        for bytes in readers.into_iter().map(|reader| reader.join().unwrap()) {
            if bytes.starts_with(b"QEVM") {
                got = bytes;
            }
        }
    });
    got
}

/// Wherever the link breaks before the guest is handed over: both QEMUs lose their connections, and the one that waits can't run the guest.
#[test]
fn a_link_that_is_cut_leaves_the_guest_at_its_source() {
    let mut random = Random(31);
    let (main_bytes, end) = main_stream(&mut random, 500, true);
    let channel_bytes = [greeting(0), random.bytes(1 << 20)].concat();
    let all = (main_bytes.len() + channel_bytes.len()) as u64;
    for cut in (0..24).map(|_| 200 + random.below(all - 20_000)) {
        let relays = Relays::start(options("none"), cut);
        let got = what_arrives(&relays, &main_bytes, &channel_bytes);
        assert!(got.len() <= end && got == main_bytes[..got.len()], "cut after {cut}: {} of {end}", got.len());
        let (near, far) = relays.end();
        for Ended { result, .. } in [near, far] {
            let error = result.unwrap_err();
            assert_eq!(error.outcome(), Outcome::SourceRunsOn, "cut after {cut}: {error}");
        }
    }
}

/// It may run over there or not: the source is kept waiting until somebody has looked.
#[test]
fn a_link_that_is_cut_at_the_hand_over_keeps_the_source_waiting() {
    for source_ends in [false, true] {
        let relays = Relays::start(options("none"), u64::MAX);
        let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
        let main = relays.connect();
        assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
        let (there, _) = relays.accept();
        read_exactly(&there, main_bytes.len() - 4);
        relays.cable.cut_now();
        main.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
        assert!(!is_closed(&main), "a source that loses its connection lets the guest run again");
        // Over there it may say what became of it.
        (&there).write_all(&shut(0)).unwrap();
        there.shutdown(Shutdown::Both).unwrap();
        match source_ends {
            true => drop(main),
            false => {
                relays.near_progress.cancel();
                main.set_read_timeout(Some(PATIENCE)).unwrap();
                assert!(is_closed(&main));
            }
        }
        let (near, far) = relays.end();
        for (Ended { result, .. }, part) in [(near, "at most one of the two"), (far, "has loaded all of the guest")] {
            let error = result.unwrap_err();
            assert!(error.outcome() == Outcome::NeedsPerson && error.to_string().contains(part), "{error}");
        }
    }
}

/// Once the source has been told, nothing that breaks matters.
#[test]
fn a_link_that_is_cut_afterwards_does_no_harm() {
    let relays = Relays::start(options("none"), u64::MAX);
    let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
    let (there, _) = relays.accept();
    read_exactly(&there, main_bytes.len() - 4);
    (&there).write_all(&shut(0)).unwrap();
    assert_eq!(read_exactly(&main, 8), shut(0));
    relays.cable.cut_now();
    drop(main);
    drop(there);
    let (near, _) = relays.end();
    near.result.unwrap();
}

/// The waiting QEMU dies, or says that it has failed: the source hears of it, and its guest runs on.
#[test]
fn a_waiting_qemu_that_fails_ends_it_for_the_source() {
    for says in [true, false] {
        let relays = Relays::start(options("zstd"), u64::MAX);
        let (main_bytes, _) = main_stream(&mut Random(3), 20_000, true);
        let main = relays.connect();
        thread::scope(|scope| {
            scope.spawn(|| say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
            let (there, _) = relays.accept();
            read_exactly(&there, 1 << 20);
            if says {
                (&there).write_all(&shut(1)).unwrap();
            }
            drop(there);
            let mut answer = Vec::new();
            let _ = (&main).read_to_end(&mut answer);
            assert!(answer.is_empty() || says && answer == shut(1), "{answer:?}");
        });
        drop(main);
        let (near, far) = relays.end();
        for Ended { result, .. } in [near, far] {
            assert_eq!(result.unwrap_err().outcome(), Outcome::SourceRunsOn);
        }
    }
}

/// A source that gives up is heard over there as it would be without relays.
#[test]
fn a_source_that_gives_up_ends_it_over_there() {
    let relays = Relays::start(options("zstd"), u64::MAX);
    let (main_bytes, end) = main_stream(&mut Random(3), 100, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes[..end / 2], Random(2), &AtomicU64::new(0)));
    let (there, _) = relays.accept();
    drop(main);
    let mut got = Vec::new();
    (&there).read_to_end(&mut got).unwrap();
    assert_eq!(got, main_bytes[4..end / 2]);
    drop(there);
    let (near, far) = relays.end();
    for Ended { result, .. } in [near, far] {
        assert_eq!(result.unwrap_err().outcome(), Outcome::SourceRunsOn);
    }
}

/// A QEMU of 7.2 takes the first connection for the main one, and a newer one that accepts a connection does nothing else until it hears
/// something. So whoever says nothing is not let through, and who speaks first waits for the main connection.
#[test]
fn the_main_connection_comes_first_and_nobody_who_is_silent() {
    let relays = Relays::start(options("none"), u64::MAX);
    let (main_bytes, _) = main_stream(&mut Random(3), 10, true);
    let silent = relays.connect();
    let (main, line) = (relays.connect(), relays.connect());
    assert!(say(&line, &greeting(0), Random(1), &AtomicU64::new(0)));
    let mut stranger = relays.connect();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(is_closed(&stranger), "it is turned away");
    relays.qemu.set_nonblocking(true).unwrap();
    assert!(relays.qemu.accept().is_err(), "nothing is opened before the main stream has begun");
    relays.qemu.set_nonblocking(false).unwrap();
    assert!(say(&main, &main_bytes, Random(2), &AtomicU64::new(0)));
    let (there, first) = relays.accept();
    assert_eq!(first, b"QEVM");
    let (line_there, first) = relays.accept();
    assert_eq!(first, greeting(0)[..4]);
    read_exactly(&there, main_bytes.len() - 4);
    (&there).write_all(&shut(0)).unwrap();
    assert_eq!(read_exactly(&main, 8), shut(0));
    drop((main, line, there, line_there));
    relays.qemu.set_nonblocking(true).unwrap();
    assert!(relays.qemu.accept().is_err(), "whoever is silent is not let through");
    let qemu = relays.qemu.try_clone().unwrap();
    let (near, far) = relays.end();
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
    assert!(qemu.accept().is_err());
    drop(silent);
}

/// What can't be relayed safely is refused before the waiting QEMU is spoken to.
#[test]
fn a_source_without_return_path_is_refused_unless_the_user_says_so() {
    let (bytes, _) = main_stream(&mut Random(3), 10, false);
    let mut postcopy = StreamWriter::new(0, 1);
    postcopy.header().configuration(&Configuration::new(Name::new("pc-q35-10.0").unwrap()));
    postcopy.command(&Command::OpenReturnPath).command(&Command::PostcopyAdvise(None)).raw(&[4; 100]);
    for (bytes, part) in [
        (bytes.clone(), "migrate_set_capability return-path on"),
        (postcopy.take_bytes(), "postcopy"),
        (b"QEVM but nothing that is known".to_vec(), "--without-return-path"),
    ] {
        let relays = Relays::start(options("none"), u64::MAX);
        let main = relays.connect();
        say(&main, &bytes, Random(2), &AtomicU64::new(0));
        assert!(is_closed(&main));
        relays.qemu.set_nonblocking(true).unwrap();
        let qemu = relays.qemu.try_clone().unwrap();
        let (near, far) = relays.end();
        let error = near.result.unwrap_err();
        assert!(error.outcome() == Outcome::SourceRunsOn && error.to_string().contains(part), "{error}");
        assert!(far.result.unwrap_err().to_string().contains(part), "the other relay says why");
        assert!(qemu.accept().is_err(), "the waiting QEMU can still be used");
    }
    let relays = Relays::start(RelayOptions { without_return_path: true, ..options("none") }, u64::MAX);
    let main = relays.connect();
    assert!(say(&main, &bytes, Random(2), &AtomicU64::new(0)));
    drop(main); // all is written: to this source that is success
    let (there, _) = relays.accept();
    assert_eq!(read_exactly(&there, bytes.len() - 4), bytes[4..]);
    drop(there);
    let (near, far) = relays.end();
    assert!(near.result.is_ok() && far.result.is_ok(), "{:?} {:?}", near.result, far.result);
}

/// The user cancels: everything is closed, and nothing runs over there.
#[test]
fn a_cancelled_relay_leaves_the_guest_at_its_source() {
    let relays = Relays::start(options("none"), u64::MAX);
    let (main_bytes, end) = main_stream(&mut Random(3), 100, true);
    let main = relays.connect();
    assert!(say(&main, &main_bytes[..end / 2], Random(2), &AtomicU64::new(0)));
    let (there, _) = relays.accept();
    relays.near_progress.cancel();
    assert!(is_closed(&main) && is_closed(&there));
    let (near, far) = relays.end();
    assert!(matches!(near.result, Err(Error::Cancelled)), "{:?}", near.result);
    assert_eq!(near.report.status, Status::Cancelled);
    assert!(far.result.unwrap_err().to_string().contains("cancelled"));
}

/// A link as somebody else may speak it.
struct Intruder {
    control: TcpStream,
    data: TcpStream,
}

impl Intruder {
    fn new(to: &Uri) -> Self {
        let connect = |role| {
            let mut stream = dial(to);
            stream.write_all(&relay::Greeting(Preamble { session: Session([1; 16]), role }).encode()).unwrap();
            stream
        };
        let mut control = connect(Role::Control);
        control.write_all(&Message::Hello { channels: 1 }.encode()).unwrap();
        assert_eq!(hear(&mut control), Some(Message::Welcome));
        Self { control, data: connect(Role::Data(0)) }
    }

    fn open(&mut self) {
        let open = Message::Open { connection: 0, first: b"QEVM".to_vec() };
        self.control.write_all(&open.encode()).unwrap();
        assert_eq!(hear(&mut self.control), Some(Message::Credit { connection: 0, amount: 16 << 20 }));
    }

    fn raw(&mut self, connection: u16, sequence: u64, bytes: &[u8]) {
        let content = Content::Raw { bytes: bytes.len() as u32, gives_end: false };
        self.packet(&Packet { connection, sequence, content }, bytes);
    }

    /// The other side may have closed it by now.
    fn packet(&mut self, packet: &Packet, payload: &[u8]) {
        let _ = self.data.write_all(&packet.encode()).and_then(|()| self.data.write_all(payload));
    }
}

fn dial(to: &Uri) -> TcpStream {
    let Uri::Tcp { port, .. } = *to else { panic!("{to}") };
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn hear(from: &mut TcpStream) -> Option<Message> {
    let mut header = [0; MESSAGE_BYTES];
    from.read_exact(&mut header).ok()?;
    let mut payload = vec![0; Message::payload_bytes(&header).unwrap()];
    from.read_exact(&mut payload).ok()?;
    Some(Message::decode(&header, &payload).unwrap())
}

/// What a peer on the link says is not believed. Each of these ends the session with a reason, and breaks what it had opened.
#[test]
fn a_hostile_relay_is_refused() {
    type Attack = fn(&mut Intruder);
    let attacks: [(&str, Attack); 10] = [
        ("connection 7, which is not open", |link| link.raw(7, 0, b"bytes")),
        ("packet 0 of connection 0 twice", |link| {
            link.raw(0, 0, b"bytes");
            link.raw(0, 0, b"bytes");
        }),
        ("although it was not allowed so much", |link| {
            // Nothing is at 0, so nothing can be written.
            (1..40).for_each(|sequence| link.raw(0, sequence, &vec![0; MAX_BYTES]));
        }),
        ("although it was not allowed so much", |link| (1..70_000).for_each(|sequence| link.raw(0, sequence, b"b"))),
        ("can't be decoded", |link| {
            let content = Content::Encoded { bytes: 4096, gives_end: false, method: 2, payload: 9 };
            link.packet(&Packet { connection: 0, sequence: 0, content }, b"no frame!");
        }),
        ("method 99 is not known", |link| {
            let content = Content::Encoded { bytes: 4096, gives_end: false, method: 99, payload: 9 };
            link.packet(&Packet { connection: 0, sequence: 0, content }, b"no frame!");
        }),
        ("packet magic", |link| drop(link.data.write_all(&[0xa5; 64]))),
        ("out of turn", |link| {
            let open = Message::Open { connection: 2, first: b"QEVM".to_vec() };
            link.control.write_all(&open.encode()).unwrap();
        }),
        ("allows more on connection 0 than was sent", |link| {
            for amount in [1000, 1] {
                link.control.write_all(&Message::Credit { connection: 0, amount }.encode()).unwrap();
            }
        }),
        ("no place here", |link| link.control.write_all(&Message::Welcome.encode()).unwrap()),
    ];
    for (part, attack) in attacks {
        let folder = tempfile::tempdir().unwrap();
        let qemu_uri = folder.path().join("qemu");
        let qemu = UnixListener::bind(&qemu_uri).unwrap();
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let uri = listener.uri().clone();
        let far = thread::spawn(move || {
            relay_to_qemu(listener, &Uri::Unix(qemu_uri), &Progress::new(), &mut Report::default())
        });
        let mut link = Intruder::new(&uri);
        link.open();
        let (there, _) = qemu.accept().unwrap();
        attack(&mut link);
        assert!(is_closed(&there), "{part}");
        let error = far.join().unwrap().unwrap_err();
        assert!(error.outcome() == Outcome::SourceRunsOn && error.to_string().contains(part), "{part}: {error}");
        let told =
            std::iter::from_fn(|| hear(&mut link.control)).find(|message| matches!(message, Message::Abort { .. }));
        let Some(Message::Abort { end, refusal }) = told else { panic!("{part}: {told:?}") };
        assert!(end == TheEnd::Withheld && refusal.reason.contains(part), "{refusal:?}");
    }
}

/// Strangers come and go, and the relay still serves.
#[test]
fn strangers_at_the_link_are_turned_away() {
    let folder = tempfile::tempdir().unwrap();
    let qemu_uri = folder.path().join("qemu");
    let _qemu = UnixListener::bind(&qemu_uri).unwrap();
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let uri = listener.uri().clone();
    let progress = Progress::new();
    let watched = Arc::clone(&progress);
    let far = thread::spawn(move || relay_to_qemu(listener, &Uri::Unix(qemu_uri), &watched, &mut Report::default()));
    let preamble = Preamble { session: Session([2; 16]), role: Role::Control };
    for bytes in [
        &[b'x'; 32][..],
        &preamble.encode(),
        b"QEVM\0\0\0\x03 and what a QEMU says then, in all of its length",
        b"short",
    ] {
        let mut stranger = dial(&uri);
        stranger.write_all(bytes).unwrap();
        let _ = stranger.shutdown(Shutdown::Write);
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
    }
    // Of another version.
    let mut other = dial(&uri);
    let mut greeting = relay::Greeting(preamble).encode();
    greeting[4] = 2;
    other.write_all(&greeting).unwrap();
    let Some(Message::Abort { refusal, .. }) = hear(&mut other) else { panic!("it is told why") };
    assert!(refusal.reason.contains("preamble version") && refusal.reason.contains("same transship"), "{refusal:?}");
    drop(Intruder::new(&uri));
    assert!(far.join().unwrap().is_err());
}

/// What listens there is no relay: the user is told what to start.
#[test]
fn a_relay_that_meets_none_says_what_to_type() {
    for answer in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let to: Uri = format!("tcp:127.0.0.1:{}", other.local_addr().unwrap().port()).parse().unwrap();
        let answering = thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.read_exact(&mut [0; 48]).unwrap();
            stream.write_all(answer).unwrap();
        });
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&Uri::Unix(folder.path().join("near"))).unwrap();
        let error =
            relay_from_qemu(&listener, &to, &options("none"), &Progress::new(), &mut Report::default()).unwrap_err();
        assert!(error.to_string().contains(&format!("transship relay --listen relay:{to}")), "{error}");
        answering.join().unwrap();
    }
}
