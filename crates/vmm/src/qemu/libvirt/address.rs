//! How a user names a domain.
use std::{fmt, str::FromStr};

/// `[URI#]DOMAIN`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// None: the one that libvirt's own commands take (`LIBVIRT_DEFAULT_URI`, or qemu:///system for root).
    pub uri: Option<String>,
    /// A name or a UUID.
    pub domain: String,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (uri, domain) = match text.rsplit_once('#') {
            Some((uri, domain)) => (Some(uri), domain),
            None => (None, text),
        };
        if domain.is_empty() {
            return Err(format!("{text:?} names no domain; write libvirt:DOMAIN or libvirt:URI#DOMAIN"));
        }
        let uri = uri.filter(|uri| !uri.is_empty()).map(str::to_owned);
        Ok(Self { uri, domain: domain.to_owned() })
    }
}

/// As a user writes it.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uri {
            Some(uri) => write!(f, "libvirt:{uri}#{}", self.domain),
            None => write!(f, "libvirt:{}", self.domain),
        }
    }
}

impl Address {
    /// virsh's command line for the domain.
    pub fn by_hand(&self, command: &str) -> String {
        let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
        match &self.uri {
            Some(uri) => format!("virsh -c {} {command} {}", quoted(uri), quoted(&self.domain)),
            None => format!("virsh {command} {}", quoted(&self.domain)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_domain_may_have_a_uri_before_it() {
        let read = |text: &str| text.parse::<Address>().unwrap();
        assert_eq!(read("g1"), Address { uri: None, domain: "g1".into() });
        let both = read("qemu:///system?socket=/run/a/libvirt-sock#g1");
        assert_eq!(both.uri.as_deref(), Some("qemu:///system?socket=/run/a/libvirt-sock"));
        assert_eq!(both.domain, "g1");
        assert_eq!(both.to_string(), "libvirt:qemu:///system?socket=/run/a/libvirt-sock#g1");
        assert_eq!(read("#g1"), read("g1"));
        for wrong in ["", "qemu:///system#", "#"] {
            assert!(wrong.parse::<Address>().unwrap_err().contains("libvirt:DOMAIN"), "{wrong}");
        }
    }

    #[test]
    fn what_a_person_types_is_quoted_for_the_shell() {
        let address: Address = "qemu:///system?socket=/a&b#it's".parse().unwrap();
        assert_eq!(address.by_hand("resume"), r"virsh -c 'qemu:///system?socket=/a&b' resume 'it'\''s'");
    }
}
