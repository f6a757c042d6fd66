//! Where bytes come from, for what is said about them.
use std::fmt::Display;

use crate::{Error, Misfit, Rule};

/// An error about a file as a whole.
pub(crate) fn wrong(name: &str, what: impl Display) -> Error {
    Error::file(format!("{name}: {what}"))
}

/// The same, where callers tell what it is.
pub(crate) fn misfit(misfit: Misfit, name: &str, what: impl Display) -> Error {
    misfit.file(format!("{name}: {what}"))
}

/// An error about bytes of a file.
pub(crate) fn damaged(name: &str, error: transship_wire::Error) -> Error {
    Error::Damaged { file: name.to_owned(), source: error }
}

/// Whoever has sent or written them.
#[derive(Debug, Clone)]
pub(crate) enum Whence {
    /// A file, as the user named it.
    File(String),
    /// The address of somebody who sends.
    Peer(String),
}

impl Whence {
    /// An error about bytes that can't be.
    pub(crate) fn bad(&self, error: transship_wire::Error) -> Error {
        match self {
            Self::File(name) => damaged(name, error),
            Self::Peer(peer) => Error::Wire { peer: peer.clone(), source: error },
        }
    }

    /// What a user can do about something of which only a part came.
    pub(crate) fn cure(&self) -> &'static str {
        match self {
            Self::File(_) => "; use another copy",
            Self::Peer(_) => "",
        }
    }

    /// Another error about it. `rule`: the one that somebody who sends has broken.
    pub(crate) fn broke(&self, rule: Rule, what: impl Display) -> Error {
        match self {
            Self::File(name) => wrong(name, what),
            Self::Peer(peer) => Error::breach(peer, rule, format!("sent something invalid: {what}")),
        }
    }
}
