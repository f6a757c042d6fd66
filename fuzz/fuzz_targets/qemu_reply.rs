//! The answers of a destination, from anybody: refused, or written back as the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::qemu::{Reply, Step};

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Ok(Step::Done { record, used }) = Reply::read(rest, 0) {
        assert_eq!(record.encode(), rest[..used]);
        rest = &rest[used..];
    }
});
