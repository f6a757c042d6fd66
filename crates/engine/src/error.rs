//! Why a move ended early, and what that means for the guest.
use crate::guest::GuestError;

/// Where the guest is after a failure; decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 1: it runs on at the source (or stands there as it stood before).
    SourceRunsOn,
    /// Exit code 3: the message says what to do.
    NeedsPerson,
}

/// One line: what happened, to what, and what now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("the peer at {peer} sent bytes that are not the protocol's: {source}")]
    Wire { peer: String, source: transship_wire::Error },
    /// The peer broke the order or the bounds of the protocol.
    #[error("the peer at {peer} {what}")]
    Protocol { peer: String, what: String },
    #[error("the other side refused: {0}")]
    Refused(String),
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Memory(#[from] transship_memory::Error),
    #[error("cancelled; the source guest runs on")]
    Cancelled,
    #[error("{0}")]
    NotConverging(String),
    /// Nobody can tell from here whether the guest runs over there.
    #[error("{0}")]
    Unknown(String),
}

impl Error {
    pub fn outcome(&self) -> Outcome {
        match self {
            Error::Unknown(_) => Outcome::NeedsPerson,
            _ => Outcome::SourceRunsOn,
        }
    }
}
