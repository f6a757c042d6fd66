//! Streams that stock QEMUs have written, against facts that another parser has found in them.
use crate::streams::*;
use serde_json::{Value, json};
use transship_wire::qemu::*;
use transship_wire::{Error, PAGE_BYTES};

const UUID: [u8; 16] = 0x1234_5678_9abc_def0_1122_3344_5566_7788_u128.to_be_bytes();
const MULTIFD: [&str; 4] = ["none-10.0.2", "zlib-10.0.2", "zstd-10.0.2", "none-7.2.22"];

/// A record in the words of the manifest.
fn word(record: &Record<'_>) -> Option<String> {
    Some(match record {
        Record::RamStart { .. } => "START:ram".into(),
        Record::Part { .. } => "PART:ram".into(),
        Record::End { .. } => "END:ram".into(),
        Record::EndOfBody => "EOS".into(),
        Record::MultifdFlush => "FLUSH".into(),
        Record::Command(command) => format!("CMD:{}", command.name()),
        _ => return None,
    })
}

/// Reads a stream and compares all that the manifest knows of its records, but for the memory's content.
fn check_records(name: &str) -> (Memory, StreamReader, Vec<u8>) {
    let bytes = sample(name);
    let facts = facts(name);
    assert_eq!(bytes.len() as u64, facts["raw_size"].as_u64().unwrap());
    let mut words = Vec::new();
    let mut memory = Memory::new();
    let reader = read_all(&bytes, StreamReader::new(), |record, _, _| {
        words.extend(word(record));
        memory.apply(record);
    })
    .unwrap();
    assert_eq!(reader.position(), facts["tail_offset"].as_u64().unwrap());
    let order: Vec<_> = facts["order"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let (first_device, order) = order.split_last().unwrap();
    assert_eq!(words, order);

    let tail = &bytes[reader.position() as usize..];
    let parsed = Tail::parse(tail, reader.position()).unwrap();
    assert_eq!(format!("FULL:{}", parsed.sections[0].name), *first_device);
    check_tail(tail, &parsed);
    (memory, reader, bytes)
}

/// The sections cover the tail without a gap, and the last one says that the guest had not been started.
fn check_tail(tail: &[u8], parsed: &Tail) {
    let mut at = 0;
    for section in &parsed.sections {
        let header = 1 + 4 + 1 + section.name.len() + 4 + 4;
        assert_eq!(section.body.start, at + header, "{}", section.name);
        at = section.body.end + 5;
    }
    let json = parsed.vmdesc.clone().unwrap();
    assert_eq!(json.start, at + 1 + 5, "EOF, then the trailer");
    assert_eq!((json.end, parsed.end), (tail.len(), tail.len()));
    assert!(tail[json].starts_with(b"{"));
    assert_eq!(&*parsed.sections.last().unwrap().name, "globalstate");
    let state = GlobalState::find(tail, 0).unwrap().unwrap();
    assert_eq!((&*state.state, state.runs()), ("prelaunch", false));
}

#[test]
fn a_plain_stream() {
    let (memory, reader, _) = check_records("plain-10.0.2");
    memory.check(&facts("plain-10.0.2")["blocks"]);
    let configuration = reader.configuration().unwrap();
    assert_eq!(*configuration, Configuration::new(Name::new("pc-i440fx-10.0").unwrap()));
    assert!(memory.blocks.iter().all(|block| block.gpa.is_none() && block.mapped.is_none()));
}

#[test]
fn a_stream_without_the_shared_block() {
    let name = "x-ignore-shared-10.0.2";
    let (memory, reader, _) = check_records(name);
    let facts = &facts(name)["blocks"];
    memory.check(facts);
    assert!(reader.configuration().unwrap().ignore_shared);
    for (block, facts) in memory.blocks.iter().zip(facts.as_array().unwrap()) {
        assert_eq!(block.gpa, facts["gpa_field"].as_u64(), "{}", block.name);
    }
}

#[test]
fn a_mapped_ram_file() {
    let name = "mapped-ram-10.0.2";
    let (mut memory, reader, bytes) = check_records(name);
    assert!(reader.configuration().unwrap().mapped_ram);
    let facts = &facts(name)["blocks"];
    for (index, facts) in facts.as_array().unwrap().iter().enumerate() {
        let block = &memory.blocks[index];
        let geometry = block.geometry().unwrap();
        assert_eq!(geometry.bitmap_offset, facts["bitmap_offset"].as_u64().unwrap());
        assert_eq!(geometry.pages_offset, facts["pages_offset"].as_u64().unwrap());
        assert_eq!(geometry, Geometry::stock(geometry.bitmap_offset, block.used_bytes));
        let bitmap = geometry.bitmap(block.used_bytes);
        let bitmap = &bytes[bitmap.start as usize..bitmap.end as usize];
        let set = |page: usize| bitmap[page / 8] & 1 << (page % 8) != 0;
        let stored: Vec<_> = (0..bitmap.len() * 8).filter(|&page| set(page)).collect();
        assert_eq!(stored.len() as u64, facts["set_bits"].as_u64().unwrap());
        for page in stored {
            let from = geometry.pages_offset as usize + page * PAGE_BYTES;
            memory.bytes[index][page * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&bytes[from..from + PAGE_BYTES]);
        }
    }
    memory.check(facts);
    // The same file, its length known, is still good; a byte less than its last pages, and it is not.
    let end = memory.blocks.last().map(|block| block.geometry().unwrap().pages(block.used_bytes).end).unwrap();
    let read = |file_bytes| read_all(&bytes, StreamReader::new().within(file_bytes), |_, _, _| {}).map(|_| ());
    assert_eq!(read(bytes.len() as u64), Ok(()));
    assert_eq!(read(end), Ok(()));
    let error = read(end - 1).unwrap_err();
    let Error::Named { field, name, .. } = &error else { panic!("{error}") };
    assert_eq!((*field, &**name), ("pages offset", "/rom@etc/acpi/rsdp"), "{error}");
}

/// A file that begins with something else, of a guest whose own memory is in a shared file: its block has no place
/// here.
#[test]
fn a_mapped_ram_file_without_the_shared_block() {
    let bytes = sample("mapped-ram-shared-11.1.3");
    let reader = StreamReader::at(SHARED_BASE).within(bytes.len() as u64);
    let reader = read_all(&bytes, reader, |_, _, _| {}).unwrap();
    let expected = Configuration {
        ignore_shared: true,
        mapped_ram: true,
        uuid: Some(UUID),
        ..Configuration::new(Name::new("pc-q35-11.1").unwrap())
    };
    assert_eq!(reader.configuration(), Some(&expected));
    let [ram, others @ ..] = reader.blocks() else { panic!("no blocks") };
    assert_eq!((&*ram.name, ram.used_bytes, ram.gpa, ram.mapped), ("mem0", 4 << 20, Some(0), Some(Mapped::Ignored)));
    assert_eq!(ram.geometry(), None);
    let mut pages_end = 0;
    for block in others {
        let geometry = block.geometry().unwrap();
        assert!(geometry.bitmap_offset > pages_end && geometry.pages_offset % PAGES_ALIGNMENT == 0);
        pages_end = geometry.pages(block.used_bytes).end;
        let stored = bytes[geometry.bitmap_offset as usize] & 1 != 0;
        let first = &bytes[geometry.pages_offset as usize..][..PAGE_BYTES];
        assert_eq!(stored, first.iter().any(|&byte| byte != 0), "{}", block.name);
        assert!(&*block.name != "pc.bios" || first.starts_with(b"firmware firmware"));
    }
    let tail = &bytes[reader.position() as usize..];
    check_tail(tail, &Tail::parse(tail, reader.position()).unwrap());
}

/// Where the stream begins in `mapped-ram-shared-11.1.3`.
const SHARED_BASE: u64 = 0x1234;

#[test]
fn main_streams_beside_multifd_channels() {
    for name in MULTIFD {
        let (memory, ..) = check_records(&format!("multifd-{name}-main"));
        assert_eq!(memory.normal, 0, "pages go by the channels");
        // 7.2 sends zero pages on the main stream.
        assert_eq!(memory.zero > 0, name.contains("7.2"));
    }
}

/// Reads a channel and compares its packets with the manifest's. `each` gets the pages and their payload.
fn check_channel(name: &str, mut each: impl FnMut(&Pages, &[u8])) {
    let bytes = sample(name);
    let facts = facts(name);
    let (greeting, _) = bytes.split_first_chunk().unwrap();
    let channel = facts["channel_id"].as_u64().unwrap() as u8;
    assert_eq!(Greeting::decode(greeting), Ok(Greeting { uuid: UUID, channel }));
    assert_eq!(Greeting { uuid: UUID, channel }.encode(), *greeting);
    let mut at = GREETING_BYTES;
    for expected in facts["packets"].as_array().unwrap() {
        let rest = &bytes[at..];
        let Step::Done { record: Packet::Pages(pages), used } = Packet::read(rest, at as u64).unwrap() else {
            panic!("no packet at {at}");
        };
        assert_eq!(used, PACKET_HEADER_BYTES);
        let payload = &rest[used..][..pages.payload_bytes() as usize];
        assert_eq!(at as u64, expected["offset"].as_u64().unwrap());
        assert_eq!(pages.sync, expected["flags"].as_u64().unwrap() & 1 != 0);
        assert_eq!(pages.normal().len() as u64, expected["normal"].as_u64().unwrap());
        assert_eq!(pages.zero().len() as u64, expected["zero"].as_u64().unwrap());
        assert_eq!(payload.len() as u64, expected["payload"].as_u64().unwrap());
        assert_eq!(pages.number, expected["packet_num"].as_u64().unwrap());
        if let Some(block) = pages.block() {
            assert_eq!(**block, *expected["ramblock"].as_str().unwrap());
        }
        if name.contains("10.0.2") {
            assert_eq!(pages.encode(), rest[..used], "what QEMU 10 sends and what we would");
        }
        each(&pages, payload);
        at += used + payload.len();
    }
    assert_eq!(at, bytes.len());
}

/// The memory that the main stream and two channels make together.
#[test]
fn raw_multifd_channels() {
    for version in ["10.0.2", "7.2.22"] {
        let main = format!("multifd-none-{version}-main");
        let (mut memory, ..) = check_records(&main);
        for channel in ["ch0", "ch1"] {
            check_channel(&format!("multifd-none-{version}-{channel}"), |pages, payload| {
                assert_eq!(pages.method, Method::None);
                let Some(name) = pages.block() else { return };
                let index = memory.blocks.iter().position(|block| block.name == *name).unwrap();
                let block = &mut memory.bytes[index];
                for (&offset, page) in pages.normal().iter().zip(payload.chunks(PAGE_BYTES)) {
                    block[offset as usize..][..PAGE_BYTES].copy_from_slice(page);
                }
                for &offset in pages.zero() {
                    block[offset as usize..][..PAGE_BYTES].fill(0);
                }
            });
        }
        memory.check(&facts(&main)["blocks_after_all_channels"]);
    }
}

#[test]
fn compressed_multifd_channels() {
    for (name, method) in [("zlib", Method::Zlib), ("zstd", Method::Zstd)] {
        let mut normal = 0;
        for channel in ["ch0", "ch1"] {
            check_channel(&format!("multifd-{name}-10.0.2-{channel}"), |pages, _| {
                normal += pages.normal().len();
                // A barrier without pages has no method to speak of.
                assert!(pages.method == method || pages.block().is_none());
            });
        }
        assert_eq!(normal, 68, "the pages that are not zero");
    }
}

/// The manifest's words for a postcopy stream: pages are counted for each part, commands come with their data.
fn postcopy_words(bytes: &[u8]) -> (Vec<String>, u64) {
    let mut words: Vec<String> = Vec::new();
    let (mut zero, mut normal) = (0, 0);
    let mut kind = "";
    let reader = read_all(bytes, StreamReader::new(), |record, bytes, _| match record {
        Record::RamStart { .. } => kind = "START ram",
        Record::Part { .. } => kind = "PART",
        Record::End { .. } => kind = "END",
        Record::Page(Page { content: PageContent::Fill(0), .. }) => zero += 1,
        Record::Page(Page { content: PageContent::Normal(_), .. }) => normal += 1,
        Record::EndOfBody => {
            words.push(format!("{kind} z={zero} n={normal}"));
            (zero, normal) = (0, 0);
        }
        Record::Command(Command::Packaged { bytes }) => words.push(format!("PACKAGED len={bytes} {{")),
        Record::Command(command) => {
            let name = command.name().replace("POSTCOPY_RAM_", "RAM_");
            let data: String = bytes[5..].iter().map(|byte| format!("{byte:02x}")).collect();
            let length = bytes.len() - 5;
            let length = if name == "RAM_DISCARD" { format!("len={length} ") } else { String::new() };
            words.push(format!("CMD {name} {length}{data}"));
        }
        Record::Raw(package) => {
            let end: String = package[package.len() - 14..].iter().map(|byte| format!("{byte:02x}")).collect();
            words.extend(["   CMD POSTCOPY_LISTEN ", "   FULL device sections ..."].map(String::from));
            words.extend([format!("   ends with {end}"), "}".into()]);
        }
        Record::Tail => words.push("EOF".into()),
        _ => {}
    });
    (words, reader.unwrap().position())
}

#[test]
fn postcopy_streams() {
    for version in ["10.0.2", "11.1.3"] {
        let name = format!("postcopy-{version}-forward");
        let bytes = sample(&name);
        let (words, end) = postcopy_words(&bytes);
        // The manifest shows only the beginning of the longer data.
        let facts = facts(&name);
        let order: Vec<_> = facts["order"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        assert_eq!(words.len(), order.len(), "{words:#?}");
        for (word, expected) in words.iter().zip(order) {
            assert!(word.starts_with(expected), "{word} instead of {expected}");
        }
        let tail = &bytes[end as usize..];
        let parsed = Tail::parse(tail, end).unwrap();
        assert_eq!((parsed.is_walked(), parsed.end), (false, 1));
        assert_eq!(GlobalState::find(tail, end), Ok(None));
    }
}

#[test]
fn replies_of_a_destination() {
    for version in ["10.0.2", "11.1.3"] {
        let name = format!("postcopy-{version}-return");
        let bytes = sample(&name);
        let mut messages = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let Step::Done { record, used } = Reply::read(&bytes[at..], at as u64).unwrap() else {
                panic!("the sample is not cut short");
            };
            assert_eq!(record.encode(), bytes[at..at + used]);
            at += used;
            messages.push(match record {
                Reply::Pong(value) => json!(["PONG", 4, format!("{value:08x}")]),
                Reply::Shut(value) => json!(["SHUT", 4, format!("{value:08x}")]),
                other => panic!("{other:?}"),
            });
        }
        assert_eq!(Value::from(messages), facts(&name)["messages"]);
    }
}

/// A virtio-mem device describes itself before the memory, in the stream and in the trailer.
#[test]
fn a_stream_with_a_memory_device() {
    let bytes = sample("virtio-mem-10.0.2");
    let mut early = None;
    let mut bitmap = Vec::new();
    let reader = read_all(&bytes, StreamReader::new(), |record, _, _| match record {
        Record::Early(section) => early = Some(section.clone()),
        Record::Raw(bytes) => bitmap.extend_from_slice(bytes),
        _ => {}
    })
    .unwrap();
    let early = early.unwrap();
    assert_eq!(&*early.name, "0000:00:01.0/virtio-mem-device-early");
    assert_eq!((early.instance, early.version, early.node), (0, 1, 0));
    assert_eq!((early.address, early.region_bytes, early.block_bytes), (4 << 30, 64 << 20, 2 << 20));
    // The guest has not been asked yet, so nothing is plugged.
    assert_eq!((early.plugged_bytes, bitmap), (0, vec![0; 8]));

    let tail = &bytes[reader.position() as usize..];
    let parsed = Tail::parse(tail, reader.position()).unwrap();
    check_tail(tail, &parsed);
    let names: Vec<_> = parsed.sections.iter().map(|section| &*section.name).collect();
    assert_eq!(names[..3], ["timer", "cpu_common", "cpu"]);
    for device in ["0000:00:01.0/virtio-mem", "0000:00:02.0/virtio-rng", "0000:00:04.0/vga"] {
        assert!(names.contains(&device), "{device} is not one of {names:?}");
    }
}

/// Each record read and written again: what we write is what QEMU writes, byte for byte.
#[test]
fn streams_written_again() {
    let mains = MULTIFD.map(|name| format!("multifd-{name}-main"));
    let others = [
        "plain-10.0.2",
        "x-ignore-shared-10.0.2",
        "mapped-ram-10.0.2",
        "virtio-mem-10.0.2",
        "mapped-ram-shared-11.1.3",
    ];
    for name in mains.into_iter().chain(others.map(String::from)) {
        let bytes = sample(&name);
        let base = if name.contains("11.1.3") { SHARED_BASE } else { 0 };
        let section = ram_section(&bytes, base);
        let mut writer = StreamWriter::new(base, section);
        let mut early = false;
        let reader = read_all(&bytes, StreamReader::at(base), |record, read, reader| {
            match record {
                Record::Early(_) => {
                    early = true;
                    writer.raw(read);
                }
                Record::Footer { .. } if std::mem::take(&mut early) => {
                    writer.raw(read);
                }
                _ => rewrite(&mut writer, record, reader),
            }
            if !matches!(record, Record::EndOfBody | Record::Footer { .. }) {
                assert_eq!(writer.position(), reader.position(), "{name}");
            }
        })
        .unwrap();
        writer.raw(&bytes[reader.position() as usize..]);
        assert_eq!(writer.position(), bytes.len() as u64);
        let pieces = writer.take();
        let jumps = reader.blocks().iter().filter(|block| block.geometry().is_some()).count();
        assert_eq!(pieces.len(), jumps + 1);
        for Piece { position, bytes: written } in pieces {
            let place = position as usize..position as usize + written.len();
            assert!(bytes[place.clone()] == written, "{name}: what was written for {place:?} differs");
        }
    }
}

fn ram_section(bytes: &[u8], base: u64) -> u32 {
    let mut found = None;
    read_all(bytes, StreamReader::at(base), |record, _, _| {
        if let Record::RamStart { section, .. } = record {
            found = Some(*section);
        }
    })
    .unwrap();
    found.unwrap()
}

fn rewrite(writer: &mut StreamWriter, record: &Record<'_>, reader: &StreamReader) {
    match record {
        Record::Header => writer.header(),
        Record::Configuration(configuration) => writer.configuration(configuration),
        Record::Command(command) => writer.command(command),
        Record::RamStart { total, .. } => writer.ram_start(*total),
        Record::Block(block) => writer.block(block),
        Record::MultifdFlush => writer.multifd_flush(),
        Record::Part { .. } => writer.part(),
        Record::End { .. } => writer.end(),
        Record::Page(Page { block, offset, content }) => match content {
            PageContent::Normal(page) => writer.page(&reader.blocks()[*block].name, *offset, page),
            PageContent::Fill(0) => writer.zero_page(&reader.blocks()[*block].name, *offset),
            other => panic!("no sample has {other:?}"),
        },
        Record::EndOfBody => writer.end_of_section(),
        Record::Raw(bytes) => writer.raw(bytes),
        // The writer puts footers where bodies end.
        Record::Footer { .. } | Record::Early(_) | Record::Tail => writer,
    };
}

/// Given only as many bytes as it asks for, the reader finds the same records.
#[test]
fn a_stream_in_drops() {
    let bytes = sample("x-ignore-shared-10.0.2");
    let mut whole = Vec::new();
    read_all(&bytes, StreamReader::new(), |record, _, _| whole.push(format!("{record:?}"))).unwrap();
    let mut reader = StreamReader::new();
    let mut drops = Vec::new();
    let mut given = 0;
    while drops.len() < whole.len() {
        let rest = &bytes[reader.position() as usize..];
        match reader.next(&rest[..given]).unwrap() {
            Step::Done { record, .. } => {
                drops.push(format!("{record:?}"));
                given = 0;
            }
            Step::More { at_least } => {
                assert!(given < at_least && at_least <= MAX_RECORD_BYTES);
                given = at_least;
            }
        }
    }
    assert_eq!(drops, whole);
}
