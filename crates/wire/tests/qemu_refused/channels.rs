//! The same of multifd channels: greetings and packets.
use super::*;

#[test]
fn greetings() {
    let good = Greeting { uuid: [3; 16], channel: 1 }.encode();
    for (place, byte, field, offset) in [
        (3, 0, "greeting magic", 0),
        (7, 2, "greeting version", 4),
        (24, 255, "greeting channel", 24),
        (25, 1, "greeting reserved", 25),
        (63, 1, "greeting reserved", 63),
    ] {
        let mut bytes = good;
        bytes[place] = byte;
        assert_eq!(Greeting::decode(&bytes).unwrap_err().place(), (field, offset));
    }
}

fn pages(method: Method) -> Vec<u8> {
    Pages::new(name("pc.ram"), &[0, PAGE], &[2 * PAGE], method, 100).encode().to_vec()
}

#[track_caller]
fn refused(mut bytes: Vec<u8>, place: usize, new: &[u8], field: &str, offset: usize) {
    bytes[place..][..new.len()].copy_from_slice(new);
    let error = Packet::read(&bytes, 500).expect_err("it should be refused");
    assert_eq!(error.place(), (field, 500 + offset), "{error}");
}

#[test]
fn packets_with_pages() {
    let raw = || pages(Method::None);
    refused(raw(), 0, &[0], "packet magic", 0);
    refused(raw(), 7, &[2], "packet version", 4);
    for flags in [0x80u32, 1 << 31, 0x06, 0x0c, 0x3e] {
        refused(raw(), 8, &flags.to_be_bytes(), "packet flags", 8);
    }
    refused(raw(), 12, &129u32.to_be_bytes(), "packet capacity", 12);
    // Two normal pages and a zero page want room for three.
    refused(raw(), 12, &1u32.to_be_bytes(), "packet normal pages", 16);
    refused(raw(), 12, &2u32.to_be_bytes(), "packet zero pages", 32);
    refused(raw(), 16, &129u32.to_be_bytes(), "packet normal pages", 16);
    refused(raw(), 32, &127u32.to_be_bytes(), "packet zero pages", 32);
    refused(raw(), 32, &u32::MAX.to_be_bytes(), "packet zero pages", 32);
    refused(raw(), 20, &8191u32.to_be_bytes(), "packet payload", 20);
    refused(pages(Method::Zstd), 20, &0u32.to_be_bytes(), "packet payload", 20);
    refused(pages(Method::Zlib), 20, &(MAX_PAYLOAD_BYTES + 1).to_be_bytes(), "packet payload", 20);
    refused(raw(), 63, &[1], "packet reserved", 63);
    refused(raw(), 64, &[0], "packet block", 64);
    refused(raw(), 65, &[7], "packet block", 65);
    refused(raw(), 320, &1u64.to_be_bytes(), "packet offset", 320);
    refused(raw(), 336, &(1u64 << 56).to_be_bytes(), "packet offset", 336);
}

/// What 7.2 leaves behind in packets without pages is not looked at, also if it is nonsense.
#[test]
fn stale_fields() {
    let mut bytes = Pages::barrier().encode().to_vec();
    bytes[15] = 128;
    bytes[20..24].fill(0xff);
    bytes[64..].fill(0xff);
    let step = Packet::read(&bytes, 0).unwrap();
    assert_eq!(step, Step::Done { record: Packet::Pages(Pages::barrier()), used: PACKET_HEADER_BYTES });
}

#[test]
fn packets_with_device_state() {
    let good = || Packet::DeviceState(DeviceState { name: name("vfio"), instance: 0, payload_bytes: 9 }).encode();
    refused(good(), 11, &[0x41], "packet flags", 8);
    refused(good(), 11, &[0x42], "packet flags", 8);
    refused(good(), 12, &[0], "packet device", 12);
    refused(good(), 275, &[0], "packet payload", 272);
}
