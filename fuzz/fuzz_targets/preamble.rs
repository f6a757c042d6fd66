//! A preamble, or a record of a probe, from anybody: refused, or written back as the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::{Preamble, Probe};

fuzz_target!(|bytes: &[u8]| {
    if let Some((header, _)) = bytes.split_first_chunk()
        && let Ok(preamble) = Preamble::decode(header)
    {
        assert_eq!(preamble.encode(), *header);
    }
    if let Some((record, _)) = bytes.split_first_chunk()
        && let Ok(probe) = Probe::decode(record)
    {
        assert_eq!(probe.encode(), *record);
    }
});
