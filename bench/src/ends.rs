//! The two ends of a move.
use std::path::Path;

use transship_lab::SlowLink;

/// The two guests, as the command names them, and what is between them.
pub(crate) struct Ends<'a> {
    pub(crate) source: String,
    pub(crate) destination: String,
    /// For the socket.
    pub(crate) folder: &'a Path,
    pub(crate) link: Option<&'a SlowLink>,
}
