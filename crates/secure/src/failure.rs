//! Why a connection is not trusted.
use std::io;

use rustls::{AlertDescription, CertificateError, Error};

/// Why a handshake failed. As a text it is the end of a sentence about the other side, `it` there; it never holds a key
/// or a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The other side is not who it has to be, or doesn't show it.
    #[error("{0}")]
    Untrusted(&'static str),
    /// The other side says that we are not who we have to be.
    #[error("{0}")]
    Refused(&'static str),
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

impl Failure {
    /// What rustls says, for the user of this side.
    pub(crate) fn of(error: Error, side: Side) -> Self {
        match (error, side) {
            (Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure), Side::Caller) => {
                Self::Untrusted(
                    "it is another receiver than the one that made this token; use the command that the receiver \
                     printed last",
                )
            }
            (Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure), Side::Host) => {
                Self::Untrusted("its token is not the one of this move")
            }
            (Error::NoCertificatesPresented, _) => Self::Untrusted("it has no token"),
            (Error::AlertReceived(alert), side) => Self::refused(alert, side),
            (Error::InvalidMessage(_), Side::Caller) => Self::Untrusted(
                "it does not answer in TLS: it expects no token, or it is no transship; use the command that the \
                 receiver printed",
            ),
            (Error::InvalidMessage(_), Side::Host) => Self::Untrusted("it does not speak TLS"),
            (Error::DecryptError, _) => Self::Untrusted("what it sent was changed on its way"),
            (Error::PeerIncompatible(_), _) => Self::Unsuited(
                "it does not speak TLS 1.3 as transship does; use the same transship on both sides".into(),
            ),
            (other, _) => Self::Unsuited(format!("the handshake failed: {other}")),
        }
    }

    /// What the other side says of us.
    pub(crate) fn refused(alert: AlertDescription, side: Side) -> Self {
        match (alert, side) {
            (AlertDescription::AccessDenied, Side::Caller) => {
                Self::Refused("it does not accept this token; use the command that the receiver printed last")
            }
            (AlertDescription::AccessDenied, Side::Host) => Self::Refused("its token is another receiver's"),
            (AlertDescription::DecryptError | AlertDescription::BadRecordMac, _) => {
                Self::Refused("what it got from here was changed on its way")
            }
            (AlertDescription::ProtocolVersion | AlertDescription::HandshakeFailure, _) => Self::Unsuited(
                "it does not speak TLS 1.3 as transship does; use the same transship on both sides".into(),
            ),
            (other, _) => Self::Unsuited(format!("it ended the handshake: {other:?}")),
        }
    }
}

/// For what is read and written once there is trust.
impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Broken(error) => error,
            Failure::Refused(_) => Self::new(io::ErrorKind::ConnectionAborted, failure),
            _ => Self::new(io::ErrorKind::InvalidData, failure),
        }
    }
}
