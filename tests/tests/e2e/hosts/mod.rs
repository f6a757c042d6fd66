//! Hosts that know each other by certificates.
use std::path::PathBuf;

use transship_lab::{Authority, Holder, Result, Scratch, Synthetic, Transship, transship::TransshipBuilder};

/// Two hosts that trust each other: `here` has the guest, `there` is called by `localhost` and 127.0.0.1, too.
pub(crate) struct Hosts {
    pub(crate) authority: Authority,
    folder: Scratch,
}

impl Hosts {
    pub(crate) fn new() -> Result<Self> {
        let hosts = Self { authority: Authority::new()?, folder: Scratch::new()? };
        hosts.host("here", &Holder::named(["ship1.example.org"]).serial(1))?;
        hosts.host("there", &Holder::named(["ship2.example.org", "localhost", "127.0.0.1"]).serial(2))?;
        Ok(hosts)
    }

    pub(crate) fn host(&self, name: &str, holder: &Holder) -> Result<()> {
        self.authority.furnish(&self.folder(name), holder)
    }

    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// `--tls` of a host.
    pub(crate) fn tls(&self, name: &str) -> [String; 2] {
        ["--tls".into(), self.folder(name).display().to_string()]
    }

    pub(crate) fn receiving(&self, destination: &Synthetic, listen: &str) -> TransshipBuilder {
        Transship::receiving(&destination.vm(), listen).args(self.tls("there"))
    }

    pub(crate) fn moving(&self, source: &Synthetic, to: &str) -> TransshipBuilder {
        Transship::moving(&source.vm(), to).args(self.tls("here")).args(["--channels", "2"])
    }
}
