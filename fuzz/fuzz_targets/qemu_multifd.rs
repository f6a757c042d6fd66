//! A multifd channel from anybody: a greeting, then packets without their payload. What is accepted keeps its bounds,
//! and written again means the same.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::qemu::{Greeting, MAX_PACKET_PAGES, MAX_PAYLOAD_BYTES, Method, Packet, Pages, Step};

fuzz_target!(|bytes: &[u8]| {
    let Some((header, mut rest)) = bytes.split_first_chunk() else { return };
    if let Ok(greeting) = Greeting::decode(header) {
        assert_eq!(greeting.encode(), *header);
    }
    loop {
        match Packet::read(rest, 64) {
            Ok(Step::Done { record, used }) => {
                if let Packet::Pages(pages) = &record {
                    check(pages);
                }
                let again = record.encode();
                assert_eq!(Packet::read(&again, 0), Ok(Step::Done { record, used: again.len() }));
                rest = &rest[used..];
            }
            Ok(Step::More { at_least }) => return assert!(rest.len() < at_least && at_least <= 1344),
            Err(_) => return,
        }
    }
});

fn check(pages: &Pages) {
    let (normal, zero) = (pages.normal(), pages.zero());
    assert!(normal.len() + zero.len() <= MAX_PACKET_PAGES);
    assert_eq!(pages.block().is_some(), normal.len() + zero.len() > 0);
    assert!(normal.iter().chain(zero).all(|offset| offset % 4096 == 0 && *offset < 1 << 56));
    assert_eq!(normal.is_empty(), pages.payload_bytes() == 0);
    assert!(pages.payload_bytes() <= MAX_PAYLOAD_BYTES);
    if pages.method == Method::None {
        assert_eq!(pages.payload_bytes() as usize, normal.len() * 4096);
    }
}
