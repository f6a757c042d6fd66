//! Bytes that no honest peer sends: each is an error that names the field and its offset, none is a panic.
use crate::common::*;
use transship_wire::*;

fn decode_packet(bytes: &[u8]) -> Result<Packet, Error> {
    Packet::decode(bytes.try_into().unwrap())
}

fn decode_preamble(bytes: &[u8]) -> Result<Preamble, Error> {
    Preamble::decode(bytes.try_into().unwrap())
}

/// The bytes of a Hello, with the payload's length put right after a change.
fn hello_with(change: impl FnOnce(&mut GuestDescription)) -> Vec<u8> {
    let mut guest = guest();
    change(&mut guest);
    Message::Hello { channels: 1, verify: false, post_copy: false, lends: false, guest }.encode(1)
}

#[test]
fn a_message_cut_anywhere_is_refused_whatever_its_frame_says() {
    for (message, name, bytes) in messages() {
        let payload = &bytes[FRAME_BYTES..];
        for cut in 0..payload.len() {
            let honest = Frame { kind: bytes[0].into(), payload: payload.len() as u32, id: 1 };
            let error = Message::decode(&honest, &payload[..cut]).unwrap_err();
            let missing = payload.len() - cut;
            assert_eq!(error, Error::Truncated { field: "message payload", offset: FRAME_BYTES, missing }, "{name}");

            // The frame agrees with what is there. Only a State may be shorter: it has no inner structure.
            let short = Frame { payload: cut as u32, ..honest };
            match Message::decode(&short, &payload[..cut]) {
                Ok(Message::State { bytes }) => {
                    assert!(matches!(message, Message::State { .. }) && bytes.len() == cut)
                }
                Ok(other) => panic!("{name} cut after {cut} bytes was read as {other:?}"),
                Err(_) => {}
            }
        }
    }
}

#[test]
fn bytes_after_a_message_are_refused() {
    for (_, name, bytes) in messages().into_iter().filter(|(_, name, _)| *name != "State") {
        let payload = [&bytes[FRAME_BYTES..], &[0]].concat();
        let honest = Frame { kind: bytes[0].into(), payload: payload.len() as u32 - 1, id: 1 };
        let error = Message::decode(&honest, &payload).unwrap_err();
        assert!(matches!(error, Error::Trailing { field: "message payload", extra: 1, .. }), "{error}");
        let long = Frame { payload: payload.len() as u32, ..honest };
        let error = Message::decode(&long, &payload).unwrap_err();
        assert_eq!(error, Error::Trailing { field: name, offset: bytes.len(), extra: 1 });
    }
}

#[test]
fn frames_with_a_bad_field_are_refused() {
    let (_, _, go) = messages().swap_remove(8);
    for kind in [0u16, 22, 0x0109, u16::MAX] {
        assert_invalid(decode(&patched(&go, 0, &kind.to_le_bytes())), "frame kind", 0);
    }
    assert_invalid(decode(&patched(&go, 2, &[1])), "frame reserved", 2);
    assert_invalid(decode(&patched(&go, 3, &[0x80])), "frame reserved", 3);
    assert_invalid(decode(&patched(&go, 8, &[0; 8])), "frame id", 8);
    let unknown = Frame { kind: 99, payload: 0, id: 1 };
    assert_invalid(Message::decode(&unknown, &[]), "frame kind", 0);
}

#[test]
fn a_frame_is_believed_only_a_length_that_its_kind_can_have() {
    let allowed: [(u16, usize, usize); 20] = [
        (1, 18, MAX_MESSAGE_BYTES),
        (2, 0, 0),
        (3, 20, 20),
        (4, 32, 32),
        (5, 32, 32),
        (6, 1, MAX_STATE_BYTES),
        (7, 40, 40),
        (8, 0, 0),
        (9, 1, 1),
        (10, 0, 0),
        (11, 2, 2 + MAX_REASON_BYTES),
        (13, 28, 4 + 24 * MAX_OWED_WINDOWS),
        (14, 8, 8),
        (15, 10, 10),
        (16, 12, 12 + MAX_PAGES_AT_ONCE * PAGE_BYTES),
        (17, 0, 0),
        (18, 0, 0),
        (19, 0, 0),
        (20, 11, 3 + 8 * MAX_REGIONS),
        (21, 1, 1),
    ];
    for (kind, least, most) in allowed {
        let frame = |payload: usize| Frame { kind, payload: payload as u32, id: 1 };
        for good in [least, most] {
            assert_eq!(Frame::decode(&frame(good).encode()), Ok(frame(good)));
        }
        assert!(most <= MAX_MESSAGE_BYTES);
        for bad in least.checked_sub(1).into_iter().chain([most + 1, MAX_MESSAGE_BYTES + 1, u32::MAX as usize]) {
            assert_invalid(Frame::decode(&frame(bad).encode()), "frame payload", 4);
        }
    }
}

#[test]
fn the_largest_guest_fits_a_hello_and_nothing_larger_does() {
    let region = |i: usize| RegionDescription { name: format!("{i:0>255}"), bytes: (1 << 56) - 4096 };
    let mut guest = GuestDescription { machine: "m".repeat(255), regions: (0..MAX_REGIONS).map(region).collect() };
    assert_eq!(guest.check(), Ok(()));
    let hello = Message::Hello { channels: 255, verify: false, post_copy: false, lends: false, guest: guest.clone() };
    let bytes = hello.encode(1);
    assert_eq!(bytes.len(), FRAME_BYTES + MAX_MESSAGE_BYTES);
    assert_eq!(decode(&bytes), Ok((1, hello)));

    guest.regions.push(region(MAX_REGIONS));
    assert_invalid(guest.check(), "region count", 0);
    assert!(
        decode(&Message::Hello { channels: 255, verify: false, post_copy: false, lends: false, guest }.encode(1))
            .is_err()
    );
}

#[test]
fn hellos_with_a_bad_field_are_refused() {
    let (_, _, hello) = messages().swap_remove(0);
    assert_invalid(decode(&patched(&hello, 16, &[0])), "Hello channels", 16);
    assert_invalid(decode(&patched(&hello, 17, &[3])), "Hello flags", 17);
    assert!(decode(&patched(&hello, 17, &[5])).is_ok());
    assert_invalid(decode(&patched(&hello, 17, &[6])), "Hello flags", 17);
    assert_invalid(decode(&patched(&hello, 17, &[8])), "Hello flags", 17);
    assert_invalid(decode(&patched(&hello, 17, &[0x81])), "Hello flags", 17);
    assert_invalid(decode(&patched(&hello, 18, &[0, 0])), "region count", 18);
    assert_invalid(decode(&patched(&hello, 18, &1025u16.to_le_bytes())), "region count", 18);
    // One region more than there is, and one less.
    let more = decode(&patched(&hello, 18, &[3])).unwrap_err();
    assert_eq!(more, Error::Truncated { field: "region bytes", offset: hello.len(), missing: 8 });
    let less = decode(&patched(&hello, 18, &[1])).unwrap_err();
    assert_eq!(less, Error::Trailing { field: "Hello", offset: 37, extra: 12 });
    // Machine: its length, then its text.
    assert_invalid(decode(&patched(&hello, 20, &[0, 1])), "machine", 20);
    assert_eq!(decode(&patched(&hello, 22, &[0xff])), Err(Error::Text { field: "machine", offset: 22 }));
    assert_invalid(decode(&patched(&hello, 23, b"\x1b")), "machine", 23);
    for bytes in [0u64, 1, 4095, 4097, 1 << 56, u64::MAX, 1 << 63] {
        assert_invalid(decode(&patched(&hello, 24, &bytes.to_le_bytes())), "region bytes", 24);
    }
    assert_invalid(decode(&patched(&hello, 32, &[0xff, 0xff])), "region name", 32);
    assert_eq!(decode(&patched(&hello, 48, &[0xc3])), Err(Error::Text { field: "region name", offset: 47 }));
}

#[test]
fn guests_with_bad_names_are_refused() {
    assert_invalid(decode(&hello_with(|g| g.machine.clear())), "machine", 20);
    assert_invalid(decode(&hello_with(|g| g.machine = "m".repeat(256))), "machine", 20);
    assert_invalid(decode(&hello_with(|g| g.machine = "m".repeat(70_000))), "machine", 20);
    assert_invalid(decode(&hello_with(|g| g.regions[0].name.clear())), "region name", 32);
    assert_invalid(decode(&hello_with(|g| g.regions[0].name = "r".repeat(256))), "region name", 32);
    assert_invalid(decode(&hello_with(|g| g.regions[1].name = "ram".into())), "region name", 47);
    assert_invalid(decode(&hello_with(|g| g.regions.clear())), "frame payload", 4);
}

#[test]
fn a_guest_is_checked_by_the_rules_that_the_peer_applies() {
    assert_eq!(guest().check(), Ok(()));
    let mut twins = guest();
    twins.regions[1].name = "ram".into();
    assert_invalid(twins.check(), "region name", 29);
    let mut crowd = guest();
    crowd.regions = vec![crowd.regions[0].clone(); 70_000];
    assert_invalid(crowd.check(), "region count", 0);
}

#[test]
fn states_out_of_bounds_are_refused() {
    let most = Message::State { bytes: vec![7; MAX_STATE_BYTES] };
    assert_eq!(decode(&most.encode(1)), Ok((1, most)));
    for count in [0, MAX_STATE_BYTES + 1] {
        let state = Message::State { bytes: vec![7; count] };
        assert_invalid(decode(&state.encode(1)), "frame payload", 4);
        let frame = Frame { kind: 6, payload: count as u32, id: 1 };
        assert_invalid(Message::decode(&frame, &vec![7; count]), "State bytes", 16);
    }
}

#[test]
fn flags_and_texts_with_bad_values_are_refused() {
    let (_, _, go) = messages().swap_remove(8);
    for flags in [2, 3, 0xff] {
        assert_invalid(decode(&patched(&go, 16, &[flags])), "Go run", 16);
    }
    let (_, _, abort) = messages().swap_remove(10);
    assert_invalid(decode(&patched(&abort, 16, &4097u16.to_le_bytes())), "Abort reason", 16);
    assert_invalid(decode(&patched(&abort, 19, b"\n")), "Abort reason", 19);
    assert_eq!(decode(&patched(&abort, 19, &[0x80])), Err(Error::Text { field: "Abort reason", offset: 19 }));
    let inner = decode(&patched(&abort, 16, &[3])).unwrap_err();
    assert_eq!(inner, Error::Truncated { field: "Abort reason", offset: 18, missing: 1 });
}

/// A reason may hold anything that an error message of a VMM holds; it must still arrive, harmless and not too long.
#[test]
fn a_reason_is_made_fit_to_travel() {
    let arrives = |reason: &str| match decode(&Message::Abort(Refusal { reason: reason.into() }).encode(1)) {
        Ok((1, Message::Abort(refusal))) => refusal.reason,
        other => panic!("{reason:?} became {other:?}"),
    };
    assert_eq!(arrives(""), "");
    assert_eq!(arrives("a\nb\x1b[2J\u{9b}c"), "a b [2J c");
    assert_eq!(arrives(&"x".repeat(4096)), "x".repeat(4096));
    assert_eq!(arrives(&"x".repeat(5000)), "x".repeat(4096));
    assert_eq!(arrives(&format!("x{}", "é".repeat(4000))), format!("x{}", "é".repeat(2047)));
}

#[test]
fn packets_with_a_bad_field_are_refused() {
    for (packet, bytes) in packets() {
        assert_invalid(decode_packet(&patched(&bytes, 0, b"QEVM")), "packet magic", 0);
        for kind in [0, 6, 0xff] {
            assert_invalid(decode_packet(&patched(&bytes, 4, &[kind])), "packet kind", 4);
        }
        let encoded = decode_packet(&patched(&bytes, 5, &[1]));
        match packet {
            // The payload of raw pages is too long for encoded ones.
            Packet::Pages { .. } => assert_invalid(encoded, "packet payload", 12),
            Packet::Encoded { .. } | Packet::Lent { .. } => assert!(encoded.is_ok()),
            _ => assert_invalid(encoded, "packet encoding", 5),
        }
        let reserved = if matches!(packet, Packet::Slot { .. }) { 57 } else { 56 };
        for offset in reserved..PACKET_BYTES {
            assert_invalid(decode_packet(&patched(&bytes, offset, &[1])), "packet reserved", offset);
        }
        if !matches!(packet, Packet::RoundEnd { .. }) {
            assert_invalid(decode_packet(&patched(&bytes, 6, &1024u16.to_le_bytes())), "packet region", 6);
        }
        if matches!(packet, Packet::Hole { .. } | Packet::RoundEnd { .. }) {
            for offset in 32..56 {
                assert_invalid(decode_packet(&patched(&bytes, offset, &[1])), "packet body", offset);
            }
        }
        if packet.payload_bytes() == 0 {
            assert_invalid(decode_packet(&patched(&bytes, 13, &[0x10])), "packet payload", 13);
        }
    }
}

#[test]
fn pages_that_contradict_themselves_are_refused() {
    let (_, bytes) = packets().swap_remove(0);
    let with = |offset, new: &[u8]| decode_packet(&patched(&bytes, offset, new));
    for payload in [0u32, 0x2000, 0x4000, 0x2fff, u32::MAX] {
        assert_invalid(with(12, &payload.to_le_bytes()), "packet payload", 12);
    }
    assert_invalid(with(24, &[0x0d]), "packet payload", 12);
    for first in [1u64, 127, 0x1c0] {
        assert_invalid(with(16, &first.to_le_bytes()), "packet first page", 16);
    }
    for first in [1u64 << 44, u64::MAX, (1 << 44) - 127, u64::MAX - 127] {
        assert_invalid(with(16, &first.to_le_bytes()), "packet first page", 16);
    }
    assert!(with(16, &((1u64 << 44) - 128).to_le_bytes()).is_ok());
    assert_invalid(with(40, &[0x01]), "packet zero mask", 40);
    assert_invalid(with(55, &[0x80]), "packet zero mask", 40);
    let empty = Packet::Pages { round: 0, region: 0, first: 0, present: 0, zero: 0 };
    assert_invalid(Packet::decode(&empty.encode()), "packet zero mask", 40);
}

#[test]
fn a_payload_of_a_wrong_length_is_told_its_own_rule() {
    for (packet, bytes) in packets() {
        let rule = match packet {
            Packet::Pages { .. } => "not 4096 bytes for each present page",
            Packet::Encoded { .. } => "not between 0 and 4096 bytes for each present page",
            _ => continue,
        };
        let error = decode_packet(&patched(&bytes, 12, &u32::MAX.to_le_bytes())).unwrap_err().to_string();
        assert!(error.contains(rule), "{error}");
    }
}

#[test]
fn encoded_pages_that_contradict_themselves_are_refused() {
    let encoded = |present, zero, method, bytes| {
        Packet::decode(&Packet::Encoded { round: 3, region: 1, first: 256, present, zero, method, bytes }.encode())
    };
    assert!(encoded(0b11, 0b100, 2, 8191).is_ok());
    assert_invalid(encoded(0b11, 0, 2, 8192), "packet payload", 12);
    assert_invalid(encoded(0b11, 0, 2, 0), "packet payload", 12);
    assert_invalid(encoded(0, 0b1, 2, 1), "packet payload", 12);
    assert_invalid(encoded(0b11, 0b10, 2, 1), "packet zero mask", 40);
}

#[test]
fn what_is_lent_is_checked() {
    let (_, slot) = packets().swap_remove(3);
    assert_invalid(decode_packet(&patched(&slot, 24, &[0; 16])), "packet present mask", 24);
    assert_invalid(decode_packet(&patched(&slot, 40, &[1])), "packet zero mask", 40);
    assert_invalid(decode_packet(&patched(&slot, 16, &[0x81])), "packet first page", 16);
    let (_, bytes) = packets().swap_remove(4);
    let with = |offset, new: &[u8]| decode_packet(&patched(&bytes, offset, new));
    assert_invalid(with(5, &[2]), "packet encoding", 5);
    assert_invalid(with(16, &[0x81]), "packet first page", 16);
    assert_invalid(with(16, &(1u64 << 44).to_le_bytes()), "packet first page", 16);
    assert_invalid(with(40, &[1]), "packet zero mask", 40);
    let empty = Packet::Lent { round: 0, region: 0, first: 0, wanted: 0, zero: 0, look: false };
    assert_invalid(Packet::decode(&empty.encode()), "packet zero mask", 40);

    let lent = |offsets: Vec<Option<u64>>| Message::Lent { offsets, slots: 0 };
    let most = lent(vec![Some(u64::MAX - 1); MAX_REGIONS]);
    assert_eq!(decode(&most.encode(1)), Ok((1, most)));
    assert_invalid(decode(&lent(vec![]).encode(1)), "frame payload", 4);
    assert_invalid(decode(&lent(vec![None; MAX_REGIONS + 1]).encode(1)), "frame payload", 4);
    let one = lent(vec![None]).encode(1);
    assert_invalid(decode(&patched(&one, 17, &[0])), "Lent regions", 17);
    assert_invalid(decode(&patched(&one, 17, &[1, 4])), "Lent regions", 17);
    assert!(matches!(decode(&patched(&one, 17, &[2])), Err(Error::Truncated { field: "Lent offset", .. })));
}

#[test]
fn holes_that_end_nowhere_are_refused() {
    let (_, bytes) = packets().swap_remove(1);
    let with = |offset, new: u64| decode_packet(&patched(&bytes, offset, &new.to_le_bytes()));
    assert_invalid(with(24, 0), "packet count", 24);
    assert_invalid(with(24, u64::MAX), "packet count", 24);
    assert_invalid(with(24, (1 << 44) - 0x80), "packet count", 24);
    assert!(with(24, (1 << 44) - 0x81).is_ok());
    assert_invalid(with(16, u64::MAX), "packet first page", 16);
    assert_invalid(with(16, 1 << 44), "packet first page", 16);
}

#[test]
fn round_ends_that_speak_of_pages_are_refused() {
    let (_, bytes) = packets().swap_remove(2);
    assert_invalid(decode_packet(&patched(&bytes, 6, &[1])), "packet region", 6);
    assert_invalid(decode_packet(&patched(&bytes, 12, &[1])), "packet payload", 12);
    assert_invalid(decode_packet(&patched(&bytes, 23, &[1])), "packet first page", 23);
}

#[test]
fn preambles_with_a_bad_field_are_refused() {
    let [(_, control), (_, data), (_, probe), (_, supply), (_, push)] = preambles().try_into().unwrap();
    for bytes in [&control, &data, &probe, &supply, &push] {
        assert_invalid(decode_preamble(&patched(bytes, 0, b"GET ")), "preamble magic", 0);
        for version in [0u16, 2, 0x0101] {
            assert_invalid(decode_preamble(&patched(bytes, 4, &version.to_le_bytes())), "preamble version", 4);
        }
        for role in [0, 5, 0xff] {
            assert_invalid(decode_preamble(&patched(bytes, 6, &[role])), "preamble role", 6);
        }
        for offset in 28..PREAMBLE_BYTES {
            assert_invalid(decode_preamble(&patched(bytes, offset, &[1])), "preamble reserved", offset);
        }
    }
    for bytes in [&control, &supply, &probe] {
        assert_invalid(decode_preamble(&patched(bytes, 7, &[1])), "preamble channel", 7);
    }
    for bytes in [&data, &push] {
        assert_invalid(decode_preamble(&patched(bytes, 7, &[255])), "preamble channel", 7);
    }
    for (bytes, line) in [(&control, 1), (&data, 1), (&probe, 1), (&supply, 0), (&push, 0)] {
        assert_invalid(decode_preamble(&patched(bytes, 24, &[line, 0, 0, 0])), "preamble line", 24);
    }
}

#[test]
fn an_error_says_what_is_wrong_and_where() {
    let (_, control) = preambles().swap_remove(0);
    let error = decode_preamble(&patched(&control, 4, &[9])).unwrap_err();
    assert_eq!(error.to_string(), "preamble version at offset 4 is 0x9: use the same transship on both sides");
}

#[test]
fn what_post_copy_says_is_checked() {
    let message = |name: &str| messages().into_iter().find(|(_, found, _)| *found == name).unwrap().2;
    let owed = message("Owed");
    for (offset, value, field) in [
        (16, &0x400_u16.to_le_bytes()[..], "Owed region"),
        (18, &[0, 0], "Owed count"),
        (18, &[1, 0x20], "Owed count"),
        (20, &[0x81], "Owed first"),
        (28, &[0], "Owed pages"),
        (44, &[0; 8], "Owed first"), // windows ascend
    ] {
        assert_invalid(decode(&patched(&owed, offset, value)), field, offset);
    }
    assert_invalid(decode(&patched(&owed, 26, &[0x10])), "Owed first", 20);
    assert_invalid(decode(&patched(&message("Want"), 16, &[0, 4])), "Want region", 16);
    assert_invalid(decode(&patched(&message("Want"), 24, &[0x10])), "Want page", 18);
    let page = message("Page");
    for (offset, value, field, at) in [
        (16, &[0, 4][..], "Page region", 16),
        (24, &[0x10], "Page first", 18),
        (26, &[0], "Page count", 26),
        (26, &[33], "Page count", 26),
        (27, &[2], "Page content", 27),
    ] {
        assert_invalid(decode(&patched(&page, offset, value)), field, at);
    }
    assert!(matches!(decode(&patched(&page, 26, &[3])), Err(Error::Truncated { field: "Page bytes", .. })));
    assert!(matches!(decode(&patched(&page, 26, &[1])), Err(Error::Trailing { field: "Page", .. })));
    assert!(matches!(decode(&patched(&page, 27, &[0])), Err(Error::Trailing { field: "Page", .. })));
}

/// The first and the last pages that a region can have travel as all others do.
#[test]
fn the_limits_of_post_copy_are_exact() {
    let end = 1 << 44;
    let accepts = |message: Message| assert_eq!(decode(&message.encode(7)), Ok((7, message)));
    let owed = |firsts: &[u64]| Message::Owed {
        region: 5,
        windows: firsts.iter().map(|&first| OwedWindow { first, pages: 1 }).collect(),
    };
    accepts(owed(&[0, 128, 256]));
    accepts(owed(&[end - 256, end - 128]));
    assert_invalid(decode(&owed(&[end]).encode(7)), "Owed first", 20);
    assert_invalid(decode(&owed(&[0, 0]).encode(7)), "Owed first", 44);
    assert_invalid(decode(&owed(&[256, 128]).encode(7)), "Owed first", 44);

    accepts(Message::Want { region: 5, page: end - 1 });
    assert_invalid(decode(&Message::Want { region: 5, page: end }.encode(7)), "Want page", 18);

    let pages = |first, count| Message::Page(Pages { region: 5, first, count, bytes: vec![] });
    for (first, count) in [(0, 32), (end - 33, 32), (end - 32, 32), (end - 1, 1)] {
        accepts(pages(first, count));
    }
    for (first, count) in [(end - 31, 32), (end - 1, 2)] {
        assert_invalid(decode(&pages(first, count).encode(7)), "Page count", 26);
    }
    assert_invalid(decode(&pages(end, 1).encode(7)), "Page first", 18);
}
