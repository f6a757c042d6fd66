//! A link from anybody: greeting, messages, packet headers. Each is refused, or written back as the same bytes, and
//! keeps the bounds that a relay relies on.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::relay::{Greeting, MAX_BYTES, MAX_CONNECTIONS, MESSAGE_BYTES, Message, Packet};

fuzz_target!(|bytes: &[u8]| {
    let Some((&way, mut rest)) = bytes.split_first() else { return };
    match way % 3 {
        0 => {
            let Some((header, _)) = rest.split_first_chunk() else { return };
            if let Ok(greeting) = Greeting::decode(header) {
                assert_eq!(greeting.encode(), *header);
            }
        }
        1 => {
            while let Some((header, after)) = rest.split_first_chunk() {
                let Ok(text) = Message::payload_bytes(header) else { return };
                assert!(text <= 4096);
                let Some((text, after)) = after.split_at_checked(text) else { return };
                let Ok(message) = Message::decode(header, text) else { return };
                assert_eq!(message.encode(), rest[..MESSAGE_BYTES + text.len()]);
                rest = after;
            }
        }
        _ => {
            // Payloads are not looked at, so they are left out.
            while let Some((header, after)) = rest.split_first_chunk() {
                let Ok(packet) = Packet::decode(header) else { return };
                assert_eq!(packet.encode(), *header);
                assert!(packet.payload_bytes() <= MAX_BYTES && packet.connection < MAX_CONNECTIONS);
                rest = after;
            }
        }
    }
});
