//! Streams into a guest of a QEMU that waits.
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use transship_engine::{
    Error, Listener, Misfit, Progress, Report, Rule, Sink, Uri,
    guest::{DestinationGuest, DeviceBlock, GuestError, StateFormat},
    receive_from_qemu,
};
use transship_memory::{GuestMemory, WindowPages};
use transship_wire::{
    GuestDescription, RegionDescription,
    qemu::{Command, GlobalState, PageContent, Record, Reply, Step, StreamReader, StreamWriter},
};

use super::captured::{BLOCKS, Order, PATIENCE, Stream, crc32, receive, replies};
use crate::common::{self, errors::cause};

/// A guest of QEMU that waits, and tells what happens to it.
pub(super) struct Waiting {
    pub(super) memory: GuestMemory,
    /// It says which memory its devices have.
    pub(super) knows_devices: bool,
    machine: &'static str,
    loaded: Vec<u8>,
    said: Arc<Mutex<Vec<String>>>,
    refuses: bool,
    /// Before it answers to have loaded.
    wait: Option<mpsc::Receiver<()>>,
}

impl Waiting {
    pub(super) fn new() -> Self {
        let memory = common::memory(&[4096]);
        memory.regions()[0].write_pages(WindowPages::new(0, 0b11), &[0xee; 8192]).unwrap();
        let (loaded, said) = (Vec::new(), Arc::default());
        Self { memory, knows_devices: true, machine: "qemu pc-i440fx-10.0", loaded, said, refuses: false, wait: None }
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
        let block = |&(name, max_bytes, _): &(&str, u64, u32)| DeviceBlock { name: name.into(), max_bytes };
        let others = BLOCKS[1..].iter().filter(|_| self.knows_devices).map(block).collect();
        StateFormat::Qemu { blocks: vec!["pc.ram".into()], others }
    }
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        state.read_to_end(&mut self.loaded).map_err(|e| GuestError::Unfit(e.to_string()))?;
        if let Some(wait) = &self.wait {
            wait.recv_timeout(PATIENCE).unwrap();
        }
        self.say("loaded");
        if self.refuses { Err(GuestError::Unfit("no such device here".into())) } else { Ok(()) }
    }
    fn check_alive(&mut self) -> Result<(), GuestError> {
        Ok(())
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

/// Where a source connects to, and who listens there.
fn listening(folder: &Path) -> (PathBuf, Listener) {
    let path = folder.join("socket");
    let listener = Listener::bind(&Uri::Unix(path.clone())).unwrap();
    (path, listener)
}

/// The guest runs here when the source, which was told, has let go, and not before.
#[test]
fn the_guest_starts_when_the_source_has_let_go() {
    let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
    let (path, listener) = listening(folder.path());
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
    let (path, listener) = listening(folder.path());
    let source = thread::spawn(move || {
        let mut main = UnixStream::connect(path).unwrap();
        main.write_all(&Stream::plain().with_return_path().main).unwrap();
        // One that left before these would be found gone without having been loaded.
        let answers = [Reply::SwitchoverAck, Reply::Pong(7)].map(|reply| reply.encode().len());
        main.set_read_timeout(Some(PATIENCE)).unwrap();
        main.read_exact(&mut vec![0; answers.iter().sum()]).unwrap();
        drop(main);
        gone.send(()).unwrap();
    });
    let result = receive_from_qemu(Sink::Guest(&mut guest), &listener, None, &Progress::new(), &mut Report::default());
    source.join().unwrap();
    let error = result.unwrap_err();
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
    assert_eq!(*guest.said.lock().unwrap(), ["loaded"]);
}

/// A source that has gone before it got its first answers is no source that can't be answered.
#[test]
fn a_source_that_left_before_it_was_answered_keeps_its_guest() {
    let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
    let (path, listener) = listening(folder.path());
    let mut main = UnixStream::connect(path).unwrap();
    main.write_all(&Stream::plain().with_return_path().main[..4096]).unwrap();
    drop(main);
    let result = receive_from_qemu(Sink::Guest(&mut guest), &listener, None, &Progress::new(), &mut Report::default());
    let error = result.unwrap_err();
    assert_eq!(error.rule(), Some(Rule::Stays), "{error}");
    assert!(guest.said.lock().unwrap().is_empty());
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
        let refused = if return_path { &error } else { cause(&error).expect("it is unknown what the source thinks") };
        assert!(matches!(refused, Error::Guest(GuestError::Unfit(_))), "{error}");
        assert!(return_path || error.to_string().contains("`cont` there"), "what a person has to do: {error}");
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
    assert_eq!(ended.result.unwrap_err().misfit(), Some(Misfit::Machine));
    assert_eq!(ended.answers.last(), Some(&Reply::Shut(1)));
    assert_eq!(common::contents(&guest.memory)[0][..8192], [0xee; 8192]);
    assert!(guest.said.lock().unwrap().is_empty());
}

/// A transship that sends as to a QEMU asks behind the last section whether all is loaded, and hands its guest over by
/// the byte that ends the sections.
#[test]
fn a_source_that_asks_before_it_hands_over_is_answered_then() {
    for hands_over in [true, false] {
        let (folder, mut guest) = (tempfile::tempdir().unwrap(), Waiting::new());
        let (path, listener) = listening(folder.path());
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
                assert_eq!(result.unwrap_err().rule(), Some(Rule::Stays), "its guest is its own");
            }
        }
        let expected: &[&str] = if hands_over { &["loaded", "started false"] } else { &["loaded"] };
        assert_eq!(*guest.said.lock().unwrap(), expected);
    }
}

/// Where the byte is that ends the device sections of a stream with a description.
pub(super) fn end_of_sections(stream: &[u8]) -> usize {
    let is_end = |&at: &usize| {
        let bytes = &stream[at..];
        let length = u32::from_be_bytes(bytes[2..6].try_into().unwrap()) as usize;
        bytes[..2] == [0, 6] && bytes[6] == b'{' && length == bytes.len() - 6
    };
    (0..stream.len() - 6).rev().find(is_end).unwrap()
}
