//! Whatever bytes come.
use std::fs;

use proptest::{collection::vec, prelude::*};
use transship_engine::{Format, Rule};
use transship_wire::qemu::{Name, Packet, Pages};

use super::{
    captured::{Order, Stream, into_file},
    refused::refusal,
};

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever comes: it ends, and there is a file if and only if all is well.
    #[test]
    fn a_changed_stream_is_refused_or_received(
        which in 0..5usize,
        changes in vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..6u8, any::<u64>()), 1..4),
        format in prop_oneof![Just(Format::MappedRam), Just(Format::Stream)],
    ) {
        let mut stream = match which {
            0 => Stream::plain(),
            n => Stream::multifd(["none-10.0.2", "zlib-10.0.2", "zstd-10.0.2", "none-7.2.22"][n - 1]),
        };
        for (part, at, how, value) in changes {
            let mut parts = stream.all();
            let part = part.index(parts.len());
            let bytes = &mut parts[part];
            // The heads of things, half of the time.
            let at = at.index(if value % 2 == 0 { bytes.len().min(3000) } else { bytes.len() });
            change(bytes, at, how, value);
        }
        if !stream.main.starts_with(b"QEVM") {
            return Ok(()); // a stranger
        }
        let folder = tempfile::tempdir().unwrap();
        let (ended, file) = into_file(folder.path(), &stream, Order::MainFirst, format);
        prop_assert_eq!(file.exists(), ended.result.is_ok());
        prop_assert_eq!(fs::read_dir(folder.path()).unwrap().count(), usize::from(ended.result.is_ok()));
    }
}

fn change(bytes: &mut Vec<u8>, at: usize, how: u8, value: u64) {
    match how {
        0 => bytes[at] ^= 1 << (value % 8),
        1 => bytes[at] = value as u8,
        2 => bytes.truncate(at.max(5)),
        3 => {
            let more = (value % 64) as usize;
            bytes.splice(at..at, std::iter::repeat_n(value as u8, more));
        }
        4 => {
            let end = bytes.len().min(at + 8);
            let count = end - at;
            bytes[at..end].copy_from_slice(&value.to_be_bytes()[..count]);
        }
        _ => {
            let end = bytes.len().min(at + (value % 64) as usize);
            bytes.drain(at..end);
        }
    }
}

/// State of a VFIO device has a header of its own, which is shorter than that of pages: nothing more need come for it
/// to be refused.
#[test]
fn state_of_devices_on_channels_is_refused() {
    let mut stream = Stream::multifd("none-10.0.2").with_return_path();
    let name = Name::new("0000:00:05.0/vfio").unwrap();
    let state = transship_wire::qemu::DeviceState { name, instance: 0, payload_bytes: 5 };
    let at = 64 + Pages::barrier().encode().len();
    stream.channels[1].truncate(at);
    stream.channels[1].extend(Packet::DeviceState(state).encode());
    let error = refusal(&stream, Order::MainFirst, None);
    assert_eq!(error.rule(), Some(Rule::Abilities), "{error}");
    assert!(error.to_string().contains("0000:00:05.0/vfio"), "it is named: {error}");
}
