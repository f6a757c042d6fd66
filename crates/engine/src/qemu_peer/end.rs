//! Where the stream ends of a source that does not close the connection, as it waits for an answer.
//!
//! - With the description of the device sections, which says where these end and is the last thing of all.
//! - Without it, if the source was told to leave it out: behind the last section, which is known, comes the byte that
//!   ends them, and then nothing.
//! - Behind the last section, if the source asks there whether everything is loaded, before it hands its guest over by
//!   that byte: a transship does that (`move --peer qemu`), and no QEMU.
//!
//! A peer chooses how long the tail is and in which pieces it comes, so what is looked at after each of them does not
//! grow with the tail.
use transship_wire::qemu::{Command, GlobalState, StreamWriter, TailWatch};

/// How long nothing must follow what looks like the end without description.
const QUIET_MS: u64 = 2000;
/// The same for a question. A source that asks sends nothing more.
const ASKED_MS: u64 = 50;
/// What ends the sections.
const EOF: u8 = 0;
const FOOTER_BYTES: usize = 5;
/// In front of the description: its type and its length.
const TRAILER_HEADER_BYTES: usize = 5;

/// Where the byte is that ends the sections, with which a QEMU runs the guest, if these are all the bytes behind the
/// memory, or all but their description. `watch`: of this tail.
pub(in crate::qemu_peer) fn place(watch: &mut TailWatch, tail: &[u8]) -> Option<usize> {
    if ends(tail) {
        return Some(tail.len() - 1);
    }
    watch.whole(tail)?.vmdesc.map(|json| json.start - TRAILER_HEADER_BYTES - 1)
}

/// Whether a source asks behind its last section whether everything is loaded.
pub(in crate::qemu_peer) fn asks(tail: &[u8]) -> bool {
    question(tail).is_some()
}

/// For how many milliseconds nothing more must come for this to be all; 0: it is not.
pub(super) fn silence(tail: &[u8]) -> u64 {
    match (question(tail), ends(tail)) {
        (Some(_), _) => ASKED_MS,
        (None, true) => QUIET_MS,
        (None, false) => 0,
    }
}

/// Makes of sections with a question behind them such that are ended. Returns its number.
pub(super) fn take_question(tail: &mut Vec<u8>) -> Option<u32> {
    let number = question(tail)?;
    tail.truncate(tail.len() - ping(number).len());
    tail.push(EOF);
    Some(number)
}

/// Whether the last section there is comes last, with the byte that ends all.
fn ends(tail: &[u8]) -> bool {
    tail.strip_suffix(&[EOF]).is_some_and(is_last)
}

/// Whether these sections end with the last one that there is.
fn is_last(sections: &[u8]) -> bool {
    let Some(at) = sections.len().checked_sub(GlobalState::SECTION_BYTES) else { return false };
    let section = [&sections[at..], &[EOF]].concat();
    let body_end = |last: GlobalState| last.body().end;
    GlobalState::find(&section, 0).ok().flatten().map(body_end) == Some(GlobalState::SECTION_BYTES - FOOTER_BYTES)
}

fn question(tail: &[u8]) -> Option<u32> {
    let number = u32::from_be_bytes(*tail.last_chunk()?);
    let sections = tail.strip_suffix(&ping(number)[..])?;
    is_last(sections).then_some(number)
}

fn ping(number: u32) -> Vec<u8> {
    StreamWriter::new(0, 0).command(&Command::Ping(number)).take_bytes()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use transship_wire::qemu::{Described, Name, describe};

    use super::*;

    fn sections() -> StreamWriter {
        let mut writer = StreamWriter::new(0, 1);
        let state = [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat();
        writer.full(2, &Name::new("timer").unwrap(), 0, 1, &[1, 2, 3]);
        writer.full(3, &Name::new("globalstate").unwrap(), 0, 1, &state);
        writer
    }

    #[test]
    fn each_end_is_known_and_nothing_before_it() {
        let ended = sections().eof().take_bytes();
        let asked = sections().command(&Command::Ping(7)).take_bytes();
        let [timer, state] = ["timer", "globalstate"].map(|name| Name::new(name).unwrap());
        let described = |name, size| Described { name, instance: 0, version: 1, fields: size };
        let json =
            describe(&[described(&timer, &[("data", "buffer", 3)]), described(&state, &[("state", "buffer", 104)])]);
        let full = sections().eof().vmdesc(&json).take_bytes();
        let is_described = |tail: &[u8]| TailWatch::new().whole(tail).is_some();
        let place = |tail: &[u8]| place(&mut TailWatch::new(), tail);
        assert!(is_described(&full) && !is_described(&ended) && !is_described(&asked));
        assert_eq!((silence(&ended), silence(&asked)), (QUIET_MS, ASKED_MS));
        for whole in [&full, &asked] {
            for cut in 0..whole.len() {
                let part = &whole[..cut];
                assert!(!is_described(part) && (silence(part) == 0 || part == ended), "{cut}");
            }
        }
        assert_eq!(
            (place(&ended), place(&asked), asks(&asked), asks(&full)),
            (Some(ended.len() - 1), None, true, false)
        );
        assert_eq!(place(&full), Some(ended.len() - 1), "the same byte, described or not");
        for cut in 0..full.len() {
            assert_eq!(place(&full[..cut]).is_some(), cut == ended.len(), "{cut}");
        }
        let mut tail = asked;
        assert_eq!((take_question(&mut tail), &tail), (Some(7), &ended));
        assert_eq!(take_question(&mut tail), None);
    }
}
