//! Why a move ended early, and what that means for the guest.
use crate::guest::GuestError;

/// Where the guest is after a failure; decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 1: it runs on at the source (or is stopped there, as it was before).
    SourceRunsOn,
    /// Exit code 3: the message says what to do.
    NeedsPerson,
}

/// One line: what happened, to what, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused something.
    #[error("can't {what}: {source}")]
    Io {
        /// What was being done, to what.
        what: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// There is no connection to the other side.
    #[error("can't connect to {to}: {source}; {cure}")]
    Connect {
        /// Its address.
        to: String,
        /// The system's word.
        source: std::io::Error,
        /// What the user can do.
        cure: &'static str,
    },
    /// Bytes that no version of the protocol has.
    #[error("the peer at {peer} sent bytes that are not the protocol's: {source}")]
    Wire {
        /// Its address.
        peer: String,
        /// The field and its offset.
        source: transship_wire::Error,
    },
    /// The peer broke the order or the bounds of the protocol.
    #[error("the peer at {peer} {what}")]
    Protocol {
        /// Its address.
        peer: String,
        /// What it did.
        what: String,
    },
    /// The other side ended the session, with its reason.
    #[error("the other side refused: {0}")]
    Refused(String),
    /// The two guests are not alike.
    #[error("{0}")]
    Unfit(String),
    /// A snapshot file that can't be used for what was asked.
    #[error("{0}")]
    File(String),
    /// The adapter failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Guest memory could not be read, written or tracked.
    #[error(transparent)]
    Memory(#[from] transship_memory::Error),
    /// The user's wish.
    #[error("cancelled; the guest runs on at the source")]
    Cancelled,
    /// The user's wish, before anything ran.
    #[error("cancelled; nothing runs, and the memory of the waiting VMM may be half filled: start a new one")]
    RestoreCancelled,
    /// The user's wish, where there is no guest.
    #[error("cancelled; nothing has changed")]
    ConversionCancelled,
    /// The guest writes faster than the link carries; the text has the numbers.
    #[error("{0}")]
    NotConverging(String),
    /// This side can't know whether the guest runs on the other side.
    #[error("{0}")]
    Unknown(String),
}

impl Error {
    /// Where the guest is now.
    pub fn outcome(&self) -> Outcome {
        match self {
            Error::Unknown(_) => Outcome::NeedsPerson,
            _ => Outcome::SourceRunsOn,
        }
    }
}
