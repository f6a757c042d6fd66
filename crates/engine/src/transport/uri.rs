//! Addresses, as they are written.
use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr};

/// An address, as QEMU writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uri {
    /// `tcp:host:port`; an IPv6 address in brackets.
    Tcp {
        /// A name or an address, without brackets.
        host: String,
        /// 0 lets a listener's system choose.
        port: u16,
    },
    /// `unix:path`
    Unix(PathBuf),
}

impl Uri {
    /// Whether what goes there, or comes from there, may go over a network: all but this host's own addresses and
    /// sockets. A name other than `localhost` may be anybody's.
    pub fn is_remote(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp { host, .. } => match host.parse::<IpAddr>() {
                Ok(address) => !address.to_canonical().is_loopback(),
                Err(_) => host != "localhost",
            },
        }
    }
}

impl FromStr for Uri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| Err(format!("{text:?} is not an address: {why}; write tcp:HOST:PORT or unix:PATH"));
        match text.split_once(':') {
            Some(("unix", "")) => wrong("the path is missing"),
            Some(("unix", path)) => Ok(Self::Unix(path.into())),
            Some(("tcp", rest)) => {
                let Some((host, port)) = rest.rsplit_once(':') else { return wrong("the port is missing") };
                let Ok(port) = port.parse() else { return wrong("the port is not a number from 0 to 65535") };
                let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
                if bare.is_none() && host.contains(':') {
                    return wrong("an IPv6 address goes in brackets");
                }
                Ok(Self::Tcp { host: bare.unwrap_or(host).to_owned(), port })
            }
            _ => wrong("unknown kind"),
        }
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["tcp:host:1234", "tcp:127.0.0.1:0", "tcp:[::1]:7", "unix:/run/a:b.sock"] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        for text in ["", "tcp:", "tcp:host", "tcp:host:70000", "tcp:::1:7", "unix:", "udp:host:1", "host:1"] {
            assert!(text.parse::<Uri>().unwrap_err().contains("tcp:HOST:PORT"), "{text}");
        }
    }
}
