//! What a file holds is what the guest gets; and what is wrong with a file is told before the guest is touched.
#![allow(clippy::unwrap_used)]
use std::{
    fs::{self, File},
    io::Read,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
};

use crate::common::{self, Op, Scripted, Waiting, contents};
use proptest::{collection::vec, prelude::*};
use rustix::fs::{Mode, OFlags};
use transship_engine::{
    Actor, DirectIo, Error, FileIo, FilePlace, FileUri, Format, Progress, Report, RestoreOptions, SaveOptions,
    SnapshotInfo, Status, Way,
    guest::{DestinationGuest, GuestError, StateFormat},
    inspect, restore_guest, save_guest,
};
use transship_memory::GuestMemory;
use transship_wire::{
    GuestDescription,
    qemu::{
        Block, Command, Configuration, GlobalState, Name, PageContent, Record, Step, StreamReader, StreamWriter, Tail,
    },
};

const PAGES: [u64; 2] = [300, 1000];

/// On a disk: what is in memory anyway can't refuse direct I/O.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options() -> RestoreOptions {
    RestoreOptions { channels: 2, ..RestoreOptions::default() }
}

fn restore(guest: &mut dyn DestinationGuest, from: &FileUri, options: &RestoreOptions) -> (Result<(), Error>, Report) {
    let mut report = Report::default();
    let result = restore_guest(guest, from, options, None, &Progress::new(), &mut report);
    (result, report)
}

/// A guest with these pages, each full of its byte, saved.
fn saved(path: &Path, pages: &[(usize, u64, u8)], way: SaveOptions, offset: u64) -> Scripted {
    let mut guest = Scripted::new(&PAGES, vec![]);
    // Its own is so long that thousands of files would take their time.
    guest.state.truncate(5000);
    for &(region, page, byte) in pages {
        common::apply(&guest.memory, &Op::Fill { region, page, byte }, &mut guest.script.lock().unwrap().history);
    }
    let to = FileUri { offset, ..FileUri::path(path) };
    save_guest(&mut guest, None, &to, &way, &Progress::new(), &mut Report::default()).unwrap();
    guest
}

fn pages() -> impl Strategy<Value = Vec<(usize, u64, u8)>> {
    vec((0..2usize, 0..1000u64, prop_oneof![Just(0u8), any::<u8>()]), 0..300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_guest_gets_what_was_saved(
        pages in pages(),
        format in prop_oneof![2 => Just(Format::MappedRam), 1 => Just(Format::Stream)],
        direct_io in prop_oneof![Just(DirectIo::Auto), Just(DirectIo::Off), Just(DirectIo::On)],
        io in prop_oneof![Just(FileIo::Auto), Just(FileIo::Plain)],
        channels in 1..5u8,
        offset in prop_oneof![Just(0), 1..100_000u64],
        run in prop_oneof![Just(None), Just(Some(false)), Just(Some(true))],
    ) {
        let folder = folder();
        let path = folder.path().join("a");
        let before = saved(&path, &pages, SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, offset);
        let mut guest = Waiting::new(&PAGES);
        let from = FileUri { offset, ..FileUri::path(&path) };
        let (result, report) = restore(&mut guest, &from, &RestoreOptions { channels, direct_io, io, run });
        result.unwrap();
        prop_assert!(contents(&guest.memory) == contents(&before.memory));
        prop_assert!(guest.state == before.state);
        prop_assert_eq!(guest.started, Some(run.unwrap_or(true)));
        prop_assert_eq!(report.pages.normal, inspect(&from, true).unwrap().blocks.iter().map(|b| b.stored).sum::<u64>());
        prop_assert_eq!(report.file.unwrap().direct_io, direct_io != DirectIo::Off && format == Format::MappedRam);
    }

    /// Whatever is done to a file, it is refused and the guest was not touched, or it is restored.
    #[test]
    fn a_mutated_file_is_refused_before_the_guest_is_touched(
        pages in pages(),
        format in prop_oneof![2 => Just(Format::MappedRam), 1 => Just(Format::Stream)],
        mutations in vec((any::<prop::sample::Index>(), 0..6u8, any::<u64>()), 1..4),
    ) {
        let folder = folder();
        let path = folder.path().join("a");
        saved(&path, &pages, SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, 0);
        let places = structure(&inspect(&FileUri::path(&path), true).unwrap());
        let mut bytes = fs::read(&path).unwrap();
        for (index, how, value) in mutations {
            // Where something means something, half of the time.
            let at = if value % 2 == 0 { places[index.index(places.len())] } else { index.index(bytes.len()) };
            mutate(&mut bytes, at, how, value);
        }
        fs::write(&path, &bytes).unwrap();
        let mut guest = Waiting::new(&PAGES);
        let before = contents(&guest.memory);
        let from = FileUri::path(&path);
        let inspected = inspect(&from, true);
        let (result, _) = restore(&mut guest, &from, &options());
        if let Err(error) = result {
            prop_assert!(guest.started.is_none());
            prop_assert!(error.to_string().contains(&*path.to_string_lossy()), "{}", error);
            // A stream is read while it is restored.
            prop_assert!(format == Format::Stream || contents(&guest.memory) == before, "{}", error);
        } else {
            prop_assert!(inspected.is_ok(), "what can be restored can be shown: {:?}", inspected.err());
        }
    }
}

/// Places of a file that mean something: its head, and where blocks and device sections begin.
fn structure(info: &SnapshotInfo) -> Vec<usize> {
    let blocks = info.blocks.iter().flat_map(|block| {
        let bitmap = block.bitmap_offset.unwrap_or(0);
        let end = block.pages_offset.map_or(0, |at| at + block.bytes);
        [bitmap.saturating_sub(60)..bitmap + 160, end..end + 60]
    });
    let sections = info.sections.iter().map(|section| section.offset..section.offset + 40);
    let all = blocks.chain(sections).chain([0..100, info.bytes.saturating_sub(200)..info.bytes]);
    all.flatten().filter(|at| *at < info.bytes).map(|at| at as usize).collect()
}

fn mutate(bytes: &mut Vec<u8>, at: usize, how: u8, value: u64) {
    let at = at.min(bytes.len().saturating_sub(1));
    match how {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << (value % 8),
        1 if !bytes.is_empty() => bytes[at] = value as u8,
        2 => bytes.truncate(at),
        3 => bytes.extend(std::iter::repeat_n(value as u8, (value % 5000) as usize)),
        4 => {
            let end = bytes.len().min(at + 8);
            bytes[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
        }
        _ => {
            let end = bytes.len().min(at + (value % 64) as usize);
            bytes.drain(at..end);
        }
    }
}

#[test]
fn a_cut_file_is_never_taken_for_a_whole_one() {
    let folder = folder();
    for format in [Format::MappedRam, Format::Stream] {
        let path = folder.path().join("a");
        saved(&path, &[(0, 3, 7), (1, 999, 8)], SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, 0);
        let info = inspect(&FileUri::path(&path), true).unwrap();
        let mut cuts = structure(&info);
        cuts.extend((0..info.bytes as usize).step_by(60_013));
        // From the end on, so that each is the one before, cut again.
        cuts.sort_unstable();
        for cut in cuts.into_iter().rev() {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(cut as u64).unwrap();
            let error = inspect(&FileUri::path(&path), true).expect_err("it was cut");
            let mut guest = Waiting::new(&PAGES);
            let (result, report) = restore(&mut guest, &FileUri::path(&path), &options());
            assert!(result.is_err() && guest.started.is_none(), "cut at {cut}: {error}");
            assert_eq!(report.status, Status::Failed);
        }
    }
}

/// Changes bytes of a saved file, and says how it is then refused.
fn refusal(change: impl FnOnce(&File, &SnapshotInfo)) -> String {
    let folder = folder();
    let path = folder.path().join("a");
    let way = SaveOptions { way: Way::Paused, ..SaveOptions::default() };
    saved(&path, &[(0, 3, 7), (1, 999, 8)], way, 0);
    let from = FileUri::path(&path);
    let info = inspect(&from, true).unwrap();
    change(&fs::OpenOptions::new().write(true).open(&path).unwrap(), &info);
    let mut guest = Waiting::new(&PAGES);
    let before = contents(&guest.memory);
    let error = restore(&mut guest, &from, &options()).0.expect_err("it is broken");
    assert_eq!(error.actor(), Actor::File, "{error}");
    let error = error.to_string();
    assert!(contents(&guest.memory) == before && guest.started.is_none(), "{error}");
    assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
    error
}

#[test]
fn what_is_wrong_is_told_by_field_and_offset() {
    // Behind the name and the length.
    let header = |info: &SnapshotInfo, block: usize| {
        let name = format!("\u{7}{}", info.blocks[block].name);
        let bytes = fs::read(&info.file).unwrap();
        bytes.windows(8).position(|bytes| bytes == name.as_bytes()).unwrap() as u64 + 16
    };
    let end = |info: &SnapshotInfo| info.offset + info.bytes;
    let error = refusal(|file, info| file.write_all_at(b"x", end(info)).unwrap());
    assert!(error.contains("the 1 bytes after its end at offset"), "{error}");
    let error = refusal(|file, info| {
        let overlapping = info.blocks[0].bitmap_offset.unwrap();
        file.write_all_at(&overlapping.to_be_bytes(), header(info, 1) + 12).unwrap();
    });
    assert!(error.contains("bitmap offset of \"region1\"") && error.contains("overlaps"), "{error}");
    let error = refusal(|file, info| file.write_all_at(&(1u64 << 40).to_be_bytes(), header(info, 0) + 20).unwrap());
    assert!(error.contains("pages offset of \"region0\"") && error.contains("beyond the end of the file"), "{error}");
    let error =
        refusal(|file, info| file.write_all_at(&[0xff; 8], info.blocks[0].bitmap_offset.unwrap() + 32).unwrap());
    assert!(error.contains("bitmap of \"region0\" at offset") && error.contains("the block has 300 pages"), "{error}");
    let error = refusal(|file, _| file.write_all_at(b"QEVX", 0).unwrap());
    assert!(error.contains("stream magic at offset 0"), "{error}");
    let error = refusal(|file, info| file.set_len(end(info) - 1).unwrap());
    assert!(error.contains("transship/device-state") || error.contains("offset"), "{error}");
}

#[test]
fn a_file_of_another_guest_is_refused() {
    let folder = folder();
    let path = folder.path().join("a");
    saved(&path, &[(0, 3, 7)], SaveOptions { way: Way::Paused, ..SaveOptions::default() }, 0);
    for (pages, why) in [(&[300, 1001][..], "\"region1\" has 4096000 bytes"), (&[300], "it has memory \"region1\"")] {
        let mut guest = Waiting::new(pages);
        let before = contents(&guest.memory);
        let error = restore(&mut guest, &FileUri::path(&path), &options()).0.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert!(contents(&guest.memory) == before);
    }
}

#[test]
fn a_vmm_that_does_not_take_the_state_is_not_started() {
    let folder = folder();
    let path = folder.path().join("a");
    saved(&path, &[(0, 3, 7)], SaveOptions { way: Way::Paused, ..SaveOptions::default() }, 0);
    let mut guest = Waiting { refuses_state: true, ..Waiting::new(&PAGES) };
    let error = restore(&mut guest, &FileUri::path(&path), &options()).0.unwrap_err().to_string();
    assert!(error.contains("no such device here") && guest.started.is_none(), "{error}");
}

#[test]
fn a_cancelled_restore_starts_nothing() {
    let folder = folder();
    let path = folder.path().join("a");
    for format in [Format::MappedRam, Format::Stream] {
        saved(&path, &[(0, 3, 7)], SaveOptions { way: Way::Paused, format, ..SaveOptions::default() }, 0);
        let mut guest = Waiting::new(&PAGES);
        let (progress, mut report) = (Progress::new(), Report::default());
        progress.cancel();
        let result = restore_guest(&mut guest, &FileUri::path(&path), &options(), None, &progress, &mut report);
        assert!(result.is_err() && guest.started.is_none());
        assert_eq!(report.status, Status::Cancelled);
    }
}

/// As if it had come through an exec.
fn passed(path: &Path, flags: OFlags) -> OwnedFd {
    let file = rustix::fs::open(path, flags, Mode::empty()).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    file
}

#[test]
fn descriptors_that_were_passed_are_read() {
    let folder = folder();
    let path = folder.path().join("a");
    let before =
        saved(&path, &[(0, 3, 7), (1, 999, 8)], SaveOptions { way: Way::Paused, ..SaveOptions::default() }, 5000);
    let (plain, direct) = (passed(&path, OFlags::RDONLY), passed(&path, OFlags::RDONLY | OFlags::DIRECT));
    let both = passed(&path, OFlags::RDWR);
    let (plain_number, direct_number) = (plain.as_raw_fd(), direct.as_raw_fd());
    for (place, direct_io, expected) in [
        (FilePlace::Fd(plain_number), DirectIo::Auto, Ok(false)),
        (FilePlace::Fd(plain_number), DirectIo::On, Err("fdset:N,M")),
        (FilePlace::Fd(direct_number), DirectIo::Auto, Err("O_DIRECT")),
        (FilePlace::Fd(both.as_raw_fd()), DirectIo::Auto, Err("O_RDONLY")),
        (FilePlace::FdSet(direct_number, plain_number), DirectIo::On, Ok(true)),
        (FilePlace::FdSet(plain_number, direct_number), DirectIo::Off, Ok(false)),
    ] {
        let mut guest = Waiting::new(&PAGES);
        let from = FileUri { place: place.clone(), offset: 5000 };
        let (result, report) = restore(&mut guest, &from, &RestoreOptions { direct_io, ..options() });
        match (result, expected) {
            (Ok(()), Ok(direct)) => {
                assert_eq!(report.file.unwrap().direct_io, direct, "{place:?}");
                assert!(contents(&guest.memory) == contents(&before.memory));
            }
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{place:?}: {error}"),
            (other, _) => panic!("{place:?} with {direct_io:?}: {other:?}"),
        }
    }
}

/// A QEMU of the samples' kind that waits.
struct WaitingQemu(Waiting);

impl WaitingQemu {
    fn new() -> Self {
        Self(Waiting::new(&[4096]))
    }
}

impl DestinationGuest for WaitingQemu {
    fn description(&self) -> GuestDescription {
        GuestDescription { machine: "qemu pc-i440fx-10.0".into(), ..self.0.description() }
    }
    fn memory(&self) -> GuestMemory {
        self.0.memory()
    }
    fn state_format(&self) -> StateFormat {
        StateFormat::Qemu { blocks: vec!["pc.ram".into()], others: vec![] }
    }
    fn load_state(&mut self, state: &mut dyn Read) -> Result<(), GuestError> {
        self.0.load_state(state)
    }
    fn start(&mut self, run: bool) -> Result<(), GuestError> {
        self.0.start(run)
    }
    fn start_hint(&self) -> String {
        self.0.start_hint()
    }
}

/// A sample of stock QEMU, unpacked.
fn sample(folder: &Path, name: &str) -> PathBuf {
    let packed = File::open(format!("{}/../wire/tests/data/{name}.bin.gz", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let path = folder.join(name);
    std::io::copy(&mut flate2::read::GzDecoder::new(packed), &mut File::create(&path).unwrap()).unwrap();
    path
}

/// Blocks by name, and the device sections, of a stream that was made for a QEMU.
fn read_stream(bytes: &[u8]) -> (Vec<(String, Vec<u8>)>, Vec<u8>) {
    let mut reader = StreamReader::new();
    let (mut at, mut blocks) = (0, Vec::new());
    loop {
        let Step::Done { record, used } = reader.next(&bytes[at..]).unwrap() else { panic!("it is cut short") };
        match record {
            Record::Configuration(configuration) => {
                assert!(configuration.ignore_shared && !configuration.mapped_ram, "{configuration:?}");
            }
            Record::Block(block) => blocks.push((block.name.to_string(), vec![0xcc; block.used_bytes as usize])),
            Record::Page(page) => {
                let memory = &mut blocks[page.block].1[page.offset as usize..][..4096];
                match page.content {
                    PageContent::Fill(byte) => memory.fill(byte),
                    PageContent::Normal(bytes) => memory.copy_from_slice(bytes),
                    other => panic!("{other:?}"),
                }
            }
            Record::Tail => return (blocks, bytes[at..].to_vec()),
            _ => {}
        }
        at += used;
    }
}

/// The same guest as a mapped-ram file and as a stream: a QEMU gets the same from both, and none of its own memory.
#[test]
fn a_qemu_gets_its_devices_and_the_rest_is_in_place() {
    let folder = folder();
    let mut seen = Vec::new();
    for name in ["mapped-ram-10.0.2", "plain-10.0.2"] {
        let path = sample(folder.path(), name);
        let mut guest = WaitingQemu::new();
        restore(&mut guest, &FileUri::path(&path), &options()).0.unwrap();
        assert_eq!(guest.0.started, Some(false), "the sample was never started");
        let memory = contents(&guest.0.memory).remove(0);
        // The pattern that the sample's README describes.
        assert!(memory[0x20_0000..].starts_with(b"page 00000000 page 00000000 "));
        assert!(memory[0x20_1000..0x20_2000].iter().all(|&byte| byte == 0));
        assert!(memory[0x20_3000..0x20_3040].iter().all(|&byte| byte == 3));
        assert!(memory[..0x20_0000].iter().chain(&memory[0x24_0000..]).all(|&byte| byte == 0), "stale bytes");
        let (blocks, tail) = read_stream(&guest.0.state);
        let names: Vec<&str> = blocks.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"pc.bios") && !names.contains(&"pc.ram"), "{names:?}");
        let bios = &blocks.iter().find(|(name, _)| name == "pc.bios").unwrap().1;
        assert!(bios[0x3000..].starts_with(b"dummy firmware page 03 dummy"));
        assert_eq!(GlobalState::find(&tail, 0).unwrap().unwrap().state, "paused", "our own `start` decides");
        seen.push((blocks, tail, memory));
    }
    assert!(seen[0].0 == seen[1].0, "other device memory");
    // The two were not saved at the same moment.
    let sections = |tail: &[u8]| {
        let sections = Tail::parse(tail, 0).unwrap().sections;
        sections.into_iter().map(|section| (section.name, section.body.len())).collect::<Vec<_>>()
    };
    assert_eq!(sections(&seen[0].1), sections(&seen[1].1));
    assert!(seen[0].2 == seen[1].2, "other memory");
}

/// A section of a memory device, which has to be there before the pages: of no plugged memory.
pub(crate) fn early_section() -> Vec<u8> {
    let name = b"0000:00:03.0/virtio-mem/virtio-mem-device-early";
    let mut section = vec![4, 0, 0, 0, 9, name.len() as u8];
    section.extend(name);
    section.extend([0, 0, 0, 0, 0, 0, 0, 1]);
    for number in [1u64 << 32, 1 << 30, 2 << 20] {
        section.extend(number.to_be_bytes());
    }
    section.extend([0; 4]);
    section.extend(0u64.to_be_bytes());
    section.extend([0x55; (1 << 30) / (2 << 20) / 8]);
    section.extend([0x7e, 0, 0, 0, 9]);
    section
}

/// A stream or file of one region and a ROM, with such a section, and the list of blocks in two parts in the stream.
fn with_early_section(path: &Path, mapped: bool) {
    let name = |name: &str| Name::new(name).unwrap();
    let block = |name: &str, pages: u64| Block {
        name: Name::new(name).unwrap(),
        used_bytes: pages * 4096,
        gpa: None,
        mapped: None,
    };
    let mut writer = StreamWriter::new(0, 1);
    writer.header().configuration(&Configuration { mapped_ram: mapped, ..Configuration::new(name("pc-i440fx-10.0")) });
    if mapped {
        writer.ram_start(4100 * 4096);
        writer.mapped_block(&name("pc.ram"), 4096 * 4096, None);
        writer.mapped_block(&name("pc.bios"), 4 * 4096, None);
        writer.end_of_section().raw(&early_section());
        writer.command(&Command::SwitchoverStart);
    } else {
        writer.ram_start(4096 * 4096).block(&block("pc.ram", 4096)).end_of_section().raw(&early_section());
        writer.part().page(&name("pc.ram"), 8192, &[7; 4096]).end_of_section();
        writer.command(&Command::SwitchoverStart);
        writer.ram_start(4 * 4096).block(&block("pc.bios", 4)).end_of_section();
        writer.end().page(&name("pc.bios"), 4096, &[8; 4096]).end_of_section();
    }
    let body = [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat();
    writer.full(3, &name("globalstate"), 0, 1, &body).eof();
    let file = File::create(path).unwrap();
    writer.take().into_iter().for_each(|piece| file.write_all_at(&piece.bytes, piece.position).unwrap());
}

#[test]
fn what_has_to_come_before_the_pages_does() {
    let folder = folder();
    let path = folder.path().join("a");
    for mapped in [true, false] {
        with_early_section(&path, mapped);
        let info = inspect(&FileUri::path(&path), true).unwrap();
        assert_eq!(info.blocks.iter().map(|block| block.name.as_str()).collect::<Vec<_>>(), ["pc.ram", "pc.bios"]);
        let mut guest = WaitingQemu::new();
        restore(&mut guest, &FileUri::path(&path), &options()).0.unwrap();
        assert_eq!(guest.0.started, Some(true));
        let (state, early) = (&guest.0.state, early_section());
        let at = state.windows(early.len()).position(|bytes| bytes == early).expect("the section is there");
        let page = [2, 0, 0, 0, 1];
        let parts = (0..at).filter(|&before| state[before..].starts_with(&page)).count();
        assert_eq!(parts, 0, "pages came before it");
        let (blocks, _) = read_stream(state);
        assert_eq!(blocks.len(), 1);
        assert!(blocks[0].1[4096..8192].iter().all(|&byte| byte == if mapped { 0 } else { 8 }));
        let memory = contents(&guest.0.memory).remove(0);
        assert!(memory[8192..12288].iter().all(|&byte| byte == if mapped { 0 } else { 7 }));
    }
}

/// A page of the guest's and one of a device's come again as what has changed in them.
#[test]
fn a_page_that_comes_as_a_change_is_put_together() {
    let folder = folder();
    let path = folder.path().join("a");
    let name = |name: &str| Name::new(name).unwrap();
    let mut writer = StreamWriter::new(0, 1);
    writer.header().configuration(&Configuration::new(name("pc-i440fx-10.0"))).ram_start(4100 * 4096);
    for (block, pages) in [("pc.ram", 4096), ("pc.bios", 4)] {
        writer.block(&Block { name: name(block), used_bytes: pages * 4096, gpa: None, mapped: None });
    }
    writer.end_of_section().end();
    for block in ["pc.ram", "pc.bios"] {
        // Two bytes stay, one is another.
        writer.page(&name(block), 8192, &[7; 4096]).xbzrle_page(&name(block), 8192, &[2, 1, 9]);
    }
    let body = [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat();
    writer.end_of_section().full(3, &name("globalstate"), 0, 1, &body).eof();
    fs::write(&path, writer.take_bytes()).unwrap();
    let mut guest = WaitingQemu::new();
    let (result, report) = restore(&mut guest, &FileUri::path(&path), &options());
    result.unwrap();
    let (blocks, _) = read_stream(&guest.0.state);
    for memory in [&contents(&guest.0.memory)[0], &blocks[0].1] {
        assert_eq!(memory[8192..8196], [7, 7, 9, 7]);
    }
    assert_eq!(report.pages.hole, 4095, "{:?}", report.pages);
}

#[test]
fn a_file_without_the_memory_says_so() {
    let folder = folder();
    for (name, offset) in [("mapped-ram-shared-11.1.3", 0x1234), ("x-ignore-shared-10.0.2", 0)] {
        let from = FileUri { offset, ..FileUri::path(sample(folder.path(), name)) };
        let mut guest = WaitingQemu::new();
        let before = contents(&guest.0.memory);
        let error = restore(&mut guest, &from, &options()).0.unwrap_err().to_string();
        assert!(error.contains("x-ignore-shared"), "{error}");
        assert!(contents(&guest.0.memory) == before && guest.0.started.is_none());
        let info = inspect(&from, true).unwrap();
        assert!(info.blocks.iter().any(|block| block.left_out), "{info:?}");
        assert!(info.refusal.is_some(), "{info:?}");
    }
}

#[test]
fn info_tells_what_is_in_the_samples() {
    let folder = folder();
    let manifest =
        fs::read_to_string(format!("{}/../wire/tests/data/manifest.json", env!("CARGO_MANIFEST_DIR"))).unwrap();
    for name in ["mapped-ram-10.0.2", "plain-10.0.2"] {
        let path = sample(folder.path(), name);
        let info = inspect(&FileUri::path(&path), true).unwrap();
        assert_eq!((info.machine.as_str(), info.state.as_deref()), ("pc-i440fx-10.0", Some("prelaunch")));
        assert_eq!(info.bytes, fs::metadata(&path).unwrap().len());
        assert!(manifest.contains(&format!("\"tail_offset\": {}", info.sections[0].offset)), "{:?}", info.sections[0]);
        let ram = &info.blocks[0];
        assert_eq!((ram.name.as_str(), ram.bytes, ram.stored, ram.zero), ("pc.ram", 16 << 20, 48, 4048));
        assert_eq!(info.sections.last().unwrap().name, "globalstate");
        assert!(info.described && info.checked && info.refusal.is_none());
    }
}
