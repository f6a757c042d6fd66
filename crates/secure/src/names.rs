//! The names by which certificates know their holders, and those that a user allows.
use std::{fmt, str::FromStr};

use rustls::pki_types::{CertificateDer, ServerName};
use webpki::EndEntityCert;
use x509_cert::{
    Certificate,
    der::{Decode, asn1::ObjectIdentifier},
    ext::pkix::{SubjectAltName, name::GeneralName},
};

/// The type of a common name in the subject of a certificate (RFC 5280).
const COMMON_NAME: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.4.3");
/// Names of a certificate that are shown, and characters of each.
const SHOWN: usize = 4;
const SHOWN_CHARACTERS: usize = 64;

/// A name that a peer's certificate may be for: a DNS name, an IP address or a common name. A `*` stands for any
/// characters but dots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerName(String);

impl FromStr for PeerName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "" => Err("a name is missing; write one as certificates have it: ship2.example.org, *.example.org".into()),
            name => Ok(Self(name.to_ascii_lowercase())),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl PeerName {
    /// Whether a certificate is for it.
    pub(crate) fn is_of(&self, shown: &EndEntityCert<'_>, names: &Names) -> bool {
        // A certificate may have wildcards, too.
        let covers = |name: ServerName<'_>| shown.verify_is_valid_for_subject_name(&name).is_ok();
        ServerName::try_from(self.0.as_str()).is_ok_and(covers) || names.0.iter().any(|name| self.matches(name))
    }

    /// Whether a name is one of those that are meant.
    fn matches(&self, name: &str) -> bool {
        matches(self.0.as_bytes(), name.to_ascii_lowercase().as_bytes())
    }
}

/// In time that grows with the product of both lengths, whatever they are.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut of, mut star) = (0, 0, None);
    while of < name.len() {
        if pattern.get(at) == Some(&b'*') {
            star = Some((at, of));
            at += 1;
        } else if pattern.get(at) == Some(&name[of]) {
            at += 1;
            of += 1;
        } else {
            // The last star takes one more; those before it need not, because it can take what they could.
            match star {
                Some((place, taken)) if name[taken] != b'.' => {
                    star = Some((place, taken + 1));
                    (at, of) = (place + 1, taken + 1);
                }
                _ => return false,
            }
        }
    }
    pattern[at..].iter().all(|&rest| rest == b'*')
}

/// The names in a certificate: DNS names, addresses, then the common name.
#[derive(Debug, Clone)]
pub(crate) struct Names(Vec<String>);

impl Names {
    /// Of a certificate that can't be read there are none.
    pub(crate) fn of(shown: &CertificateDer<'_>) -> Self {
        let Ok(read) = Certificate::from_der(shown) else { return Self(Vec::new()) };
        let certificate = read.tbs_certificate();
        let alternatives = certificate.get_extension::<SubjectAltName>().ok().flatten();
        let mut names: Vec<_> = alternatives.iter().flat_map(|(_, names)| &names.0).filter_map(alternative).collect();
        let common = certificate.subject().iter().filter(|part| part.oid == COMMON_NAME);
        names.extend(common.filter_map(|part| std::str::from_utf8(part.value.value()).ok().map(str::to_owned)));
        Self(names)
    }
}

fn alternative(name: &GeneralName) -> Option<String> {
    match name {
        GeneralName::DnsName(name) => Some(name.to_string()),
        GeneralName::IpAddress(bytes) => match bytes.as_bytes().len() {
            4 => <[u8; 4]>::try_from(bytes.as_bytes()).ok().map(|bytes| std::net::Ipv4Addr::from(bytes).to_string()),
            16 => <[u8; 16]>::try_from(bytes.as_bytes()).ok().map(|bytes| std::net::Ipv6Addr::from(bytes).to_string()),
            _ => None,
        },
        _ => None,
    }
}

/// For messages. Whoever made the certificate chose the names: what is no plain character is escaped, and not all of
/// them are shown.
impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no name");
        }
        let mut seen: Vec<&String> = Vec::new();
        for name in &self.0 {
            if !seen.contains(&name) {
                seen.push(name);
            }
        }
        for (number, name) in seen.iter().take(SHOWN).enumerate() {
            let name: String = name.chars().take(SHOWN_CHARACTERS).collect();
            write!(f, "{}{}", if number > 0 { ", " } else { "" }, name.escape_debug())?;
        }
        if seen.len() > SHOWN { f.write_str(", …") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_meant(pattern: &str, name: &str) -> bool {
        pattern.parse::<PeerName>().is_ok_and(|pattern| pattern.matches(name))
    }

    #[test]
    fn a_star_is_any_part_of_one_label() {
        for (pattern, name) in [
            ("ship2", "ship2"),
            ("Ship2.Example.org", "ship2.eXample.org"),
            ("*.example.org", "ship2.example.org"),
            ("ship*.example.*", "ship22.example.net"),
            ("*", "ship2"),
            ("ship*2", "ship2"),
            ("a*b*c", "axbxbxc"),
            ("The Source*", "The Source, Host 1"),
        ] {
            assert!(is_meant(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("ship2", "ship22"),
            ("ship2", "ship"),
            ("*.example.org", "example.org"),
            ("*.example.org", "a.b.example.org"),
            ("*.example.org", "ship2.example.org.evil.net"),
            ("*", "ship2.example.org"),
            ("a*b*c", "axbxb"),
            ("ship2", ""),
        ] {
            assert!(!is_meant(pattern, name), "{pattern} {name}");
        }
        assert!("  ".parse::<PeerName>().is_err());
    }

    proptest! {
        /// Against the plain definition.
        #[test]
        fn patterns_are_matched_as_they_are_defined(pattern in "[ab.*]{1,8}", name in "[ab.]{0,10}") {
            fn plain(pattern: &[u8], name: &[u8]) -> bool {
                match (pattern.split_first(), name.split_first()) {
                    (None, _) => name.is_empty(),
                    (Some((b'*', rest)), taken) => plain(rest, name)
                        || taken.is_some_and(|(first, left)| *first != b'.' && plain(pattern, left)),
                    (Some((wanted, rest)), Some((first, left))) => wanted == first && plain(rest, left),
                    (Some(_), None) => false,
                }
            }
            prop_assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), plain(pattern.as_bytes(), name.as_bytes()));
        }
    }
}
