//! Why a move ended early, and what that means for the guest.
use crate::{
    guest::GuestError,
    shortfall::{Shortfall, TooLate},
};

/// What a failure leaves behind; decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 1: a guest that ran runs on where it was, one that stood still stands there, and files are whole.
    NothingLost,
    /// Exit code 3: the message says what to do.
    NeedsPerson,
}

/// The party that can act on a failure, in the report as `error_by`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Actor {
    /// The user: a guest, a setting or a wish is not as it must be for this.
    User,
    /// Whoever is at the other end of the connection.
    Peer,
    /// A file that is not what it should be.
    File,
    /// The VMM, or its guest.
    Vmm,
    /// The system on which this runs.
    System,
    /// We: it is a bug.
    Transship,
}

/// What a user has cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// A move, before the guest was given up.
    Move,
    /// A save, or a look at a guest, which changes nothing of it.
    Look,
    /// A restore, before anything ran.
    Restore,
    /// A conversion, where there is no guest.
    Conversion,
}

impl std::fmt::Display for Cancelled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Move => "the guest runs on at the source",
            Self::Look => "the guest is as it was",
            Self::Restore => "nothing runs, and the memory of the waiting VMM may be half filled: start a new one",
            Self::Conversion => "nothing has changed",
        })
    }
}

/// What became of the guest is for a person to find out.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Unknown {
    /// What is known, and what to do.
    what: String,
    /// What went wrong at that moment; `what` says it, too.
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl From<String> for Unknown {
    fn from(what: String) -> Self {
        Self { what, source: None }
    }
}

/// What a peer has to keep to, by what to think of it if it does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// It stays until all is said.
    Stays,
    /// It answers, and takes what it is sent, within a time.
    Answers,
    /// It says nothing but what is due or was asked for.
    Turn,
    /// Rounds, messages and packets come in order, each of them once.
    Order,
    /// As much comes as is announced.
    Count,
    /// What it names is there, and it sends no more than there is room for.
    Bounds,
    /// What it has encoded can be decoded, and keeps to one method.
    Encoding,
    /// What is there at the end is what was here.
    Digest,
    /// It opens the connections that both sides have been told of.
    Channels,
    /// It wants only what this side can do.
    Abilities,
    /// It does not give up.
    Perseverance,
}

/// What is wrong with a descriptor that was passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescriptorFault {
    /// It was not passed.
    NotPassed,
    /// It is not open for what is done with it.
    Mode,
    /// It is no regular file.
    NotRegular,
    /// It is another file than the other one of its set.
    OtherFile,
    /// O_DIRECT: one must have it, and the other one not; one alone must not.
    Direct,
}

/// What is not as it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Misfit {
    /// The machine type: another one than that of the other guest, or one with which this can't be done.
    Machine,
    /// The guest's memory: other names or sizes than those of the other guest.
    Memory,
    /// A file has not the memory of its guest.
    LeftOut,
    /// A file was made to be sent to somebody who answers.
    NeedsAnswers,
    /// Another VMM than one whose device state can be loaded there.
    Vmm,
    /// A command that the user named has failed.
    Command,
    /// It took longer than the user has allowed it.
    CommandTime,
    /// The guest's writers can't be held.
    Pace,
    /// A process that goes on with a move has too many before it.
    Attempts,
    /// A descriptor that was passed, or was not.
    Descriptor(DescriptorFault),
    /// A file is none in which pages have places.
    NotRegular,
    /// Pages can't go past the page cache there.
    DirectIo,
    /// Another process writes the file.
    Busy,
    /// The file is the memory of the guest itself.
    OwnMemory,
    /// Pages are on their way to a file that is to be complete.
    Unfinished,
    /// Only the text says it.
    Else,
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
    /// The peer broke a rule of the protocol.
    #[error("the peer at {peer} {what}")]
    Breach {
        /// Its address.
        peer: String,
        /// The rule.
        rule: Rule,
        /// What it did.
        what: String,
    },
    /// The other side is not who it has to be, or does not take us for that.
    #[error("{0}")]
    Untrusted(String),
    /// The other side ended the session, with its reason.
    #[error("the other side refused: {0}")]
    Refused(String),
    /// A guest, a setting or a wish is not as it must be for this.
    #[error("{text}")]
    Unfit {
        /// By which a caller tells it.
        what: Misfit,
        /// For the user.
        text: String,
    },
    /// A snapshot file that can't be used for what was asked.
    #[error("{text}")]
    File {
        /// By which a caller tells it.
        what: Misfit,
        /// For the user.
        text: String,
    },
    /// Bytes of a file that no version of its format has.
    #[error("{file}: {source}; use another copy")]
    Damaged {
        /// Its name.
        file: String,
        /// The field and its offset.
        source: transship_wire::Error,
    },
    /// The adapter failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// Guest memory could not be read, written or tracked.
    #[error(transparent)]
    Memory(#[from] transship_memory::Error),
    /// The user's wish.
    #[error("cancelled; {0}")]
    Cancelled(Cancelled),
    /// The guest writes faster than the link carries.
    #[error("{0}")]
    NotConverging(Box<Shortfall>),
    /// It did not end by the time that the user has named.
    #[error("{0}")]
    TooLate(TooLate),
    /// This side can't know whether the guest runs on the other side.
    #[error("{0}")]
    Unknown(#[from] Unknown),
    /// Something is not as our own code promises.
    #[error("{0}; this is a bug")]
    Bug(&'static str),
}

impl Misfit {
    pub(crate) fn unfit(self, text: impl Into<String>) -> Error {
        Error::Unfit { what: self, text: text.into() }
    }

    pub(crate) fn file(self, text: impl Into<String>) -> Error {
        Error::File { what: self, text: text.into() }
    }
}

impl Error {
    /// The user's wish, while a guest is moved or saved; a save says so at its end.
    pub(crate) const CANCELLED: Self = Self::Cancelled(Cancelled::Move);

    /// The user's wish, before a restored guest runs.
    pub(crate) const RESTORE_CANCELLED: Self = Self::Cancelled(Cancelled::Restore);

    /// What a person does with a lazily restored guest that this has stopped: a sentence without its full stop.
    pub fn restore_anew(&self) -> &'static str {
        match self {
            Self::Memory(_) => "Restore it into a new VMM",
            _ => "Restore it into a new VMM from another copy of the file",
        }
    }

    /// A guest, a setting or a wish of the user's is not as it must be.
    pub fn unfit(text: impl Into<String>) -> Self {
        Misfit::Else.unfit(text)
    }

    /// A file can't be used for what was asked.
    pub fn file(text: impl Into<String>) -> Self {
        Misfit::Else.file(text)
    }

    /// The peer has broken a rule.
    pub(crate) fn breach(peer: impl Into<String>, rule: Rule, what: impl Into<String>) -> Self {
        Self::Breach { peer: peer.into(), rule, what: what.into() }
    }

    pub(crate) fn untrusted(peer: &str, why: &transship_secure::SecureError) -> Self {
        Self::Untrusted(format!("no encrypted connection with {peer}: {why}"))
    }

    /// What became of the guest is for a person to find out, because of `source`. `what`: what is known, and what to
    /// do.
    pub(crate) fn unknown<E: std::error::Error + Send + Sync + 'static>(
        source: E,
        what: impl FnOnce(&E) -> String,
    ) -> Self {
        Self::Unknown(Unknown { what: what(&source), source: Some(Box::new(source)) })
    }

    /// The rule that the peer has broken, if it is known.
    pub fn rule(&self) -> Option<Rule> {
        match self {
            Self::Breach { rule, .. } => Some(*rule),
            _ => None,
        }
    }

    /// What is not as it must be, if that is what is wrong.
    pub fn misfit(&self) -> Option<Misfit> {
        match self {
            Self::Unfit { what, .. } | Self::File { what, .. } => Some(*what),
            _ => None,
        }
    }

    /// What is left behind.
    pub fn outcome(&self) -> Outcome {
        match self {
            Error::Unknown(_) => Outcome::NeedsPerson,
            _ => Outcome::NothingLost,
        }
    }

    /// The party that can act on it.
    pub fn actor(&self) -> Actor {
        match self {
            Error::Connect { .. }
            | Error::Unfit { .. }
            | Error::Untrusted(_)
            | Error::Cancelled(_)
            | Error::NotConverging(_)
            | Error::TooLate(_)
            | Error::Unknown(_) => Actor::User,
            Error::Wire { .. } | Error::Breach { .. } | Error::Refused(_) => Actor::Peer,
            Error::File { .. } | Error::Damaged { .. } => Actor::File,
            // Bytes that the peer did not send, or not so.
            Error::Io { source, .. }
                if source.get_ref().is_some_and(|why| why.is::<transship_secure::SecureError>()) =>
            {
                Actor::Peer
            }
            Error::Io { .. } | Error::Memory(_) => Actor::System,
            Error::Guest(error) => match error {
                GuestError::Unfit(_) => Actor::User,
                GuestError::Vmm(_) => Actor::Vmm,
                GuestError::Bug(_) => Actor::Transship,
                _ => Actor::System,
            },
            Error::Bug(_) => Actor::Transship,
        }
    }
}
