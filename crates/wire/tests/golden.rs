//! The layout, written down by hand: whoever changes a byte of it breaks the moves between two versions, and this test.
use crate::common::*;
use transship_wire::*;

#[test]
fn messages_have_these_bytes() {
    for (message, name, bytes) in messages() {
        assert_eq!(message.encode(0x0102), bytes, "{name}");
        assert_eq!(decode(&bytes), Ok((0x0102, message.clone())));
        assert_eq!(message.name(), name);
    }
}

#[test]
fn packets_have_these_bytes_and_payloads() {
    let payloads = [3 * PAGE_BYTES, 0, 0, 0, 0];
    for ((packet, bytes), payload) in packets().into_iter().zip(payloads) {
        assert_eq!(packet.encode().to_vec(), bytes, "{packet:?}");
        assert_eq!(Packet::decode(bytes.as_slice().try_into().unwrap()), Ok(packet));
        assert_eq!(packet.payload_bytes(), payload, "{packet:?}");
    }
}

#[test]
fn preambles_have_these_bytes() {
    for (preamble, bytes) in preambles() {
        assert_eq!(preamble.encode().to_vec(), bytes, "{preamble:?}");
        assert_eq!(Preamble::decode(bytes.as_slice().try_into().unwrap()), Ok(preamble));
    }
}
