//! What holds for all values and for all bytes.
use crate::common;
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use transship_wire::*;

fn session() -> impl Strategy<Value = SessionId> {
    any::<[u8; 16]>().prop_map(SessionId)
}

fn preamble() -> impl Strategy<Value = Preamble> {
    let role = prop_oneof![
        Just(Role::Control),
        Just(Role::Probe),
        (0u8..=254).prop_map(Role::Data),
        (1u32..).prop_map(Role::Supply),
        (1u32.., 0u8..=254).prop_map(|(line, channel)| Role::Push { line, channel }),
    ];
    (session(), role).prop_map(|(session, role)| Preamble { session, role })
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9./_-]{1,255}", "\\PC{1,63}"]
        .prop_filter("no control characters", |n| !n.contains(char::is_control))
}

fn guest() -> impl Strategy<Value = GuestDescription> {
    let region = |name| {
        (1u64..1 << 44).prop_map(move |pages| RegionDescription { name: String::clone(&name), bytes: pages * 4096 })
    };
    let regions =
        btree_set(name(), 1..20).prop_flat_map(move |names| names.into_iter().map(region).collect::<Vec<_>>());
    (name(), regions).prop_map(|(machine, regions)| GuestDescription { machine, regions })
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        (1u8.., 0..5, guest()).prop_map(|(channels, how, guest)| Message::Hello {
            channels,
            verify: matches!(how, 1 | 4),
            post_copy: how == 2,
            lends: how > 2,
            guest
        }),
        (vec(option::of(0..u64::MAX), 1..1025), any::<u8>())
            .prop_map(|(offsets, slots)| Message::Lent { offsets, slots }),
        Just(Message::Lend),
        any::<bool>().prop_map(|is_readable| Message::Borrowed { is_readable }),
        (0u16..1024, btree_set(0u64..1 << 37, 1..50), 1u128..).prop_map(|(region, windows, pages)| Message::Owed {
            region,
            windows: windows.into_iter().map(|number| OwedWindow { first: number * PAGES_PER_PACKET, pages }).collect()
        }),
        any::<u64>().prop_map(|pages| Message::OwedEnd { pages }),
        (0u16..1024, 0u64..1 << 44).prop_map(|(region, page)| Message::Want { region, page }),
        (0u16..1024, 0u64..=(1 << 44) - 32, 1u8..=32, any::<bool>(), any::<u8>()).prop_map(
            |(region, first, count, is_zero, byte)| {
                let bytes = vec![byte; if is_zero { 0 } else { usize::from(count) * PAGE_BYTES }];
                Message::Page(Pages { region, first, count, bytes })
            }
        ),
        Just(Message::Complete),
        Just(Message::Stale),
        any::<(u32, u64, u64)>().prop_map(|(round, pages, zero)| Message::RoundDone { round, pages, zero }),
        any::<[u8; 32]>().prop_map(|digest| Message::Digest { digest }),
        any::<[u8; 32]>().prop_map(|digest| Message::DigestIs { digest }),
        vec(any::<u8>(), 1..5000).prop_map(|bytes| Message::State { bytes }),
        any::<(u64, [u8; 32])>().prop_map(|(bytes, digest)| Message::StateEnd { bytes, digest }),
        any::<bool>().prop_map(|run| Message::Go { run }),
        "\\PC{0,1000}"
            .prop_filter("no control characters", |t| !t.contains(char::is_control))
            .prop_map(|reason| Message::Abort(Refusal { reason })),
        Just(Message::Welcome),
        Just(Message::Loaded),
        Just(Message::Running),
    ]
}

/// Masks of every kind: sparse, dense, only one of them; never overlapping, never both empty.
fn masks() -> impl Strategy<Value = (u128, u128)> {
    let sparse = any::<(u128, u128, u128)>().prop_map(|(a, b, c)| a & b & c);
    let mask = prop_oneof![Just(0), Just(u128::MAX), any::<u128>(), sparse];
    (mask.clone(), mask)
        .prop_map(|(present, zero)| (present, zero & !present))
        .prop_filter("not empty", |(p, z)| p | z != 0)
}

fn packet() -> impl Strategy<Value = Packet> {
    let pages =
        (any::<u32>(), 0u16..1024, 0u64..1 << 37, masks()).prop_map(|(round, region, window, (present, zero))| {
            Packet::Pages { round, region, first: window * PAGES_PER_PACKET, present, zero }
        });
    let hole = (any::<u32>(), 0u16..1024, 0u64..1 << 44).prop_flat_map(|(round, region, first)| {
        (1..=(1 << 44) - first).prop_map(move |count| Packet::Hole { round, region, first, count })
    });
    let end = any::<(u32, u64)>().prop_map(|(round, packets)| Packet::RoundEnd { round, packets });
    let encoded = (any::<u32>(), 0u16..1024, 0u64..1 << 37, masks(), 1u8.., any::<u32>())
        .prop_filter("pages", |(_, _, _, (present, _), _, _)| *present != 0)
        .prop_map(|(round, region, window, (present, zero), method, bytes)| {
            let bytes = 1 + bytes % (present.count_ones() * 4096 - 1);
            Packet::Encoded { round, region, first: window * PAGES_PER_PACKET, present, zero, method, bytes }
        });
    let lent = (any::<u32>(), 0u16..1024, 0u64..1 << 37, masks(), any::<bool>()).prop_map(
        |(round, region, window, (wanted, zero), look)| Packet::Lent {
            round,
            region,
            first: window * PAGES_PER_PACKET,
            wanted,
            zero,
            look,
        },
    );
    let slot = (any::<u32>(), 0u16..1024, 0u64..1 << 37, masks(), any::<u8>())
        .prop_filter("pages", |(_, _, _, (present, _), _)| *present != 0)
        .prop_map(|(round, region, window, (present, zero), slot)| Packet::Slot {
            round,
            region,
            first: window * PAGES_PER_PACKET,
            present,
            zero,
            slot,
        });
    prop_oneof![pages, encoded, hole, end, lent, slot]
}

/// Bytes near to good ones: good ones with a few of them changed. Pure chance would not get past a magic.
fn nearly(good: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (prop::sample::select(good), vec((any::<prop::sample::Index>(), any::<u8>()), 0..4)).prop_map(
        |(mut bytes, changes)| {
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes
        },
    )
}

/// Whatever is accepted is written back as the same bytes: no two byte strings mean the same.
fn check_message(bytes: &[u8]) {
    if let Ok((id, message)) = common::decode(bytes) {
        assert_eq!(message.encode(id), bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn preambles_survive(preamble in preamble()) {
        prop_assert_eq!(Preamble::decode(&preamble.encode()), Ok(preamble));
    }

    #[test]
    fn packets_survive(packet in packet()) {
        prop_assert_eq!(Packet::decode(&packet.encode()), Ok(packet));
        prop_assert!(packet.payload_bytes() <= PAGES_PER_PACKET as usize * PAGE_BYTES);
    }

    #[test]
    fn messages_survive(message in message(), id in 1u64..) {
        prop_assert_eq!(common::decode(&message.encode(id)), Ok((id, message)));
    }

    #[test]
    fn guests_that_pass_the_check_are_accepted(guest in guest()) {
        prop_assert_eq!(guest.check(), Ok(()));
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), FRAME_BYTES..600), kind in 0u16..13) {
        check_message(&bytes);
        let payload = &bytes[FRAME_BYTES..];
        let frame = Frame { kind, payload: payload.len() as u32, id: 1 };
        // The result may be either; a panic would fail the test.
        let _ = Message::decode(&frame, payload);
    }

    #[test]
    fn nearly_good_messages_are_refused_or_mean_what_they_say(
        bytes in nearly(common::messages().into_iter().map(|(_, _, bytes)| bytes).collect()),
    ) {
        check_message(&bytes);
    }

    #[test]
    fn nearly_good_packets_are_refused_or_mean_what_they_say(
        bytes in nearly(common::packets().into_iter().map(|(_, bytes)| bytes).collect()),
    ) {
        if let Ok(packet) = Packet::decode(bytes.as_slice().try_into().unwrap()) {
            prop_assert_eq!(packet.encode().to_vec(), bytes);
        }
    }

    #[test]
    fn nearly_good_preambles_are_refused_or_mean_what_they_say(
        bytes in nearly(common::preambles().into_iter().map(|(_, bytes)| bytes).collect()),
    ) {
        if let Ok(preamble) = Preamble::decode(bytes.as_slice().try_into().unwrap()) {
            prop_assert_eq!(preamble.encode().to_vec(), bytes);
        }
    }
}
