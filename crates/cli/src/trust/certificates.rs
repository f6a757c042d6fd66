//! `--tls` and `--peer-name`: the files that have a host's certificates, and whose others count.
use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    sync::Arc,
};

use transship_engine::{Caller, Certificates, Host, PeerName, Pem, Piece, Unusable, Uri, Usage};
use zeroize::Zeroizing;

use crate::{args::TlsArgs, checks::Checks};

/// More than any of these files has; a long list of what was revoked may be large.
const FILE_MAX: u64 = 16 << 20;
/// What others of this host may not do with a key.
const OTHERS: u32 = 0o007;

/// What this end shows, and whom it believes.
pub(crate) struct Shown {
    certificates: Arc<Certificates>,
    names: Vec<PeerName>,
}

impl Shown {
    /// Of the flags; none within: there is no `--tls`. `others`: flags that say otherwise who the other end is, and
    /// whether they were given.
    pub(crate) fn check(
        checks: &mut Checks,
        args: &TlsArgs,
        usage: Usage,
        others: &[(&str, bool)],
    ) -> Option<Option<Self>> {
        let Some(folder) = &args.tls else {
            if !args.peer_name.is_empty() {
                checks.mistake("--peer-name: it is a name in a certificate; add --tls DIR".into());
            }
            return Some(None);
        };
        for (flag, _) in others.iter().filter(|(_, given)| *given) {
            checks.mistake(format!("--tls, {flag}: both say how the other end is known; leave one of them out"));
        }
        let names: Vec<_> =
            args.peer_name.iter().map(|name| checks.read("--peer-name", name, str::parse::<PeerName>)).collect();
        match read(folder, usage) {
            Ok(certificates) => Some(Some(Self {
                certificates: Arc::new(certificates),
                names: names.into_iter().collect::<Option<_>>()?,
            })),
            Err(why) => {
                checks.mistake(format!("--tls: {why}"));
                None
            }
        }
    }

    /// The end that calls `to`.
    pub(crate) fn caller(&self, checks: &mut Checks, to: &Uri) -> Option<Caller> {
        let caller = match (self.names.is_empty(), to) {
            (false, _) => Ok(Caller::to_peer(&self.certificates, self.names.clone())),
            (true, Uri::Tcp { host, .. }) => Caller::to_host(&self.certificates, host).map_err(|why| why.to_string()),
            (true, Uri::Unix(_)) => Err("a unix socket has no name that a certificate could be for".into()),
        };
        caller.map_err(|why| checks.mistake(format!("--to {to}: {why}; name the receiver with --peer-name"))).ok()
    }

    /// The end that is called.
    pub(crate) fn host(&self) -> Host {
        Host::with_certificates(&self.certificates, self.names.clone())
    }
}

fn file_of(piece: Piece, usage: Usage) -> &'static str {
    match (piece, usage) {
        (Piece::Authorities, _) => "ca-cert.pem",
        (Piece::Revoked, _) => "ca-crl.pem",
        (Piece::Own, Usage::Client) => "client-cert.pem",
        (Piece::Own, Usage::Server) => "server-cert.pem",
        (Piece::Key, Usage::Client) => "client-key.pem",
        (Piece::Key, Usage::Server) => "server-key.pem",
    }
}

fn read(folder: &Path, usage: Usage) -> Result<Certificates, String> {
    let path = |piece| folder.join(file_of(piece, usage));
    let text = |piece| {
        let path = path(piece);
        contents(&path, piece).map_err(|error| format!("can't read {}: {error}", path.display()))
    };
    let revoked = if path(Piece::Revoked).exists() { Some(text(Piece::Revoked)?) } else { None };
    let [authorities, own, key] = [text(Piece::Authorities)?, text(Piece::Own)?, text(Piece::Key)?];
    let revoked = revoked.as_ref().map(|text| text.as_slice());
    let said = |Unusable { piece, why }: Unusable| format!("{} {why}", path(piece).display());
    let pem = Pem { authorities: &authorities, revoked, own: &own, key: &key };
    let certificates = Certificates::from_pem(pem).map_err(said)?;
    certificates.check_own(usage).map_err(said)?;
    Ok(certificates)
}

fn contents(path: &Path, piece: Piece) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut file = fs::File::open(path)?;
    let found = file.metadata()?;
    if piece == Piece::Key && found.permissions().mode() & OTHERS != 0 {
        let cure = "every user of this host may use it; take it from them (chmod o-rwx), and make a new key if others \
                    may have read it";
        return Err(io::Error::other(cure));
    }
    if found.size() > FILE_MAX {
        return Err(io::Error::other("it is too large for such a file"));
    }
    // Made as large as the file at once: a buffer that grows leaves copies behind.
    let mut text = Zeroizing::new(Vec::with_capacity(found.size() as usize + 1));
    io::Read::read_to_end(&mut io::Read::take(&mut file, found.size()), &mut text)?;
    Ok(text)
}
