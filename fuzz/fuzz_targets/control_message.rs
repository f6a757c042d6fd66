//! A control connection from anybody: each message is refused, or written back as the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::{Frame, Message};

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Some((header, after)) = rest.split_first_chunk() {
        let Ok(frame) = Frame::decode(header) else { return };
        assert_eq!(frame.encode(), *header);
        let Some((payload, next)) = after.split_at_checked(frame.payload as usize) else {
            assert!(Message::decode(&frame, after).is_err(), "a message that is cut short was accepted");
            return;
        };
        let Ok(message) = Message::decode(&frame, payload) else { return };
        assert_eq!(message.encode(frame.id), rest[..rest.len() - next.len()]);
        if let Message::Hello { guest, .. } = &message {
            assert_eq!(guest.check(), Ok(()), "a peer's guest and our own follow different rules");
        }
        rest = next;
    }
});
