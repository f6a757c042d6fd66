//! The moment at which everything that a command reads from, or writes to, is open, and not a byte of it is read yet.
use std::sync::{Mutex, PoisonError};

use crate::Error;

type Hook = Box<dyn FnOnce() -> Result<(), Error> + Send>;

static HOOK: Mutex<Option<Hook>> = Mutex::new(None);

/// Calls `hook` once, on the thread that opens a snapshot: when its file is open and nothing of it is read, or, of an
/// image, when its manifest was read and all its files are open (for a clone, its disks were looked at, too); or, of
/// one that is made, when it is there and empty. If it fails, nothing is read or saved. One that was given before and
/// was not called yet is forgotten.
pub fn when_opened(hook: impl FnOnce() -> Result<(), Error> + Send + 'static) {
    *HOOK.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
}

/// It has come.
pub(crate) fn all_is_open() -> Result<(), Error> {
    let hook = HOOK.lock().unwrap_or_else(PoisonError::into_inner).take();
    hook.map_or(Ok(()), |hook| hook())
}
