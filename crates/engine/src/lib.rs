//! Moves a guest: the source's rounds, channels, convergence and switchover, and the destination's counterpart.
//! It knows a guest only by the traits in [`guest`].
#![forbid(unsafe_code)]

mod error;
pub mod guest;
mod options;
mod progress;
mod report;
mod transport;

pub use error::{Error, Outcome};
pub use options::{MoveOptions, ZeroPages};
pub use progress::{Phase, Progress};
pub use report::{ByteCounts, CpuSeconds, PageCounts, Report, RoundReport, Status};
pub use transport::{Listener, Uri};

use std::sync::Arc;
use guest::{DestinationGuest, SourceGuest};

/// Moves the guest to the `transship receive` that listens at `to`.
/// The report is filled as far as it got, also on failure.
#[allow(unused_variables)]
pub fn move_guest(guest: &mut dyn SourceGuest, to: &Uri, options: &MoveOptions, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    todo!()
}

/// Receives one guest. Returns when it runs here, or with the error that ended the session.
#[allow(unused_variables)]
pub fn receive_guest(guest: &mut dyn DestinationGuest, listener: Listener, progress: &Arc<Progress>, report: &mut Report) -> Result<(), Error> {
    todo!()
}
