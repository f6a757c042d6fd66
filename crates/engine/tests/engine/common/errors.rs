//! Which error it was, where a variant alone does not say it.
use std::error::Error as _;

use transship_engine::Error;

/// The field of bytes that can't be, and its place.
pub fn place(error: &Error) -> Option<(&'static str, usize)> {
    match error {
        Error::Wire { source, .. } | Error::Damaged { source, .. } => Some(source.place()),
        _ => None,
    }
}

/// The field alone.
pub fn field(error: &Error) -> Option<&'static str> {
    place(error).map(|(field, _)| field)
}

/// What went wrong when it became unknown where the guest runs.
pub fn cause(error: &Error) -> Option<&Error> {
    let Error::Unknown(unknown) = error else { return None };
    unknown.source()?.downcast_ref()
}
