//! The bytes of a link between two relays: their layout, and what is refused.
use proptest::collection::vec;
use proptest::prelude::*;
use transship_wire::relay::*;
use transship_wire::{Error, Preamble, Refusal, Role, SessionId};

fn reason() -> impl Strategy<Value = Refusal> {
    "\\PC{0,500}"
        .prop_filter("no control characters", |t| !t.contains(char::is_control))
        .prop_map(|reason| Refusal { reason })
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        (1u8..).prop_map(|channels| Message::Hello { channels }),
        Just(Message::Welcome),
        (0..MAX_CONNECTIONS, vec(any::<u8>(), 1..=MAX_FIRST_BYTES))
            .prop_map(|(connection, first)| Message::Open { connection, first }),
        (0..MAX_CONNECTIONS, 1..=MAX_CREDIT).prop_map(|(connection, amount)| Message::Credit { connection, amount }),
        Just(Message::Done),
        (any::<bool>(), reason()).prop_map(|(given, refusal)| {
            let end = if given { TheEnd::Given } else { TheEnd::Withheld };
            Message::Abort { end, refusal }
        }),
    ]
}

fn packet() -> impl Strategy<Value = Packet> {
    let bytes = 1..=MAX_BYTES as u32;
    let encoded =
        (2..=MAX_BYTES as u32, any::<bool>(), 1u8.., any::<u32>()).prop_map(|(bytes, gives_end, method, some)| {
            Content::Encoded { bytes, gives_end, method, payload: 1 + some % (bytes - 1) }
        });
    let content = prop_oneof![
        (bytes, any::<bool>()).prop_map(|(bytes, gives_end)| Content::Raw { bytes, gives_end }),
        encoded,
        Just(Content::End),
    ];
    (0..MAX_CONNECTIONS, any::<u64>(), content).prop_map(|(connection, sequence, content)| Packet {
        connection,
        sequence,
        content,
    })
}

/// Reads a message as an engine does: the text is read only as far as the header says.
fn decode(bytes: &[u8]) -> Result<Message, Error> {
    let header = bytes[..MESSAGE_BYTES].try_into().unwrap();
    let text = Message::payload_bytes(header)?;
    Message::decode(header, &bytes[MESSAGE_BYTES..][..text.min(bytes.len() - MESSAGE_BYTES)])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn messages_survive_and_no_part_of_one_is_one(message in message()) {
        let bytes = message.encode();
        prop_assert_eq!(decode(&bytes), Ok(message));
        for cut in MESSAGE_BYTES..bytes.len() {
            let error = decode(&bytes[..cut]).unwrap_err();
            let is_right = matches!(error, Error::Truncated { offset: MESSAGE_BYTES, missing, .. } if missing == bytes.len() - cut);
            prop_assert!(is_right, "{}", error);
        }
    }

    #[test]
    fn packets_survive(packet in packet()) {
        prop_assert_eq!(Packet::decode(&packet.encode()), Ok(packet));
        prop_assert!(packet.payload_bytes() <= MAX_BYTES);
    }

    /// Whatever is accepted would be written back as the same bytes.
    #[test]
    fn bytes_have_one_meaning(
        (message, packet) in (message(), packet()),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let (mut message, mut packet) = (message.encode(), packet.encode());
        for (at, value) in changes {
            let (m, p) = (at.index(MESSAGE_BYTES), at.index(PACKET_BYTES));
            message[m] = value;
            packet[p] = value;
        }
        if let Ok(read) = decode(&message) {
            prop_assert_eq!(read.encode().len().min(message.len()), read.encode().len());
            prop_assert_eq!(&message[..read.encode().len()], &read.encode()[..]);
        }
        if let Ok(read) = Packet::decode(&packet) {
            prop_assert_eq!(read.encode(), packet);
        }
    }
}

/// Written down by hand: whoever changes a byte breaks the link between two versions, and this test.
#[test]
fn the_layout_is_this() {
    let refusal = Refusal { reason: "no".into() };
    for (message, bytes) in [
        (Message::Hello { channels: 4 }, &[1, 4, 0, 0, 0, 0, 0, 0][..]),
        (Message::Welcome, &[2, 0, 0, 0, 0, 0, 0, 0]),
        (Message::Open { connection: 3, first: b"no".to_vec() }, &[3, 0, 3, 0, 2, 0, 0, 0]),
        (Message::Credit { connection: 255, amount: 0x0100_0000 }, &[4, 0, 255, 0, 0, 0, 0, 1]),
        (Message::Done, &[5, 0, 0, 0, 0, 0, 0, 0]),
        (Message::Abort { end: TheEnd::Given, refusal: refusal.clone() }, &[6, 1, 0, 0, 2, 0, 0, 0]),
        (Message::Abort { end: TheEnd::Withheld, refusal }, &[6, 0, 0, 0, 2, 0, 0, 0]),
    ] {
        let text: &[u8] = if matches!(bytes[0], 3 | 6) { b"no" } else { b"" };
        assert_eq!(message.encode(), [bytes, &[0; 8], text].concat());
    }
    let content = Content::Encoded { bytes: 0x0008_0000, gives_end: true, method: 2, payload: 0x0102_0304 & 0xffff };
    let packet = Packet { connection: 0x00fe, sequence: 0x0102_0304_0506_0708, content };
    let bytes = [&b"TSRP"[..], &[1, 2, 0xfe, 0, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 8, 0, 4, 3, 0, 0, 1], &[0; 7]].concat();
    assert_eq!(packet.encode().to_vec(), bytes);
    let greeting = Greeting(Preamble { session: SessionId([7; 16]), role: Role::Data(9) });
    let bytes = [&b"TSRL"[..], &[1, 0, 2, 9], &[7; 16], &[0; 8]].concat();
    assert_eq!(greeting.encode().to_vec(), bytes);
    assert_eq!(Greeting::decode(bytes.as_slice().try_into().unwrap()), Ok(greeting));
}

#[test]
fn what_is_not_a_link_is_refused() {
    let preamble = Preamble { session: SessionId([7; 16]), role: Role::Control };
    let error = Greeting::decode(&preamble.encode()).unwrap_err();
    assert!(matches!(error, Error::Invalid { field: "preamble magic", offset: 0, .. }), "{error}");
    assert!(Preamble::decode(&Greeting(preamble).encode()).is_err());
    let probe = Greeting(Preamble { session: SessionId([7; 16]), role: Role::Probe });
    let error = Greeting::decode(&probe.encode()).unwrap_err();
    assert!(matches!(error, Error::Invalid { field: "preamble role", offset: 6, .. }), "{error}");

    let good = Packet { connection: 1, sequence: 5, content: Content::Raw { bytes: 9, gives_end: false } }.encode();
    for (at, value, field) in [
        (0, 0, "packet magic"),
        (4, 3, "packet kind"),
        (5, 1, "packet payload"), // as long as the bytes, and encoded
        (7, 1, "packet connection"),
        (16, 0, "packet bytes"),
        (18, 9, "packet bytes"),
        (20, 8, "packet payload"),
        (24, 2, "packet flags"),
        (31, 1, "packet reserved"),
    ] {
        let mut bad = good;
        bad[at] = value;
        let error = Packet::decode(&bad).unwrap_err();
        assert!(matches!(error, Error::Invalid { field: f, .. } if f == field), "{at}: {error}");
    }
    for (bytes, field) in [
        ([0, 0, 0, 0, 0, 0, 0, 0], "message kind"),
        ([7, 0, 0, 0, 0, 0, 0, 0], "message kind"),
        ([1, 0, 0, 0, 0, 0, 0, 0], "message flags"),
        ([6, 2, 0, 0, 0, 0, 0, 0], "message flags"),
        ([3, 0, 0, 1, 0, 0, 0, 0], "message connection"),
        ([5, 0, 1, 0, 0, 0, 0, 0], "message connection"),
        ([3, 0, 1, 0, 0, 0, 0, 0], "message amount"),
        ([3, 0, 1, 0, 65, 0, 0, 0], "message amount"),
        ([4, 0, 1, 0, 0, 0, 0, 0], "message amount"),
        ([4, 0, 1, 0, 1, 0, 0, 0x40], "message amount"),
        ([6, 0, 0, 0, 1, 0x10, 0, 0], "message amount"),
    ] {
        let mut header = [0; MESSAGE_BYTES];
        header[..8].copy_from_slice(&bytes);
        let error = Message::payload_bytes(&header).unwrap_err();
        assert!(matches!(error, Error::Invalid { field: f, .. } if f == field), "{bytes:?}: {error}");
    }
}
