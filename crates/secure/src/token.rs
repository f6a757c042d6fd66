//! The token of one move: the receiver's public key, and a secret that the caller proves to know.
use std::{fmt, str::FromStr};

use data_encoding::BASE64URL_NOPAD;
use ring::{
    digest, hkdf,
    rand::{SecureRandom, SystemRandom},
};
use zeroize::Zeroizing;

/// What a token begins with: its kind and version.
const PREFIX: &str = "ts1-";
const KEY: usize = 32;
const SECRET: usize = 16;
const CHECK: usize = 4;
const BYTES: usize = KEY + SECRET + CHECK;
/// What the checksum and the caller's key are made for, so that they fit nothing else.
const CONTEXT: &[u8] = b"transship token 1";

/// Whoever has it may open one session with the receiver that made it, and knows that receiver by it. It is never shown
/// but by [`Token::reveal`], and wiped when it is dropped.
#[derive(Clone)]
pub struct Token {
    host_key: [u8; KEY],
    secret: Zeroizing<[u8; SECRET]>,
}

/// Why a text is no token. It holds nothing of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It begins otherwise.
    #[error("a token begins with ts1-; use the one that the receiver printed")]
    Prefix,
    /// Its length is that of none.
    #[error("it is too short or too long for a token: part of it is missing, or something was added")]
    Length,
    /// It has a character that none has.
    #[error("it has a character that no token has; copy it again")]
    Character,
    /// A character was changed.
    #[error("a part of it was changed on the way (its checksum is wrong); copy it again")]
    Checksum,
}

impl Token {
    /// One with a new secret, for the receiver with this public key (Ed25519).
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn new(host_key: [u8; KEY]) -> Result<Self, ring::error::Unspecified> {
        let mut secret = Zeroizing::new([0; SECRET]);
        SystemRandom::new().fill(&mut *secret)?;
        Ok(Self { host_key, secret })
    }

    /// The token as text, to be given to the caller and to nobody else.
    pub fn reveal(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new([0; BYTES]);
        bytes[..KEY].copy_from_slice(&self.host_key);
        bytes[KEY..KEY + SECRET].copy_from_slice(&*self.secret);
        bytes[KEY + SECRET..].copy_from_slice(&self.check());
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + BASE64URL_NOPAD.encode_len(BYTES)));
        text.push_str(PREFIX);
        BASE64URL_NOPAD.encode_append(&*bytes, &mut text);
        text
    }

    /// The receiver's public key.
    pub(crate) fn host_key(&self) -> &[u8; KEY] {
        &self.host_key
    }

    /// What the caller's private key is made of (an Ed25519 seed). Both sides can compute it; nobody else can.
    pub(crate) fn caller_seed(&self) -> Zeroizing<[u8; 32]> {
        let mut seed = Zeroizing::new([0; 32]);
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, CONTEXT).extract(&*self.secret);
        secret
            .expand(&[b"caller's key", &self.host_key], hkdf::HKDF_SHA256)
            .and_then(|made| made.fill(&mut *seed))
            .expect("32 bytes are what one step of HKDF-SHA256 makes");
        seed
    }

    /// It finds a token that was copied badly. It is no protection.
    fn check(&self) -> [u8; CHECK] {
        let mut context = digest::Context::new(&digest::SHA256);
        [CONTEXT, &self.host_key, &*self.secret].iter().for_each(|part| context.update(part));
        let mut check = [0; CHECK];
        check.copy_from_slice(&context.finish().as_ref()[..CHECK]);
        check
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let text = text.trim().strip_prefix(PREFIX).ok_or(TokenError::Prefix)?;
        if BASE64URL_NOPAD.decode_len(text.len()) != Ok(BYTES) {
            return Err(TokenError::Length);
        }
        let mut bytes = Zeroizing::new([0; BYTES]);
        BASE64URL_NOPAD.decode_mut(text.as_bytes(), &mut *bytes).map_err(|_| TokenError::Character)?;
        let (mut host_key, mut secret) = ([0; KEY], Zeroizing::new([0; SECRET]));
        host_key.copy_from_slice(&bytes[..KEY]);
        secret.copy_from_slice(&bytes[KEY..KEY + SECRET]);
        let token = Self { host_key, secret };
        if token.check() == bytes[KEY + SECRET..] { Ok(token) } else { Err(TokenError::Checksum) }
    }
}

/// Without the secret, for logs.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_token_is_read_as_it_is_written() {
        let token = Token::new([7; 32]).unwrap();
        let text = token.reveal();
        let read: Token = format!(" {}\n", *text).parse().unwrap();
        assert_eq!((read.host_key, *read.secret), (token.host_key, *token.secret));
        assert!(text.starts_with("ts1-") && text.len() == 74, "{}", text.len());
        assert_eq!(format!("{token:?}"), "Token(…)");
    }

    #[test]
    fn no_two_tokens_and_no_two_receivers_have_a_caller_in_common() {
        let [one, other] = [[7; 32], [8; 32]].map(|key| Token::new(key).unwrap());
        let moved = Token { host_key: other.host_key, secret: one.secret.clone() };
        let seeds = [&one, &other, &moved].map(|token| token.caller_seed());
        assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds[1] != seeds[2]);
    }

    #[test]
    fn every_character_counts() {
        let text = Token::new([7; 32]).unwrap().reveal();
        for at in 0..text.len() {
            let mut changed = text.as_bytes().to_vec();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(String::from_utf8(changed).unwrap().parse::<Token>().is_err(), "character {at}");
            assert!(text[..at].parse::<Token>().is_err(), "cut at {at}");
        }
        assert_eq!(format!("{}A", *text).parse::<Token>().unwrap_err(), TokenError::Length);
        assert_eq!(format!("{}+", &text[..73]).parse::<Token>().unwrap_err(), TokenError::Character);
        assert_eq!("tcp:ship2:1".parse::<Token>().unwrap_err(), TokenError::Prefix);
    }

    proptest! {
        #[test]
        fn any_text_is_a_token_or_an_error(text in ".*") {
            let prefixed = ["ts1-", &text].concat();
            prop_assert!(text.parse::<Token>().is_err() && prefixed.parse::<Token>().is_err());
        }
    }
}
