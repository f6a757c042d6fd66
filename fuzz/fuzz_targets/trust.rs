//! What is read before anybody is trusted: a token, a handshake of whoever has come, records that nobody sealed. A text
//! is refused or written back as it was, and nobody gets in without the key.
#![no_main]
use std::{
    io::{Error, ErrorKind, Read, Result, Write},
    sync::OnceLock,
};

use libfuzzer_sys::fuzz_target;
use transship_secure::{Caller, Handshake, Host, Progress, Token};

/// Gives what it has, and then says that nothing more is there; what is written goes nowhere.
struct Stranger<'a>(&'a [u8]);

impl Read for Stranger<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        match self.0.read(into)? {
            0 => Err(Error::from(ErrorKind::WouldBlock)),
            count => Ok(count),
        }
    }
}

impl Write for Stranger<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// One key for all of it: making one takes longer than the rest.
fn ends() -> &'static (Host, Caller) {
    static ENDS: OnceLock<(Host, Caller)> = OnceLock::new();
    ENDS.get_or_init(|| {
        let (host, token) = Host::with_new_token().expect("the system has random numbers");
        let caller = Caller::with_token(&token).expect("a token is a key");
        (host, caller)
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&way, rest)) = bytes.split_first() else { return };
    let (host, caller) = ends();
    match way % 3 {
        0 => {
            let Ok(text) = std::str::from_utf8(rest) else { return };
            if let Ok(token) = text.parse::<Token>() {
                assert_eq!(*token.reveal(), text.trim());
            }
        }
        1 => {
            let mut stranger = Stranger(rest);
            let mut handshake = Handshake::hosting(host).expect("the system has random numbers");
            assert!(!matches!(handshake.advance(&mut stranger), Ok(Progress::Done(_))), "a stranger was let in");
        }
        _ => {
            let mut stranger = Stranger(rest);
            let mut handshake = Handshake::calling(caller).expect("the system has random numbers");
            assert!(!matches!(handshake.advance(&mut stranger), Ok(Progress::Done(_))), "a stranger was believed");
        }
    }
});
