//! Why a connection is not trusted.
use std::{borrow::Cow, io};

use rustls::{AlertDescription, CertificateError, Error, PeerIncompatible};

use crate::{
    Certificates,
    ends::{Means, Word},
};

/// What is doubtful about the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Doubt {
    /// What it sent was changed, or is of another connection.
    Changed,
    /// It does not speak TLS.
    NoTls,
    /// It shows nothing by which it could be known.
    ShowsNothing,
    /// It is another receiver than that of the token.
    OtherReceiver,
    /// Its token is that of another move.
    OtherToken,
    /// Its certificate.
    Certificate,
}

/// Why a handshake failed. As a text it is the end of a sentence about the other side, `it` there; it never holds a key
/// or a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecureError {
    /// The other side is not who it has to be, or doesn't show it.
    #[error("{1}")]
    Untrusted(Doubt, Cow<'static, str>),
    /// The other side says that we are not who we have to be.
    #[error("{0}")]
    Refused(Cow<'static, str>),
    /// The two don't speak the same language.
    #[error("{0}")]
    Unsuited(String),
    /// The connection has broken, or nothing came in time.
    #[error("{0}")]
    Broken(#[from] io::Error),
}

/// Which end of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Caller,
    Host,
}

/// How one end sees the other, for words about it.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) side: Side,
    pub(crate) means: Means,
    pub(crate) word: Word,
}

const NO_TLS13: &str = "it does not speak TLS 1.3 as transship does; use the same transship on both sides";
const ONLY_OLDER: &str = "it speaks no TLS 1.3, and nothing older is accepted; allow TLS 1.3 there";
const NOTHING_IN_COMMON: &str =
    "it has no kind of handshake in common with this side: it needs certificates as here (--tls), and TLS 1.3";
const TWO_WAYS: &str = "one side uses a token and the other one certificates; use --token or --tls on both";

impl View {
    /// What rustls says, for the user of this side.
    pub(crate) fn failure(&self, error: Error) -> SecureError {
        if let Means::Certificates { refusal, .. } = &self.means
            && let Some(why) = refusal.get()
        {
            return SecureError::Untrusted(Doubt::Certificate, why.clone().into());
        }
        let with_certificates = matches!(self.means, Means::Certificates { .. });
        let untrusted = |doubt, why: &'static str| SecureError::Untrusted(doubt, why.into());
        match (error, self.side) {
            (Error::AlertReceived(alert), _) => self.refused(alert),
            (Error::DecryptError, _) => untrusted(Doubt::Changed, "what it sent was changed on its way"),
            (Error::PeerIncompatible(PeerIncompatible::IncorrectCertificateTypeExtension), _) => {
                SecureError::Unsuited(TWO_WAYS.into())
            }
            (Error::PeerIncompatible(_), _) => {
                SecureError::Unsuited(if with_certificates { ONLY_OLDER } else { NO_TLS13 }.into())
            }
            (Error::InvalidMessage(_), Side::Host) => untrusted(Doubt::NoTls, "it does not speak TLS"),
            (Error::InvalidMessage(_), Side::Caller) if with_certificates => {
                let why = match self.word {
                    Word::Due => "it does not answer in TLS: give it its certificates, with --tls DIR",
                    Word::None => "it does not answer in TLS: set its tls-creds",
                };
                untrusted(Doubt::NoTls, why)
            }
            (Error::InvalidMessage(_), Side::Caller) => untrusted(
                Doubt::NoTls,
                "it does not answer in TLS: it expects no token, or it is no transship; use the command that the \
                 receiver printed",
            ),
            (Error::NoCertificatesPresented, _) if with_certificates => untrusted(
                Doubt::ShowsNothing,
                "it shows no certificate; put client-cert.pem and client-key.pem there, signed by an authority of \
                 ca-cert.pem here",
            ),
            (Error::NoCertificatesPresented, _) => untrusted(Doubt::ShowsNothing, "it has no token"),
            (Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure), Side::Caller) => untrusted(
                Doubt::OtherReceiver,
                "it is another receiver than the one that made this token; use the command that the receiver printed \
                 last",
            ),
            (Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure), Side::Host) => {
                untrusted(Doubt::OtherToken, "its token is not the one of this move")
            }
            (other, _) => SecureError::Unsuited(format!("the handshake failed: {other}")),
        }
    }

    /// What the other side says of us.
    pub(crate) fn refused(&self, alert: AlertDescription) -> SecureError {
        let refused = |why: &'static str| SecureError::Refused(why.into());
        match (&self.means, alert, self.side) {
            (_, AlertDescription::DecryptError | AlertDescription::BadRecordMac, _) => {
                refused("what it got from here was changed on its way")
            }
            (Means::Certificates { own, .. }, alert, _) => refused_certificate(own, alert),
            (Means::Token, AlertDescription::AccessDenied, Side::Caller) => {
                refused("it does not accept this token; use the command that the receiver printed last")
            }
            (Means::Token, AlertDescription::AccessDenied, Side::Host) => refused("its token is another receiver's"),
            (Means::Token, AlertDescription::UnsupportedCertificate, _) => SecureError::Unsuited(TWO_WAYS.into()),
            (Means::Token, AlertDescription::HandshakeFailure, _) => SecureError::Unsuited(TWO_WAYS.into()),
            (Means::Token, AlertDescription::ProtocolVersion, _) => SecureError::Unsuited(NO_TLS13.into()),
            (Means::Token, other, _) => SecureError::Unsuited(format!("it ended the handshake: {other:?}")),
        }
    }
}

/// Why the other side does not take our certificate. It has words of its own; TLS carries only their kind.
fn refused_certificate(own: &Certificates, alert: AlertDescription) -> SecureError {
    use AlertDescription as Alert;
    let why = match alert {
        Alert::CertificateExpired => "has expired or is not good yet; check it, and the clocks of both hosts",
        Alert::CertificateRevoked => "was revoked; make a new one",
        Alert::UnknownCA => {
            "is signed by no authority that is trusted there, or can't be checked there; both sides need the same \
             ca-cert.pem, and a current ca-crl.pem if any"
        }
        Alert::BadCertificate => "is not for the name by which this host was called; see what is said there",
        Alert::AccessDenied => "is for none of the names that are allowed there (--peer-name)",
        Alert::UnsupportedCertificate => "is not for this purpose (its extended key usage), or of a kind unknown there",
        Alert::CertificateUnknown | Alert::CertificateRequired => "is not accepted; see what is said there",
        Alert::HandshakeFailure => return SecureError::Unsuited(NOTHING_IN_COMMON.into()),
        Alert::ProtocolVersion | Alert::InsufficientSecurity => return SecureError::Unsuited(ONLY_OLDER.into()),
        other => return SecureError::Unsuited(format!("it ended the handshake: {other:?}")),
    };
    SecureError::Refused(format!("it says that the certificate of this side ({}) {why}", own.names()).into())
}

/// For what is read and written once there is trust.
impl From<SecureError> for io::Error {
    fn from(failure: SecureError) -> Self {
        match failure {
            SecureError::Broken(error) => error,
            SecureError::Refused(_) => Self::new(io::ErrorKind::ConnectionAborted, failure),
            _ => Self::new(io::ErrorKind::InvalidData, failure),
        }
    }
}
