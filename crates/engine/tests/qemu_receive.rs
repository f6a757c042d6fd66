//! What stock QEMUs have sent, sent again to us: into files and into a guest; whole, cut, and changed.
#![allow(clippy::unwrap_used)]
mod common;

use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use common::snapshot::Snapshot;
use proptest::{collection::vec, prelude::*};
use transship_engine::{
    Error, FileSink, FileUri, Format, Listener, Progress, Report, Sink, Status, Uri,
    guest::{DestinationGuest, GuestError, StateFormat},
    receive_from_qemu,
};
use transship_memory::GuestMemory;
use transship_wire::{
    GuestDescription, RegionDescription,
    qemu::{Command, GlobalState, Name, Packet, PageContent, Pages, Record, Reply, Step, StreamReader, StreamWriter},
};

/// More than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Of the guest that was captured, by block: name, length, CRC-32.
const BLOCKS: [(&str, u64, u32); 6] = [
    ("pc.ram", 16 << 20, 0x5b6a_034e),
    ("/rom@etc/acpi/tables", 131_072, 0x56d3_ab2d),
    ("pc.rom", 131_072, 0x7ee8_cdcd),
    ("pc.bios", 65_536, 0x4a69_4fb4),
    ("/rom@etc/table-loader", 4096, 0x82a6_fe63),
    ("/rom@etc/acpi/rsdp", 4096, 0x8101_e52f),
];

fn sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../wire/tests/data/{name}.bin.gz"));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// What a source sends.
#[derive(Debug, Clone)]
struct Stream {
    main: Vec<u8>,
    channels: Vec<Vec<u8>>,
}

impl Stream {
    fn plain() -> Self {
        Self { main: sample("plain-10.0.2"), channels: Vec::new() }
    }

    fn multifd(method: &str) -> Self {
        let part = |part| sample(&format!("multifd-{method}-{part}"));
        Self { main: part("main"), channels: vec![part("ch0"), part("ch1")] }
    }

    /// The same of a source that wants to be answered.
    fn with_return_path(mut self) -> Self {
        let mut reader = StreamReader::new();
        while reader.configuration().is_none() {
            let at = reader.position() as usize;
            assert!(matches!(reader.next(&self.main[at..]).unwrap(), Step::Done { .. }));
        }
        let mut writer = StreamWriter::new(0, 1);
        writer.command(&Command::OpenReturnPath).command(&Command::Ping(7));
        let at = reader.position() as usize;
        self.main.splice(at..at, writer.take_bytes());
        self
    }

    fn all(&mut self) -> Vec<&mut Vec<u8>> {
        [&mut self.main].into_iter().chain(&mut self.channels).collect()
    }
}

/// What was answered.
fn replies(mut bytes: &[u8]) -> Vec<Reply> {
    let mut replies = Vec::new();
    while let Step::Done { record, used } = Reply::read(bytes, 0).unwrap() {
        replies.push(record);
        bytes = &bytes[used..];
        if bytes.is_empty() {
            break;
        }
    }
    replies
}

/// Sends it all, and reads answers to their end. Whatever goes wrong is the other side's doing.
fn send(path: &Path, stream: &Stream, order: Order) -> Vec<u8> {
    let connect = || UnixStream::connect(path).unwrap();
    let main = (order == Order::MainFirst).then(connect);
    let channels: Vec<_> = stream
        .channels
        .iter()
        .map(|bytes| {
            let (mut channel, bytes) = (connect(), bytes.clone());
            thread::spawn(move || {
                let _ = channel.write_all(&bytes);
                // Until it is closed over there.
                let _ = channel.shutdown(Shutdown::Write);
                let _ = channel.read(&mut [0]);
            })
        })
        .collect();
    let mut main = main.unwrap_or_else(connect);
    main.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = main.write_all(&stream.main);
    let mut answers = Vec::new();
    if order != Order::StaysOpen {
        let _ = main.shutdown(Shutdown::Write);
    }
    let mut piece = [0; 100];
    while let Ok(count @ 1..) = main.read(&mut piece) {
        answers.extend_from_slice(&piece[..count]);
        if replies(&answers).iter().any(|reply| matches!(reply, Reply::Shut(_))) {
            break;
        }
    }
    drop(main);
    channels.into_iter().for_each(|channel| channel.join().unwrap());
    answers
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    MainFirst,
    ChannelsFirst,
    /// Main first, and it stays open until it was answered.
    StaysOpen,
}

struct Ended {
    result: Result<(), Error>,
    report: Report,
    answers: Vec<Reply>,
}

fn receive(sink: Sink<'_>, folder: &Path, stream: &Stream, order: Order, channels: Option<u8>) -> Ended {
    let path = folder.join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let (stream, mut report) = (stream.clone(), Report::default());
    let sender = thread::spawn(move || send(&path, &stream, order));
    let progress = Progress::new();
    let result = receive_from_qemu(sink, &listener, channels, &progress, &mut report);
    drop(listener);
    Ended { result, report, answers: replies(&sender.join().unwrap()) }
}

fn into_file(folder: &Path, stream: &Stream, order: Order, format: Format) -> (Ended, PathBuf) {
    let file = folder.join("file");
    let sink = FileSink::create(&FileUri::path(&file), format).unwrap();
    (receive(Sink::File(sink), folder, stream, order, None), file)
}

fn assert_is_the_guest(file: &Path, story: &str) {
    let snapshot = Snapshot::read(file, 0);
    let blocks: Vec<_> = snapshot
        .names
        .iter()
        .zip(&snapshot.memory)
        .map(|(name, memory)| (name.as_str(), memory.len() as u64, crc32(memory)))
        .collect();
    assert_eq!(blocks, BLOCKS, "{story}");
}

#[test]
fn captured_streams_become_files() {
    for name in ["plain", "none-10.0.2", "zlib-10.0.2", "zstd-10.0.2", "none-7.2.22"] {
        for order in [Order::MainFirst, Order::ChannelsFirst, Order::StaysOpen] {
            for format in [Format::MappedRam, Format::Stream] {
                let (folder, story) = (tempfile::tempdir().unwrap(), format!("{name} {order:?} {format}"));
                let mut stream = if name == "plain" { Stream::plain() } else { Stream::multifd(name) };
                if order == Order::StaysOpen {
                    stream = stream.with_return_path();
                }
                let (ended, file) = into_file(folder.path(), &stream, order, format);
                ended.result.unwrap_or_else(|error| panic!("{story}: {error}"));
                assert_eq!(ended.report.status, Status::Completed);
                if name.contains("7.2") {
                    let snapshot = Snapshot::read(&file, 0);
                    let ram = snapshot.names.iter().position(|name| name == "pc.ram").unwrap();
                    assert_eq!(crc32(&snapshot.memory[ram]), BLOCKS[0].2, "{story}");
                } else {
                    assert_is_the_guest(&file, &story);
                }
                assert!(Snapshot::read(&file, 0).tail.ends_with(b"}"), "{story}");
                let expected = match order {
                    Order::StaysOpen if name.contains("7.2") => vec![Reply::Pong(7), Reply::Shut(0)],
                    Order::StaysOpen => vec![Reply::SwitchoverAck, Reply::Pong(7), Reply::Shut(0)],
                    _ => vec![],
                };
                assert_eq!(ended.answers, expected, "{story}");
            }
        }
    }
}

/// A zero page is zero, whatever was there: by ZERO records, and by packets' entries, which a stock destination may not clear.
#[test]
fn zero_pages_clear_what_came_before() {
    let ram = Name::new("pc.ram").unwrap();
    let mut stream = Stream::multifd("none-10.0.2");
    // Behind the channel's first barrier, that of the list of blocks, comes a round in which all pages are full of something else; then a barrier.
    let barrier = Pages::barrier().encode();
    let mut junk = Vec::new();
    for first in (0..4096u64).step_by(128) {
        let offsets: Vec<u64> = (first..first + 128).map(|page| page * 4096).collect();
        junk.extend(Pages::new(ram.clone(), &offsets, &[], transship_wire::qemu::Method::None, 0).encode());
        junk.extend([0x5a; 128 * 4096]);
    }
    junk.extend(barrier);
    let behind_first = |bytes: &[u8]| {
        let Step::Done { record: Packet::Pages(pages), .. } = Packet::read(&bytes[64..], 0).unwrap() else { panic!() };
        assert!(pages.sync && pages.block().is_none());
        64 + barrier.len()
    };
    let at = behind_first(&stream.channels[0]);
    stream.channels[0].splice(at..at, junk);
    let at = behind_first(&stream.channels[1]);
    stream.channels[1].splice(at..at, barrier);
    // And the main stream's half.
    let mut reader = StreamReader::new();
    let begin = loop {
        let at = reader.position() as usize;
        match reader.next(&stream.main[at..]).unwrap() {
            Step::Done { record: Record::Part { .. }, .. } => break reader.position() as usize,
            Step::Done { .. } => {}
            more => panic!("{more:?}"),
        }
    };
    stream.main.splice(begin..begin, 0x200u64.to_be_bytes());
    for format in [Format::MappedRam, Format::Stream] {
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, format);
        ended.result.unwrap();
        assert_is_the_guest(&file, &format.to_string());
        if format == Format::MappedRam {
            assert!(ended.report.file.unwrap().pages_freed > 4000, "their disk space is given back");
        }
    }
}

/// A guest of QEMU that waits, and tells what happens to it.
struct Waiting {
    memory: GuestMemory,
    machine: &'static str,
    loaded: Vec<u8>,
    said: Arc<Mutex<Vec<String>>>,
    refuses: bool,
    /// Before it answers to have loaded.
    wait: Option<mpsc::Receiver<()>>,
}

impl Waiting {
    fn new() -> Self {
        let memory = common::memory(&[4096]);
        memory.regions()[0].write_pages(0, 0b11, &[0xee; 8192]).unwrap();
        let (loaded, said) = (Vec::new(), Arc::default());
        Self { memory, machine: "qemu pc-i440fx-10.0", loaded, said, refuses: false, wait: None }
    }

    fn say(&self, what: impl Into<String>) {
        self.said.lock().unwrap().push(what.into());
    }
}

impl DestinationGuest for Waiting {
    fn description(&self) -> GuestDescription {
        let regions = vec![RegionDescription { name: "mem0".into(), bytes: 16 << 20 }];
        GuestDescription { machine: self.machine.into(), regions }
    }
    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }
    fn state_format(&self) -> StateFormat {
        let others = BLOCKS[1..].iter().map(|(name, ..)| (*name).to_owned()).collect();
        StateFormat::Qemu { blocks: vec!["pc.ram".into()], others }
    }
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        state.read_to_end(&mut self.loaded).map_err(|e| GuestError(e.to_string()))?;
        if let Some(wait) = &self.wait {
            wait.recv_timeout(PATIENCE).unwrap();
        }
        self.say("loaded");
        if self.refuses { Err(GuestError("no such device here".into())) } else { Ok(()) }
    }
    fn start(&mut self, run: bool) -> Result<(), GuestError> {
        self.say(format!("started {run}"));
        Ok(())
    }
    fn start_hint(&self) -> String {
        "start it".into()
    }
}

#[test]
fn captured_streams_go_into_a_guest() {
    for (name, return_path) in
        [("plain", true), ("plain", false), ("none-10.0.2", true), ("zlib-10.0.2", true), ("zstd-10.0.2", false)]
    {
        let mut stream = if name == "plain" { Stream::plain() } else { Stream::multifd(name) };
        let mut order = Order::MainFirst;
        if return_path {
            (stream, order) = (stream.with_return_path(), Order::StaysOpen);
        }
        let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
        let ended = receive(Sink::Guest(&mut guest), folder.path(), &stream, order, None);
        ended.result.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(crc32(&common::contents(&guest.memory)[0]), BLOCKS[0].2, "{name}");
        // Its source had not been started: it says so, and so it stays.
        assert_eq!(*guest.said.lock().unwrap(), ["loaded", "started false"], "{name}");
        let (blocks, state) = devices(&guest.loaded);
        assert_eq!(blocks, BLOCKS[1..].iter().map(|(name, _, crc)| ((*name).to_owned(), *crc)).collect::<Vec<_>>());
        assert_eq!(state, "paused", "it must not run before its time");
    }
}

/// The blocks of the stream that a VMM was given, and the state that it says.
fn devices(stream: &[u8]) -> (Vec<(String, u32)>, String) {
    let mut reader = StreamReader::new();
    let (mut names, mut memory) = (Vec::new(), Vec::new());
    loop {
        let at = reader.position() as usize;
        match reader.next(&stream[at..]).unwrap() {
            Step::Done { record: Record::Block(block), .. } => {
                names.push(block.name.to_string());
                memory.push(vec![0xee; block.used_bytes as usize]);
            }
            Step::Done { record: Record::Page(page), .. } => {
                let place = &mut memory[page.block][page.offset as usize..][..4096];
                match page.content {
                    PageContent::Fill(byte) => place.fill(byte),
                    PageContent::Normal(bytes) => place.copy_from_slice(bytes),
                    other => panic!("{other:?}"),
                }
            }
            Step::Done { record: Record::Tail, .. } => break,
            Step::Done { .. } => {}
            more => panic!("{more:?}"),
        }
    }
    assert!(reader.configuration().unwrap().ignore_shared);
    let tail = &stream[reader.position() as usize..];
    let state = GlobalState::find(tail, 0).unwrap().unwrap().state;
    (names.into_iter().zip(memory.iter().map(|memory| crc32(memory))).collect(), state)
}

/// The guest runs here when the source, which was told, has let go, and not before.
#[test]
fn the_guest_starts_when_the_source_has_let_go() {
    let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let said = Arc::clone(&guest.said);
    let source = thread::spawn(move || {
        let mut main = UnixStream::connect(path).unwrap();
        main.set_read_timeout(Some(PATIENCE)).unwrap();
        main.write_all(&Stream::plain().with_return_path().main).unwrap();
        let expected = [Reply::SwitchoverAck, Reply::Pong(7), Reply::Shut(0)];
        let mut bytes = vec![0; expected.iter().map(|reply| reply.encode().len()).sum()];
        main.read_exact(&mut bytes).unwrap();
        assert_eq!(replies(&bytes), expected);
        // It would have to be quicker than that by a second to be let through.
        thread::sleep(Duration::from_secs(1));
        assert_eq!(*said.lock().unwrap(), ["loaded"]);
    });
    receive_from_qemu(Sink::Guest(&mut guest), &listener, None, &Progress::new(), &mut Report::default()).unwrap();
    source.join().unwrap();
    assert_eq!(*guest.said.lock().unwrap(), ["loaded", "started false"]);
}

/// A source that has closed the connection while we loaded runs its guest again.
#[test]
fn a_source_that_left_keeps_its_guest() {
    let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
    let (gone, wait) = mpsc::channel();
    guest.wait = Some(wait);
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let source = thread::spawn(move || {
        let mut main = UnixStream::connect(path).unwrap();
        main.write_all(&Stream::plain().with_return_path().main).unwrap();
        drop(main);
        gone.send(()).unwrap();
    });
    let result = receive_from_qemu(Sink::Guest(&mut guest), &listener, None, &Progress::new(), &mut Report::default());
    source.join().unwrap();
    let error = result.unwrap_err();
    assert!(error.to_string().contains("runs on there") && !matches!(error, Error::Unknown(_)), "{error}");
    assert_eq!(*guest.said.lock().unwrap(), ["loaded"]);
}

#[test]
fn a_guest_that_does_not_load_stays_at_the_source() {
    for return_path in [true, false] {
        let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
        guest.refuses = true;
        let (stream, order) = match return_path {
            true => (Stream::plain().with_return_path(), Order::StaysOpen),
            false => (Stream::plain(), Order::MainFirst),
        };
        let ended = receive(Sink::Guest(&mut guest), folder.path(), &stream, order, None);
        let error = ended.result.unwrap_err();
        // One that can't be told may think that all is well.
        assert_eq!(matches!(error, Error::Unknown(_)), !return_path, "{error}");
        assert!(
            error.to_string().contains("no such device") && (return_path || error.to_string().contains("`cont` there"))
        );
        assert_eq!(ended.answers.last(), return_path.then_some(&Reply::Shut(1)));
        assert_eq!(*guest.said.lock().unwrap(), ["loaded"]);
    }
}

/// Another machine, other memory: known from the head of the stream.
#[test]
fn a_guest_that_does_not_fit_is_refused_untouched() {
    let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
    guest.machine = "qemu pc-q35-10.0";
    let stream = Stream::plain().with_return_path();
    let ended = receive(Sink::Guest(&mut guest), folder.path(), &stream, Order::StaysOpen, None);
    let error = ended.result.unwrap_err().to_string();
    assert!(error.contains("its machine is \"pc-i440fx-10.0\""), "{error}");
    assert_eq!(ended.answers.last(), Some(&Reply::Shut(1)));
    assert_eq!(common::contents(&guest.memory)[0][..8192], [0xee; 8192]);
    assert!(guest.said.lock().unwrap().is_empty());
}

/// How it fails, into a file that then is not there.
fn refusal(stream: &Stream, order: Order, channels: Option<u8>) -> String {
    let folder = tempfile::tempdir().unwrap();
    let sink = FileSink::create(&FileUri::path(folder.path().join("file")), Format::MappedRam).unwrap();
    let ended = receive(Sink::File(sink), folder.path(), stream, order, channels);
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!ended.answers.contains(&Reply::Shut(0)));
    ended.result.expect_err("it can't be received").to_string()
}

#[test]
fn what_can_not_be_received_is_refused_with_its_reason() {
    let x_ignore_shared = Stream { main: sample("x-ignore-shared-10.0.2"), channels: vec![] };
    let mapped_ram = Stream { main: sample("mapped-ram-10.0.2"), channels: vec![] };
    let postcopy = Stream { main: sample("postcopy-10.0.2-forward"), channels: vec![] };
    let without_channels = Stream { channels: vec![], ..Stream::multifd("none-10.0.2") };
    let mut twice = Stream::multifd("none-10.0.2");
    twice.channels[1] = twice.channels[0].clone();
    for (stream, channels, why) in [
        (&x_ignore_shared, None, "x-ignore-shared"),
        (&mapped_ram, None, "mapped-ram"),
        (&postcopy, None, "postcopy"),
        (&without_channels, None, "none of its channels has come"),
        (&Stream::multifd("none-10.0.2"), Some(1), "opened channel 1, where --channels says that there are 1"),
        (&twice, None, "opened channel 0 twice"),
    ] {
        let error = refusal(stream, Order::MainFirst, channels);
        assert!(error.contains(why), "{why}: {error}");
    }
}

#[test]
fn a_source_that_dies_leaves_no_file() {
    let whole = Stream::plain().with_return_path();
    // With less it is a stranger, who is turned away.
    for cut in [4, 8, 40, 100, whole.main.len() / 2, whole.main.len() - 200] {
        let stream = Stream { main: whole.main[..cut].to_vec(), ..whole.clone() };
        let error = refusal(&stream, Order::MainFirst, None);
        assert!(
            error.contains("has closed the connection") || error.contains("needed") || error.contains("cut short"),
            "{error}"
        );
    }
    for method in ["none-10.0.2", "zstd-10.0.2", "none-7.2.22"] {
        let whole = Stream::multifd(method).with_return_path();
        let mut stream = whole.clone();
        let length = stream.channels[0].len();
        stream.channels[0].truncate(length / 2);
        let error = refusal(&stream, Order::MainFirst, None);
        assert!(error.contains("channel 0") && error.contains("closed"), "{error}");
    }
}

/// QEMU 9.2 sends one barrier more on the channels than on its main stream.
#[test]
fn the_last_barrier_may_have_no_other_half() {
    for _ in 0..5 {
        let mut stream = Stream::multifd("zstd-10.0.2").with_return_path();
        stream.channels.iter_mut().for_each(|channel| channel.extend(Pages::barrier().encode()));
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::StaysOpen, Format::MappedRam);
        ended.result.unwrap();
        assert_is_the_guest(&file, "9.2");
    }
}

/// `-machine suppress-vmdesc=on`, and a connection that stays open: nothing says where the stream ends but what is in it.
#[test]
fn a_stream_without_description_ends_too() {
    let mut stream = Stream::plain().with_return_path();
    let end = end_of_sections(&stream.main);
    stream.main.truncate(end + 1);
    let folder = tempfile::tempdir().unwrap();
    let (ended, file) = into_file(folder.path(), &stream, Order::StaysOpen, Format::MappedRam);
    ended.result.unwrap();
    assert_is_the_guest(&file, "without description");
    assert_eq!(ended.answers.last(), Some(&Reply::Shut(0)));
}

/// A source without a return path that had nothing left to send may think that all is well, so the message has to say what to do.
#[test]
fn who_can_not_be_told_of_a_late_failure_is_named() {
    let whole = Stream::plain();
    for (cut, late) in [(whole.main.len() - 200, true), (whole.main.len() / 2, false)] {
        let stream = Stream { main: whole.main[..cut].to_vec(), channels: vec![] };
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, Format::MappedRam);
        let error = ended.result.unwrap_err();
        assert_eq!(matches!(error, Error::Unknown(_)), late, "{error}");
        assert_eq!(error.to_string().contains("`cont` there"), late, "{error}");
        assert!(!file.exists());
    }
}

/// Pages behind the last barrier may have been overtaken by the end of the stream.
#[test]
fn pages_behind_the_last_barrier_are_missed() {
    let mut stream = Stream::multifd("none-10.0.2").with_return_path();
    let ram = Name::new("pc.ram").unwrap();
    for channel in &mut stream.channels {
        // Instead of the last barrier.
        let end = channel.len() - Pages::barrier().encode().len();
        channel.truncate(end);
        channel.extend(Pages::new(ram.clone(), &[], &[4096], transship_wire::qemu::Method::None, 0).encode());
    }
    let error = refusal(&stream, Order::MainFirst, None);
    assert!(error.contains("has closed channel"), "{error}");
}

/// Somebody who is silent or speaks something else keeps nobody from coming.
#[test]
fn strangers_are_turned_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let sink = FileSink::create(&FileUri::path(folder.path().join("file")), Format::MappedRam).unwrap();
    let silent = UnixStream::connect(&path).unwrap();
    let mut stranger = UnixStream::connect(&path).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let sender = thread::spawn(move || send(&path, &Stream::multifd("zlib-10.0.2"), Order::MainFirst));
    receive_from_qemu(Sink::File(sink), &listener, Some(2), &Progress::new(), &mut Report::default()).unwrap();
    sender.join().unwrap();
    assert_is_the_guest(&folder.path().join("file"), "with strangers about");
    drop(silent);
}

/// A source that gives up before its stream begins, and tries again.
#[test]
fn channels_of_an_attempt_that_was_given_up_are_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let sink = FileSink::create(&FileUri::path(folder.path().join("file")), Format::MappedRam).unwrap();
    let stream = Stream::multifd("none-10.0.2");
    let [main, channel] = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
    (&channel).write_all(&stream.channels[0][..64]).unwrap();
    drop((main, channel));
    let sender = thread::spawn(move || send(&path, &stream, Order::MainFirst));
    receive_from_qemu(Sink::File(sink), &listener, None, &Progress::new(), &mut Report::default()).unwrap();
    sender.join().unwrap();
    assert_is_the_guest(&folder.path().join("file"), "at the second attempt");
}

#[test]
fn a_reception_can_be_cancelled_at_any_time() {
    let whole = Stream::plain().with_return_path().main;
    for sent in [None, Some(0), Some(6), Some(2000), Some(whole.len() / 2)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
        let sink = FileSink::create(&FileUri::path(folder.path().join("file")), Format::MappedRam).unwrap();
        let mut source = sent.map(|sent| {
            let mut source = UnixStream::connect(&path).unwrap();
            source.write_all(&whole[..sent]).unwrap();
            source
        });
        let progress = Progress::new();
        let later = Arc::clone(&progress);
        let cancel = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            later.cancel();
        });
        let mut report = Report::default();
        let error = receive_from_qemu(Sink::File(sink), &listener, None, &progress, &mut report).unwrap_err();
        cancel.join().unwrap();
        assert!(matches!(error, Error::Cancelled), "{sent:?}: {error}");
        assert_eq!(report.status, Status::Cancelled);
        if let Some(source) = &mut source {
            let mut answers = Vec::new();
            source.read_to_end(&mut answers).unwrap();
            if sent > Some(1000) {
                assert_eq!(replies(&answers).last(), Some(&Reply::Shut(1)));
            }
        }
        drop((source, listener));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever comes: it ends, and there is a file if and only if all is well.
    #[test]
    fn a_changed_stream_is_refused_or_received(
        which in 0..5usize,
        changes in vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..6u8, any::<u64>()), 1..4),
        format in prop_oneof![Just(Format::MappedRam), Just(Format::Stream)],
    ) {
        let mut stream = match which {
            0 => Stream::plain(),
            n => Stream::multifd(["none-10.0.2", "zlib-10.0.2", "zstd-10.0.2", "none-7.2.22"][n - 1]),
        };
        for (part, at, how, value) in changes {
            let mut parts = stream.all();
            let part = part.index(parts.len());
            let bytes = &mut parts[part];
            // The heads of things, half of the time.
            let at = at.index(if value % 2 == 0 { bytes.len().min(3000) } else { bytes.len() });
            change(bytes, at, how, value);
        }
        if !stream.main.starts_with(b"QEVM") {
            return Ok(()); // a stranger
        }
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, format);
        prop_assert_eq!(file.exists(), ended.result.is_ok());
        prop_assert_eq!(fs::read_dir(folder.path()).unwrap().count(), usize::from(ended.result.is_ok()));
    }
}

fn change(bytes: &mut Vec<u8>, at: usize, how: u8, value: u64) {
    match how {
        0 => bytes[at] ^= 1 << (value % 8),
        1 => bytes[at] = value as u8,
        2 => bytes.truncate(at.max(5)),
        3 => {
            let more = (value % 64) as usize;
            bytes.splice(at..at, std::iter::repeat_n(value as u8, more));
        }
        4 => {
            let end = bytes.len().min(at + 8);
            let count = end - at;
            bytes[at..end].copy_from_slice(&value.to_be_bytes()[..count]);
        }
        _ => {
            let end = bytes.len().min(at + (value % 64) as usize);
            bytes.drain(at..end);
        }
    }
}

/// State of a VFIO device has a header of its own, which is shorter than that of pages: nothing more need come for it to be refused.
#[test]
fn state_of_devices_on_channels_is_refused() {
    let mut stream = Stream::multifd("none-10.0.2").with_return_path();
    let name = Name::new("0000:00:05.0/vfio").unwrap();
    let state = transship_wire::qemu::DeviceState { name, instance: 0, payload_bytes: 5 };
    let at = 64 + Pages::barrier().encode().len();
    stream.channels[1].truncate(at);
    stream.channels[1].extend(Packet::DeviceState(state).encode());
    let error = refusal(&stream, Order::MainFirst, None);
    assert!(error.contains("on channel 1") && error.contains("0000:00:05.0/vfio"), "{error}");
}

/// A transship that sends as to a QEMU asks behind the last section whether all is loaded, and hands its guest over by the byte that ends the sections.
#[test]
fn a_source_that_asks_before_it_hands_over_is_answered_then() {
    for hands_over in [true, false] {
        let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
        let path = folder.path().join("socket");
        let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
        let said = Arc::clone(&guest.said);
        let source = thread::spawn(move || {
            let mut main = UnixStream::connect(path).unwrap();
            main.set_read_timeout(Some(PATIENCE)).unwrap();
            let stream = Stream::plain().with_return_path().main;
            let end = end_of_sections(&stream);
            let mut writer = StreamWriter::new(0, 1);
            main.write_all(&stream[..end]).unwrap();
            main.write_all(&writer.command(&Command::Ping(8)).take_bytes()).unwrap();
            let read = |expected: &[Reply], mut main: &UnixStream| {
                let mut bytes = vec![0; expected.iter().map(|reply| reply.encode().len()).sum()];
                main.read_exact(&mut bytes).unwrap();
                assert_eq!(replies(&bytes), expected);
            };
            read(&[Reply::SwitchoverAck, Reply::Pong(7), Reply::Pong(8)], &main);
            assert_eq!(*said.lock().unwrap(), ["loaded"]);
            if hands_over {
                main.write_all(&stream[end..]).unwrap();
                read(&[Reply::Shut(0)], &main);
                assert_eq!(*said.lock().unwrap(), ["loaded"]);
            }
        });
        let result =
            receive_from_qemu(Sink::Guest(&mut guest), &listener, None, &Progress::new(), &mut Report::default());
        source.join().unwrap();
        match hands_over {
            true => result.unwrap(),
            false => {
                let error = result.unwrap_err();
                assert!(error.to_string().contains("before it handed its guest over"), "{error}");
                assert!(!matches!(error, Error::Unknown(_)), "its guest is its own: {error}");
            }
        }
        let expected: &[&str] = if hands_over { &["loaded", "started false"] } else { &["loaded"] };
        assert_eq!(*guest.said.lock().unwrap(), expected);
    }
}

/// Where the byte is that ends the device sections of a stream with a description.
fn end_of_sections(stream: &[u8]) -> usize {
    let is_end = |&at: &usize| {
        let bytes = &stream[at..];
        let length = u32::from_be_bytes(bytes[2..6].try_into().unwrap()) as usize;
        bytes[..2] == [0, 6] && bytes[6] == b'{' && length == bytes.len() - 6
    };
    (0..stream.len() - 6).rev().find(is_end).unwrap()
}
