//! Captured streams of stock QEMUs, and who sends them again.
use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use transship_engine::{
    Error, FileSink, FileSinkOptions, FileUri, Format, Listener, Progress, Report, Sink, Uri, receive_from_qemu,
};
use transship_wire::qemu::{Command, GREETING_BYTES, Reply, Step, StreamReader, StreamWriter};

use crate::common::snapshot::Snapshot;

/// More than anything here takes.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Of the guest that was captured, by block: name, length, CRC-32.
pub(super) const BLOCKS: [(&str, u64, u32); 6] = [
    ("pc.ram", 16 << 20, 0x5b6a_034e),
    ("/rom@etc/acpi/tables", 131_072, 0x56d3_ab2d),
    ("pc.rom", 131_072, 0x7ee8_cdcd),
    ("pc.bios", 65_536, 0x4a69_4fb4),
    ("/rom@etc/table-loader", 4096, 0x82a6_fe63),
    ("/rom@etc/acpi/rsdp", 4096, 0x8101_e52f),
];

pub(super) fn sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../wire/tests/data/{name}.bin.gz"));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// What a source sends.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub(super) main: Vec<u8>,
    pub(super) channels: Vec<Vec<u8>>,
}

impl Stream {
    pub(super) fn plain() -> Self {
        Self { main: sample("plain-10.0.2"), channels: Vec::new() }
    }

    pub(super) fn multifd(method: &str) -> Self {
        let part = |part| sample(&format!("multifd-{method}-{part}"));
        Self { main: part("main"), channels: vec![part("ch0"), part("ch1")] }
    }

    /// The same of a source that wants to be answered.
    pub(super) fn with_return_path(mut self) -> Self {
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

    pub(super) fn all(&mut self) -> Vec<&mut Vec<u8>> {
        [&mut self.main].into_iter().chain(&mut self.channels).collect()
    }
}

/// What was answered.
pub(super) fn replies(mut bytes: &[u8]) -> Vec<Reply> {
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
pub(super) fn send(path: &Path, stream: &Stream, order: Order) -> Vec<u8> {
    let connect = || UnixStream::connect(path).unwrap();
    let main = (order == Order::MainFirst).then(connect);
    // Who they are, they have said before the main stream begins, however the threads are scheduled.
    let open = |bytes: &Vec<u8>| {
        let (mut channel, bytes) = (connect(), bytes.clone());
        let greeting = GREETING_BYTES.min(bytes.len());
        let _ = channel.write_all(&bytes[..greeting]);
        thread::spawn(move || {
            let _ = channel.write_all(&bytes[greeting..]);
            // Until it is closed on the other side.
            let _ = channel.shutdown(Shutdown::Write);
            let _ = channel.read(&mut [0]);
        })
    };
    let channels: Vec<_> = stream.channels.iter().map(open).collect();
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
pub(super) enum Order {
    MainFirst,
    ChannelsFirst,
    /// Main first, and it stays open until it was answered.
    StaysOpen,
}

pub(super) struct Ended {
    pub(super) result: Result<(), Error>,
    pub(super) report: Report,
    pub(super) answers: Vec<Reply>,
}

pub(super) fn receive(sink: Sink<'_>, folder: &Path, stream: &Stream, order: Order, channels: Option<u8>) -> Ended {
    let path = folder.join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    let (stream, mut report) = (stream.clone(), Report::default());
    let sender = thread::spawn(move || send(&path, &stream, order));
    let progress = Progress::new();
    let result = receive_from_qemu(sink, &listener, channels, &progress, &mut report);
    drop(listener);
    Ended { result, report, answers: replies(&sender.join().unwrap()) }
}

pub(super) fn into_file(folder: &Path, stream: &Stream, order: Order, format: Format) -> (Ended, PathBuf) {
    let file = folder.join("file");
    let sink =
        FileSink::create(&FileUri::path(&file), FileSinkOptions { format, ..FileSinkOptions::default() }).unwrap();
    (receive(Sink::File(sink), folder, stream, order, None), file)
}

pub(super) fn assert_is_the_guest(file: &Path, story: &str) {
    let snapshot = Snapshot::read(file, 0);
    let blocks: Vec<_> = snapshot
        .names
        .iter()
        .zip(&snapshot.memory)
        .map(|(name, memory)| (name.as_str(), memory.len() as u64, crc32(memory)))
        .collect();
    assert_eq!(blocks, BLOCKS, "{story}");
}
