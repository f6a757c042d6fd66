//! One good example of everything, and what the tests do with them.
#![allow(dead_code, clippy::unwrap_used)]
use transship_wire::*;

/// Bytes written as hex digits; blanks separate the fields.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16).unwrap()).collect();
    assert!(digits.len().is_multiple_of(2), "half a byte in {text:?}");
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}

/// Frame and payload as a receiver takes them: the header first, then as much payload as it announces.
pub(crate) fn decode(bytes: &[u8]) -> Result<(u64, Message), Error> {
    let (header, payload) = bytes.split_first_chunk().expect("a frame header");
    let frame = Frame::decode(header)?;
    Ok((frame.id, Message::decode(&frame, payload)?))
}

/// A guest of two regions.
pub(crate) fn guest() -> GuestDescription {
    GuestDescription {
        machine: "pc".into(),
        regions: vec![
            RegionDescription { name: "ram".into(), bytes: 0x1000_0000 },
            RegionDescription { name: "é".into(), bytes: 0x1000 },
        ],
    }
}

/// Every message once, with its name and its bytes under the id 0x0102.
pub(crate) fn messages() -> Vec<(Message, &'static str, Vec<u8>)> {
    let digest: [u8; 32] = std::array::from_fn(|i| i as u8);
    let digest_hex = "000102030405060708090a0b0c0d0e0f 101112131415161718191a1b1c1d1e1f";
    let id = "0201000000000000";
    vec![
        (
            Message::Hello { channels: 4, verify: true, post_copy: false, lends: false, guest: guest() },
            "Hello",
            hex(&format!(
                "0100 0000 21000000 {id} 04 01 0200 0200 7063
                 0000001000000000 0300 72616d   0010000000000000 0200 c3a9"
            )),
        ),
        (Message::Welcome, "Welcome", hex(&format!("0200 0000 00000000 {id}"))),
        (
            Message::RoundDone { round: 3, pages: 0x1122, zero: 0x33 },
            "RoundDone",
            hex(&format!("0300 0000 14000000 {id} 03000000 2211000000000000 3300000000000000")),
        ),
        (Message::Digest { digest }, "Digest", hex(&format!("0400 0000 20000000 {id} {digest_hex}"))),
        (Message::DigestIs { digest }, "DigestIs", hex(&format!("0500 0000 20000000 {id} {digest_hex}"))),
        (Message::State { bytes: b"QEVM".into() }, "State", hex(&format!("0600 0000 04000000 {id} 5145564d"))),
        (
            Message::StateEnd { bytes: 0x0dbba0, digest },
            "StateEnd",
            hex(&format!("0700 0000 28000000 {id} a0bb0d0000000000 {digest_hex}")),
        ),
        (Message::Loaded, "Loaded", hex(&format!("0800 0000 00000000 {id}"))),
        (Message::Go { run: true }, "Go", hex(&format!("0900 0000 01000000 {id} 01"))),
        (Message::Running, "Running", hex(&format!("0a00 0000 00000000 {id}"))),
        (Message::Abort(Refusal { reason: "no".into() }), "Abort", hex(&format!("0b00 0000 04000000 {id} 0200 6e6f"))),
        (Message::DigestWanted, "DigestWanted", hex(&format!("0c00 0000 00000000 {id}"))),
        (
            Message::Owed {
                region: 5,
                windows: vec![OwedWindow { first: 0x80, pages: 0b101 }, OwedWindow { first: 0x300, pages: 1 << 127 }],
            },
            "Owed",
            hex(&format!(
                "0d00 0000 34000000 {id} 0500 0200 8000000000000000 05000000000000000000000000000000
                 0003000000000000 00000000000000000000000000000080"
            )),
        ),
        (Message::OwedEnd { pages: 3 }, "OwedEnd", hex(&format!("0e00 0000 08000000 {id} 0300000000000000"))),
        (
            Message::Want { region: 1, page: 0x1234 },
            "Want",
            hex(&format!("0f00 0000 0a000000 {id} 0100 3412000000000000")),
        ),
        (
            Message::Page(Pages { region: 1, first: 0x1234, count: 2, bytes: vec![7; 2 * PAGE_BYTES] }),
            "Page",
            [hex(&format!("1000 0000 0c200000 {id} 0100 3412000000000000 02 01")), vec![7; 2 * PAGE_BYTES]].concat(),
        ),
        (Message::Complete, "Complete", hex(&format!("1100 0000 00000000 {id}"))),
        (Message::Stale, "Stale", hex(&format!("1200 0000 00000000 {id}"))),
        (Message::Lend, "Lend", hex(&format!("1300 0000 00000000 {id}"))),
        (
            Message::Lent { offsets: vec![Some(0x20_0000), None], slots: 4 },
            "Lent",
            hex(&format!("1400 0000 13000000 {id} 04 0200 0000200000000000 ffffffffffffffff")),
        ),
        (Message::Borrowed { is_readable: true }, "Borrowed", hex(&format!("1500 0000 01000000 {id} 01"))),
    ]
}

/// Every packet once, with its bytes.
pub(crate) fn packets() -> Vec<(Packet, Vec<u8>)> {
    vec![
        (
            Packet::Pages { round: 2, region: 5, first: 0x180, present: 0b101 | 1 << 127, zero: 0b10 },
            hex("5453504b 01 00 0500 02000000 00300000 8001000000000000
                 05000000000000000000000000000080 02000000000000000000000000000000 0000000000000000"),
        ),
        (
            Packet::Hole { round: 7, region: 1, first: 0x81, count: 0x10000 },
            hex("5453504b 02 00 0100 07000000 00000000 8100000000000000
                 0000010000000000 0000000000000000 00000000000000000000000000000000 0000000000000000"),
        ),
        (
            Packet::RoundEnd { round: 9, packets: 0x0a0b },
            hex("5453504b 03 00 0000 09000000 00000000 0000000000000000
                 0b0a000000000000 0000000000000000 00000000000000000000000000000000 0000000000000000"),
        ),
        (
            Packet::Slot { round: 2, region: 5, first: 0x180, present: 0b101 | 1 << 127, zero: 0b10, slot: 3 },
            hex("5453504b 05 00 0500 02000000 00000000 8001000000000000
                 05000000000000000000000000000080 02000000000000000000000000000000 0300000000000000"),
        ),
        (
            Packet::Lent { round: 2, region: 5, first: 0x180, wanted: 0b101 | 1 << 127, zero: 0b10, look: true },
            hex("5453504b 04 01 0500 02000000 00000000 8001000000000000
                 05000000000000000000000000000080 02000000000000000000000000000000 0000000000000000"),
        ),
    ]
}

/// A preamble for each role, with its bytes.
pub(crate) fn preambles() -> Vec<(Preamble, Vec<u8>)> {
    let session = SessionId(std::array::from_fn(|i| 0xa0 + i as u8));
    let session_hex = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf";
    vec![
        (
            Preamble { session, role: Role::Control },
            hex(&format!("54534850 0100 01 00 {session_hex} 0000000000000000")),
        ),
        (
            Preamble { session, role: Role::Data(254) },
            hex(&format!("54534850 0100 02 fe {session_hex} 0000000000000000")),
        ),
        (Preamble { session, role: Role::Probe }, hex(&format!("54534850 0100 10 00 {session_hex} 0000000000000000"))),
        (
            Preamble { session, role: Role::Supply(0x0102) },
            hex(&format!("54534850 0100 03 00 {session_hex} 02010000 00000000")),
        ),
        (
            Preamble { session, role: Role::Push { line: 1, channel: 254 } },
            hex(&format!("54534850 0100 04 fe {session_hex} 01000000 00000000")),
        ),
    ]
}

/// `bytes` with `new` in place of what is at `offset`.
pub(crate) fn patched(bytes: &[u8], offset: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[offset..offset + new.len()].copy_from_slice(new);
    bytes
}

/// Requires a refusal of the value of `field`, at `offset`.
#[track_caller]
pub(crate) fn assert_invalid<T: std::fmt::Debug>(result: Result<T, Error>, field: &str, offset: usize) {
    match result {
        Err(Error::Invalid { field: f, offset: o, .. }) if (f, o) == (field, offset) => {}
        other => panic!("{field} at {offset} should be refused: {other:?}"),
    }
}
