//! What a stand-in is charged with, whatever it stands in for.
use serde::{Deserialize, Serialize};

use crate::{destination::Received, snapshot::TakeOver, source::Serving};

/// What a second process is told when it begins to stand by, beside the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Charge {
    /// A lazy restore: it goes on with that.
    File(TakeOver),
    /// A guest that was received before all its pages were.
    Move(Received),
    /// A guest that was handed over before all its pages were.
    Serve(Serving),
}
