//! From one layout to the other and back: the guest is the same, whatever its stream was made of; what can't be
//! converted leaves no trace.
#![allow(clippy::unwrap_used)]
use std::{fs, io::Read, path::Path};

use crate::common::{self, contents, errors::place, snapshot::Snapshot};
use proptest::{collection::vec, prelude::*};
use transship_engine::{
    Actor, Cancelled, Error, FileUri, Format, Misfit, Progress, Report, RestoreOptions, Status, convert,
    guest::{DestinationGuest, DeviceBlock, GuestError, StateFormat},
    inspect, restore_guest,
};
use transship_memory::GuestMemory;
use transship_wire::{
    GuestDescription, RegionDescription,
    qemu::{Block, Command, Configuration, Name, PageContent, Record, Step, StreamReader, StreamWriter, xbzrle},
};

const PAGES: [u64; 2] = [300, 70];

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// What a source says of a page.
#[derive(Debug, Clone)]
enum Say {
    Page {
        block: usize,
        page: u64,
        byte: u8,
    },
    Zero {
        block: usize,
        page: u64,
    },
    /// These bytes have changed.
    Xbzrle {
        block: usize,
        page: u64,
        skip: u8,
        bytes: Vec<u8>,
    },
    NextPart,
}

fn saying() -> impl Strategy<Value = Vec<Say>> {
    let place = || (0..2usize, 0..70u64);
    let say = prop_oneof![
        // Runs, too.
        4 => (place(), any::<u8>(), 1..20u64).prop_map(|((block, page), byte, count)| {
            (page..(page + count).min(70)).map(|page| Say::Page { block, page, byte }).collect::<Vec<_>>()
        }),
        2 => (place(), 1..20u64).prop_map(|((block, page), count)| {
            (page..(page + count).min(70)).map(|page| Say::Zero { block, page }).collect()
        }),
        2 => (place(), any::<u8>(), vec(any::<u8>(), 1..100))
            .prop_map(|((block, page), skip, bytes)| vec![Say::Xbzrle { block, page, skip, bytes }]),
        1 => Just(vec![Say::NextPart]),
    ];
    vec(say, 0..40).prop_map(|says| says.concat())
}

/// The stream, and the memory that it makes of one that is zero.
fn stream_of(says: &[Say], switchover: bool) -> (Vec<u8>, Vec<Vec<u8>>) {
    let blocks = [("pc.ram", PAGES[0]), ("vga.vram", PAGES[1])].map(|(block, pages)| Block {
        name: name(block),
        used_bytes: pages * 4096,
        gpa: None,
        mapped: None,
    });
    let mut memory: Vec<Vec<u8>> = PAGES.iter().map(|pages| vec![0; *pages as usize * 4096]).collect();
    let mut writer = StreamWriter::new(0, 7);
    writer.header().configuration(&Configuration::new(name("pc-q35-10.0")));
    writer.command(&Command::Ping(1)).ram_start(PAGES.iter().sum::<u64>() * 4096);
    blocks.iter().for_each(|block| {
        writer.block(block);
    });
    writer.end_of_section().part();
    for say in says {
        match say {
            Say::Page { block, page, byte } => {
                writer.page(&blocks[*block].name, page * 4096, &[*byte; 4096]);
                memory[*block][*page as usize * 4096..][..4096].fill(*byte);
            }
            Say::Zero { block, page } => {
                writer.zero_page(&blocks[*block].name, page * 4096);
                memory[*block][*page as usize * 4096..][..4096].fill(0);
            }
            Say::Xbzrle { block, page, skip, bytes } => {
                let skip = skip % 128;
                let delta = [&[skip, bytes.len() as u8][..], bytes].concat();
                writer.xbzrle_page(&blocks[*block].name, page * 4096, &delta);
                memory[*block][*page as usize * 4096 + usize::from(skip)..][..bytes.len()].copy_from_slice(bytes);
            }
            Say::NextPart => {
                writer.end_of_section().part();
            }
        }
    }
    writer.end_of_section();
    if switchover {
        writer.command(&Command::SwitchoverStart);
    }
    writer.end().end_of_section().raw(&tail());
    (writer.take_bytes(), memory)
}

fn tail() -> Vec<u8> {
    let mut writer = StreamWriter::new(0, 7);
    let state = [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat();
    writer.full(9, &name("globalstate"), 0, 1, &state).eof();
    writer.take_bytes()
}

fn run(from: &Path, to: &Path, format: Option<Format>) -> (Result<(), Error>, Report) {
    let mut report = Report::default();
    let result = convert(&FileUri::path(from), &FileUri::path(to), format, (None, None), &Progress::new(), &mut report);
    (result, report)
}

/// A QEMU that waits, with a graphics adapter.
struct Waiting {
    memory: GuestMemory,
    state: Vec<u8>,
}

impl DestinationGuest for Waiting {
    fn description(&self) -> GuestDescription {
        let regions = vec![RegionDescription { name: "mem0".into(), bytes: PAGES[0] * 4096 }];
        GuestDescription { machine: "qemu pc-q35-10.0".into(), regions }
    }
    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }
    fn state_format(&self) -> StateFormat {
        StateFormat::Qemu {
            blocks: vec!["pc.ram".into()],
            others: vec![DeviceBlock { name: "vga.vram".into(), max_bytes: 16 << 20 }],
        }
    }
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        state.read_to_end(&mut self.state).map(drop).map_err(|e| GuestError::Unfit(e.to_string()))
    }
    fn check_alive(&mut self) -> Result<(), GuestError> {
        Ok(())
    }
    fn start(&mut self, _run: bool) -> Result<(), GuestError> {
        Ok(())
    }
    fn start_hint(&self) -> String {
        "start it".into()
    }
}

fn restore(guest: &mut Waiting, from: &Path) -> Result<(), Error> {
    let options = RestoreOptions::default();
    restore_guest(guest, &FileUri::path(from), &options, None, &Progress::new(), &mut Report::default())
}

/// What a VMM makes of the one block in its stream.
fn loaded(stream: &[u8]) -> Vec<u8> {
    let (mut reader, mut memory) = (StreamReader::new(), Vec::new());
    loop {
        let at = reader.position() as usize;
        let Step::Done { record, .. } = reader.next(&stream[at..]).unwrap() else { panic!("it is cut short") };
        match record {
            Record::Block(block) => memory = vec![0; block.used_bytes as usize],
            Record::Page(page) => {
                let place: &mut [u8; 4096] = (&mut memory[page.offset as usize..][..4096]).try_into().unwrap();
                match page.content {
                    PageContent::Fill(byte) => place.fill(byte),
                    PageContent::Normal(bytes) => *place = *bytes,
                    PageContent::Xbzrle(delta) => xbzrle::decode(delta, 0, place).unwrap(),
                    other => panic!("{other:?}"),
                }
            }
            Record::Tail => return memory,
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_guest_is_the_same_in_every_layout(says in saying(), switchover: bool, offset in prop_oneof![Just(0), 1..9999u64]) {
        let folder = tempfile::tempdir().unwrap();
        let [first, mapped, plain, again] = ["first", "mapped", "plain", "again"].map(|name| folder.path().join(name));
        let (stream, memory) = stream_of(&says, switchover);
        fs::write(&first, &stream).unwrap();
        let (result, report) = run(&first, &mapped, None);
        result.unwrap();
        prop_assert_eq!((report.status, report.file.unwrap().format), (Status::Completed, "mapped-ram".to_owned()));
        let file = Snapshot::read(&mapped, 0);
        prop_assert_eq!(&file.names, &["pc.ram", "vga.vram"]);
        prop_assert!(file.memory == memory);
        prop_assert_eq!(&file.tail, &tail());
        prop_assert!(file.configuration.mapped_ram);
        // A file is what it was, whichever way it is rewritten.
        let to = FileUri { offset, ..FileUri::path(&plain) };
        convert(&FileUri::path(&mapped), &to, None, (None, None), &Progress::new(), &mut Report::default()).unwrap();
        let back = Snapshot::read(&plain, offset);
        prop_assert!(back.memory == memory && back.tail == tail() && !back.configuration.mapped_ram);
        let has = |bytes: &[u8]| bytes.windows(5).any(|bytes| bytes == [8, 0, 11, 0, 0]);
        prop_assert_eq!(has(&fs::read(&plain).unwrap()), switchover, "the mark of the switchover");
        convert(&to, &FileUri::path(&again), Some(Format::MappedRam), (None, None), &Progress::new(), &mut Report::default()).unwrap();
        prop_assert!(Snapshot::read(&again, 0).memory == memory);
        run(&mapped, &again, Some(Format::MappedRam)).0.unwrap();
        prop_assert!(Snapshot::read(&again, 0).memory == memory);
        // Differences stay what they are in a stream, and are read there.
        run(&first, &again, Some(Format::Stream)).0.unwrap();
        run(&again, &mapped, None).0.unwrap();
        prop_assert!(Snapshot::read(&mapped, 0).memory == memory);
        // And a restore makes the same of it.
        let mut guest = Waiting { memory: common::memory(&[PAGES[0]]), state: Vec::new() };
        restore(&mut guest, &again).unwrap();
        prop_assert!(contents(&guest.memory)[0] == memory[0]);
        prop_assert!(loaded(&guest.state) == memory[1]);
    }
}

/// What a stock QEMU has sent.
fn sample(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wire/tests/data").join(name);
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_stream_of_stock_qemu_becomes_a_file_that_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to, back] = ["from", "to", "back"].map(|name| folder.path().join(name));
    fs::write(&from, sample("plain-10.0.2.bin.gz")).unwrap();
    run(&from, &to, None).0.unwrap();
    let info = inspect(&FileUri::path(&to), None, true).unwrap();
    assert_eq!((info.format.as_str(), info.refusal.as_deref(), info.described), ("mapped-ram", None, true));
    run(&to, &back, None).0.unwrap();
    let (before, after) = (Snapshot::read(&from, 0), Snapshot::read(&back, 0));
    assert!(before.memory == after.memory && before.names == after.names && before.tail == after.tail);
    assert!(Snapshot::read(&to, 0).memory == before.memory);
    // The file is no larger on the disk than what is in it.
    let stored = info.blocks.iter().map(|block| block.stored).sum::<u64>() * 4096;
    assert!(info.allocated.unwrap() <= stored + (256 << 10), "{info:?}");
}

#[test]
fn what_can_not_be_converted_leaves_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::write(&to, "what was there").unwrap();
    let (whole, _) = stream_of(&[Say::Page { block: 0, page: 3, byte: 9 }], false);
    let ignoring = sample("x-ignore-shared-10.0.2.bin.gz");
    let multifd = sample("multifd-none-10.0.2-main.bin.gz");
    let postcopy = sample("postcopy-10.0.2-forward.bin.gz");
    let ends = |error: &Error| {
        matches!(error, Error::Damaged { source: transship_wire::Error::Truncated { missing: 1.., .. }, .. })
    };
    let is_none = |error: &Error| place(error) == Some(("stream magic", 0));
    let is = |misfit| move |error: &Error| error.misfit() == Some(misfit);
    type IsIt<'a> = &'a dyn Fn(&Error) -> bool;
    let cases: [(&[u8], IsIt<'_>); 6] = [
        (&whole[..whole.len() - 1], &ends),
        (&whole[..whole.len() / 2], &ends),
        (b"not a stream", &is_none),
        (&ignoring, &is(Misfit::LeftOut)),
        (&multifd, &is(Misfit::NeedsAnswers)),
        (&postcopy, &is(Misfit::NeedsAnswers)),
    ];
    for (bytes, is_it) in cases {
        fs::write(&from, bytes).unwrap();
        for format in [Format::MappedRam, Format::Stream] {
            let error = run(&from, &to, Some(format)).0.unwrap_err();
            assert_eq!(error.actor(), Actor::File, "{error}");
            assert!(is_it(&error), "{error:?}");
            assert!(error.to_string().contains("from"), "the file is named: {error}");
            assert_eq!(fs::read(&to).unwrap(), b"what was there");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "{error}");
        }
    }
}

/// A mapped-ram file of one block without pages.
fn of_one_block(bytes: u64) -> Vec<u8> {
    let mut writer = StreamWriter::new(0, 7);
    writer.header().configuration(&Configuration { mapped_ram: true, ..Configuration::new(name("pc")) });
    writer.ram_start(bytes).mapped_block(&name("pc.ram"), bytes, None);
    writer.end_of_section().end().end_of_section().raw(&tail());
    let mut file = vec![0; writer.position() as usize];
    for piece in writer.take() {
        file[piece.position as usize..][..piece.bytes.len()].copy_from_slice(&piece.bytes);
    }
    file
}

/// Sizes that no machine has take neither memory nor disk, nor time.
#[test]
fn more_memory_than_any_machine_has_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    let huge = (1 << 56) - 4096;
    for mapped_ram in [false, true] {
        // With its bitmap the file would be too long to be made: its start says enough.
        let mut writer = StreamWriter::new(0, 7);
        writer.header().configuration(&Configuration { mapped_ram, ..Configuration::new(name("pc")) });
        let at = writer.position();
        writer.ram_start(huge);
        let mut bytes = writer.take_bytes();
        bytes.resize(bytes.len() + 4096, 0);
        fs::write(&from, &bytes).unwrap();
        let field = ("RAM total", at as usize + 17);
        for error in [run(&from, &to, None).0.unwrap_err(), inspect(&FileUri::path(&from), None, false).unwrap_err()] {
            assert_eq!((error.actor(), place(&error)), (Actor::File, Some(field)), "{error}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

/// Pages that are not there cost a record each in a stream.
#[test]
fn a_conversion_of_zero_pages_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::write(&from, of_one_block(64 << 20)).unwrap();
    run(&from, &to, None).0.unwrap();
    fs::remove_file(&to).unwrap();
    let (progress, mut report) = (Progress::new(), Report::default());
    progress.cancel();
    let error =
        convert(&FileUri::path(&from), &FileUri::path(&to), None, (None, None), &progress, &mut report).unwrap_err();
    assert!(matches!(error, Error::Cancelled(Cancelled::Conversion)), "{error}");
    assert_eq!(report.status, Status::Cancelled);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_cancelled_conversion_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::write(&from, stream_of(&[], false).0).unwrap();
    let (progress, mut report) = (Progress::new(), Report::default());
    progress.cancel();
    let error =
        convert(&FileUri::path(&from), &FileUri::path(&to), None, (None, None), &progress, &mut report).unwrap_err();
    assert_eq!((error.to_string().as_str(), report.status), ("cancelled; nothing has changed", Status::Cancelled));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
