//! What the relay near the source has to know of the main stream: whether the source waits for word from the
//! destination, and where the byte is with which a QEMU runs the guest. What comes before that byte is sent on at once;
//! itself, and what follows, when all before has been taken.
use std::{borrow::Cow, sync::atomic::Ordering::SeqCst};

use transship_wire::qemu::{Command, Record, Reply, Step, StreamReader, TailWatch};

use super::session::RelaySession;
use crate::qemu_peer::end;

/// More behind the memory is not kept until its end comes.
const TAIL_MAX: usize = 64 << 20;

/// Reads along with the main stream.
pub(super) struct Follower {
    reader: StreamReader,
    /// A record that is not complete.
    carry: Vec<u8>,
    place: StreamPart,
    /// The source has opened a return path; it wants postcopy; the list of its blocks has begun, and before that all of
    /// this is known.
    pub(super) return_path: bool,
    pub(super) postcopy: bool,
    pub(super) begun: bool,
}

enum StreamPart {
    Memory,
    /// Behind the memory, as far as it was not sent on.
    Tail(Vec<u8>, TailWatch),
    /// Behind a question, which is answered before the source goes on with the end; or in the end.
    End,
}

/// Bytes to send on: those before the end, and those from it on.
#[derive(Debug, Default)]
pub(super) struct Sorted<'a> {
    pub(super) before: Cow<'a, [u8]>,
    pub(super) end: Cow<'a, [u8]>,
}

impl Sorted<'_> {
    /// Whether they are just the bytes that were given, none of them of the end.
    pub(super) fn is_all_before_the_end(&self) -> bool {
        matches!(self.before, Cow::Borrowed(before) if !before.is_empty()) && self.end.is_empty()
    }
}

impl Follower {
    pub(super) fn new() -> Self {
        let (reader, carry) = (StreamReader::new(), Vec::new());
        Self { reader, carry, place: StreamPart::Memory, return_path: false, postcopy: false, begun: false }
    }

    /// It has lost its way: all may be the end.
    pub(super) fn give_up(&mut self) {
        self.place = StreamPart::End;
    }

    pub(super) fn has_given_up(&self) -> bool {
        matches!(self.place, StreamPart::End)
    }

    /// Bytes are kept that will go on when more come, or none.
    pub(super) fn holds(&self) -> bool {
        matches!(&self.place, StreamPart::Tail(tail, _) if !tail.is_empty())
    }

    /// Takes the next bytes of the stream.
    ///
    /// # Errors
    /// They can't be followed; nothing of them was used.
    pub(super) fn sort<'a>(&mut self, bytes: &'a [u8]) -> Result<Sorted<'a>, transship_wire::Error> {
        if let StreamPart::Memory = self.place {
            let Some(at) = self.step(bytes)? else { return Ok(Sorted { before: bytes.into(), end: Cow::default() }) };
            let (before, tail) = bytes.split_at(at);
            self.place = StreamPart::Tail(Vec::new(), TailWatch::new());
            let Sorted { before: more, end } = self.sort_tail(tail);
            return Ok(Sorted { before: [before, &more].concat().into(), end: end.into_owned().into() });
        }
        Ok(self.sort_tail(bytes))
    }

    fn sort_tail<'a>(&mut self, bytes: &'a [u8]) -> Sorted<'a> {
        let StreamPart::Tail(tail, watch) = &mut self.place else {
            return Sorted { before: Cow::default(), end: bytes.into() };
        };
        tail.extend_from_slice(bytes);
        if end::asks(tail) {
            let before = std::mem::take(tail);
            self.place = StreamPart::End;
            return Sorted { before: before.into(), end: Cow::default() };
        }
        match end::place(watch, tail) {
            Some(at) => {
                let end = tail.split_off(at);
                let before = std::mem::take(tail);
                self.place = StreamPart::End;
                Sorted { before: before.into(), end: end.into() }
            }
            None if tail.len() > TAIL_MAX => self.let_go(),
            None => Sorted::default(),
        }
    }

    /// Gives what is kept: nothing more comes for a while, and what is there must be the end.
    pub(super) fn let_go(&mut self) -> Sorted<'static> {
        let StreamPart::Tail(tail, _) = &mut self.place else { return Sorted::default() };
        let end = std::mem::take(tail);
        self.place = StreamPart::End;
        Sorted { before: Cow::default(), end: end.into() }
    }

    /// Where the memory ends in these bytes, if it does.
    fn step(&mut self, bytes: &[u8]) -> Result<Option<usize>, transship_wire::Error> {
        let mut at = 0;
        loop {
            let straddles = !self.carry.is_empty();
            let input = if straddles { &self.carry[..] } else { &bytes[at..] };
            let (used, ends) = match self.reader.next(input)? {
                Step::Done { record: Record::Tail, .. } => (0, true),
                Step::Done { record, used } => {
                    match record {
                        Record::Command(Command::OpenReturnPath) => self.return_path = true,
                        Record::Command(Command::PostcopyAdvise(_)) => self.postcopy = true,
                        Record::RamStart { .. } => self.begun = true,
                        _ => {}
                    }
                    (used, false)
                }
                Step::More { at_least } => {
                    let more = if straddles { at_least - self.carry.len() } else { bytes.len() - at };
                    let more = more.min(bytes.len() - at);
                    self.carry.extend_from_slice(&bytes[at..at + more]);
                    at += more;
                    if at == bytes.len() && (more == 0 || !straddles) {
                        return Ok(None);
                    }
                    continue;
                }
            };
            if straddles {
                // What is left of it came with these bytes: without them it was too short.
                at -= self.carry.len() - used;
                self.carry.clear();
            } else {
                at += used;
            }
            if ends {
                return Ok(Some(at));
            }
        }
    }
}

/// Listens to what a waiting QEMU answers.
#[derive(Default)]
pub(super) struct Replies {
    heard: Vec<u8>,
    position: u64,
    is_lost: bool,
}

impl Replies {
    /// Notes what the waiting QEMU says of itself.
    pub(super) fn hear(&mut self, bytes: &[u8], session: &RelaySession) {
        if self.is_lost {
            return;
        }
        session.answered.store(true, SeqCst);
        self.heard.extend_from_slice(bytes);
        loop {
            match Reply::read(&self.heard, self.position) {
                Ok(Step::Done { record, used }) => {
                    self.heard.drain(..used);
                    self.position += used as u64;
                    if record == Reply::Shut(0) {
                        session.all_is_well.store(true, SeqCst);
                    }
                }
                Ok(Step::More { .. }) => return,
                // Nothing that it can say in a migration that is relayed; whether all is well can't be told then.
                Err(_) => {
                    self.is_lost = true;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use transship_wire::qemu::{Block, Configuration, Described, GlobalState, Name, StreamWriter, describe};

    use super::*;

    /// A stream with a page of each kind, and the place of its last byte before the description.
    fn stream(return_path: bool, described: bool) -> (Vec<u8>, usize) {
        let mut writer = StreamWriter::new(0, 1);
        writer.header().configuration(&Configuration::new(Name::new("pc-q35-10.0").unwrap()));
        if return_path {
            writer.command(&Command::OpenReturnPath);
        }
        let ram = Name::new("pc.ram").unwrap();
        writer
            .ram_start(8192)
            .block(&Block { name: ram.clone(), used_bytes: 8192, gpa: None, mapped: None })
            .end_of_section();
        writer.part().zero_page(&ram, 0).page(&ram, 4096, &[7; 4096]).end_of_section();
        writer.end().end_of_section();
        let state = [&8u32.to_be_bytes()[..], b"running", &[0; 93]].concat();
        writer.full(3, &Name::new("globalstate").unwrap(), 0, 1, &state);
        let mut bytes = writer.eof().take_bytes();
        let end = bytes.len() - 1;
        if described {
            let name = Name::new("globalstate").unwrap();
            let json =
                describe(&[Described { name: &name, instance: 0, version: 1, fields: &[("state", "buffer", 104)] }]);
            let mut writer = StreamWriter::new(0, 1);
            bytes.extend(writer.vmdesc(&json).take_bytes());
        }
        (bytes, end)
    }

    #[test]
    fn the_end_is_found_however_the_stream_is_cut() {
        for described in [false, true] {
            let (bytes, place) = stream(true, described);
            for piece in [1, 2, 3, 7, 100, 4000, bytes.len()] {
                let mut follower = Follower::new();
                let (mut before, mut end) = (Vec::new(), Vec::new());
                for bytes in bytes.chunks(piece) {
                    let sorted = follower.sort(bytes).unwrap();
                    assert!(end.is_empty() || sorted.before.is_empty());
                    before.extend_from_slice(&sorted.before);
                    end.extend_from_slice(&sorted.end);
                }
                assert!(follower.begun && follower.return_path && !follower.postcopy && !follower.holds());
                assert_eq!((before.len(), before.len() + end.len()), (place, bytes.len()), "pieces of {piece}");
                assert_eq!([before, end].concat(), bytes);
            }
        }
        let mut follower = Follower::new();
        follower.sort(&stream(false, false).0).unwrap();
        assert!(follower.begun && !follower.return_path);
    }

    #[test]
    fn a_tail_whose_end_is_not_known_is_kept_until_nothing_follows() {
        let (bytes, end) = stream(true, false);
        let cut = end - 200; // within the last section
        let mut follower = Follower::new();
        let sorted = follower.sort(&bytes[..cut]).unwrap();
        let sent = sorted.before.len();
        assert!(sent > 8000 / 2 && sorted.end.is_empty());
        drop(sorted);
        if follower.holds() {
            let kept = follower.let_go();
            assert!(kept.before.is_empty());
            assert_eq!(sent + kept.end.len(), cut);
        }
        assert_eq!(&*follower.sort(b"more").unwrap().end, if follower.has_given_up() { &b"more"[..] } else { b"" });
    }

    /// A tail in small pieces, each of which looks like an end. To take all of it apart at each piece would take hours.
    #[test]
    fn a_tail_that_seems_to_end_everywhere_is_looked_at_once() {
        let mut follower = Follower::new();
        let (bytes, end) = stream(true, false);
        let begin = end - GlobalState::SECTION_BYTES;
        let sorted = follower.sort(&bytes[..begin + 30]).unwrap();
        assert!(sorted.end.is_empty() && sorted.before.len() == begin, "{} {begin}", sorted.before.len());
        drop(sorted);
        for _ in 0..1 << 17 {
            for piece in [&b"}}}}}}}}"[..], &[0]] {
                let sorted = follower.sort(piece).unwrap();
                assert!(sorted.before.is_empty() && sorted.end.is_empty());
            }
        }
        assert!(follower.holds());
    }

    #[test]
    fn what_is_no_stream_can_not_be_followed() {
        assert!(Follower::new().sort(b"GET / HTTP/1.1").is_err());
    }
}
