//! Both ends in one process: who gets in, and what becomes of bytes on their way.
#![allow(clippy::unwrap_used)]
use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    rc::Rc,
    thread,
};

use proptest::prelude::*;

use crate::{Caller, Doubt, Halves, Handshake, Host, Progress, RECORD_BYTES, SecureError, Token, sealer::Limit};

mod certificates;
mod files;

/// A handshake to its end over a connection that waits.
fn shake(mut handshake: Handshake, mut connection: UnixStream) -> Result<(Halves, UnixStream), SecureError> {
    match handshake.advance(&mut connection)? {
        Progress::Done(halves) => Ok((*halves, connection)),
        Progress::Waiting => panic!("it reads until there is something"),
    }
}

pub(crate) type Ended = Result<(Halves, UnixStream), SecureError>;

/// Both sides of one; the caller also waits for the host's word.
pub(crate) fn meet(caller: &Caller, host: &Host) -> (Ended, Ended) {
    let (near, far) = UnixStream::pair().unwrap();
    let host = Handshake::hosting(host).unwrap();
    let there = thread::spawn(move || shake(host, far));
    let here = shake(Handshake::calling(caller).unwrap(), near).and_then(|(mut halves, mut connection)| {
        halves.opener.await_word(&mut connection)?;
        Ok((halves, connection))
    });
    (here, there.join().unwrap())
}

fn trusted() -> ((Halves, UnixStream), (Halves, UnixStream)) {
    let (host, token) = Host::with_new_token().unwrap();
    let (here, there) = meet(&Caller::with_token(&token).unwrap(), &host);
    (here.unwrap(), there.unwrap())
}

/// What is written can be read; it gives and takes as many bytes at a time as it is told to.
#[derive(Clone, Default)]
struct Pipe {
    bytes: Rc<RefCell<VecDeque<u8>>>,
    at_a_time: usize,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.at_a_time);
        self.bytes.borrow_mut().extend(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut bytes = self.bytes.borrow_mut();
        let count = into.len().min(self.at_a_time).min(bytes.len());
        bytes.drain(..count).zip(into).for_each(|(byte, place)| *place = byte);
        if count == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }
}

/// Bytes that say where they are.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

/// All that is there.
fn read_all(halves: &mut Halves, from: &mut impl Read, at_a_time: usize) -> Vec<u8> {
    let mut all = Vec::new();
    let mut piece = vec![0; at_a_time];
    loop {
        match halves.opener.read(from, &mut piece) {
            Ok(0) => return all,
            Ok(count) => all.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn those_who_share_a_token_understand_each_other() {
    let ((mut here, mut near), (mut there, mut far)) = trusted();
    here.sealer.write(&mut near, b"to the host").unwrap();
    there.sealer.write(&mut far, b"to the caller").unwrap();
    let mut room = [0; 64];
    let count = there.opener.read(&mut far, &mut room).unwrap();
    assert_eq!(&room[..count], b"to the host");
    let count = here.opener.read(&mut near, &mut room).unwrap();
    assert_eq!(&room[..count], b"to the caller");
    drop(near);
    assert_eq!(there.opener.read(&mut far, &mut room).unwrap(), 0);
}

/// Another process goes on as the same host, or as its caller.
#[test]
fn ends_that_were_revealed_are_the_same() {
    let (host, token) = Host::with_new_token().unwrap();
    let text = host.reveal();
    let caller = Caller::revealed(&Caller::with_token(&token).unwrap().reveal()).unwrap();
    let (here, there) = meet(&caller, &Host::revealed(&text).unwrap());
    assert!(here.is_ok() && there.is_ok());
    let (other, _) = Host::with_new_token().unwrap();
    let other = other.reveal();
    let mixed = format!("{}.{}", other.split_once('.').unwrap().0, token.reveal().as_str());
    for damaged in ["", ".", &text[1..], &text[..text.len() - 1], &mixed] {
        assert!(matches!(Host::revealed(damaged).unwrap_err(), SecureError::Unsuited(_)), "{damaged}");
    }
}

/// A token of another move, of an older one of the same receiver, and none: the host has learned nothing then, and has
/// told nothing, and each side knows why.
#[test]
fn a_token_of_another_move_opens_nothing() {
    let [(host, _), (_, token)] = [0; 2].map(|_| Host::with_new_token().unwrap());
    let (here, there) = meet(&Caller::with_token(&token).unwrap(), &host);
    assert!(matches!(here.unwrap_err(), SecureError::Untrusted(Doubt::OtherReceiver, _)));
    assert!(matches!(there.unwrap_err(), SecureError::Refused(_)));
}

/// The key is the receiver's, the secret is not: the receiver is known, the caller is not.
#[test]
fn a_caller_without_the_secret_is_told_so() {
    let (host, token) = Host::with_new_token().unwrap();
    let forged = Token::new(*token.host_key()).unwrap();
    let (here, there) = meet(&Caller::with_token(&forged).unwrap(), &host);
    assert!(matches!(here.unwrap_err(), SecureError::Refused(_)));
    assert!(matches!(there.unwrap_err(), SecureError::Untrusted(Doubt::OtherToken, _)));
}

#[test]
fn what_is_no_tls_is_noticed_at_its_first_bytes() {
    for (words, speaks) in [(&b"TSHP\x01\x00\x01"[..], true), (b"", false), (b"\x16\x03\x01\0\0", true)] {
        let (host, _) = Host::with_new_token().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(words).unwrap();
        near.shutdown(std::net::Shutdown::Write).unwrap();
        let failure = shake(Handshake::hosting(&host).unwrap(), far).unwrap_err();
        match speaks {
            true => assert!(matches!(failure, SecureError::Untrusted(Doubt::NoTls, _)), "{failure:?}"),
            false => assert!(matches!(failure, SecureError::Broken(_)), "{failure:?}"),
        }
    }
}

/// All that a caller says in a handshake, said again by somebody else, to the same receiver.
#[test]
fn a_handshake_can_not_be_repeated() {
    let (host, token) = Host::with_new_token().unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let hosting = Handshake::hosting(&host).unwrap();
    let there = thread::spawn(move || shake(hosting, far));
    let said = Rc::new(RefCell::new(Vec::new()));
    let mut heard = Recorded { connection: near.try_clone().unwrap(), said: Rc::clone(&said) };
    let mut calling = Handshake::calling(&Caller::with_token(&token).unwrap()).unwrap();
    let Progress::Done(mut halves) = calling.advance(&mut heard).unwrap() else { panic!("it waits") };
    halves.sealer.write(&mut heard, b"a page").unwrap();
    there.join().unwrap().unwrap();
    near.shutdown(std::net::Shutdown::Both).unwrap();

    let (mut near, far) = UnixStream::pair().unwrap();
    near.write_all(&said.borrow()).unwrap();
    let failure = shake(Handshake::hosting(&host).unwrap(), far).unwrap_err();
    assert!(matches!(failure, SecureError::Untrusted(Doubt::Changed, _)), "{failure}");
}

struct Recorded {
    connection: UnixStream,
    said: Rc<RefCell<Vec<u8>>>,
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.connection.write(bytes)?;
        self.said.borrow_mut().extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Recorded {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.connection.read(into)
    }
}

/// Both directions of a connection that nothing waits for. One byte of what goes out may be changed.
struct Loop {
    out: Pipe,
    back: Pipe,
    changes: Option<usize>,
}

impl Loop {
    fn pair(changes: Option<usize>) -> (Self, Self) {
        let pipe = || Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
        let (out, back) = (pipe(), pipe());
        (Self { out: out.clone(), back: back.clone(), changes }, Self { out: back, back: out, changes: None })
    }
}

impl Write for Loop {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut bytes = bytes.to_vec();
        if let Some(left) = self.changes {
            self.changes = match bytes.get_mut(left) {
                Some(byte) => {
                    *byte ^= 0x10;
                    None
                }
                None => Some(left - bytes.len()),
            };
        }
        self.out.write(&bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Loop {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.back.read(into)
    }
}

/// Every byte that a caller says in a handshake, changed by somebody in the middle: the two sides don't trust each
/// other then. What is in none of their hashes also means nothing: the version in the headers of its three records.
#[test]
fn a_changed_byte_of_the_handshake_is_noticed() {
    let (host, token) = Host::with_new_token().unwrap();
    let caller = Caller::with_token(&token).unwrap();
    let mut meaningless = 0;
    for at in 0.. {
        let (mut near, mut far) = Loop::pair(Some(at));
        let (mut here, mut there) = (Handshake::calling(&caller).unwrap(), Handshake::hosting(&host).unwrap());
        let (mut called, mut hosted) = (here.advance(&mut near), there.advance(&mut far));
        // As far as it goes: the caller, the host, and the host's word.
        if matches!(called, Ok(Progress::Waiting)) {
            called = here.advance(&mut near);
        }
        if matches!(hosted, Ok(Progress::Waiting)) {
            hosted = there.advance(&mut far);
        }
        let word = match called {
            Ok(Progress::Done(mut halves)) => halves.opener.await_word(&mut near).is_ok(),
            _ => false,
        };
        let is_trusted = word && matches!(hosted, Ok(Progress::Done(_)));
        match (is_trusted, near.changes.is_some()) {
            (true, false) => meaningless += 1,
            (trusted, untouched) => assert_eq!(trusted, untouched, "byte {at}: {hosted:?}"),
        }
        if near.changes.is_some() {
            assert!(at > 300 && meaningless == 3, "{meaningless} of {at} bytes mean nothing");
            return;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn bytes_arrive_as_they_were_however_they_are_cut(
        sizes in prop::collection::vec(0_usize..40_000, 1..8),
        taken in 1_usize..50_000, given in 1_usize..50_000, read in 1_usize..50_000, records in 1_u64..6,
    ) {
        let ((mut here, _), (mut there, _)) = trusted();
        here.sealer.set_limit(Limit(records));
        let bytes = Rc::default();
        let (mut to, mut from) =
            (Pipe { bytes: Rc::clone(&bytes), at_a_time: taken }, Pipe { bytes, at_a_time: given });
        let sent = pattern(sizes.iter().sum());
        let mut rest = sent.as_slice();
        for size in sizes {
            let (piece, after) = rest.split_at(size);
            here.sealer.write(&mut to, piece).unwrap();
            rest = after;
        }
        prop_assert!(read_all(&mut there, &mut from, read) == sent);
    }

    #[test]
    fn a_changed_byte_is_noticed_before_anything_of_its_record_is_read(at in 0_usize..40_000, bit in 0_u32..8) {
        let ((mut here, _), (mut there, _)) = trusted();
        let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
        let sent = pattern(39_000);
        here.sealer.write(&mut pipe, &sent).unwrap();
        let length = pipe.bytes.borrow().len();
        pipe.bytes.borrow_mut()[at % length] ^= 1 << bit;
        let mut got = Vec::new();
        let mut piece = [0; 7000];
        let error = loop {
            match there.opener.read(&mut pipe, &mut piece) {
                Ok(count) => got.extend_from_slice(&piece[..count]),
                Err(error) => break error,
            }
        };
        // A length that was changed may make it wait for the rest.
        if error.kind() != ErrorKind::WouldBlock {
            prop_assert_eq!(error.kind(), ErrorKind::InvalidData);
            let again = there.opener.read(&mut pipe, &mut piece).unwrap_err();
            prop_assert_eq!(again.kind(), ErrorKind::InvalidData);
        }
        prop_assert!(got.len() % RECORD_BYTES == 0 && sent.starts_with(&got), "{} bytes", got.len());
    }

    #[test]
    fn any_bytes_are_refused_by_a_host(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (host, _) = Host::with_new_token().unwrap();
        let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
        pipe.write_all(&bytes).unwrap();
        let progress = Handshake::hosting(&host).unwrap().advance(&mut pipe);
        prop_assert!(matches!(progress, Ok(Progress::Waiting) | Err(_)));
    }
}

/// Records that are left out, doubled or of another connection.
#[test]
fn each_record_has_its_place() {
    let ((mut here, _), (mut there, _)) = trusted();
    let ((mut other, _), _) = trusted();
    let sealed = |halves: &mut Halves, bytes: &[u8]| {
        let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
        halves.sealer.write(&mut pipe, bytes).unwrap();
        Vec::from(pipe.bytes.take())
    };
    let records = [sealed(&mut here, b"first"), sealed(&mut here, b"second"), sealed(&mut other, b"of another")];
    let mut room = [0; 64];
    let refused = |there: &mut Halves, record: &[u8]| {
        let mut copy = record;
        there.opener.read(&mut copy, &mut [0; 64]).unwrap_err().kind()
    };
    let count = there.opener.read(&mut records[0].as_slice(), &mut room).unwrap();
    assert_eq!(&room[..count], b"first");
    assert_eq!(refused(&mut there, &records[0]), ErrorKind::InvalidData, "it came twice");
    assert_eq!(refused(&mut there, &records[1]), ErrorKind::InvalidData, "nothing is read after that");
    let ((_, _), (mut fresh, _)) = trusted();
    assert_eq!(refused(&mut fresh, &records[2]), ErrorKind::InvalidData, "it is another connection's");
}

/// A connection that is cut shows it, wherever it is cut: at the end of a record as an end, elsewhere as an error.
#[test]
fn a_cut_is_an_end() {
    let ((mut here, _), _) = trusted();
    let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
    here.sealer.write(&mut pipe, b"a message").unwrap();
    let length = pipe.bytes.borrow().len();
    for cut in 0..length {
        let ((mut here, _), (mut there, _)) = trusted();
        let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
        here.sealer.write(&mut pipe, b"a message").unwrap();
        let sealed = Vec::from(pipe.bytes.take());
        let read = there.opener.read(&mut &sealed[..cut], &mut [0; 64]);
        match cut {
            0 => assert_eq!(read.unwrap(), 0),
            _ => assert_eq!(read.unwrap_err().kind(), ErrorKind::UnexpectedEof, "cut at {cut}"),
        }
    }
}

/// Takes nothing at all, or so many bytes and no more.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.0);
        self.0 -= count;
        if count == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A source that believes that its last word was never sent runs its guest on: the word must not go out later.
#[test]
fn what_was_not_sent_is_never_sent() {
    for room in [0, 3] {
        let ((mut here, _), _) = trusted();
        assert!(here.sealer.write(&mut Full(room), b"Go").is_err());
        let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
        assert!(here.sealer.write(&mut pipe, b"Abort").is_err());
        assert!(here.sealer.flush(&mut pipe).is_err());
        assert!(here.sealer.append(&mut pipe, |_| Ok(())).is_err());
        assert!(here.sealer.write_whole(&mut pipe, b"Go").is_err());
        assert!(pipe.bytes.borrow().is_empty());
    }
}

/// The same of a message that must be taken whole or not at all.
#[test]
fn a_whole_message_fails_only_if_no_byte_of_it_was_taken() {
    let ((mut here, _), _) = trusted();
    assert!(here.sealer.write_whole(&mut Full(0), b"Go").is_err());
    let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
    assert!(here.sealer.write(&mut pipe, b"Abort").is_err() && pipe.bytes.borrow().is_empty());

    let ((mut here, _), _) = trusted();
    here.sealer.write_whole(&mut Full(3), b"Go").unwrap();
    assert!(here.sealer.write(&mut pipe, b"Abort").is_err() && pipe.bytes.borrow().is_empty());
}

#[test]
fn what_is_looked_at_is_read_afterwards() {
    let ((mut here, _), (mut there, _)) = trusted();
    let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
    assert!(there.opener.peek(&mut pipe, 8).unwrap().is_empty());
    here.sealer.write(&mut pipe, b"first, ").unwrap();
    here.sealer.write(&mut pipe, b"and second").unwrap();
    assert_eq!(there.opener.peek(&mut pipe, 8).unwrap(), b"first, a");
    assert_eq!(there.opener.peek(&mut pipe, 128).unwrap(), b"first, and second");
    here.sealer.write(&mut pipe, b"; third").unwrap();
    assert_eq!(read_all(&mut there, &mut pipe, 5), b"first, and second; third");
}

#[test]
fn a_record_has_a_size() {
    let ((mut here, _), (mut there, _)) = trusted();
    let mut pipe = Pipe { bytes: Rc::default(), at_a_time: usize::MAX };
    let whole = pattern(RECORD_BYTES);
    here.sealer.append(&mut pipe, |room| room.write_all(&whole)).unwrap();
    here.sealer.flush(&mut pipe).unwrap();
    assert!(read_all(&mut there, &mut pipe, 1000) == whole);
    assert!(here.sealer.append(&mut pipe, |room| room.write_all(&[0; RECORD_BYTES + 1])).is_err());
}
