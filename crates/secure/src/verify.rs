//! Whether a certificate is one of a peer that is meant: signed by an authority that is trusted, in time, not revoked,
//! for this purpose, and for the right name.
use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, KeyUsage, RevocationOptionsBuilder, UnknownStatusPolicy,
};
use x509_cert::der::DateTime;

use crate::{
    Certificates,
    ends::{NO_TLS12, provider},
    names::{Names, PeerName},
};

/// What a certificate is shown for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// To call.
    Client,
    /// To be called.
    Server,
}

/// Whom the other end may be, of all those with a certificate of an authority that is trusted.
#[derive(Debug, Clone)]
pub(crate) enum Expected {
    Anybody,
    /// The host that was called.
    Host(ServerName<'static>),
    /// Any of these.
    Named(Vec<PeerName>),
}

/// Why a certificate does not count, for the user of the side that has looked at it.
#[derive(Debug)]
pub(crate) struct Reason {
    names: Names,
    why: String,
}

impl Reason {
    /// About one that this side has itself.
    pub(crate) fn of_ours(&self) -> String {
        format!("it is for {}, and {}", self.names, self.why)
    }
}

/// About one of the other side.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its certificate ({}) {}", self.names, self.why)
    }
}

/// A moment as text.
pub(crate) fn when(time: UnixTime) -> String {
    let moment = DateTime::from_unix_duration(std::time::Duration::from_secs(time.as_secs()));
    moment.map_or_else(|_| "a day that is far away".into(), |moment| moment.to_string())
}

/// Looks at a certificate, and those that came with it.
pub(crate) fn judge(
    certificates: &Certificates,
    shown: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
    expected: &Expected,
    usage: Usage,
    now: UnixTime,
) -> Result<(), (CertificateError, Reason)> {
    let names = Names::of(shown);
    let refuse = |(kind, why): (CertificateError, String)| (kind, Reason { names: names.clone(), why });
    let certificate = EndEntityCert::try_from(shown).map_err(|error| refuse(explain(&error, usage, false)))?;
    let is_own_issuer = certificate.issuer() == certificate.subject();
    let lists: Vec<&CertRevocationList<'_>> = certificates.revoked.iter().collect();
    // As GnuTLS has it: a list counts as long as it is current, and who has none of his own has revoked nobody.
    let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|options| {
        options.with_status_policy(UnknownStatusPolicy::Allow).with_expiration_policy(ExpirationPolicy::Enforce).build()
    });
    let purpose = match usage {
        Usage::Client => KeyUsage::client_auth(),
        Usage::Server => KeyUsage::server_auth(),
    };
    let known = provider().signature_verification_algorithms.all;
    certificate
        .verify_for_usage(known, &certificates.anchors, between, now, purpose, revocation, None)
        .map_err(|error| refuse(explain(&error, usage, is_own_issuer)))?;
    let is_meant = match expected {
        Expected::Anybody => Ok(()),
        Expected::Host(host) => certificate.verify_is_valid_for_subject_name(host).map_err(|_| {
            let host = host.to_str();
            let why = format!(
                "is not for {host}, by which it was called; use a name that it is for, or name it with --peer-name"
            );
            (CertificateError::NotValidForName, why)
        }),
        Expected::Named(allowed) => match allowed.iter().any(|name| name.is_of(&certificate, &names)) {
            true => Ok(()),
            false => {
                let allowed: Vec<_> = allowed.iter().map(ToString::to_string).collect();
                let why = format!("is for none of the names that --peer-name allows here: {}", allowed.join(", "));
                Err((CertificateError::ApplicationVerificationFailure, why))
            }
        },
    };
    is_meant.map_err(refuse)
}

/// What is wrong, for TLS and for the user.
fn explain(error: &webpki::Error, usage: Usage, is_own_issuer: bool) -> (CertificateError, String) {
    use CertificateError as Kind;
    use webpki::Error as Wrong;
    let role = match usage {
        Usage::Client => "client",
        Usage::Server => "server",
    };
    match error {
        Wrong::CertExpired { not_after, .. } => {
            (Kind::Expired, format!("expired on {}; make a new one", when(*not_after)))
        }
        Wrong::CertNotValidYet { not_before, .. } => {
            (Kind::NotValidYet, format!("is good from {} on; check the clocks of both hosts", when(*not_before)))
        }
        Wrong::CertRevoked => (Kind::Revoked, "was revoked (ca-crl.pem); make a new one".into()),
        Wrong::CrlExpired { next_update, .. } => {
            let why = format!("can't be checked: ca-crl.pem here is good until {}; get a new list", when(*next_update));
            (Kind::ExpiredRevocationList, why)
        }
        Wrong::UnknownIssuer | Wrong::CaUsedAsEndEntity if is_own_issuer => {
            (Kind::UnknownIssuer, "is signed by itself; have an authority of ca-cert.pem sign it".into())
        }
        Wrong::UnknownIssuer | Wrong::InvalidSignatureForPublicKey => {
            let why = "is signed by none of the authorities in ca-cert.pem here; both sides need the same ca-cert.pem";
            (Kind::UnknownIssuer, why.into())
        }
        Wrong::CaUsedAsEndEntity => {
            (Kind::InvalidPurpose, format!("is one of an authority; make one for a {role} and have it signed"))
        }
        Wrong::RequiredEkuNotFoundContext(_) => {
            let why = format!("is not for a TLS {role} (its extended key usage); make one with tls_www_{role}");
            (Kind::InvalidPurpose, why)
        }
        Wrong::IssuerNotCrlSigner | Wrong::InvalidCrlSignatureForPublicKey => {
            let why = "can't be checked: the authority may not sign the list in ca-crl.pem, or has not; make its \
                       certificate with crl_signing_key";
            (Kind::UnknownRevocationStatus, why.into())
        }
        other => (Kind::BadEncoding, format!("can't be used: {other}; make a new one")),
    }
}

/// Of one connection: what it has found wrong is that connection's.
#[derive(Debug)]
pub(crate) struct Verifier {
    pub(crate) certificates: Arc<Certificates>,
    pub(crate) expected: Arc<Expected>,
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) refusal: Arc<OnceLock<String>>,
}

impl Verifier {
    fn check(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        usage: Usage,
        now: UnixTime,
    ) -> Result<(), Error> {
        judge(&self.certificates, shown, between, &self.expected, usage, now).map_err(|(kind, reason)| {
            // Set once: a handshake ends with this.
            let _ = self.refusal.set(reason.to_string());
            kind.into()
        })
    }

    fn check_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, shown, signature, &self.provider.signature_verification_algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(shown, between, Usage::Server, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Verifier {
    /// None: a caller that has only certificates of others then shows one of those, and is told what is wrong with it.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(shown, between, Usage::Client, now).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(NO_TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}
