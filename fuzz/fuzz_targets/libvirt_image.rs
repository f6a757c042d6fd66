//! A save image of libvirt's from anybody: header and definition are refused, or written back as something that reads
//! the same.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::libvirt::{Definition, Header, MAX_DEFINITION_BYTES};

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first_chunk() else { return };
    let Ok(header) = Header::decode(first) else { return };
    assert!(header.definition_bytes() <= MAX_DEFINITION_BYTES as usize);
    let Ok(definition) = Definition::decode(&header, rest) else { return };
    let written = definition.encode(header.ran, header.encoding);
    let (first, rest) = written.split_first_chunk().expect("a header was written");
    let again = Header::decode(first).expect("it was written");
    assert_eq!((again.ran, again.encoding), (header.ran, header.encoding));
    assert_eq!(Definition::decode(&again, rest).expect("it was written"), definition);
});
