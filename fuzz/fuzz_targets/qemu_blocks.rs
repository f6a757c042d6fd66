//! The list of blocks of a mapped-ram file: what is accepted has a place of its own in the file for everything. The
//! first byte says whether x-ignore-shared is on, the next eight how long all blocks are together; then come the
//! entries, without gaps.
#![no_main]
use libfuzzer_sys::fuzz_target;
use std::ops::Range;
use transship_wire::qemu::{Configuration, Name, Record, Step, StreamReader, StreamWriter};

fuzz_target!(|bytes: &[u8]| {
    let Some((&[flags, ref total @ ..], entries)) = bytes.split_first_chunk::<9>() else { return };
    let machine = Name::new("pc").expect("it is one");
    let ignore_shared = flags & 1 != 0;
    let mut writer = StreamWriter::new(0, 1);
    let configuration = Configuration { mapped_ram: true, ignore_shared, ..Configuration::new(machine) };
    writer.header().configuration(&configuration).ram_start(u64::from_be_bytes(*total) & !0xfff);
    let start = writer.take_bytes();

    let mut reader = StreamReader::new();
    while reader.position() < start.len() as u64 {
        // Only their length may be wrong: more than any guest has.
        let Ok(Step::Done { .. }) = reader.next(&start[reader.position() as usize..]) else { return };
    }
    let mut taken = vec![0..start.len() as u64];
    let mut at = 0;
    while let Ok(Step::Done { record, used }) = reader.next(&entries[at..]) {
        match record {
            Record::Block(block) => {
                let entry = taken[0].end;
                // The list, up to here; what follows it is behind the pages.
                taken[0].end = entry + block.entry_bytes();
                assert_eq!(used as u64, block.entry_bytes());
                if let Some(geometry) = block.geometry() {
                    let pages = geometry.pages(block.used_bytes);
                    taken.extend([geometry.bitmap(block.used_bytes), pages.clone()]);
                    taken.insert(0, pages.end..pages.end);
                }
                assert_eq!(reader.position(), taken[0].end);
                assert_eq!(block.mapped.is_some_and(|_| block.geometry().is_none()) && !ignore_shared, false);
            }
            // The list is complete, and the rest of the file is the stream's.
            Record::EndOfBody => {
                taken[0].end = u64::MAX;
                return check(&mut taken);
            }
            _ => return,
        }
        at += used;
    }
});

fn check(taken: &mut [Range<u64>]) {
    taken.sort_by_key(|range| range.start);
    assert!(taken.windows(2).all(|pair| pair[0].end <= pair[1].start), "two parts overlap: {taken:?}");
}
