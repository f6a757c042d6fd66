//! An end as a text, for another process of the same host that goes on in its place, and for nobody else.
//!
//! ```text
//!   ts1-…                                         the caller with this token
//!   SEED.ts1-…                                    the receiver that made the token
//!   x509.EXPECTED.AUTHORITIES.REVOKED.OWN.KEY     either of them, by certificates: whom they expect, and the files
//! ```
//!
//! What stands between dots is in base64url without padding. Only ends that speak to another transship are handed on.
use std::sync::Arc;

use data_encoding::BASE64URL_NOPAD;
use rustls::pki_types::ServerName;
use zeroize::Zeroizing;

use crate::{
    Certificates, PeerName, Pem, SecureError, Token,
    ends::{Caller, CallerBy, Host, HostBy},
    verify::Expected,
};

const CERTIFICATES: &str = "x509.";
const BETWEEN: char = '.';

impl Caller {
    /// What another process needs to be this caller.
    pub fn reveal(&self) -> Zeroizing<String> {
        match self.by() {
            CallerBy::Token(_, token) => token.reveal(),
            CallerBy::Certificates(certificates, expected) => text_of(certificates, expected),
        }
    }

    /// The caller that was revealed so.
    ///
    /// # Errors
    /// It is no such text.
    pub fn revealed(text: &str) -> Result<Self, SecureError> {
        match certificates_in(text)? {
            Some((certificates, expected)) => Ok(Self::with_certificates(&certificates, expected)),
            None => Self::with_token(&text.parse::<Token>().map_err(|_| unsuited())?),
        }
    }
}

impl Host {
    /// What another process needs to be this host.
    pub fn reveal(&self) -> Zeroizing<String> {
        match self.by() {
            HostBy::Token(_, known) => {
                let (seed, token) = known.parts();
                joined("", &[seed], &token.reveal())
            }
            HostBy::Certificates(certificates, expected) => text_of(certificates, expected),
        }
    }

    /// The host that was revealed so.
    ///
    /// # Errors
    /// It is no such text.
    pub fn revealed(text: &str) -> Result<Self, SecureError> {
        if let Some((certificates, expected)) = certificates_in(text)? {
            return Ok(Self::expecting(&certificates, expected));
        }
        let (seed, token) = text.split_once(BETWEEN).ok_or_else(unsuited)?;
        let token: Token = token.parse().map_err(|_| unsuited())?;
        let seed = decoded(seed)?;
        let seed = <[u8; 32]>::try_from(seed.as_slice()).map(Zeroizing::new).map_err(|_| unsuited())?;
        Self::of_seed(seed, token)?.ok_or_else(unsuited)
    }
}

fn unsuited() -> SecureError {
    SecureError::Unsuited("what one end is known by was damaged on its way to another process".into())
}

fn text_of(certificates: &Certificates, expected: &Expected) -> Zeroizing<String> {
    let (expected, pem) = (words_of(expected), certificates.pem());
    let revoked = pem.revoked.unwrap_or_default();
    joined(CERTIFICATES, &[expected.as_bytes(), pem.authorities, revoked, pem.own], &encoded(pem.key))
}

/// The pieces between a beginning and an end, in a buffer that need not grow: that would leave copies behind.
fn joined(start: &str, pieces: &[&[u8]], end: &str) -> Zeroizing<String> {
    let length: usize = pieces.iter().map(|piece| BASE64URL_NOPAD.encode_len(piece.len()) + 1).sum();
    let mut text = Zeroizing::new(String::with_capacity(start.len() + length + end.len()));
    text.push_str(start);
    for piece in pieces {
        BASE64URL_NOPAD.encode_append(piece, &mut text);
        text.push(BETWEEN);
    }
    text.push_str(end);
    text
}

fn encoded(piece: &[u8]) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(BASE64URL_NOPAD.encode_len(piece.len())));
    BASE64URL_NOPAD.encode_append(piece, &mut text);
    text
}

fn decoded(text: &str) -> Result<Zeroizing<Vec<u8>>, SecureError> {
    let length = BASE64URL_NOPAD.decode_len(text.len()).map_err(|_| unsuited())?;
    let mut bytes = Zeroizing::new(vec![0; length]);
    BASE64URL_NOPAD.decode_mut(text.as_bytes(), &mut bytes).map_err(|_| unsuited())?;
    Ok(bytes)
}

/// None: it is the text of an end that is known by a token.
fn certificates_in(text: &str) -> Result<Option<(Arc<Certificates>, Expected)>, SecureError> {
    let Some(pieces) = text.strip_prefix(CERTIFICATES) else { return Ok(None) };
    let pieces = pieces.split(BETWEEN).map(decoded).collect::<Result<Vec<_>, _>>()?;
    let [expected, authorities, revoked, own, key] = &pieces[..] else { return Err(unsuited()) };
    let revoked = (!revoked.is_empty()).then_some(revoked.as_slice());
    let certificates = Certificates::from_pem(Pem { authorities, revoked, own, key }).map_err(|_| unsuited())?;
    Ok(Some((Arc::new(certificates), expected_in(expected).ok_or_else(unsuited)?)))
}

/// One word to a line: of what kind, and then the names.
fn words_of(expected: &Expected) -> String {
    match expected {
        Expected::Anybody => "anybody".into(),
        Expected::Host(name) => format!("host\n{}", name.to_str()),
        Expected::Named(names) => names.iter().fold("named".into(), |words, name| format!("{words}\n{name}")),
    }
}

fn expected_in(words: &[u8]) -> Option<Expected> {
    let mut words = std::str::from_utf8(words).ok()?.split('\n');
    Some(match words.next()? {
        "anybody" => Expected::Anybody,
        "host" => Expected::Host(ServerName::try_from(words.next()?.to_owned()).ok()?),
        "named" => Expected::Named(words.map(|name| name.parse::<PeerName>().ok()).collect::<Option<_>>()?),
        _ => return None,
    })
}
