//! Why an adapter could not do something.

/// An adapter's failure, by who can act on it. Each is one line: what happened, to what, and what the user can do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The user: the guest, its VMM or the call is not as it must be. The text names the cure.
    #[error("{0}")]
    Unfit(String),
    /// The VMM or the guest: it refused, answered something else than it should, or did not answer.
    #[error("{0}")]
    Vmm(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The system refused something.
    #[error("can't {what}: {source}{}{cure}", if cure.is_empty() { "" } else { "; " })]
    System {
        /// What was tried, to what.
        what: String,
        /// The system's reason.
        source: std::io::Error,
        /// What the user can do; empty if the reason says enough.
        cure: &'static str,
    },
    /// Guest memory could not be read, written, tracked or guarded.
    #[error(transparent)]
    Memory(#[from] transship_memory::Error),
    /// We: something is not as our own code promises.
    #[error("{0}; this is a bug")]
    Bug(String),
}

impl GuestError {
    /// The VMM, or its guest, did not do what it was asked for.
    pub fn vmm(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Vmm(what.into())
    }

    /// For `map_err`: the system refused `what`.
    pub fn system<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System { what, source: source.into(), cure: "" }
    }
}
