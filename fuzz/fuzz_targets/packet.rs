//! A data channel from anybody: header, payload, header, …. Each header is refused, or written back as the same bytes;
//! one that is accepted keeps the bounds that the engine relies on.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::{MAX_REGIONS, PAGE_BYTES, PAGES_PER_PACKET, Packet};

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Some((header, after)) = rest.split_first_chunk() {
        let Ok(packet) = Packet::decode(header) else { return };
        assert_eq!(packet.encode(), *header);
        check_bounds(&packet);
        // The contents are not looked at. A fuzzer would never find 4096 bytes a page worth its while, so they are left
        // out.
        rest = after;
    }
});

fn check_bounds(packet: &Packet) {
    assert!(packet.payload_bytes() <= PAGES_PER_PACKET as usize * PAGE_BYTES);
    let (region, first, count) = match *packet {
        Packet::Pages { region, first, present, zero, .. } => {
            assert_eq!(present & zero, 0);
            assert_eq!(packet.payload_bytes(), present.count_ones() as usize * PAGE_BYTES);
            (region, first, PAGES_PER_PACKET)
        }
        Packet::Encoded { region, first, present, zero, bytes, .. } => {
            assert_eq!(present & zero, 0);
            assert!(0 < bytes && (bytes as usize) < present.count_ones() as usize * PAGE_BYTES);
            (region, first, PAGES_PER_PACKET)
        }
        Packet::Hole { region, first, count, .. } => (region, first, count),
        Packet::RoundEnd { .. } => return,
        Packet::Slot { region, first, present, zero, .. } => {
            assert!(present != 0 && present & zero == 0);
            (region, first, PAGES_PER_PACKET)
        }
        Packet::Lent { region, first, wanted, zero, .. } => {
            assert_eq!(wanted & zero, 0);
            (region, first, PAGES_PER_PACKET)
        }
    };
    assert!(usize::from(region) < MAX_REGIONS);
    let end = first.checked_add(count).and_then(|end| end.checked_mul(PAGE_BYTES as u64));
    assert!(end.is_some_and(|end| end > 0 && i64::try_from(end).is_ok()), "the byte offsets of {packet:?} overflow");
}
