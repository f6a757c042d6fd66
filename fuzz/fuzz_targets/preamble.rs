//! A preamble from anybody: refused, or written back as the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::Preamble;

fuzz_target!(|bytes: &[u8]| {
    let Some((header, _)) = bytes.split_first_chunk() else { return };
    if let Ok(preamble) = Preamble::decode(header) {
        assert_eq!(preamble.encode(), *header);
    }
});
