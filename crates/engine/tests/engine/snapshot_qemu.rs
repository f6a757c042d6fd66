//! Files that a QEMU has made, or that only a QEMU can load: it gets its devices, and the rest is in place.
#![allow(clippy::unwrap_used)]
use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use transship_engine::{
    FileUri, Misfit,
    guest::{DestinationGuest, GuestError, StateFormat},
    inspect,
};
use transship_memory::GuestMemory;
use transship_wire::{
    GuestDescription,
    qemu::{
        Block, Command, Configuration, GlobalState, Name, PageContent, Record, Step, StreamReader, StreamWriter, Tail,
    },
};

use crate::{
    common::{Waiting, contents},
    snapshot_restore::{folder, options, restore},
};

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
    fn check_alive(&mut self) -> Result<(), GuestError> {
        Ok(())
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
        let info = inspect(&FileUri::path(&path), None, true).unwrap();
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
        let error = restore(&mut guest, &from, &options()).0.unwrap_err();
        assert_eq!(error.misfit(), Some(Misfit::LeftOut), "{error}");
        assert!(contents(&guest.0.memory) == before && guest.0.started.is_none());
        let info = inspect(&from, None, true).unwrap();
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
        let info = inspect(&FileUri::path(&path), None, true).unwrap();
        assert_eq!((info.machine.as_str(), info.state.as_deref()), ("pc-i440fx-10.0", Some("prelaunch")));
        assert_eq!(info.bytes, fs::metadata(&path).unwrap().len());
        assert!(manifest.contains(&format!("\"tail_offset\": {}", info.sections[0].offset)), "{:?}", info.sections[0]);
        let ram = &info.blocks[0];
        assert_eq!((ram.name.as_str(), ram.bytes, ram.stored, ram.zero), ("pc.ram", 16 << 20, 48, 4048));
        assert_eq!(info.sections.last().unwrap().name, "globalstate");
        assert!(info.described && info.checked && info.refusal.is_none());
    }
}
