//! Whether a session goes on, and why it does not.
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use transship_wire::relay::TheEnd;

use crate::{Error, Rule};

/// Locks what a thread that panicked may have left: all of it is replaced or counted in one step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a session broke.
#[derive(Debug)]
pub(super) struct SessionFailure {
    pub(super) error: Error,
    /// What the other relay says of its QEMU, if it was that which ended the session.
    pub(super) told: Option<TheEnd>,
}

/// What becomes of a session, for all who have a part in it.
pub(super) struct Fate {
    /// The other relay.
    pub(super) peer: String,
    /// Set once, with `failure`. SeqCst, as is that the waiting QEMU may have the end: whoever gives the end sets that
    /// and then looks at this, and whoever fails sets this and then looks at that.
    failed: AtomicBool,
    failure: Mutex<Option<SessionFailure>>,
    /// What the link says no more means nothing.
    over: AtomicBool,
}

impl Fate {
    pub(super) fn new(peer: String) -> Arc<Self> {
        let failed = AtomicBool::new(false);
        Arc::new(Self { peer, failed, failure: Mutex::default(), over: AtomicBool::new(false) })
    }

    /// Breaks the session, unless it is broken or over.
    pub(super) fn fail(&self, error: Error, told: Option<TheEnd>) {
        if !self.is_over() {
            lock(&self.failure).get_or_insert(SessionFailure { error, told });
            self.failed.store(true, SeqCst);
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.failed.load(SeqCst)
    }

    /// Why, if it is. The other relay's own word counts most.
    pub(super) fn take_failure(&self) -> Option<SessionFailure> {
        self.is_broken().then(|| lock(&self.failure).take()).flatten()
    }

    /// Adds the other relay's word to a failure that was seen by other signs. Without a reason it is the answer to our
    /// own word, and tells of the end only. False: nothing has failed so far.
    pub(super) fn add_word(&self, reason: &str, end: TheEnd) -> bool {
        let mut failure = lock(&self.failure);
        let Some(failure) = &mut *failure else { return false };
        failure.told = Some(end);
        if !reason.is_empty() {
            failure.error = Error::Refused(reason.to_owned());
        }
        true
    }

    pub(super) fn was_told(&self) -> bool {
        lock(&self.failure).as_ref().is_some_and(|failure| failure.told.is_some())
    }

    /// Why it is broken, for the other relay.
    pub(super) fn failure_text(&self) -> String {
        lock(&self.failure).as_ref().map_or_else(String::new, |failure| failure.error.to_string())
    }

    /// What breaks from now on is no failure.
    pub(super) fn set_over(&self) {
        self.over.store(true, SeqCst);
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(SeqCst)
    }

    /// The other relay did what it must not.
    pub(super) fn broke(&self, rule: Rule, what: impl Into<String>) -> Error {
        Error::breach(&self.peer, rule, what)
    }
}
