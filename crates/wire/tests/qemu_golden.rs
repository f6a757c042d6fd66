//! Streams that stock QEMUs have written, against facts that another parser has found in them.
#![allow(clippy::unwrap_used)]
mod streams;
use streams::*;
use transship_wire::PAGE_BYTES;
use transship_wire::qemu::*;

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
    let error = read(end - 1).unwrap_err().to_string();
    assert!(error.starts_with("pages offset of \"/rom@etc/acpi/rsdp\" at offset"), "{error}");
}
