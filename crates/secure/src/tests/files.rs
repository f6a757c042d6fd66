//! Files that are encrypted for keys, and opened by them.
use std::io::{self, Cursor, Read, Write};

use crate::{Identities, KeyTextError, NotOpened, Recipients};

/// As `age-keygen` writes it.
const KEY: &str = "# created: 2026-11-23T21:00:00Z\n# public key: age17zkmx7n3zaa7453pas6q2qusxz8qqvdl9235nnnx92y9z7zu94xsdj2g0u\n\
                   AGE-SECRET-KEY-1YKQ5WJNTF49ARTESWZA9VKA69VZFHDT7SFRPW3DFSS0RRYLPF85QKM8PK0\n";
const PUBLIC: &str = "age17zkmx7n3zaa7453pas6q2qusxz8qqvdl9235nnnx92y9z7zu94xsdj2g0u";
const OTHER: &str = "AGE-SECRET-KEY-1YD5JJWZ0CTZHMHDC28P6C3PMQ5R5YMP7YDTH2T99LCDY3MZSZ4FQ9D0ZS7";

fn sealed(for_whom: &str, bytes: &[u8]) -> Vec<u8> {
    let mut sealer = for_whom.parse::<Recipients>().unwrap().seal(Vec::new()).unwrap();
    sealer.write_all(bytes).unwrap();
    sealer.finish().unwrap()
}

fn opened(by: &str, bytes: Vec<u8>) -> Result<io::Result<Vec<u8>>, NotOpened> {
    let mut reader = by.parse::<Identities>().unwrap().open(Cursor::new(bytes))?;
    let mut all = Vec::new();
    Ok(reader.read_to_end(&mut all).map(|_| all))
}

#[test]
fn both_forms_of_a_key_are_the_same_one() {
    let bytes: Vec<u8> = (0..200_000u32).map(|at| at as u8).collect();
    for for_whom in [KEY, PUBLIC] {
        assert_eq!(opened(KEY, sealed(for_whom, &bytes)).unwrap().unwrap(), bytes);
    }
    let both = format!("{PUBLIC}\n\n{OTHER}\n");
    assert_eq!(opened(OTHER, sealed(&both, &bytes)).unwrap().unwrap(), bytes);
    match opened(OTHER, sealed(PUBLIC, &bytes)) {
        Err(NotOpened::OtherKey(tried)) => assert!(tried.starts_with("age1") && tried != PUBLIC, "{tried}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_byte_and_the_end_count() {
    let whole = sealed(PUBLIC, &[7; 140_000]);
    for at in (0..200).chain((200..whole.len()).step_by(997)).chain([whole.len() - 1]) {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        assert!(!matches!(opened(KEY, changed), Ok(Ok(_))), "byte {at} was changed");
        assert!(!matches!(opened(KEY, whole[..at].to_vec()), Ok(Ok(_))), "it ends at {at}");
    }
}

#[test]
fn a_head_without_an_end_is_given_up() {
    struct Endless(u64);
    impl Read for Endless {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0 += into.len() as u64;
            assert!(self.0 < 16 << 20, "it is read for ever");
            into.fill(b'a');
            Ok(into.len())
        }
    }
    let head = Cursor::new(b"age-encryption.org/v1\n-> X25519 ").chain(Endless(0));
    assert!(matches!(KEY.parse::<Identities>().unwrap().open(head), Err(NotOpened::Damaged)));
}

#[test]
fn what_is_no_key_is_named_by_its_line() {
    for (text, line) in [("ssh-ed25519 AAAA", 1), ("# a\n\nage1xx", 3), ("AGE-SECRET-KEY-PQ-1QQ", 1)] {
        assert_eq!(text.parse::<Recipients>().unwrap_err(), KeyTextError::Line(line), "{text}");
        assert_eq!(text.parse::<Identities>().unwrap_err(), KeyTextError::Line(line), "{text}");
    }
    assert_eq!(format!("# mine\n{PUBLIC}").parse::<Identities>().unwrap_err(), KeyTextError::Public(2));
    assert_eq!("# none\n".parse::<Recipients>().unwrap_err(), KeyTextError::Empty);
    assert!(!format!("{:?}", KEY.parse::<Identities>().unwrap()).contains("AGE"));
}
