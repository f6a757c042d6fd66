//! Where the bytes go: `tcp:host:port` and `unix:path`.
use crate::Error;

/// An address, as QEMU writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uri {
    Tcp { host: String, port: u16 },
    Unix(std::path::PathBuf),
}

/// A socket that waits for a source.
pub struct Listener {}

#[allow(unused_variables)]
impl Listener {
    pub fn bind(uri: &Uri) -> Result<Self, Error> { todo!() }
    /// The address, with the port that the system chose if 0 was asked for.
    pub fn uri(&self) -> &Uri { todo!() }
}

impl std::str::FromStr for Uri {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> { todo!("{s}") }
}
impl std::fmt::Display for Uri {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { todo!("{f:?}") }
}
