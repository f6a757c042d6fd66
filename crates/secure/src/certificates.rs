//! What a host needs in order to know others by certificates, and to be known by them.
use std::sync::Arc;

use pkcs8::PrivateKeyInfoRef;
use rustls::{
    pki_types::{
        CertificateDer, CertificateRevocationListDer, PrivateKeyDer, PrivateSec1KeyDer, TrustAnchor, UnixTime,
        pem::{self, PemObject},
    },
    sign::CertifiedKey,
};
use sec1::EcPrivateKey;
use webpki::{CertRevocationList, OwnedCertRevocationList, anchor_from_trusted_cert};
use x509_cert::{
    Certificate,
    der::{Decode, Encode},
};
use zeroize::Zeroizing;

use crate::{
    ends::provider,
    names::Names,
    verify::{Expected, Usage, judge, when},
};

/// One of the files of which [`Certificates`] are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// The certificates of those who may sign.
    Authorities,
    /// What they have revoked.
    Revoked,
    /// This end's own, and those between it and an authority.
    Own,
    /// The private key that belongs to it.
    Key,
}

/// Why certificates are of no use: in which file, and the end of a sentence about that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// Where it is.
    pub piece: Piece,
    /// What it is, and what to do.
    pub why: String,
}

/// Contents of files in PEM.
#[derive(Clone, Copy)]
pub struct Pem<'a> {
    /// Of [`Piece::Authorities`].
    pub authorities: &'a [u8],
    /// Of [`Piece::Revoked`]; none: nothing was revoked.
    pub revoked: Option<&'a [u8]>,
    /// Of [`Piece::Own`].
    pub own: &'a [u8],
    /// Of [`Piece::Key`].
    pub key: &'a [u8],
}

/// What one end has in order to know the other and to be known. Good for any number of sessions.
pub struct Certificates {
    pub(crate) anchors: Vec<TrustAnchor<'static>>,
    pub(crate) revoked: Vec<CertRevocationList<'static>>,
    pub(crate) own: Arc<CertifiedKey>,
    files: Files,
}

/// What they were made of, for another process that goes on with them.
struct Files {
    authorities: Vec<u8>,
    revoked: Option<Vec<u8>>,
    own: Vec<u8>,
    key: Zeroizing<Vec<u8>>,
}

impl Certificates {
    /// # Errors
    /// Something is missing, is not what it has to be, or does not belong to the rest.
    pub fn from_pem(pem: Pem<'_>) -> Result<Self, Unusable> {
        let own = certificates(Piece::Own, pem.own)?;
        let key = PrivateKeyDer::from_pem_slice(pem.key).map_err(|error| not_read(Piece::Key, &error))?;
        let bad = |piece, why: String| Unusable { piece, why };
        let key = match without_padding(&key) {
            Some(plain) => {
                drop(Zeroizing::new(key)); // wiped
                plain
            }
            None => key,
        };
        let private = provider().key_provider.load_private_key(key).map_err(|_| {
            let kinds = "RSA with 2048 bits or more, ECDSA with P-256 or P-384, or Ed25519";
            bad(Piece::Key, format!("holds a key of a kind that is not known here; use {kinds}"))
        })?;
        let own = Arc::new(CertifiedKey::new(own, private));
        if own.keys_match().is_err() {
            return Err(bad(Piece::Key, "is not the key of the certificate beside it".into()));
        }
        let revoked = pem.revoked.map_or(Ok(Vec::new()), revocations)?;
        let files = Files {
            authorities: pem.authorities.to_vec(),
            revoked: pem.revoked.map(<[u8]>::to_vec),
            own: pem.own.to_vec(),
            key: Zeroizing::new(pem.key.to_vec()),
        };
        Ok(Self { anchors: anchors(pem.authorities)?, revoked, own, files })
    }

    /// What they were made of.
    pub(crate) fn pem(&self) -> Pem<'_> {
        let Files { authorities, revoked, own, key } = &self.files;
        Pem { authorities, revoked: revoked.as_deref(), own, key }
    }

    /// Whether others can take this end for what it says it is, now. They may still know of a revocation that it does
    /// not know of.
    ///
    /// # Errors
    /// They can't.
    pub fn check_own(&self, usage: Usage) -> Result<(), Unusable> {
        let [own, between @ ..] = &self.own.cert[..] else { return Ok(()) };
        judge(self, own, between, &Expected::Anybody, usage, UnixTime::now())
            .map_err(|(_, why)| Unusable { piece: Piece::Own, why: format!("is of no use: {}", why.of_ours()) })
    }

    /// The names for which this end's own certificate is.
    pub(crate) fn names(&self) -> Names {
        Names::of(&self.own.cert[0])
    }
}

/// GnuTLS writes every other elliptic key with a zero in front, as if it were a number with a sign; ring takes none.
fn without_padding(key: &PrivateKeyDer<'_>) -> Option<PrivateKeyDer<'static>> {
    let key = match key {
        PrivateKeyDer::Sec1(key) => key.secret_sec1_der(),
        PrivateKeyDer::Pkcs8(key) => PrivateKeyInfoRef::from_der(key.secret_pkcs8_der()).ok()?.private_key.as_bytes(),
        _ => return None,
    };
    let mut key = EcPrivateKey::from_der(key).ok()?;
    let (zero, number) = key.private_key.split_first()?;
    if *zero != 0 || !matches!(number.len(), 32 | 48) {
        return None;
    }
    key.private_key = number;
    Some(PrivateKeyDer::Sec1(PrivateSec1KeyDer::from(key.to_der().ok()?)))
}

fn not_read(piece: Piece, error: &pem::Error) -> Unusable {
    let wanted = match piece {
        Piece::Authorities | Piece::Own => "certificate",
        Piece::Revoked => "revocation list",
        Piece::Key => "private key that is not itself encrypted",
    };
    let why = match error {
        pem::Error::NoItemsFound => format!("holds no {wanted} in PEM"),
        other => format!("can't be read as PEM with a {wanted}: {other}"),
    };
    Unusable { piece, why }
}

fn certificates(piece: Piece, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let all = all.map_err(|error| not_read(piece, &error))?;
    if all.is_empty() { Err(not_read(piece, &pem::Error::NoItemsFound)) } else { Ok(all) }
}

/// An authority whose own time is over signs nothing that counts. What follows it in the file may be its successor.
fn anchors(text: &[u8]) -> Result<Vec<TrustAnchor<'static>>, Unusable> {
    let bad = |why: String| Unusable { piece: Piece::Authorities, why };
    let mut anchors = Vec::new();
    let mut over = None;
    let now = UnixTime::now();
    for certificate in certificates(Piece::Authorities, text)? {
        let anchor = anchor_from_trusted_cert(&certificate)
            .map_err(|error| bad(format!("holds a certificate that can't be read ({error}); make it anew")))?;
        let ends = Certificate::from_der(&certificate).ok();
        let ends = ends.map(|read| read.tbs_certificate().validity().not_after.to_unix_duration());
        match ends.map(UnixTime::since_unix_epoch) {
            Some(end) if end < now => over = Some(end),
            _ => anchors.push(anchor.to_owned()),
        }
    }
    match (anchors.is_empty(), over) {
        (true, Some(end)) => Err(bad(format!("expired on {}; get the new one of this authority", when(end)))),
        _ => Ok(anchors),
    }
}

fn revocations(text: &[u8]) -> Result<Vec<CertRevocationList<'static>>, Unusable> {
    let bad = |why: String| Unusable { piece: Piece::Revoked, why };
    let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(text).collect();
    let lists = lists.map_err(|error| not_read(Piece::Revoked, &error))?;
    if lists.is_empty() {
        return Err(not_read(Piece::Revoked, &pem::Error::NoItemsFound));
    }
    let read = |list: CertificateRevocationListDer<'_>| OwnedCertRevocationList::from_der(&list);
    let lists: Result<Vec<_>, _> = lists.into_iter().map(read).collect();
    let lists =
        lists.map_err(|error| bad(format!("holds a list that can't be read ({error}); make a version 2 list")))?;
    Ok(lists.into_iter().map(CertRevocationList::from).collect())
}

/// Without keys, for logs.
impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificates({})", self.names())
    }
}
