//! QEMU's main stream from anybody: each record is read or refused, the same whether it comes at once or in drops.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::Error;
use transship_wire::qemu::{MAX_BLOCKS, MAX_RECORD_BYTES, Record, Step, StreamReader};

fuzz_target!(|bytes: &[u8]| {
    let (mut whole, mut drops) = (StreamReader::new(), StreamReader::new());
    // A mapped-ram file jumps; its bytes are taken one after the other all the same, or no input would get beyond a
    // block.
    let mut at = 0;
    loop {
        let rest = &bytes[at..];
        let before = whole.position();
        let step = whole.next(rest);
        if !matches!(step, Ok(Step::Done { record: Record::Raw(_), .. })) {
            assert_eq!(step, in_drops(&mut drops, rest));
        } else {
            drops = whole.clone();
        }
        match step {
            Ok(Step::Done { record: Record::Tail, used }) => return assert_eq!(used, 0),
            Ok(Step::Done { record, used }) => {
                assert!(whole.position() >= before + used as u64);
                check(&record, &whole);
                at += used;
            }
            Ok(Step::More { at_least }) => {
                assert!(rest.len() < at_least && at_least <= MAX_RECORD_BYTES);
                return assert!(matches!(whole.cut_short(rest), Error::Truncated { .. }));
            }
            Err(_) => return assert_eq!(whole.position(), before),
        }
    }
});

/// The same step, with never a byte more than was asked for.
fn in_drops<'a>(reader: &mut StreamReader, rest: &'a [u8]) -> Result<Step<Record<'a>>, Error> {
    let mut given = 0;
    loop {
        match reader.next(&rest[..given]) {
            Ok(Step::More { at_least }) if at_least <= rest.len() => given = at_least,
            step => return step,
        }
    }
}

fn check(record: &Record<'_>, reader: &StreamReader) {
    assert!(reader.blocks().len() <= MAX_BLOCKS);
    if let Record::Page(page) = record {
        assert!(page.offset < reader.blocks()[page.block].used_bytes && page.offset % 4096 == 0);
    }
}
